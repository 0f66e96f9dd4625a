# SPDX-License-Identifier: Apache-2.0
"""Every pooling, with and without key weights, forward and back, against formulas in float64 that autograd derives."""

import pytest
import torch
from torch import Tensor

from terarec.errors import ConfigError
from terarec.kernels.cpu import host
from terarec.ops import bag_lookup
from terarec.ops.row_update import BagGradient, row_rule, row_update_
from tests.errors import at
from tests.ops.bags import Lookup, make_layout, make_lookup, one_feature
from tests.ops.hosts import SETS
from tests.params import paired

POOLED = ("sum", "mean", "sqrtn", "max")


def pool(vectors: Tensor, factors: Tensor, pooling: str) -> Tensor:
    if pooling == "max":
        return vectors.max(dim=0).values
    total = (factors[:, None] * vectors).sum(dim=0)
    if pooling == "mean":
        return total / factors.sum()
    return total / (factors**2).sum().sqrt() if pooling == "sqrtn" else total


def by_formula(held: Lookup, weights: Tensor, factors: Tensor | None) -> Tensor:
    """Return float64[B, S * D], bag by bag."""
    batch = (held.offsets.numel() - 1) // len(held.layout.pooling)
    factors = torch.ones(held.keys.numel(), dtype=torch.float64) if factors is None else factors
    columns = []
    for feature, pooling in enumerate(held.layout.pooling):
        base = int(held.layout.array[feature, 0])
        rows = []
        for bag in range(feature * batch, (feature + 1) * batch):
            part = slice(int(held.offsets[bag]), int(held.offsets[bag + 1]))
            empty = weights.new_zeros(held.layout.width)
            keys = held.keys[part] + base
            rows.append(pool(weights[keys], factors[part], pooling) if keys.numel() else empty)
        columns.append(torch.stack(rows))
    return torch.cat(columns, dim=1)


@pytest.mark.parametrize("implementation", ["cpu", "ref"])
@pytest.mark.parametrize("pooling", [*POOLED, POOLED])
@pytest.mark.parametrize("width", [3, 16])
def test_forward_and_gradient_follow_the_formula(implementation, pooling, width):
    held = make_lookup(make_layout(width, pooling), 9, 3, seed=4)
    exact = held.weights.double().requires_grad_()
    expected = by_formula(held, exact, None)
    weights = held.weights.clone().requires_grad_()
    result = bag_lookup(weights, held.keys, held.offsets, held.layout, implementation=implementation)
    torch.testing.assert_close(result.double(), expected, rtol=1e-5, atol=1e-6)
    grad = torch.randn(result.shape)
    result.backward(grad)
    expected.backward(grad.double())
    torch.testing.assert_close(weights.grad.to_dense().double(), exact.grad, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("implementation", ["cpu", "ref"])
@pytest.mark.parametrize("pooling", ["sum", "mean", "sqrtn", ("sum", "mean", "sqrtn", "mean")])
def test_weighted_forward_and_gradient_follow_the_formula(implementation, pooling):
    held = make_lookup(make_layout(16, pooling), 9, 3, seed=5)
    exact = held.weights.double().requires_grad_()
    expected = by_formula(held, exact, held.key_weights.double())
    weights = held.weights.clone().requires_grad_()
    arguments = (weights, held.keys, held.offsets, held.layout)
    result = bag_lookup(*arguments, key_weights=held.key_weights, implementation=implementation)
    torch.testing.assert_close(result.double(), expected, rtol=1e-5, atol=1e-6)
    grad = torch.randn(result.shape)
    result.backward(grad)
    expected.backward(grad.double())
    torch.testing.assert_close(weights.grad.to_dense().double(), exact.grad, rtol=1e-5, atol=1e-5)


@pytest.fixture(params=["ref", *SETS])
def implementation(request):
    """The plain kernels, and the compiled ones on every instruction set."""
    if request.param != "ref":
        host.select(request.param)
    yield "ref" if request.param == "ref" else "cpu"
    host.select("auto")


@pytest.mark.parametrize(
    ("pooling", "size", "weighted"), paired([*POOLED, POOLED], [(5, 40), (64, 40), (64, 3)], [False, True])
)
def test_updates_follow_the_formula(implementation, pooling, size, weighted):
    width, batch = size
    layout = make_layout(width, pooling)
    held = make_lookup(layout, batch, 3, seed=6)
    key_weights = held.key_weights if weighted and layout.takes_key_weights else None
    exact = held.weights.double().requires_grad_()
    expected = by_formula(held, exact, None if key_weights is None else key_weights.double())
    grad = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1))
    expected.backward(grad.double())
    moved = held.weights.clone()
    gradient = BagGradient(held.keys, held.offsets, grad, layout, key_weights)
    row_update_(moved, (), [gradient], row_rule("sgd", lr=1.0), step=1, implementation=implementation)
    torch.testing.assert_close(moved.double(), held.weights.double() - exact.grad, rtol=1e-4, atol=1e-4)


