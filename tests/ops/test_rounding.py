# SPDX-License-Identifier: Apache-2.0
"""Rows of 16 bits: every rule on them, and the stochastic rounding with which they are written."""

import math

import pytest
import torch

from terarec.errors import ConfigError
from terarec.kernels.row_rules import RULE_KINDS
from terarec.ops.row_update import BagGradient, row_gradient_norm, row_update_
from tests.errors import at
from tests.ops.bags import IMPLEMENTATIONS as EVERY_IMPLEMENTATION
from tests.ops.bags import one_feature
from tests.ops.hosts import on_every_host
from tests.ops.rules import make_gradients, make_rule, make_state

IMPLEMENTATIONS = ["cpu", "ref"]
DTYPES = [torch.bfloat16, torch.float16]
WORD = 2**64


def rounded(values, dtype, implementation="cpu", seed=0, step=1, order=None):
    """`values` float32[n, D] as an update writes them to the rows 0, 1, ... of a table."""
    rows, width = values.shape
    layout = one_feature(rows, width)
    keys = torch.arange(rows) if order is None else order
    gradient = BagGradient(keys, torch.arange(rows + 1), -values[keys], layout)
    weights = torch.zeros(rows, width, dtype=dtype)
    rule = make_rule("sgd", lr=1.0)
    row_update_(weights, (), [gradient], rule, step=step, rounding_seed=seed, implementation=implementation)
    return weights


def scattered(rows, width):
    """Values of every size: normal and subnormal ones of both types, and ones that are near their limits."""
    generator = torch.Generator().manual_seed(4)
    exponents = torch.randint(-45, 17, (rows, width), generator=generator)
    return torch.randn(rows, width, generator=generator) * torch.pow(2.0, exponents)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 2, 7, 16, 33, 128])
def test_the_same_bits_in_every_implementation_and_instruction_set(width, dtype):
    values = scattered(300, width)
    expected = rounded(values, dtype, "ref", seed=2**62 + 5, step=9)
    for result in on_every_host(lambda: rounded(values, dtype, "cpu", seed=2**62 + 5, step=9), threads=(1,)):
        assert torch.equal(result.view(torch.int16), expected.view(torch.int16))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [1.0009, -0.3337, 3.1e-6, -7.7e-8, 40_000.7])
