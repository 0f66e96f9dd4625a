# SPDX-License-Identifier: Apache-2.0
"""Compile the Triton kernels for a GPU, down to its machine code, on a machine that has none.

``python -m tests.kernels.triton_compile cuda|hip [--all]`` prints a line for each kernel, and what does not compile.
Triton reads the device to compile for from a driver; here it gets one that knows its name and can do no more.
"""

import os
import sys

os.environ["TRITON_INTERPRET"] = "0"  # read when Triton is loaded

from typing import Any
from unittest import mock

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from terarec.kernels.contract import KernelGradient
from terarec.kernels.row_rules import LAST_UPDATE, RULE_KINDS, RowRule, row_rule
from terarec.kernels.triton import bag_lookup, row_update, rows, segments
from terarec.kernels.triton.device import hash_table
from tests.ops.rules import known

TARGETS = {"cuda": GPUTarget("cuda", 90, 32), "hip": GPUTarget("hip", "gfx942", 64)}
BATCH = 5000  # enough keys for every level of parts


class NamedDevice:
    """A driver that knows what to compile for."""

    def __init__(self, name: str) -> None:
        self._target = TARGETS[name]

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def compile_only(compiled: dict[str, int]) -> None:
    """From now on launches compile and do no more; `compiled` counts them by kernel."""
    launch = JITFunction.run

    def run(self: JITFunction, *arguments: object, grid: object, warmup: bool, **options: object) -> None:
        kernel = launch(self, *arguments, grid=grid, warmup=True, **options)
        # It adds products of gradients and factors, which other places compute in two steps; the rest of an update
        # divides, for which a GPU needs such instructions.
        if self.__name__ == "key_parts_kernel" and "cubin" in kernel.asm and "FFMA" in kernel.asm["sass"]:
            raise AssertionError("key_parts_kernel rounds a product and a sum at once")
        compiled[self.__name__] = compiled.get(self.__name__, 0) + 1

    JITFunction.run = run


def look_up_and_update(width: int, dtype: torch.dtype, poolings: tuple[int, int], rules: list[RowRule]) -> None:
    """Lookup, and updates by `rules`, of two features."""
    layout = torch.tensor([[0, 100, poolings[0], 0], [100, 100, poolings[1], 1]])
    weights = torch.zeros(200, width, dtype=dtype)
    keys, offsets = torch.zeros(2 * BATCH, dtype=torch.int64), torch.arange(2 * BATCH + 1)
    key_weights = torch.ones(2 * BATCH) if dtype == torch.bfloat16 else None
    result = bag_lookup.bag_lookup(weights, keys, offsets, layout, 2 not in poolings, key_weights)
    if 2 not in poolings:
        bag_lookup.row_dots(weights, keys, offsets, result, layout)
    gradients = [KernelGradient(keys, offsets, torch.zeros_like(result), layout, key_weights)]
    for rule in rules:
        update(weights, gradients, rule, torch.ones(2) if rule.updates_all_rows else None)
    row_update.row_gradient_norm(weights, gradients, row_rule("sgd", lr=1.0))


def update(
    weights: torch.Tensor,
    gradients: list[KernelGradient],
    rule: RowRule,
    table_lr: torch.Tensor | None = None,
    numbers: torch.Tensor | None = None,
) -> None:
    rows, width = weights.shape
    state = [torch.zeros(rows, *(() if rule.kind == "rowwise_adagrad" else (width,))) for _ in rule.state_names]
    if LAST_UPDATE in rule.state_names:
        state[-1] = torch.zeros(rows, dtype=torch.int32)
    row_update.row_update_(weights, state, gradients, rule, 3, table_lr, 5, numbers)


def update_in_other_forms(width: int) -> None:
    """Updates with learning rates by table, of rows that were missed, lie elsewhere, have numbers, or 64 bits."""
    layout = torch.tensor([[0, 100, 0, 0], [100, 100, 0, 1]])
    keys, offsets = torch.zeros(2 * BATCH, dtype=torch.int64), torch.arange(2 * BATCH + 1)
    weights, gradient = torch.zeros(200, width), KernelGradient(keys, offsets, torch.zeros(BATCH, 2 * width), layout)
    for kind in ("sgd", "adagrad"):
        update(weights, [gradient], rule_of(kind), torch.ones(2))
    update(weights, [gradient], rule_of("adam", mode="lazy_global"))
    update(weights, [gradient._replace(places=keys)], rule_of("sgd"))
    for numbers in (torch.arange(200), torch.zeros(1, 3, dtype=torch.int64)):
        update(weights.bfloat16(), [gradient], rule_of("sgd"), numbers=numbers)
    with mock.patch.object(segments, "_INT32_ROWS", 0):
        update(weights, [gradient], rule_of("sgd"))


def rule_of(kind: str, **more: Any) -> RowRule:
    return row_rule(kind, lr=0.1, **known(kind, eps=1e-3, beta1=0.9, beta2=0.99), **more)


def compile_all(*, every_rule: bool) -> None:
    """Launch every kernel in every form that a GPU would meet; of the rules' forms a few unless `every_rule`."""
    kinds = RULE_KINDS if every_rule else ("sgd",)  # adam follows
    look_up_and_update(128, torch.float32, (0, 0), [rule_of(kind) for kind in kinds])
    for width in (1, 8, 32, 64, 256, 1024) if every_rule else ():
        look_up_and_update(width, torch.float32, (0, 1), [rule_of("sgd"), rule_of("adam")])
    look_up_and_update(16, torch.bfloat16, (1, 3), [rule_of("rowwise_adagrad")])
    look_up_and_update(48, torch.float16, (2, 2), [rule_of("sgd")])
    lazy = ("momentum", "nesterov", "rmsprop", "adam", "adamw") if every_rule else ("adam",)
    caught_up = [rule_of(kind, mode="lazy_global") for kind in lazy]
    look_up_and_update(3, torch.float32, (0, 4), [*caught_up, rule_of("ftrl", mode="global", clip_norm=1.0)])
    for width in (64, 128) if every_rule else (64,):
        update_in_other_forms(width)
    keys, offsets, layout = torch.zeros(10, dtype=torch.int64), torch.arange(11), torch.tensor([[0, 9, 0, 0]])
    bag_lookup.quantized_bag_lookup(torch.zeros(9, 24, dtype=torch.uint8), keys, offsets, layout, True)
    for kind in ("uniform", "normal"):
        rows.fill_keyed_rows(torch.zeros(10, 16), keys, keys, kind, 3, 0.5)
    for gives_rows in (True, False):
        hash_table.find_kernel[(1,)](keys, keys, keys, keys, 10, 9, BLOCK=256, GIVES_ROWS=gives_rows)
    hash_table.claim_kernel[(1,)](keys, keys, keys, keys, 10, 9, BLOCK=256)
    scores = torch.zeros(10, dtype=torch.int32)
    rows.count_low_kernel[(1,)](scores, scores, scores.bool(), keys, 10, BLOCK=1024)
    rows.write_low_kernel[(1,)](scores, scores, scores.bool(), keys, keys, 10, BLOCK=1024)


if __name__ == "__main__":
    driver.set_active(NamedDevice(sys.argv[1]))
    count: dict[str, int] = {}
    compile_only(count)
    compile_all(every_rule="--all" in sys.argv)
    for kernel, times in sorted(count.items()):
        print(kernel, times)
