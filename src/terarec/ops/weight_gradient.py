"""The gradient of a lookup's weights as a tensor, for optimizers that want one: dense, or sparse over touched rows."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from terarec.kernels.ref.bag_lookup import spread_gradient
from terarec.ops.row_update import BagGradient, RowRule, row_update_

_SUBTRACT = RowRule(kind="sgd", lr=1.0)  # from rows of zeros it leaves the gradients' sums, negated
# Marking rows is a pass over a byte a row, sorting one of about 60 ns a key (Zen 3): up to this many rows a key, mark.
_MARKED_ROWS_A_KEY = 64


def dense_gradient(gradient: BagGradient, dtype: torch.dtype, weights: Tensor | None = None) -> Tensor:
    """The gradient [V, D] of the weights: every row's gradients summed in float32, zeros elsewhere.

    Args:
        gradient: of one lookup, in a layout of one table of V rows.
        dtype: of the result.
        weights: [V, D] as they were at the lookup; needed for pooling "max".
    """
    layout = gradient.layout
    total = torch.zeros(layout.num_rows, layout.width, device=gradient.grad.device)
    row_update_(total, (), [per_key(gradient, weights)], _SUBTRACT, step=1)
    return total.neg_().to(dtype)


def sparse_gradient(gradient: BagGradient, dtype: torch.dtype, weights: Tensor | None = None) -> Tensor:
    """The gradient of the weights as a coalesced sparse COO tensor [V, D]: each touched row once, with its sum.

    Needs memory for the touched rows and a few bytes a row or key beside; never a dense [V, D].

    Args:
        gradient: of one lookup, in a layout of one table of V rows.
        dtype: of the result.
        weights: [V, D] as they were at the lookup; needed for pooling "max".
    """
    gradient = per_key(gradient, weights)
    shape = (gradient.layout.num_rows, gradient.layout.width)
    rows, groups = group_keys(gradient.keys, shape[0])
    values = torch.zeros(rows.shape[0], shape[1], device=gradient.grad.device)
    if rows.shape[0]:
        layout = dataclasses.replace(gradient.layout, table_rows=(rows.shape[0],))
        row_update_(values, (), [gradient._replace(keys=groups, layout=layout)], _SUBTRACT, step=1)
    values = values.neg_().to(dtype)
    return torch.sparse_coo_tensor(rows[None], values, shape, is_coalesced=True, check_invariants=False)


def per_key(gradient: BagGradient, weights: Tensor | None) -> BagGradient:
    """`gradient`; if it is of pooling "max", as the gradients of its keys, so that `weights` may move.

    Args:
        gradient: of one lookup, in a layout of one feature.
        weights: [V, D] as they were at the lookup; read for "max" alone.
    """
    layout = gradient.layout
    if layout.pooling != ("max",):
        return gradient
    _, grads = spread_gradient(gradient.keys, gradient.offsets, gradient.grad, layout.array, weights=weights)
    return gradient._replace(grad=grads, layout=dataclasses.replace(layout, pooling=("none",)))


def group_keys(keys: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """(distinct keys int64[U], rising; the place of each key among them int64[N]).

    Args:
        keys: int64[N], each 0 <= key < `num_rows`.
        num_rows: V.
    """
    if num_rows > _MARKED_ROWS_A_KEY * keys.shape[0]:
        distinct, places = torch.unique(keys, return_inverse=True)
        return distinct, places
    is_touched = torch.zeros(num_rows, dtype=torch.bool, device=keys.device)
    is_touched[keys] = True
    rows = is_touched.nonzero()[:, 0]
    place = torch.empty(num_rows, dtype=torch.int64, device=keys.device)
    place[rows] = torch.arange(rows.shape[0], device=keys.device)
    return rows, place[keys]