def test_the_mean_is_the_value(value, dtype, implementation):
    values = torch.full((4000, 8), value)
    results = rounded(values, dtype, implementation).double()
    below, above = results.min(), results.max()
    assert below <= value <= above
    assert results.unique().numel() == 2
    deviation = float(above - below) / 2 / math.sqrt(values.numel())  # at most
    assert abs(float(results.mean()) - float(values[0, 0])) < 5 * deviation


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_results_are_neighbours_and_exact_values_stay(dtype, implementation):
    values = scattered(500, 9).clamp(-60_000, 60_000)
    results = rounded(values, dtype, implementation).float()
    nearest = values.to(dtype).float()
    spacing = torch.finfo(dtype).eps * values.abs() + torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    assert bool(((results - values).abs() < 1.001 * spacing).all())
    assert torch.equal(rounded(nearest, dtype, implementation).float(), nearest)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_limits(dtype, implementation):
    largest = torch.finfo(dtype).max
    values = torch.tensor([[math.inf, -math.inf, math.nan, 0.0, 3.4e38, -3.4e38, largest, 1e-44]])
    results = rounded(values, dtype, implementation)[0].tolist()
    assert results[:2] == [math.inf, -math.inf]
    assert math.isnan(results[2])
    assert results[3:] == [0.0, largest, -largest, largest, 0.0]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_the_bits_are_those_of_the_counters(implementation):
    def mix(bits):
        bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9 % WORD
        bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EB % WORD
        return bits ^ (bits >> 31)

    seed, step, row, column, increment = 77, 12, 5, 3, 0x9E3779B97F4A7C15
    stream = mix((mix(seed) + step * increment) % WORD)
    stream = mix((stream + (row + 1) * increment) % WORD)
    noise = mix((stream + (column // 2 + 1) * increment) % WORD) & 0xFFFF  # an odd column takes the low half
    for fraction in (noise, 0x10000 - noise):  # of the 16 bits that bfloat16 drops; the second reaches the next number
        bits = torch.tensor([[0x3F800000 + fraction]], dtype=torch.int32).expand(8, 4)
        result = rounded(bits.contiguous().view(torch.float32), torch.bfloat16, implementation, seed, step)
        assert (float(result[row, column]) > 1.0) == (fraction + noise >= 0x10000)


def test_the_bits_depend_on_seed_and_step_and_not_on_order_or_threads(set_threads):
    values = scattered(3000, 24)
    first = rounded(values, torch.bfloat16, seed=3, step=5)
    assert torch.equal(rounded(values, torch.bfloat16, seed=3, step=5, order=torch.randperm(3000)), first)
    for count in (1, 3):
        set_threads(count)
        assert torch.equal(rounded(values, torch.bfloat16, seed=3, step=5), first)
    assert not torch.equal(rounded(values, torch.bfloat16, seed=4, step=5), first)
    assert not torch.equal(rounded(values, torch.bfloat16, seed=3, step=6), first)


@pytest.mark.parametrize("mode", ["local", "global"])
@pytest.mark.parametrize("implementation", EVERY_IMPLEMENTATION)
def test_the_bits_depend_on_the_numbers_of_the_rows(implementation, mode):
    """Rows of other numbers, by row and by segments, as where they have these places; one segment is passed twice."""
    segments = torch.tensor([[0, 0, 29], [1, 0, 3], [2, 2, 0], [9, 1, 21]])
    numbers = torch.cat([torch.tensor([29, 3]), 2 * torch.arange(2, 9), torch.arange(9, 12) + 21])
    keys = torch.tensor([10, 0, 3, 11, 1, 2])
    grad, start = torch.randn(6, 6), torch.randn(12, 6).bfloat16()
    rule = make_rule("sgd" if mode == "local" else "momentum", mode)

    def moved(rows, keys, row_numbers):
        gradient = BagGradient(keys, torch.arange(7), grad, one_feature(len(rows), 6))
        weights, state = rows.clone(), make_state(rule, rows.float())
        how = {"step": 3, "rounding_seed": 5, "row_numbers": row_numbers, "implementation": implementation}
        row_update_(weights, state, [gradient], rule, **how)
        return weights

    apart = torch.zeros(40, 6, dtype=torch.bfloat16)
    apart[numbers] = start
    expected = moved(apart, numbers[keys], None)[numbers]
    for row_numbers in (numbers, segments):
        assert torch.equal(moved(start, keys, row_numbers), expected)
    assert not torch.equal(moved(start, keys, None), expected)
    for wrong in (numbers.int(), segments[:, :2]):
        with pytest.raises(ConfigError, check=at("row_numbers")):
            moved(start, keys, wrong)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("mode", ["local", "global", "lazy_global"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", RULE_KINDS)
def test_rules_move_narrow_rows_as_wide_ones(kind, dtype, mode, implementation):
    weights, gradients = make_gradients(19, ("mean", "sum", "mean", "mean"), 30, 3)
    rule = make_rule(kind, mode, clip_norm=3.0)
    narrow = weights.to(dtype)
    wide = narrow.float()
    state, wide_state = make_state(rule, weights), make_state(rule, weights)
    row_update_(narrow, state, gradients, rule, step=3, implementation=implementation)
    row_update_(wide, wide_state, gradients, rule, step=3, implementation="ref")
    torch.testing.assert_close(state, wide_state, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(narrow.float(), wide, rtol=2 * torch.finfo(dtype).eps, atol=1e-5)
    untouched = (wide == weights.to(dtype).float()).all(dim=1)
    assert torch.equal(narrow[untouched], weights.to(dtype)[untouched])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_batch_without_keys_changes_nothing(dtype, implementation):
    weights, gradients = make_gradients(19, "sum", 0, 1)
    narrow = weights.to(dtype)
    before = narrow.clone()
    row_update_(narrow, (), gradients[:1], make_rule("sgd"), step=1, implementation=implementation)
    assert torch.equal(narrow, before)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_norm_needs_no_wide_rows(dtype):
    weights, gradients = make_gradients(19, "sum", 30, 3)
    norms = {
        row_gradient_norm(held, gradients, make_rule("sgd"), implementation="cpu")
        for held in (weights, weights.to(dtype))
    }
    assert len(norms) == 1


@pytest.mark.parametrize("dtype", DTYPES)
def test_small_steps_are_not_lost(dtype):
    """A thousand steps, each far smaller than the distance of two numbers, add up in the mean."""
    weights = torch.ones(400, 4, dtype=dtype)
    layout = one_feature(400, 4)
    gradient = BagGradient(torch.arange(400), torch.arange(401), torch.ones(400, 4), layout)
    for step in range(1, 1001):
        row_update_(weights, (), [gradient], make_rule("sgd", lr=1e-4), step=step, implementation="cpu")
    assert float(weights.float().mean()) == pytest.approx(0.9, abs=0.003)
