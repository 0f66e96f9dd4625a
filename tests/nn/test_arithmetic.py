# SPDX-License-Identifier: Apache-2.0
"""Layers without weights that compute: elementwise, reductions, products of matrices, activations, FM, interaction."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from terarec.errors import ConfigError
from tests.errors import at
from tests.nn.formula import Array, assert_gradcheck, compare, draw, make

CASES: list[tuple[str, dict[str, Any], Callable[..., Any]]] = [
    ("relu", {}, lambda x: x * (x > 0)),
    ("sigmoid", {}, lambda x: 1 / (1 + np.exp(-x))),
    ("elu", {}, lambda x: np.where(x < 0, np.exp(x) - 1, x)),
    ("elu", {"alpha": 0.3}, lambda x: np.where(x < 0, 0.3 * (np.exp(x) - 1), x)),
    ("softmax", {}, lambda x: np.exp(x) / np.exp(x).sum(-1, keepdims=True)),
    ("softmax", {"factor": 3.0}, lambda x: np.exp(x) / np.exp(x).sum(-1, keepdims=True)),
]


@pytest.mark.parametrize(("kind", "options", "formula"), CASES)
@pytest.mark.parametrize(("batch_size", "dims"), [(1, (1,)), (3, (7,)), (2, (3, 5))])
def test_elements_follow_the_formula(
    kind: str, options: dict[str, Any], formula: Callable[..., Any], batch_size: int, dims: tuple[int, ...]
) -> None:
    layer = make(kind, [dims], options)
    compare(layer, formula, draw(batch_size, dims))
    assert_gradcheck(layer, draw(batch_size, dims))


def test_cast_changes_the_type() -> None:
    x = torch.randn(3, 2)
    assert make("cast", [(2,)], {"dtype": "bfloat16"})(x).dtype == torch.bfloat16
    assert make("cast", [(2,)])(x.half()).dtype == torch.float32
    compare_as_is = make("cast", [(2,)], {"dtype": "float32"})(x)
    assert torch.equal(compare_as_is, x)


@pytest.mark.parametrize("dims", [(1,), (5,), (2, 3)])
@pytest.mark.parametrize("count", [2, 3, 5])
def test_sums_differences_and_products(count: int, dims: tuple[int, ...]) -> None:
    inputs = draw(3, *[dims] * count)
    compare(make("add", [dims] * count), lambda *x: sum(x), inputs)
    compare(make("elementwise_multiply", [dims] * count), lambda *x: np.prod(np.stack(x), axis=0), inputs)
    if count == 2:
        compare(make("sub", [dims] * 2), lambda x, y: x + -1.0 * y, inputs)


@pytest.mark.parametrize(("dims", "axis"), [((1,), 1), ((7,), 1), ((3, 5), 1), ((3, 5), 2), ((2, 3, 2), 2)])
def test_reductions_keep_the_dimension(dims: tuple[int, ...], axis: int) -> None:
    def total(x: Array) -> Array:
        out = np.zeros([1 if index == axis else length for index, length in enumerate(x.shape)])
        for place in np.ndindex(x.shape):
            out[tuple(0 if index == axis else at for index, at in enumerate(place))] += x[place]
        return out

    compare(make("reduce_sum", [dims], {"axis": axis}), total, draw(3, dims))
    compare(make("reduce_mean", [dims], {"axis": axis}), lambda x: total(x) / dims[axis - 1], draw(3, dims))


@pytest.mark.parametrize(
    ("left", "right", "transposed"),
    [((1, 1), (1, 1), False), ((2, 3), (3, 5), False), ((2, 3), (5, 3), True), ((2, 2, 3), (2, 3, 5), False)],
)
def test_matrices_of_each_sample(left: tuple[int, ...], right: tuple[int, ...], transposed: bool) -> None:
    layer = make("matrix_multiply", [left, right], {"transpose_b": transposed})

    def formula(a: Array, b: Array) -> Array:
        b = np.swapaxes(b, -1, -2) if transposed else b
        out = np.zeros((*a.shape[:-1], b.shape[-1]))
        for place in np.ndindex(out.shape):
            row, column = a[place[:-1]], b[place[:-2]][:, place[-1]]
            out[place] = sum(row[i] * column[i] for i in range(len(row)))
        return out

    compare(layer, formula, draw(3, left, right))


@pytest.mark.parametrize("right", [(4,), (2, 3)])
def test_matrices_of_whole_batches(right: tuple[int, ...]) -> None:
    layer = make("matrix_multiply", [(5,), right])
    inputs = [*draw(3, (5,)), *draw(5, right)]
    compare(layer, lambda a, b: np.einsum("mn,n...->m...", a, b), inputs)


@pytest.mark.parametrize(("slots", "out_dim"), [(1, 1), (3, 2), (5, 7)])
def test_fm_sums_the_products_of_all_pairs(slots: int, out_dim: int) -> None:
    def formula(x: Array) -> Array:
        vectors = x.reshape(len(x), slots, out_dim)
        out = np.zeros((len(x), out_dim))
        for i in range(slots):
            for j in range(i):
                out += vectors[:, i] * vectors[:, j]
        return out

    for dims in ((slots * out_dim,), (slots, out_dim)):
        compare(make("fm_order2", [dims], {"out_dim": out_dim}), formula, draw(3, dims))


@pytest.mark.parametrize(("slots", "width"), [(1, 1), (2, 3), (5, 4), (26, 2)])
def test_interaction_has_hugectr_columns(slots: int, width: int) -> None:
    def formula(first: Array, others: Array) -> Array:
        vectors = np.concatenate([first[:, None], others], axis=1)
        columns = [first]
        for row in range(1, slots + 1):
            columns += [(vectors[:, row] * vectors[:, column]).sum(1, keepdims=True) for column in range(row)]
        return np.concatenate([*columns, np.zeros((len(first), 1))], axis=1)

    layer = make("interaction", [(width,), (slots, width)])
    assert layer.output_shapes[0].dims == (width + (slots + 1) * (slots + 2) // 2 - (slots + 1) + 1,)
    compare(layer, formula, draw(2, (width,), (slots, width)))


@pytest.mark.parametrize(("batch_size", "dims"), [(1, (1,)), (3, (5,)), (7, (2,)), (4, (2, 3))])
@pytest.mark.parametrize("is_training", [True, False])
def test_dice_uses_the_statistics_of_its_batch_always(
    batch_size: int, dims: tuple[int, ...], is_training: bool
) -> None:
    def formula(x: Array) -> Array:
        mean = x.sum(0) / len(x)
        var = ((x - mean) ** 2).sum(0) / len(x)
        p = 1 / (1 + np.exp((mean - x) / np.sqrt(var + 0.1)))
        return p * x + (1 - p) * 0.3 * x

    layer = make("prelu_dice", [dims], {"alpha": 0.3, "eps": 0.1}).train(is_training)
    compare(layer, formula, draw(batch_size, dims))
    assert_gradcheck(layer, draw(batch_size, dims))


WRONG: list[tuple[str, list[tuple[int, ...]], dict[str, Any], str]] = [
    ("add", [(3,), (4,)], {}, ("layer add", "inputs [B, 3], [B, 4]")),
    ("add", [(3,)], {}, ("layer add", "expected 2 or more inputs")),
    ("sub", [(3,)] * 3, {}, ("layer sub",)),
    ("elementwise_multiply", [(3,), (3, 1)], {}, ("layer elementwise_multiply",)),
    ("reduce_sum", [(3,)], {"axis": 2}, ("layer reduce_sum",)),
    ("reduce_mean", [(3,)], {"axis": 0}, ("layer reduce_mean",)),
    (
        "matrix_multiply",
        [(2, 3), (2, 3)],
        {},
        ("layer matrix_multiply", "inputs [B, 2, 3], [B, 2, 3], transpose_b=False"),
    ),
    ("matrix_multiply", [(2, 3), (3,)], {}, ("layer matrix_multiply", "expected matrices")),
    ("matrix_multiply", [(2, 2, 3), (3, 3, 2)], {}, ("layer matrix_multiply", "expected matrices")),
    ("matrix_multiply", [(3,), (3,)], {"transpose_b": True}, ("layer matrix_multiply", "not transposed")),
    ("fm_order2", [(5,)], {"out_dim": 2}, ("layer fm_order2",)),
    ("interaction", [(3,), (2, 4)], {}, ("layer interaction", "[B, 3], [B, 2, 4]")),
    ("interaction", [(2, 3), (2, 3)], {}, ("layer interaction", "expected [B, d]")),
    ("relu", [(3,)], {"alpha": 1.0}, ("layer relu",)),
    ("elu", [(3,)], {"alpha": math.inf}, ("layer elu",)),
    ("prelu_dice", [(3,)], {"eps": -1.0}, ("layer prelu_dice",)),
    ("cast", [(3,)], {"dtype": "int8"}, ("layer cast",)),
]


@pytest.mark.parametrize(("kind", "dims", "options", "place"), WRONG)
def test_wrong_shapes_and_options_are_rejected(
    kind: str, dims: list[tuple[int, ...]], options: dict[str, Any], place: tuple[str, ...]
) -> None:
    with pytest.raises(ConfigError, check=at(*place)):
        make(kind, dims, options)