def one_bag(weights, keys, pooling, implementation, key_weights=None):
    layout = make_layout(weights.shape[1], pooling)
    keys = torch.tensor(keys)
    offsets = torch.tensor([0, *[keys.numel()] * 4])  # of four features, the first has a bag
    arguments = (weights, keys, offsets, layout)
    result = bag_lookup(*arguments, key_weights=key_weights, implementation=implementation)
    return result[0, : weights.shape[1]], offsets, layout


@pytest.mark.parametrize("implementation", ["cpu", "ref"])
@pytest.mark.parametrize("width", [1, 3, 16])
def test_of_equal_maxima_the_first_key_takes_the_gradient(implementation, width):
    weights = torch.zeros(1014, width)
    weights[[4, 7]] = 2.0
    result, offsets, layout = one_bag(weights, [3, 7, 4, 7], "max", implementation)
    assert torch.equal(result, torch.full((width,), 2.0))
    gradient = BagGradient(torch.tensor([3, 7, 4, 7]), offsets, torch.ones(1, 4 * width), layout)
    row_update_(weights, (), [gradient], row_rule("sgd", lr=0.5), step=1, implementation=implementation)
    assert torch.equal(weights[7], torch.full((width,), 1.5))
    assert torch.equal(weights[4], torch.full((width,), 2.0))
    assert torch.equal(weights[3], torch.zeros(width))


@pytest.mark.parametrize("implementation", ["cpu", "ref"])
def test_a_maximum_that_is_not_a_number_stays_in_its_column(implementation):
    weights = torch.zeros(1014, 9)
    weights[5, 2] = weights[6, 2] = float("nan")
    weights[6, 3] = float("-inf")
    result, offsets, layout = one_bag(weights, [1, 5, 6], "max", implementation)
    assert result.isnan().nonzero().tolist() == [[2]]
    assert float(result[3]) == 0.0
    gradient = BagGradient(torch.tensor([1, 5, 6]), offsets, torch.ones(1, 36), layout)
    row_update_(weights, (), [gradient], row_rule("sgd", lr=1.0), step=1, implementation=implementation)
    assert weights[6].tolist()[3:] == [float("-inf"), 0, 0, 0, 0, 0]
    assert weights[1].tolist() == [-1, -1, 0, -1, -1, -1, -1, -1, -1]


@pytest.mark.parametrize("implementation", ["cpu", "ref"])
@pytest.mark.parametrize("pooling", ["mean", "sqrtn"])
def test_key_weights_of_zero_give_zeros(implementation, pooling):
    weights = torch.randn(1014, 8)
    result, _, _ = one_bag(weights, [1, 2], pooling, implementation, torch.zeros(2))
    assert torch.equal(result, torch.zeros(8))
    result, _, _ = one_bag(weights, [1, 2], pooling, implementation, torch.tensor([0.0, 2.0]))
    torch.testing.assert_close(result, weights[2])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [1, 21, 64])
def test_narrow_rows_are_read_exactly(implementation, dtype, width):
    """Every value of the type: subnormal ones, infinities and all kinds of NaN too."""
    patterns = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    rows = -(-patterns.numel() // width)
    table = torch.cat([patterns, patterns[: rows * width - patterns.numel()]]).reshape(rows, width)
    layout = one_feature(rows, width)
    result = bag_lookup(table, torch.arange(rows), torch.arange(rows + 1), layout, implementation=implementation)
    assert result.dtype == torch.float32
    assert torch.equal(result.isnan(), table.isnan())
    assert torch.equal(result.nan_to_num(1.5), table.float().nan_to_num(1.5))


def test_rows_of_other_types_are_rejected():
    held = make_lookup(make_layout(8), 5, 1)
    for dtype in (torch.float64, torch.int8, torch.uint8):
        with pytest.raises(ConfigError, check=at("weights")):
            bag_lookup(held.weights.to(dtype), held.keys, held.offsets, held.layout)
