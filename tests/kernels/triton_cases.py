"""What every Triton kernel must give, as plain functions: pytest runs them interpreted, ``benchmarks/gpu.py`` compiled.

Each takes the device to run on and compares with the plain kernels on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from terarec.errors import ConfigError
from terarec.kernels.contract import BadKeyError, LaidGradient, RowRule
from terarec.kernels.ref import bag_lookup as ref_lookup
from terarec.kernels.ref import row_update as ref_update
from terarec.kernels.ref import rows as ref_rows
from terarec.kernels.triton.bag_lookup import bag_lookup
from terarec.kernels.triton.row_update import KINDS, row_update_
from terarec.kernels.triton.rows import fill_keyed_rows
from terarec.ops import BagLayout, state_shapes
from tests.ops.bags import make_layout, make_lookup

WIDTHS = (1, 3, 16, 48, 128)
POOLINGS = ("sum", "none", ("mean", "sum", "mean", "mean"))
BATCHES = ((0, 1), (1, 3), (7, 4), (33, 1))
"""(samples, hotness): no bag, one sample, empty bags and repeated keys, just above a power of two."""

Case = Callable[[torch.device], None]
CASES: dict[str, Case] = {}


def case(function: Case) -> Case:
    """Keep `function` among the cases."""
    CASES[function.__name__] = function
    return function


def layouts(widths: Iterable[int] = WIDTHS) -> list[BagLayout]:
    return [make_layout(width, pooling) for width in widths for pooling in POOLINGS]


def looked_up(device: torch.device, weights: Tensor, keys: Tensor, offsets: Tensor, layout: BagLayout) -> Tensor:
    result = bag_lookup(weights.to(device), keys.to(device), offsets.to(device), layout.array, layout.is_pooled)
    return result.cpu()


def updated(
    device: torch.device,
    weights: Tensor,
    state: Sequence[Tensor],
    gradients: Sequence[LaidGradient],
    rule: RowRule,
    steps: int,
) -> tuple[Tensor, list[Tensor]]:
    """Weights and state after some steps; the arguments stay as they are."""
    weights, state = weights.clone().to(device), [held.clone().to(device) for held in state]
    there = [moved(gradient, device) for gradient in gradients]
    for step in range(1, steps + 1):
        row_update_(weights, state, there, rule, step)
    return weights.cpu(), [held.cpu() for held in state]


def expected_update(
    weights: Tensor, state: Sequence[Tensor], gradients: Sequence[LaidGradient], rule: RowRule, steps: int
) -> tuple[Tensor, list[Tensor]]:
    weights, state = weights.clone(), [held.clone() for held in state]
    for step in range(1, steps + 1):
        ref_update.row_update_(weights, state, gradients, rule, step)
    return weights, state


def moved(gradient: LaidGradient, device: torch.device) -> LaidGradient:
    keys, offsets, grad, layout, _ = gradient
    return LaidGradient(keys.to(device), offsets.to(device), grad.to(device), layout)


def gradient_of(layout: BagLayout, batch: int, hotness: int, seed: int) -> LaidGradient:
    held = make_lookup(layout, batch, hotness, seed)
    shape = (batch, 4 * layout.width) if layout.is_pooled else (held.keys.shape[0], layout.width)
    grad = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return LaidGradient(held.keys, held.offsets, grad, layout.array)


@case
def lookups_equal_the_plain_ones(device: torch.device) -> None:
    for layout in layouts():
        for batch, hotness in BATCHES:
            held = make_lookup(layout, batch, hotness)
            expected = ref_lookup.bag_lookup(held.weights, held.keys, held.offsets, layout.array, layout.is_pooled)
            result = looked_up(device, held.weights, held.keys, held.offsets, layout)
            torch.testing.assert_close(result, expected)


@case
def rows_wider_than_a_tile_are_looked_up(device: torch.device) -> None:
    held = make_lookup(make_layout(259), 3, 2)
    result = looked_up(device, held.weights, held.keys, held.offsets, held.layout)
    expected = ref_lookup.bag_lookup(held.weights, held.keys, held.offsets, held.layout.array, True)
    torch.testing.assert_close(result, expected)


@case
def gradients_of_every_shape_are_summed(device: torch.device) -> None:
    for number, layout in enumerate(layouts()):
        batch, hotness = BATCHES[number % len(BATCHES)]
        gradients = [gradient_of(layout, batch, hotness, 1), gradient_of(layout, batch + 2, hotness, 2)]
        compare_updates(device, layout, gradients, RowRule(kind="sgd", lr=0.05), steps=1)


@case
def rules_equal_the_plain_ones(device: torch.device) -> None:
    for kind in KINDS:
        for width in (3, 16):
            layout = make_layout(width, "mean")
            rule = RowRule(kind=kind, lr=0.05, eps=1e-3, beta1=0.9, beta2=0.99)
            compare_updates(device, layout, [gradient_of(layout, 9, 3, 1)], rule, steps=2)


def compare_updates(
    device: torch.device, layout: BagLayout, gradients: Sequence[LaidGradient], rule: RowRule, steps: int
) -> None:
    weights = make_lookup(layout, 0, 1).weights
    state = [torch.full(shape, 0.01) for _, shape in state_shapes(rule.kind, *weights.shape)]
    result = updated(device, weights, state, gradients, rule, steps)
    expected = expected_update(weights, state, gradients, rule, steps)
    torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-6)


@case
def a_hot_key_is_summed_in_parts(device: torch.device) -> None:
    """As many occurrences as one program takes, one more, and as one more level of parts takes."""
    layout = torch.tensor([[0, 50, 0, 0]])
    rule = RowRule(kind="sgd", lr=0.1)
    for count, repeats in ((64, 64), (65, 65), (300, 200), (6000, 5000)):
        generator = torch.Generator().manual_seed(count)
        order = torch.randperm(count, generator=generator)
        keys = torch.where(order < repeats, 7, order % 50)
        gradient = LaidGradient(keys, torch.arange(count + 1), torch.randn(count, 3, generator=generator), layout)
        weights = torch.randn(50, 3, generator=generator)
        result, _ = updated(device, weights, [], [gradient], rule, steps=1)
        expected, _ = expected_update(weights, [], [gradient], rule, steps=1)
        torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-4)


@case
def an_update_gives_the_same_bits_every_time(device: torch.device) -> None:
    gradient = gradient_of(make_layout(16), 40, 4, 1)
    weights = make_lookup(make_layout(16), 0, 1).weights
    rule = RowRule(kind="sgd", lr=0.1)
    first, again = (updated(device, weights, [], [gradient], rule, steps=1) for _ in range(2))
    assert torch.equal(first[0], again[0])


def fault(function: Callable[..., object], *arguments: object) -> tuple[type, str]:
    try:
        function(*arguments)
    except (BadKeyError, ConfigError) as error:
        return type(error), str(error)
    raise AssertionError("nothing was raised")


@case
def what_is_bad_is_reported_as_by_the_plain_kernel(device: torch.device) -> None:
    layout = make_layout(8)
    for where, index, value in [
        ("keys", 0, -1),
        ("keys", 57, 2**63 - 1),
        ("keys", 180, -(2**63)),
        ("offsets", 0, 1),
        ("offsets", 57, 2**62),
        ("offsets", 100, -1),
        ("offsets", 200, 199),
    ]:
        held = make_lookup(layout, 50, 1)
        getattr(held, where)[index] = value
        arguments = (held.weights, held.keys, held.offsets)
        expected = fault(ref_lookup.bag_lookup, *arguments, layout.array, True)
        assert fault(looked_up, device, *arguments, layout) == expected
        gradient = LaidGradient(held.keys, held.offsets, torch.ones(50, 32), layout.array)
        assert fault(updated, device, held.weights, [], [gradient], RowRule(kind="sgd", lr=1.0), 1) == expected


@case
def unchecked_bad_keys_count_as_absent(device: torch.device) -> None:
    layout = make_layout(8)
    held = make_lookup(layout, 50, 1)
    grad = torch.ones(50, 32)
    good, bad = (LaidGradient(held.keys.clone(), held.offsets, grad.clone(), layout.array) for _ in range(2))
    bad.keys[[3, 60]] = 5000
    good.grad[3, :8] = good.grad[10, 8:16] = 0.0
    weights, there = held.weights.clone().to(device), moved(bad, device)
    result = bag_lookup(weights, there.keys, there.offsets, layout.array, True, is_checked=False)
    assert not result[3, :8].any()
    assert not result[10, 8:16].any()
    row_update_(weights, [], [there], RowRule(kind="sgd", lr=1.0), 1, is_checked=False)
    expected, _ = expected_update(held.weights, [], [good], RowRule(kind="sgd", lr=1.0), steps=1)
    torch.testing.assert_close(weights.cpu(), expected)


@case
def first_values_equal_the_plain_ones(device: torch.device) -> None:
    """Uniform ones bit for bit; normal ones within two units in the last place, as the logarithms of doubles differ."""
    keys = torch.tensor([0, 5, -1, 2**63 - 1, -(2**63), 77])
    rows = torch.tensor([3, 0, 6, 1, 5, 2])
    for width in (1, 7, 64):
        for kind in ("uniform", "normal"):
            weights = torch.zeros(7, width, device=device)
            fill_keyed_rows(weights, rows.to(device), keys.to(device), kind, 2**63 + 11, 0.25)
            expected = np.zeros((7, width), np.float32)
            ref_rows.fill_keyed_rows(expected, rows.numpy(), keys.numpy(), kind, 2**63 + 11, 0.25)
            ulps = (weights.cpu().view(torch.int32) - torch.from_numpy(expected).view(torch.int32)).abs().max()
            assert int(ulps) <= (0 if kind == "uniform" else 2)
