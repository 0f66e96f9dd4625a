"""The gradient of a lookup's weights as a tensor, for optimizers that want one: dense, or sparse over touched rows."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from terarec.ops.row_update import BagGradient, RowRule, row_update_

# Adding a gradient to a row is a step of SGD with this learning rate: 0 - (-1) g, exactly g.
_ADD = RowRule(kind="sgd", lr=-1.0)
# Marking rows is a pass over a byte a row, sorting one of about 60 ns a key (Zen 3): up to this many rows a key, mark.
_MARKED_ROWS_A_KEY = 64


def dense_gradient(gradient: BagGradient, dtype: torch.dtype) -> Tensor:
    """The gradient [V, D] of the weights: every row's gradients summed in float32, zeros elsewhere.

    Args:
        gradient: of one lookup, in a layout of one table of V rows.
        dtype: of the result.
    """
    layout = gradient.layout
    total = torch.zeros(layout.num_rows, layout.width, device=gradient.grad.device)
    row_update_(total, (), [gradient], _ADD, step=1)
    return total.to(dtype)


def sparse_gradient(gradient: BagGradient, dtype: torch.dtype) -> Tensor:
    """The gradient of the weights as a coalesced sparse COO tensor [V, D]: each touched row once, with its sum.

    Needs memory for the touched rows and a few bytes a row or key beside; never a dense [V, D].

    Args:
        gradient: of one lookup, in a layout of one table of V rows.
        dtype: of the result.
    """
    shape = (gradient.layout.num_rows, gradient.layout.width)
    rows, groups = group_keys(gradient.keys, shape[0])
    values = torch.zeros(rows.shape[0], shape[1], device=gradient.grad.device)
    if rows.shape[0]:
        layout = dataclasses.replace(gradient.layout, table_rows=(rows.shape[0],))
        row_update_(values, (), [dataclasses.replace(gradient, keys=groups, layout=layout)], _ADD, step=1)
    return torch.sparse_coo_tensor(rows[None], values.to(dtype), shape, is_coalesced=True, check_invariants=False)


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
