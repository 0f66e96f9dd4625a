# SPDX-License-Identifier: Apache-2.0
"""Row updates by rules that take all columns of a row, where these are on several ranks.

A norm of a row's gradient and the mean of its squares are sums over columns. Each rank sums its own, the sums of the
ranks are added up, and the rest of the update is by column. For the bits of one process, the rows are brought together
instead. Nothing waits for a device.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from terarec.errors import ConfigError
from terarec.kernels.ref.row_update import rounding_numbers
from terarec.kernels.row_rules import RowRule, row_rule
from terarec.ops.layout import BagLayout, found_rows, single_layout
from terarec.ops.row_update import BagGradient, key_gradients, row_update_, summed_gradients

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

    def place(self, table: str) -> int:
        """Return the number of this rank among those of a table of which it has columns."""
        ...


def takes_whole_rows(rule: RowRule) -> bool:
    """Return whether an update by a rule takes all columns of a row."""
    return num_row_sums(rule) > 0


def num_row_sums(rule: RowRule) -> int:
    """Return the sums over all columns of a row that an update by a rule takes."""
    return len(rule.row_states) + (rule.clip_norm < math.inf)


class _Rounding(NamedTuple):
    """Seed of the random bits that round weights of 16 bits, and numbers of the rows on which they depend."""

    seed: int
    row_numbers: Tensor | None


class _Touched(NamedTuple):
    """The distinct rows of a table, in the order in which they first occur: that order is the same on all ranks.

    A device need not tell how many there are: on one there are as many as keys, of which those behind the distinct
    ones are the first row again, with gradients of zeros.

    Attributes:
        keys: int64[U], rows of the table, or arena rows, as gradients name them.
        places: int64[U], where they lie in weights and state.
        layout: Layout of one feature of the table.
        grad: float32[U, D], the sums of their gradients here.
        is_used: bool[U, 1], whether it is no such repetition.
        table: Number of the table in the arena.
        has_places: Whether gradients name places.
    """

    keys: Tensor
    places: Tensor
    layout: BagLayout
    grad: Tensor
    is_used: Tensor
    table: int
    has_places: bool


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
    row_numbers: Tensor | None = None,
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
        row_numbers: Numbers of the rows on which these bits depend, as in `row_update_`.

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
    if not split:  # on all ranks: all of these tables are frozen
        return table_lr
    touched = {name: _touched(weights, gradients, number) for name, number in split.items()}
    rounding = _Rounding(rounding_seed, row_numbers)
    if columns.is_exact:
        rates = {name: factors[number : number + 1].clone() for name, number in split.items()}
        _update_whole_rows_(weights, state, touched, rule, columns, rates, step=step, rounding=rounding)
    else:
        _update_by_sums_(weights, state, touched, rule, columns, factors, step=step, rounding=rounding)
    for number in split.values():
        # These rows are done: 0 keeps the caller's update of the whole arena from moving them again.
        factors[number] = 0.0
    return factors


def _update_by_sums_(
    weights: Tensor,
    state: Mapping[str, Tensor],
    touched: Mapping[str, _Touched],
    rule: RowRule,
    columns: SplitColumns,
    factors: Tensor,
    *,
    step: int,
    rounding: _Rounding,
) -> None:
    """Update the columns of rows here, with the sums over all columns that the rule takes."""
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
                rows = weights[touched_rows.places].float() * touched_rows.is_used
                grads[name] = grads[name] + (rule.l2 * rows + rule.l1 * rows.sign())
        for name, squares in _squares(grads, columns).items():
            touched_rows = touched[name]
            # Not by assignment, for which repetitions of the first row would count.
            sums.index_add_(0, touched_rows.places, squares[:, 0] / columns.widths[name])
            lr = torch.tensor(rule.lr, dtype=torch.float32) * factors[touched_rows.table]
            grads[name] = grads[name] * rule.rates(sums[touched_rows.places], lr)
    else:
        arguments = [tuple(state.values())]
    for name, touched_rows in touched.items():
        if touched_rows.keys.numel():
            # The layout names all tables of the arena; factors of 0 leave the others alone.
            only = torch.zeros_like(factors)
            only[touched_rows.table] = 1.0 if kernel_rule is _SUBTRACT else factors[touched_rows.table]
            places = touched_rows.places if touched_rows.has_places else None
            offsets = torch.arange(2, device=touched_rows.keys.device) * touched_rows.keys.numel()
            row_update_(
                weights,
                arguments[0] if arguments else (),
                [BagGradient(touched_rows.keys, offsets, grads[name], touched_rows.layout, None, places)],
                kernel_rule,
                step=step,
                table_lr=only,
                rounding_seed=rounding.seed,
                row_numbers=rounding.row_numbers,
            )


def _touched(weights: Tensor, gradients: Sequence[BagGradient], table: int) -> _Touched:
    """Sum the gradients of each row of a table."""
    keys: list[Tensor] = []
    places: list[Tensor] = []
    grads: list[Tensor] = []
    layout = gradients[0].layout
    for gradient in gradients:
        every = key_gradients(gradient, weights)
        where = gradient.keys if gradient.places is None else gradient.places
        ends = gradient.feature_ends
        for feature, of_table in enumerate(gradient.layout.feature_table):
            if of_table == table:
                span = slice(ends[feature], ends[feature + 1])
                keys.append(gradient.keys[span])
                places.append(where[span] + (gradient.layout.table_base[table] if gradient.places is None else 0))
                grads.append(every[span])
    # Not in the order of the rows: ranks may have given the keys of a dynamic table other rows.
    joined = torch.cat(keys)
    count, device = joined.numel(), joined.device
    first, number = _first_occurrences(joined)
    summed = torch.zeros(first.numel(), layout.width, device=device)
    if count:
        one = single_layout(found_rows(summed), layout.width, "none")
        occurrences = BagGradient(number, torch.arange(2, device=device) * count, torch.cat(grads), one)
        # By the update kernel, which adds in the order of the batch: one process and several ranks get the same bits.
        summed = summed_gradients([occurrences], summed)
    is_used = first < count
    chosen = torch.where(is_used, first, 0)
    has_places = gradients[0].places is not None
    return _Touched(
        joined[chosen], torch.cat(places)[chosen], _of_rows(layout, table), summed, is_used[:, None], table, has_places
    )


@functools.lru_cache(maxsize=256)  # a device keeps a copy of each
def _of_rows(layout: BagLayout, table: int) -> BagLayout:
    return replace(layout, feature_names=("rows",), feature_table=(table,), pooling=("none",))


def _first_occurrences(keys: Tensor) -> tuple[Tensor, Tensor]:
    """Return the place int64[U] at which each distinct key first occurs, rising, and the number int64[N] of each key.

    On a device, which need not tell how many are distinct, U is N: behind the places there are further N.
    """
    count = keys.numel()
    order = keys.argsort(stable=True)
    sorted_keys = keys[order]
    begins = torch.ones_like(keys, dtype=torch.bool)
    begins[1:] = sorted_keys[1:] != sorted_keys[:-1]
    rising = torch.empty_like(keys).scatter_(0, order, begins.cumsum(0) - 1)  # the number of each key by its value
    first = torch.full_like(keys, count).scatter_reduce_(0, rising, torch.arange(count, device=keys.device), "amin")
    by_place = first.argsort()
    number = torch.empty_like(keys).scatter_(0, by_place, torch.arange(count, device=keys.device))
    first = first[by_place]
    return first[: int(begins.sum())] if keys.is_cpu else first, number[rising]


def _clipped(grad: Tensor, rule: RowRule) -> Tensor:
    scaled = grad * torch.tensor(rule.grad_scale, dtype=torch.float32)
    return scaled.clamp(-rule.clip_value, rule.clip_value)


def _squares(grads: Mapping[str, Tensor], columns: SplitColumns) -> dict[str, Tensor]:
    """Return the sums of the squares [U, 1] over all columns of the rows of each table."""
    sums = columns.parts({name: grad.square().sum(dim=1, keepdim=True) for name, grad in grads.items()})
    return {name: torch.stack(parts).sum(0) for name, parts in sums.items()}


def _update_whole_rows_(
    weights: Tensor,
    state: Mapping[str, Tensor],
    touched: Mapping[str, _Touched],
    rule: RowRule,
    columns: SplitColumns,
    factors: Mapping[str, Tensor],
    *,
    step: int,
    rounding: _Rounding,
) -> None:
    """Update rows by their gradients in all columns, which are brought together here: D times the bytes of sums.

    The kernel of one process takes its own sums over columns, in its own order.
    """
    grads = columns.parts({name: one.grad for name, one in touched.items()})
    # Regularisation makes the sums depend on the weights of all columns; other columns of weights and state move
    # alone, and what they become here is left out.
    others: Mapping[str, Sequence[Tensor]] = {}
    if rule.is_coupled and rule.row_states:
        others = columns.parts({name: weights[one.places].float() for name, one in touched.items()})
    for name, one in touched.items():
        count, width = one.grad.shape
        if not count:
            continue
        numbers = torch.arange(count, device=one.keys.device)
        mine = slice(columns.place(name) * width, (columns.place(name) + 1) * width)
        whole = torch.cat(grads[name], dim=1)
        rows = torch.cat(list(others[name]), dim=1).to(weights.dtype) if others else _widened(weights, one, whole, mine)
        moved = {
            key: tensor[one.places] if tensor.dim() == 1 else _widened(tensor, one, whole, mine)
            for key, tensor in state.items()
        }
        ends = torch.arange(2, device=numbers.device) * count
        row_update_(
            rows,
            tuple(moved.values()),
            [BagGradient(numbers, ends, whole, single_layout(found_rows(rows), whole.shape[1], "none"))],
            rule,
            step=step,
            table_lr=factors[name],
            rounding_seed=rounding.seed,
            row_numbers=rounding_numbers(one.keys + one.layout.table_base[one.table], rounding.row_numbers),
        )
        # Repetitions of the first row get what it became.
        chosen = torch.where(one.is_used[:, 0], numbers, 0)
        weights[one.places] = rows[chosen, mine]
        for key, tensor in state.items():
            tensor[one.places] = moved[key][chosen] if tensor.dim() == 1 else moved[key][chosen, mine]


def _widened(values: Tensor, touched: _Touched, like: Tensor, columns: slice) -> Tensor:
    """Return the touched rows of ``values [V, D]`` in some columns of a matrix of zeros, of the shape of `like`."""
    whole = torch.zeros_like(like, dtype=values.dtype)
    whole[:, columns] = values[touched.places]
    return whole
