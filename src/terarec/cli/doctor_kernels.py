"""What ``terarec doctor`` asks the kernels: which run and why, on which threads, and whether they are right."""

from __future__ import annotations

import shutil
import time
from importlib.util import find_spec
from typing import Any

import torch

from terarec.errors import KernelError
from terarec.kernels.registry import active, available
from terarec.nn.precision import fast_precisions
from terarec.ops import BagGradient, BagLayout, RowRule, bag_lookup, linear_choice, row_update_
from terarec.spec import Pooling
from terarec.train.devices import active_kernels, describe_device, resolve_device

_ROWS, _WIDTH, _FEATURES, _BATCH = 20_000, 32, 8, 4096
"""A table of 2.5 MiB and 32,768 keys: both implementations together take about 0.1 s."""
_REPEATS = 5
_TOLERANCE = 1e-5
"""Both sum in float32, in different orders; the sums are of magnitude 1."""


def choices() -> list[dict[str, Any]]:
    """Per op the implementation that "auto" takes on the CPU, and on a GPU where torch sees one, and why."""
    rows = []
    for device in ("cpu", *(["cuda"] if torch.cuda.is_available() else [])):
        for op in active_kernels(device):
            choice = active(op, device)
            rows.append({"op": op, "device": device, "implementation": choice.implementation, "why": choice.why})
    linear = linear_choice()
    return [*rows, {"op": "linear", "device": "cpu", "implementation": linear.implementation, "why": linear.why}]


def training() -> dict[str, Any]:
    """Where ``--device auto`` trains, on how many CPU threads, and in which precisions at full speed."""
    device = resolve_device("auto")
    return {
        "device": describe_device(device),
        "threads": torch.get_num_threads(),
        "precisions": fast_precisions(device),
        "kernels": list(dict.fromkeys(active_kernels(device.type).values())),
        "compile": can_compile(),
    }


def can_compile() -> bool:
    """Whether ``--compile`` works: torch.compile needs a C++ compiler on the CPU, and Triton on a GPU."""
    if torch.cuda.is_available():
        return find_spec("triton") is not None
    return any(shutil.which(compiler) is not None for compiler in ("g++", "clang++"))


def threads() -> dict[str, Any]:
    """Torch's threads; the compiled core's, the runtime that they belong to, and the instruction set in use."""
    told: dict[str, Any] = {"torch": torch.get_num_threads()}
    if available()["cpu"]:
        return {**told, "core": None, "core_runtime": None, "instruction_set": None}
    from terarec.kernels.cpu import host

    count, runtime = host.threads()
    return {**told, "core": count, "core_runtime": runtime, "instruction_set": host.features()}


def check() -> dict[str, Any]:
    """Look up and update random rows with the compiled core and with plain PyTorch, and compare.

    Returns:
        ``passed``; ``why`` it did not, or None; ``largest_difference`` of any number; rows looked up a second.
    """
    failed: dict[str, Any] = {"passed": False, "largest_difference": None, "lookup_rows_per_second": None}
    if reason := available()["cpu"]:
        return {**failed, "why": f"the compiled core does not load: {reason}"}
    try:
        looked_up, updated = _run("cpu")
        expected_lookup, expected_update = _run("ref")
    except KernelError as error:
        return {**failed, "why": str(error)}
    difference = max(float((looked_up - expected_lookup).abs().max()), float((updated - expected_update).abs().max()))
    passed = difference <= _TOLERANCE
    return {
        "passed": passed,
        "why": None if passed else f"core and reference differ by {difference:g}, expected at most {_TOLERANCE:g}",
        "largest_difference": difference,
        "lookup_rows_per_second": _lookup_rate(),
    }


def _run(implementation: str) -> tuple[torch.Tensor, torch.Tensor]:
    """What a lookup gives, and the table after an update with a gradient of ones."""
    weights, keys, offsets, layout = _problem()
    pooled = bag_lookup(weights, keys, offsets, layout, implementation=implementation)
    gradient = BagGradient(keys, offsets, torch.full_like(pooled, 1 / _BATCH), layout)
    row_update_(weights, (), [gradient], RowRule(kind="sgd", lr=0.1), step=1, implementation=implementation)
    return pooled, weights


def _lookup_rate() -> float:
    weights, keys, offsets, layout = _problem()
    fastest = float("inf")
    for _ in range(_REPEATS):
        start = time.perf_counter()
        bag_lookup(weights, keys, offsets, layout, implementation="cpu")
        fastest = min(fastest, time.perf_counter() - start)
    return keys.numel() / fastest


def _problem() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, BagLayout]:
    generator = torch.Generator().manual_seed(0)
    num_keys = _FEATURES * _BATCH
    sum_pooling: Pooling = "sum"
    layout = BagLayout(
        table_names=("check",),
        table_base=(0,),
        table_rows=(_ROWS,),
        feature_names=tuple(f"feature {index}" for index in range(_FEATURES)),
        feature_table=(0,) * _FEATURES,
        pooling=(sum_pooling,) * _FEATURES,
        width=_WIDTH,
    )
    weights = torch.rand(_ROWS, _WIDTH, generator=generator)
    keys = torch.randint(_ROWS, (num_keys,), generator=generator)
    return weights, keys, torch.arange(num_keys + 1), layout
