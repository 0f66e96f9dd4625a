# SPDX-License-Identifier: Apache-2.0
"""Offsets past 2^31 elements and rows: an arena of virtual memory of which a few pages are touched."""

import math
import mmap

import pytest
import torch

from terarec.kernels.ref.bag_lookup import dequantize_rows
from terarec.kernels.rows import initialise_keys
from terarec.ops import BagLayout, bag_lookup, quantize_rows, quantized_bag_lookup
from terarec.ops.row_update import BagGradient, row_rule, row_update_, state_dtype, state_shapes
from terarec.spec import Pooling
from tests.ops.rules import make_rule

NO_RESERVE = 0x4000  # MAP_NORESERVE of Linux


def forged_arena(rows: int, width: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE
    memory = mmap.mmap(-1, rows * width * dtype.itemsize, flags=flags)
    return torch.frombuffer(memory, dtype=dtype).reshape(rows, width)


def two_tables(rows: int, width: int, pooling: Pooling = "sum") -> BagLayout:
    return BagLayout(
        table_names=("first", "second"),
        table_base=(0, rows),
        table_rows=(rows, rows),
        feature_names=("f", "g"),
        feature_table=(0, 1),
        pooling=(pooling, pooling),
        width=width,
    )


@pytest.mark.parametrize(("rows", "width"), [(40_000_000, 64), (2**31 + 7, 1)])
def test_rows_past_two_to_the_31_elements(rows, width):
    weights = forged_arena(2 * rows, width)
    layout = two_tables(rows, width)
    keys = torch.tensor([0, rows - 1, rows - 1, 5, rows - 1, rows - 2])
    offsets = torch.tensor([0, 2, 3, 5, 6])
    grad = torch.arange(1, 4 * width + 1, dtype=torch.float32).reshape(2, 2 * width)
    gradient = BagGradient(keys, offsets, grad, layout)
    row_update_(weights, (), [gradient], row_rule("sgd", lr=1.0), step=1, implementation="cpu")
    assert torch.equal(weights[0], -grad[0, :width])
    assert torch.equal(weights[rows - 1], -grad[0, :width] - grad[1, :width])
    assert torch.equal(weights[rows + 5], -grad[0, width:])
    assert torch.equal(weights[2 * rows - 1], -grad[0, width:])
    assert torch.equal(weights[2 * rows - 2], -grad[1, width:])
    result = bag_lookup(weights, keys, offsets, layout, implementation="cpu")
    assert torch.equal(result[0, :width], weights[0] + weights[rows - 1])
    assert torch.equal(result[1], torch.cat([weights[rows - 1], weights[2 * rows - 2]]))


@pytest.mark.parametrize(("kind", "mode"), [("adam", "lazy_global"), ("rowwise_adagrad", "local"), ("ftrl", "local")])
def test_states_past_two_to_the_31_elements(kind, mode):
    rows, width = 40_000_000, 64
    rule = make_rule(kind, mode)
    layout, keys, offsets = two_tables(rows, width), torch.tensor([0, rows - 1]), torch.tensor([0, 1, 2])
    gradient = BagGradient(keys, offsets, torch.linspace(0.5, 2.0, 2 * width)[None], layout)
    shapes = state_shapes(kind, 2 * rows, width, mode=mode)
    far = [forged_arena(math.prod(shape), 1, state_dtype(name)).view(shape) for name, shape in shapes]
    weights, touched = forged_arena(2 * rows, width), [0, 2 * rows - 1]
    near_layout = two_tables(1, width)
    near = [torch.zeros(2, *shape[1:], dtype=state_dtype(name)) for name, shape in shapes]
    near_weights = torch.zeros(2, width)
    near_gradient = gradient._replace(keys=torch.zeros(2, dtype=torch.int64), layout=near_layout)
    for step in (1, 2):
        row_update_(weights, far, [gradient], rule, step=step, implementation="cpu")
        row_update_(near_weights, near, [near_gradient], rule, step=step, implementation="cpu")
    assert near_weights.all()
    assert torch.equal(weights[touched], near_weights)
    assert all(torch.equal(one[touched], other) for one, other in zip(far, near, strict=True))


def test_initial_values_past_two_to_the_31_elements():
    rows, keys = torch.tensor([1, 79_999_999]), torch.tensor([-5, 2**62])
    far, near = forged_arena(80_000_000, 64), torch.zeros(2, 64)
    for weights, places in ((far, rows), (near, torch.arange(2))):
        initialise_keys(weights, places, keys, table="t", seed=3, initializer="normal", scale=0.5)
    assert near.all()
    assert torch.equal(far[rows], near)


@pytest.mark.parametrize("pooling", ["mean", "max", "none"])
@pytest.mark.parametrize(("rows", "width"), [(40_000_000, 64), (2**31 + 7, 1)])
@pytest.mark.parametrize("kind", ["bfloat16", "float16", "codes"])
def test_narrow_rows_past_two_to_the_31_elements(rows, width, kind, pooling):
    vectors = torch.randn(3, width)
    far = [0, rows - 1, 2 * rows - 1]
    keys, offsets = torch.tensor([0, rows - 1, rows - 1]), torch.tensor([0, 2, 3])
    layout = two_tables(rows, width, pooling)
    if kind == "codes":
        packed = forged_arena(2 * rows, width + 8, torch.uint8)
        packed[far] = quantize_rows(vectors)
        result = quantized_bag_lookup(packed, keys, offsets, layout, implementation="cpu")
        vectors = dequantize_rows(packed[far])
    else:
        weights = forged_arena(2 * rows, width, getattr(torch, kind))
        weights[far] = vectors.to(weights.dtype)
        result = bag_lookup(weights, keys, offsets, layout, implementation="cpu")
        vectors = weights[far].float()
    first = {"mean": vectors[:2].mean(dim=0), "max": vectors[:2].amax(dim=0), "none": vectors[:2]}[pooling]
    torch.testing.assert_close(
        result if pooling == "none" else result[0],
        torch.cat([first, vectors[2:]] if pooling == "none" else [first, vectors[2]]),
    )
