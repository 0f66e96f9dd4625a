# SPDX-License-Identifier: Apache-2.0
"""Rows of 8-bit codes: the error of packing, and lookups against the plain kernel and the rows they stand for."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from terarec.errors import ConfigError, KernelError, KeyOutOfRangeError
from terarec.kernels.ref.bag_lookup import dequantize_rows
from terarec.ops import bag_lookup, quantize_rows, quantized_bag_lookup
from tests.errors import at
from tests.ops.bags import make_layout, make_lookup
from tests.ops.hosts import SETS, on_every_host

ROUNDING = 2.0**-22  # of the largest value: the error of float32 in addition to that of the codes


@given(
    numbers=st.lists(
        st.floats(width=32, allow_nan=False, allow_infinity=False, min_value=-(2.0**126), max_value=2.0**126)
    ),
    width=st.integers(1, 9),
)
def test_no_value_moves_by_more_than_half_a_code(numbers, width):
    weights = torch.tensor(numbers[: len(numbers) // width * width], dtype=torch.float32).reshape(-1, width)
    packed = quantize_rows(weights)
    assert (packed.dtype, packed.shape) == (torch.uint8, (weights.shape[0], width + 8))
    exact, found = weights.double(), dequantize_rows(packed).double()
    ranges = exact.amax(dim=1) - exact.amin(dim=1)
    bound = ranges / 510 + ROUNDING * exact.abs().amax(dim=1) + 2e-43
    assert bool(((exact - found).abs() <= bound[:, None]).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_random_rows_keep_the_bound_and_their_ends(dtype):
    weights = (torch.randn(3001, 33) * torch.logspace(-6, 3, 3001)[:, None]).to(dtype)
    found = dequantize_rows(quantize_rows(weights)).double()
    exact = weights.double()
    bound = (exact.amax(dim=1) - exact.amin(dim=1)) / 510 + ROUNDING * exact.abs().amax(dim=1)
    assert bool(((exact - found).abs() <= bound[:, None]).all())
    torch.testing.assert_close(found.amin(dim=1), exact.amin(dim=1))
    torch.testing.assert_close(found.amax(dim=1), exact.amax(dim=1), rtol=1e-6, atol=0)


def test_constant_rows_stay_unchanged():
    weights = torch.tensor([[0.1], [-3e38], [0.0], [1e-45]]).expand(4, 7)
    assert torch.equal(dequantize_rows(quantize_rows(weights)), weights)


def test_the_bytes_of_a_row():
    packed = quantize_rows(torch.tensor([[-1.0, 0.0, 254.0]]))
    assert packed[0].tolist() == [0, 1, 255, 0, 0, 128, 63, 0, 0, 128, 191]  # codes, 1.0, -1.0


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_values_that_are_not_finite_are_rejected(value):
    weights = torch.zeros(50, 4)
    weights[37, 2] = value
    with pytest.raises(ConfigError, check=at("weights[37]")):
        quantize_rows(weights)


def test_what_cannot_be_packed_is_rejected():
    with pytest.raises(ConfigError, check=at("weights[0]")):
        quantize_rows(torch.tensor([[-3e38, 3e38]]))
    for wrong in (torch.zeros(3), torch.zeros(3, 2, dtype=torch.float64)):
        with pytest.raises(ConfigError, check=at("weights")):
            quantize_rows(wrong)


@pytest.mark.parametrize("width", [1, 3, 8, 16, 17, 64, 128, 130, 256])
@pytest.mark.parametrize("pooling", ["none", ("mean", "sum", "sqrtn", "max")])
def test_equals_the_plain_kernel_and_a_lookup_of_the_values(select, width, pooling):
    layout = make_layout(width, pooling)
    for batch, hotness in [(0, 1), (1, 3), (31, 1), (65, 4)]:
        held = make_lookup(layout, batch, hotness)
        packed = quantize_rows(held.weights)
        arguments = (held.keys, held.offsets, layout)
        expected = quantized_bag_lookup(packed, *arguments, implementation="ref")
        for name in SETS:
            select(name)
            result = quantized_bag_lookup(packed, *arguments, implementation="cpu")
            torch.testing.assert_close(result, expected)
            torch.testing.assert_close(result, bag_lookup(dequantize_rows(packed), *arguments))


@pytest.mark.parametrize("width", [17, 64])
@pytest.mark.parametrize("weighted", [False, True])
def test_the_same_bits_on_every_instruction_set_and_thread_count(width, weighted):
    held = make_lookup(make_layout(width, ("mean", "sum", "sqrtn", "sum")), 700, 5)
    packed, key_weights = quantize_rows(held.weights), held.key_weights if weighted else None
    arguments = (packed, held.keys, held.offsets, held.layout)

    def looked_up(implementation="cpu"):
        return quantized_bag_lookup(*arguments, key_weights=key_weights, implementation=implementation)

    results = on_every_host(looked_up, threads=(1, 2, 3))
    torch.testing.assert_close(results[0], looked_up("ref"))
    assert all(torch.equal(results[0], result) for result in results)


@pytest.mark.parametrize("implementation", ["cpu", "ref"])
def test_what_does_not_fit_is_rejected(implementation):
    held = make_lookup(make_layout(8), 5, 1)
    packed = quantize_rows(held.weights)
    arguments = (held.keys, held.offsets, held.layout)
    for wrong in (held.weights, packed[:, :15], packed[:1000], packed.view(torch.int8)):
        with pytest.raises(ConfigError, check=at("packed")):
            quantized_bag_lookup(wrong, *arguments, implementation=implementation)
    with pytest.raises(ConfigError, check=at("key_weights")):
        quantized_bag_lookup(packed, *arguments, key_weights=torch.ones(3), implementation=implementation)
    held.keys[7] = 13
    with pytest.raises(KeyOutOfRangeError, check=at("feature 'b'")):
        quantized_bag_lookup(packed, *arguments, implementation=implementation)
    with pytest.raises(KernelError, check=at("implementation")):
        quantized_bag_lookup(packed, *arguments, implementation="fast")
