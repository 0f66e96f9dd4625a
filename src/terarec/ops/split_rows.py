# SPDX-License-Identifier: Apache-2.0
"""Row updates by rules that take all columns of a row, where these are on several ranks.

A norm of a row's gradient and the mean of its squares are sums over columns. Each rank sums its own, the sums of the
ranks are added up, and the rest of the update is by column.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from terarec.errors import ConfigError
from terarec.kernels.row_rules import RowRule, row_rule
from terarec.ops.layout import BagLayout
from terarec.ops.row_update import BagGradient, key_gradients, row_update_, summed_gradients

_LANES = 16
_SUBTRACT = row_rule("sgd", lr=1.0)


class SplitColumns(Protocol):
    """The tables of which this rank has some columns alone.

    Attributes:
        widths: Table -> columns of its whole rows.
        is_exact: Whether sums over columns have the bits of one process.
    """

    widths: Mapping[str, int]
    is_exact: bool

    def parts(self, values: Mapping[str, Tensor]) -> dict[str, list[Tensor]]:
        """Return ``[n, ...]`` of each table from all of its ranks, in the order of their columns.

        All ranks call it at the same time, with the same tables; a rank without columns of a table has no rows of it.
        """
        ...


def takes_whole_rows(rule: RowRule) -> bool:
    """Return whether an update by a rule takes all columns of a row."""
    return num_row_sums(rule) > 0


def num_row_sums(rule: RowRule) -> int:
    """Return the sums over all columns of a row that an update by a rule takes."""
    return len(rule.row_states) + (rule.clip_norm < math.inf)


class _Touched(NamedTuple):
    """The distinct rows of a table, in the order in which they first occur: that order is the same on all ranks.

    Attributes:
        keys: int64[U], rows of the table, or arena rows, as gradients name them.
        places: int64[U], where they lie in weights and state.
        layout: Layout of one feature of the table.
        grad: float32[U, D], the sums of their gradients here.
    """

    keys: Tensor
    places: Tensor
    layout: BagLayout
    grad: Tensor


def split_row_update_(
    weights: Tensor,
    state: Mapping[str, Tensor],
    gradients: Sequence[BagGradient],
    rule: RowRule,
    columns: SplitColumns,
    *,
    step: int,
    table_lr: Tensor | None = None,
    rounding_seed: int = 0,
) -> Tensor | None:
    """Update the rows of an arena's tables that are split by column; other tables of the arena are left alone.

    Args:
        weights: [V, D], the arena.
        state: The rule's state by name.
        gradients: Gradients of all lookups of this step in these weights.
        rule: Update rule.
        columns: The tables that are split.
        step: Number of this update, from 1.
        table_lr: float32[T], factors of the learning rate by table; None for ones.
        rounding_seed: Seed of the random bits that round weights of 16 bits.

    Returns:
        `table_lr` with zeros for the split tables, for `row_update_` of the others.

    Raises:
        ConfigError: A rule that updates rows without a gradient, too.
    """
    if rule.updates_all_rows:
        raise ConfigError("mode", "got 'global' for columns on several ranks, expected 'local' or 'lazy_global'")
    names = gradients[0].layout.table_names if gradients else ()
    factors = torch.ones(len(names)) if table_lr is None else table_lr.clone()
    split = {name: number for number, name in enumerate(names) if name in columns.widths and factors[number]}
    touched = {name: _touched(weights, gradients, number) for name, number in split.items()}
    grads = {name: _clipped(one.grad, rule) for name, one in touched.items()}
    if rule.clip_norm < math.inf:
        for name, squares in _squares(grads, columns).items():
            norm = squares.double().sqrt().float()  # the nearest float32, as in `RowRule.rates`
            bound = torch.full_like(norm, rule.clip_norm)  # a tensor: a number would be multiplied by 1 / norm
            grads[name] = torch.where(norm > bound, grads[name] * (bound / norm), grads[name])
    arguments: list[tuple[Tensor, ...]] = []
    # Not again by the kernel, which would take the norm over the columns of this rank alone.
    kernel_rule = replace(rule, grad_scale=1.0, clip_value=math.inf, clip_norm=math.inf)
    if rule.row_states:
        # A row's rate needs the sum over all ranks; with it, what is left for the kernel is a subtraction.
        kernel_rule = _SUBTRACT
        (sums,) = (state[name] for name in rule.row_states)
        for name, touched_rows in touched.items():
            if rule.is_coupled:
                rows = weights[touched_rows.places].float()
                grads[name] = grads[name] + (rule.l2 * rows + rule.l1 * rows.sign())
        for name, squares in _squares(grads, columns).items():
            touched_rows = touched[name]
            sums[touched_rows.places] += squares[:, 0] / columns.widths[name]
            lr = torch.tensor(rule.lr, dtype=torch.float32) * factors[split[name]]
            grads[name] = grads[name] * rule.rates(sums[touched_rows.places], lr)
    else:
        arguments = [tuple(state.values())]
    for name, touched_rows in touched.items():
        if touched_rows.keys.numel():
            # The layout names all tables of the arena; factors of 0 leave the others alone.
            only = torch.zeros_like(factors)
            only[split[name]] = 1.0 if kernel_rule is _SUBTRACT else factors[split[name]]
            places = touched_rows.places if gradients[0].places is not None else None
            offsets = torch.arange(2, device=touched_rows.keys.device) * touched_rows.keys.numel()
            row_update_(
                weights,
                arguments[0] if arguments else (),
                [BagGradient(touched_rows.keys, offsets, grads[name], touched_rows.layout, None, places)],
                kernel_rule,
                step=step,
                table_lr=only,
                rounding_seed=rounding_seed,
            )
    for number in split.values():
        # These rows are done: 0 keeps the caller's update of the whole arena from moving them again.
        factors[number] = 0.0
    return factors if split else table_lr


def _touched(weights: Tensor, gradients: Sequence[BagGradient], table: int) -> _Touched:
    """Sum the gradients of each row of a table."""
    keys: list[Tensor] = []
    places: list[Tensor] = []
    grads: list[Tensor] = []
    layout = gradients[0].layout
    for gradient in gradients:
        every = key_gradients(gradient, weights)
        where = gradient.keys if gradient.places is None else gradient.places
        size = max(1, (gradient.offsets.numel() - 1) // len(gradient.layout.feature_table))
        ends = gradient.offsets[::size].tolist()
        for feature, of_table in enumerate(gradient.layout.feature_table):
            if of_table == table:
                span = slice(ends[feature], ends[feature + 1])
                keys.append(gradient.keys[span])
                places.append(where[span] + (gradient.layout.table_base[table] if gradient.places is None else 0))
                grads.append(every[span])
    # Not in the order of the rows: ranks may have given the keys of a dynamic table other rows.
    joined = torch.cat(keys)
    distinct, inverse = torch.unique(joined, return_inverse=True)
    count = joined.numel()
    first = torch.full_like(distinct, count).scatter_reduce_(
        0, inverse, torch.arange(count, device=joined.device), "amin"
    )
    order = first.argsort()
    number = torch.empty_like(order)
    number[order] = torch.arange(order.numel(), device=order.device)
    one = BagLayout(
        table_names=("rows",),
        table_base=(0,),
        table_rows=(distinct.numel(),),
        feature_names=("rows",),
        feature_table=(0,),
        pooling=("none",),
        width=layout.width,
    )
    summed = torch.zeros(distinct.numel(), layout.width, device=joined.device)
    if count:
        occurrences = BagGradient(number[inverse], torch.arange(2, device=joined.device) * count, torch.cat(grads), one)
        # By the update kernel, which adds in the order of the batch: one process and several ranks get the same bits.
        summed = summed_gradients([occurrences], summed)
    of_rows = replace(layout, feature_names=("rows",), feature_table=(table,), pooling=("none",))
    return _Touched(distinct[order], torch.cat(places)[first[order]], of_rows, summed)


def _clipped(grad: Tensor, rule: RowRule) -> Tensor:
    scaled = grad * torch.tensor(rule.grad_scale, dtype=torch.float32)
    return scaled.clamp(-rule.clip_value, rule.clip_value)


def _squares(grads: Mapping[str, Tensor], columns: SplitColumns) -> dict[str, Tensor]:
    """Return the sums of the squares [U, 1] over all columns of the rows of each table."""
    # All columns of a row are brought together and summed in the order of one process: exact, but D times the bytes.
    if columns.is_exact:
        return {name: _sum_of_squares(torch.cat(parts, dim=1)) for name, parts in columns.parts(grads).items()}
    sums = columns.parts({name: _sum_of_squares(grad) for name, grad in grads.items()})
    return {name: torch.stack(parts).sum(0) for name, parts in sums.items()}


def _sum_of_squares(grad: Tensor) -> Tensor:
    """Return [n, 1] of ``grad [n, D]``, in the order of the compiled core, which has the same bits on every CPU."""
    lanes = grad.new_zeros(grad.shape[0], _LANES)
    for block in torch.split(grad, _LANES, dim=1):
        lanes[:, : block.shape[1]] += block * block
    half = _LANES // 2
    while half:
        lanes = lanes[:, :half] + lanes[:, half : 2 * half]
        half //= 2
    return lanes
