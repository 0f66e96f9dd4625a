# SPDX-License-Identifier: Apache-2.0
"""The layers that only move elements: concat, reshape, slice, select, gather, scale, fused_reshape_concat(_general)."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from terarec.errors import ConfigError
from terarec.nn import TensorShape, build_layer
from tests.errors import at
from tests.nn.formula import Array, assert_gradcheck, compare, draw, make
from tests.params import examples

LENGTH = st.integers(1, 7)


def plain_concat(axis: int) -> Callable[..., Any]:
    def formula(*inputs: Array) -> Array:
        length = sum(array.shape[axis] for array in inputs)
        shape = list(inputs[0].shape)
        shape[axis] = length
        out = np.zeros(shape)
        start = 0
        for array in inputs:
            for place in np.ndindex(array.shape):
                target = list(place)
                target[axis] += start
                out[tuple(target)] = array[place]
            start += array.shape[axis]
        return out

    return formula


@settings(max_examples=examples(40))
@given(
    batch_size=st.integers(1, 3), axis=st.integers(1, 2), lengths=st.lists(LENGTH, min_size=1, max_size=3), other=LENGTH
)
def test_concat_equals_the_formula(batch_size: int, axis: int, lengths: list[int], other: int) -> None:
    dims = [(length, other) if axis == 1 else (other, length) for length in lengths]
    compare(make("concat", dims, {"axis": axis}), plain_concat(axis), draw(batch_size, *dims))
    flat = [(length,) for length in lengths]
    compare(make("concat", flat), plain_concat(1), draw(batch_size, *flat))


@settings(max_examples=examples(40))
@given(
    batch_size=st.integers(1, 3),
    slots=LENGTH,
    width=LENGTH,
    rows=st.integers(1, 3),
    data=st.data(),
)
def test_reshape_is_the_row_major_view(batch_size: int, slots: int, width: int, rows: int, data: st.DataObject) -> None:
    numel = rows * slots * width
    divisors = [number for number in range(1, numel + 1) if numel % number == 0]
    last = data.draw(st.sampled_from(divisors))
    step = data.draw(st.sampled_from([number for number in divisors if (numel // last) % number == 0]))
    (x,) = draw(batch_size * rows, (slots, width))
    ways: list[tuple[dict[str, object], tuple[int, ...]]] = [
        ({"leading_dim": last}, (last,)),
        ({"leading_dim": last, "time_step": step}, (step, last)),
        ({"shape": [-1, step, last]}, (step, last)),
    ]
    for options, dims in ways:
        layer = make("reshape", [(slots, width)], options, rows=rows)
        assert layer.output_shapes == (TensorShape(numel // math.prod(dims), dims),)

        def formula(array: Array, dims: tuple[int, ...] = dims) -> Array:
            return np.array(list(array.flat)).reshape(-1, *dims)

        np.testing.assert_array_equal(layer(torch.from_numpy(x)).numpy(), formula(x))
    compare(layer, formula, [x])


@settings(max_examples=examples(40))
@given(batch_size=st.integers(1, 3), slots=LENGTH, width=LENGTH, data=st.data())
def test_reshape_takes_slots(batch_size: int, slots: int, width: int, data: st.DataObject) -> None:
    chosen = data.draw(st.lists(st.integers(0, slots - 1), max_size=4))
    layer = make("reshape", [(slots, width)], {"selected": True, "selected_slots": chosen})
    taken = chosen or list(range(slots))

    def formula(x: Array) -> Array:
        return np.concatenate([x[:, slot] for slot in taken], axis=1)

    compare(layer, formula, draw(batch_size, (slots, width)))


@settings(max_examples=examples(40))
@given(batch_size=st.integers(1, 3), width=st.integers(1, 9), data=st.data())
def test_slice_takes_ranges_and_sums_their_gradients(batch_size: int, width: int, data: st.DataObject) -> None:
    bounds = st.lists(st.integers(0, width), min_size=2, max_size=2, unique=True).map(sorted)
    ranges = data.draw(st.lists(bounds, min_size=1, max_size=4))
    dims = data.draw(st.sampled_from([(width,), (2, width)]))
    layer = make("slice", [dims], {"ranges": ranges})

    def formula(x: Array) -> tuple[Array, ...]:
        return tuple(np.stack([x[..., i] for i in range(start, end)], axis=-1) for start, end in ranges)

    compare(layer, formula, draw(batch_size, dims))


@pytest.mark.parametrize("ranges", [[(0, 2), (2, 3), (3, 7)], [(0, 7), (0, 7)], [(0, 7)], [(0, 3), (2, 7)]])
def test_slice_of_parts_and_of_copies(ranges: list[tuple[int, int]]) -> None:
    layer = make("slice", [(7,)], {"ranges": ranges})
    compare(layer, lambda x: tuple(x[:, start:end].copy() for start, end in ranges), draw(3, (7,)))


@settings(max_examples=examples(40))
@given(batch_size=st.integers(1, 3), dims=st.lists(LENGTH, min_size=1, max_size=3), data=st.data())
def test_select_takes_entries(batch_size: int, dims: list[int], data: st.DataObject) -> None:
    dim = data.draw(st.integers(1, len(dims)))
    index = data.draw(st.lists(st.integers(0, dims[dim - 1] - 1), min_size=1, max_size=4))
    layer = make("select", [tuple(dims)], {"dim": dim, "index": index})

    def formula(x: Array) -> Array:
        return np.stack([np.moveaxis(x, dim, 0)[entry] for entry in index], axis=dim)

    compare(layer, formula, draw(batch_size, tuple(dims)))


def test_gather_takes_rows_of_the_batch() -> None:
    layer = make("gather", [(3,)], {"indices": [4, 0, 4]})
    compare(layer, lambda x: np.stack([x[4], x[0], x[4]]), draw(5, (3,)))
    assert_gradcheck(layer, draw(5, (3,)))
    with pytest.raises(IndexError):
        layer(torch.zeros(4, 3))


@pytest.mark.parametrize(("axis", "factor", "width"), [(0, 1, 3), (0, 3, 2), (1, 2, 1), (1, 5, 3)])
def test_scale_repeats_elements_or_rows(axis: int, factor: int, width: int) -> None:
    layer = make("scale", [(width,)], {"axis": axis, "factor": factor})

    def formula(x: Array) -> Array:
        out = np.zeros((x.shape[0], width * factor) if axis == 0 else (x.shape[0] * factor, width))
        for b, j in np.ndindex(x.shape):
            for copy in range(factor):
                out[(b, j * factor + copy) if axis == 0 else (b * factor + copy, j)] = x[b, j]
        return out

    compare(layer, formula, draw(3, (width,)))


@pytest.mark.parametrize("axis", [0, 1])
def test_scale_passes_the_first_copys_gradient_on_request(axis: int) -> None:
    layer = make("scale", [(3,)], {"axis": axis, "factor": 4, "first_copy_gradient": True})
    twin = make("scale", [(3,)], {"axis": axis, "factor": 4})
    x = torch.from_numpy(draw(2, (3,))[0]).requires_grad_()
    out = layer(x)
    torch.testing.assert_close(out, twin(x))
    weight = torch.from_numpy(draw(out.shape[0], out.shape[1:])[0])
    (out * weight).sum().backward()
    first = weight.view(2, 3, 4)[:, :, 0] if axis == 0 else weight.view(2, 4, 3)[:, 0]
    torch.testing.assert_close(x.grad, first)


@pytest.mark.parametrize(("slots", "widths"), [(2, (1,)), (3, (2, 5)), (5, (1, 3, 2))])
def test_fused_reshape_concat_splits_off_the_last_slot(slots: int, widths: tuple[int, ...]) -> None:
    dims = [(slots, width) for width in widths]

    def rows(*inputs: Array) -> list[list[Array]]:
        return [
            [np.concatenate([x[b, slot] for x in inputs]) for slot in range(slots)] for b in range(inputs[0].shape[0])
        ]

    def split(*inputs: Array) -> tuple[Array, Array]:
        by_sample = rows(*inputs)
        items = np.stack([row for sample in by_sample for row in sample[:-1]])
        return items, np.stack([sample[-1] for sample in by_sample])

    def general(*inputs: Array) -> Array:
        return np.stack([row for sample in rows(*inputs) for row in sample])

    compare(make("fused_reshape_concat", dims), split, draw(3, *dims))
    compare(make("fused_reshape_concat_general", dims), general, draw(3, *dims))


WRONG: list[tuple[str, list[tuple[int, ...]], dict[str, object], str]] = [
    ("concat", [(3, 2), (4, 2)], {"axis": 2}, "[B, 3, 2], [B, 4, 2], axis=2, expected shapes equal except for"),
    ("concat", [(3,), (3, 2)], {}, "expected shapes equal"),
    ("concat", [(3,)], {"axis": 2}, "expected more than 2 dimensions"),
    ("concat", [], {}, "expected 1 or more inputs"),
    ("reshape", [(3, 2)], {}, "expected exactly one of leading_dim, selected and shape"),
    ("reshape", [(3, 2)], {"leading_dim": 4}, "expected whole rows of 4"),
    ("reshape", [(3, 2)], {"leading_dim": 2, "selected": True}, "expected exactly one"),
    ("reshape", [(3, 2)], {"selected": True, "selected_slots": [3]}, "expected slots below 3"),
    ("reshape", [(6,)], {"selected": True}, "expected [B, slots, d]"),
    ("reshape", [(6,)], {"shape": [2, -1]}, "shape=(2, -1), expected -1 followed by positive"),
    ("slice", [(4,)], {"ranges": [(0, 5)]}, "ranges=((0, 5),), expected at least one range, start < end <= 4"),
    ("slice", [(4,)], {"ranges": [(2, 2)]}, "start < end"),
    ("slice", [(4,)], {"ranges": [(-1, 2)]}, "ranges is [(-1, 2)], expected a list, each a list of 2"),
    ("slice", [(4,)], {"ranges": []}, "at least one range"),
    ("select", [(4,)], {"dim": 0, "index": [0]}, "dim is 0, expected an integer >= 1"),
    ("select", [(4,)], {"dim": 1, "index": [4]}, "expected entries below 4"),
    ("select", [(4,)], {"dim": 2, "index": [0]}, "expected more than 2 dimensions"),
    ("gather", [(4,)], {"indices": []}, "at least one index"),
    ("scale", [(4, 2)], {"factor": 2}, "expected one input of two dimensions"),
    ("scale", [(4,)], {"factor": 2, "axis": 2}, "axis is 2, expected one of 0, 1"),
    ("scale", [(4,)], {}, "factor is missing, expected an integer >= 1"),
    ("fused_reshape_concat", [(1, 2)], {}, "expected at least two slots"),
    ("fused_reshape_concat_general", [(2, 2), (3, 2)], {}, "expected [B, s, w_i] with equal s"),
]


@pytest.mark.parametrize(("kind", "dims", "options", "problem"), WRONG)
def test_wrong_shapes_and_options_are_rejected(
    kind: str, dims: list[tuple[int, ...]], options: dict[str, object], problem: str
) -> None:
    with pytest.raises(ConfigError, check=at(f"layer {kind}", problem)):
        make(kind, dims, options)


def test_rows_that_differ_are_rejected() -> None:
    shapes = [TensorShape(1, (3,)), TensorShape(2, (3,))]
    with pytest.raises(ConfigError, check=at("layer concat")):
        build_layer("concat", shapes, {}, generator=torch.Generator())
