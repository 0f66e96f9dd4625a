# SPDX-License-Identifier: Apache-2.0
"""Row updates by the gradients of a batch, each row once and in place; the norm, sum and checks of those gradients."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from terarec.errors import ConfigError
from terarec.kernels.contract import BadKeyError, KernelGradient
from terarec.kernels.ref.bag_lookup import locate_checked, spread
from terarec.kernels.registry import Op, choose
from terarec.kernels.row_rules import LAST_UPDATE, RowRule, UpdateMode, number_names, row_rule, rule_class
from terarec.ops import checks
from terarec.ops.checks import is_traced
from terarec.ops.layout import BagLayout, found_rows, placed

__all__ = [
    "BagGradient",
    "RowRule",
    "are_finite",
    "dense_gradient",
    "find_non_finite",
    "group_keys",
    "key_gradients",
    "per_key",
    "row_gradient_norm",
    "row_rule",
    "row_update_",
    "sparse_gradient",
    "state_dtype",
    "state_shapes",
    "summed_gradients",
]


class BagGradient(NamedTuple):
    """The gradient of one `bag_lookup`.

    Attributes:
        keys: int64[N] that were looked up.
        offsets: int64[S * B + 1] of the lookup.
        grad: Gradient of its result: float32[B, S * D], or float32[N, D] for a layout without pooling.
        layout: The layout of the lookup.
        key_weights: float32[N] of the lookup, or None.
        places: int64[N], the row of the weights in which each key's row lies; None where arena rows lie in their order.
        ends: The key at which each feature's begin, and the number of keys, where the host knows them; else None.
    """

    keys: Tensor
    offsets: Tensor
    grad: Tensor
    layout: BagLayout
    key_weights: Tensor | None = None
    places: Tensor | None = None
    ends: tuple[int, ...] | None = None

    @property
    def feature_ends(self) -> Sequence[int]:
        """The key at which each feature's begin, and the number of keys; unless given, read from the offsets."""
        if self.ends is not None:
            return self.ends
        # Bags are feature-major: every B-th offset is where the keys of a feature begin.
        batch_size = (self.offsets.numel() - 1) // len(self.layout.feature_table)
        ends: list[int] = self.offsets[:: max(1, batch_size)].tolist()
        return ends


def state_shapes(
    kind: str, rows: int, width: int, *, mode: UpdateMode = "local"
) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Return name and shape of each state tensor of a rule, in the order in which `row_update_` takes them.

    Args:
        kind: Kind of the `RowRule`.
        rows: Arena rows V.
        width: Length D of a vector.
        mode: Mode of the `RowRule`.
    """
    return _shapes_of(row_rule(kind, lr=1.0, mode=mode), rows, width)


def state_dtype(name: str) -> torch.dtype:
    """Return the type of the state tensor `name`: int32 for the step counters of "lazy_global", else float32."""
    return torch.int32 if name == LAST_UPDATE else torch.float32


def row_update_(
    weights: Tensor,
    state: tuple[Tensor, ...],
    gradients: Sequence[BagGradient],
    rule: RowRule,
    *,
    step: int,
    table_lr: Tensor | None = None,
    rounding_seed: int = 0,
    row_numbers: Tensor | None = None,
    implementation: str = "auto",
) -> None:
    """Update the rows that move under `rule`, each once, by the sum of its gradients.

    The result is the same bit for bit for any number of threads.

    Args:
        weights: Float32, bfloat16 or float16 [V, D], the arena.
        state: The rule's state as `state_shapes` lists it.
        gradients: Gradients of all lookups of this step in these weights.
        rule: Which rows move, and how.
        step: Number of this update, from 1.
        table_lr: float32[T] in host memory, factors of the learning rate for the tables of the layouts; 0 leaves a
            table's rows and state as they are.
        rounding_seed: Seed of the random bits that round weights of 16 bits.
        row_numbers: Numbers of the rows on which these bits depend, int64 on the device of the weights: [V] of all
            rows; or [S, 3] of S segments of rows, the first row of each, rising from 0, and the factor and the shift
            that make numbers of its rows. None for the rows themselves.
        implementation: "auto", or one of `terarec.kernels.registry.IMPLEMENTATIONS` by name.

    Raises:
        KeyOutOfRangeError: A key outside its table; nothing is changed.
        ConfigError: Tensors that do not fit the layouts, the rule or each other; nothing is changed.
        KernelError: An implementation requested by name that cannot run here.
    """
    if not gradients:
        return
    traced = is_traced(weights)
    _check_gradients(weights, gradients, traced)
    if rule.updates_all_rows and gradients[0].places is not None:
        raise ConfigError("mode", "got 'global' for rows with places, expected 'local' or 'lazy_global'")
    _check_state(weights, state, rule, step)
    _check_factors(table_lr, gradients, rule)
    if weights.dtype == torch.float32:
        row_numbers = None
    _check_numbers(row_numbers, weights)
    flat_gradients = _kernel_gradients(gradients)
    try:
        if traced:
            _row_update_op(
                weights,
                list(state),
                [part for gradient in flat_gradients for part in gradient],
                rule.kind,
                rule.mode,
                # A truth value passes as 0.0 or 1.0.
                [float(getattr(rule, name)) for name in number_names(type(rule))],
                [step, rounding_seed],
                row_numbers,
                table_lr,
                implementation,
            )
        else:
            kernel = choose(Op.ROW_UPDATE, weights.device, implementation, (*rule.kernels, "ref"))
            kernel(weights, state, flat_gradients, rule, step, table_lr, rounding_seed, row_numbers)
            # The kernel writes past autograd, which knows a write by the tensor's version .
            torch.autograd.graph.increment_version((weights, *state))
    except BadKeyError as error:
        raise checks.named(error, gradients[error.gradient].layout) from None


def row_gradient_norm(
    weights: Tensor,
    gradients: Sequence[BagGradient],
    rule: RowRule,
    *,
    table_lr: Tensor | None = None,
    first_row: int = 0,
    implementation: str = "auto",
) -> float:
    """Return the L2 norm over the summed gradients of all rows, times ``rule.grad_scale``.

    The result is the same bit for bit for any number of threads.

    Args:
        weights: float32[V, D], the arena; not changed.
        gradients: Gradients of all lookups of a step in it.
        rule: Update rule, of which only `grad_scale` is used.
        table_lr: Factors as in `row_update_`; tables with the factor 0 do not count.
        first_row: Arena rows before it do not count.
        implementation: "auto", or one of `terarec.kernels.registry.IMPLEMENTATIONS` by name.

    Raises:
        KeyOutOfRangeError: A key outside its table.
        ConfigError: Tensors that do not fit the layouts or each other.
        KernelError: An implementation requested by name that cannot run here.
    """
    if not gradients:
        return 0.0
    _check_gradients(weights, gradients, is_traced(weights))
    _check_factors(table_lr, gradients, rule)
    kernel = choose(Op.ROW_GRADIENT_NORM, weights.device, implementation)
    try:
        norm: float = kernel(weights, _kernel_gradients(gradients), rule, table_lr, first_row)
        return norm
    except BadKeyError as error:
        raise checks.named(error, gradients[error.gradient].layout) from None


def _shapes_of(rule: RowRule, rows: int, width: int) -> tuple[tuple[str, tuple[int, ...]], ...]:
    one_a_row = {LAST_UPDATE, *rule.row_states}
    return tuple((name, (rows,) if name in one_a_row else (rows, width)) for name in rule.state_names)


def _kernel_gradients(gradients: Sequence[BagGradient]) -> list[KernelGradient]:
    return [
        KernelGradient(
            gradient.keys, gradient.offsets, gradient.grad, gradient.layout.array, gradient.key_weights, gradient.places
        )
        for gradient in gradients
    ]


def _check_gradients(weights: Tensor, gradients: Sequence[BagGradient], traced: bool) -> None:
    for keys, offsets, grad, layout, key_weights, places, _ in gradients:
        if places is None:
            checks.lookup_fits(weights, keys, offsets, layout, key_weights, grad, traced=traced)
        else:
            checks.bags_fit(weights, keys, offsets, layout, key_weights, grad)
            checks.places_fit(places, keys, weights, layout.width)
    if len({gradient.places is None for gradient in gradients}) > 1:
        raise ConfigError("places", "got some gradients without, expected them for all or none")


def _check_state(weights: Tensor, state: tuple[Tensor, ...], rule: RowRule, step: int) -> None:
    if state or rule.state_names:
        checks.same_device(weights, state)
        expected = [(state_dtype(name), shape) for name, shape in _shapes_of(rule, *weights.shape)]
        held_shapes = [(tensor.dtype, tuple(tensor.shape)) for tensor in state]
        if held_shapes != expected:
            got = _listed(held_shapes)
            raise ConfigError("state", f"got {got}, expected {_listed(expected)} for {rule.kind!r}")
    # The counters of "lazy_global" are int32.
    if not 1 <= step < 2**31:
        raise ConfigError("step", f"got {step}, expected 1 <= step < 2^31")


def _check_factors(table_lr: Tensor | None, gradients: Sequence[BagGradient], rule: RowRule) -> None:
    if table_lr is None:
        return
    for gradient in gradients:
        tables = len(gradient.layout.table_names)
        if table_lr.device.type != "cpu" or table_lr.dtype != torch.float32 or tuple(table_lr.shape) != (tables,):
            got = f"{_listed([(table_lr.dtype, tuple(table_lr.shape))])} on {table_lr.device}"
            raise ConfigError("table_lr", f"got {got}, expected float32[{tables}] in host memory, one for each table")
        # A row without a key belongs to each of the tables that share it: which factor would hold is not defined.
        if (
            rule.updates_all_rows
            and len({*gradient.layout.table_base}) < tables
            and bool((table_lr != table_lr[0]).any())
        ):
            raise ConfigError(
                "table_lr",
                f"got {table_lr.tolist()} for tables that share rows, expected one factor for all of them in "
                "mode 'global'",
            )


def _check_numbers(row_numbers: Tensor | None, weights: Tensor) -> None:
    if row_numbers is None:
        return
    fits = row_numbers.dim() == 1 or (row_numbers.dim() == 2 and row_numbers.shape[1] == 3)
    if row_numbers.dtype != torch.int64 or not fits or row_numbers.device != weights.device:
        got = f"{_listed([(row_numbers.dtype, tuple(row_numbers.shape))])} on {row_numbers.device}"
        raise ConfigError("row_numbers", f"got {got}, expected int64[V] or int64[S, 3] on {weights.device}")


def _listed(tensors: Sequence[tuple[torch.dtype, tuple[int, ...]]]) -> str:
    names = [f"{str(dtype).removeprefix('torch.')}{list(shape)}" for dtype, shape in tensors]
    return ", ".join(names) or "nothing"


# A schema of an op has tensors, numbers and texts alone, so that rule and gradients cross it in parts:
# `gradients` are the fields of each `KernelGradient` in turn, `rule_numbers` those of the rule's class but the mode.
def _row_update(
    weights: Tensor,
    state: Sequence[Tensor],
    gradients: Sequence[Tensor | None],
    rule_kind: str,
    rule_mode: str,
    rule_numbers: Sequence[float],
    step_and_seed: Sequence[int],
    row_numbers: Tensor | None,
    table_lr: Tensor | None,
    implementation: str,
) -> None:
    numbers = dict(zip(number_names(rule_class(rule_kind)), rule_numbers, strict=True))
    rule = row_rule(rule_kind, mode=cast(UpdateMode, rule_mode), **numbers)
    parts = len(KernelGradient._fields)
    flat: Sequence[Any] = gradients
    kernel_gradients = [KernelGradient(*flat[first : first + parts]) for first in range(0, len(gradients), parts)]
    kernel = choose(Op.ROW_UPDATE, weights.device, implementation, (*rule.kernels, "ref"))
    step, rounding_seed = step_and_seed
    kernel(weights, state, kernel_gradients, rule, step, table_lr, rounding_seed, row_numbers)


_row_update_op = torch.library.custom_op("terarec::row_update_", mutates_args=("weights", "state"))(_row_update)


@_row_update_op.register_fake
def _fake(*arguments: object) -> None:
    """Return nothing, as the op does."""


_SUBTRACT = row_rule("sgd", lr=1.0)  # from rows of zeros it leaves the gradients' sums, negated
# Marking rows is a pass over a byte a row, sorting one of about 60 ns a key (Zen 3): up to this many rows a key, mark.
_MARKED_ROWS_A_KEY = 64


def dense_gradient(gradient: BagGradient, dtype: torch.dtype, weights: Tensor | None = None) -> Tensor:
    """Return the gradient [V, D] of the weights: every row's gradients summed in float32, zeros elsewhere.

    Args:
        gradient: Gradient of one lookup, in a layout of one table of V rows.
        dtype: Type of the result.
        weights: [V, D] as they were at the lookup; needed for pooling "max".
    """
    layout = gradient.layout
    # By the update kernel instead of `index_add_`: it sums on all threads, and in the order of the batch.
    total = torch.zeros(layout.num_rows, layout.width, device=gradient.grad.device)
    row_update_(total, (), [per_key(gradient, weights)], _SUBTRACT, step=1)
    return total.neg_().to(dtype)


def sparse_gradient(gradient: BagGradient, dtype: torch.dtype, weights: Tensor | None = None) -> Tensor:
    """Return the gradient of the weights as a coalesced sparse COO tensor [V, D]: each touched row once, with its sum.

    It takes memory for the touched rows and a few bytes for each row or key, never a dense [V, D].

    Args:
        gradient: Gradient of one lookup, in a layout of one table of V rows.
        dtype: Type of the result.
        weights: [V, D] as they were at the lookup; needed for pooling "max".
    """
    gradient = per_key(gradient, weights)
    shape = (gradient.layout.num_rows, gradient.layout.width)
    rows, groups = group_keys(gradient.keys, shape[0])
    values = torch.zeros(rows.shape[0], shape[1], device=gradient.grad.device)
    if rows.shape[0]:
        # An update of the touched rows alone, renumbered from 0, so that nothing of the size of the table is made.
        layout = placed(gradient.layout, found_rows(values))
        row_update_(values, (), [gradient._replace(keys=groups, layout=layout)], _SUBTRACT, step=1)
    values = values.neg_().to(dtype)
    # Rows are distinct and rising: torch need not sort and sum them again, nor check them.
    return torch.sparse_coo_tensor(rows[None], values, shape, is_coalesced=True, check_invariants=False)


def per_key(gradient: BagGradient, weights: Tensor | None) -> BagGradient:
    """Return `gradient`; if a feature is of pooling "max", as the gradients of its keys, so that `weights` may move.

    Args:
        gradient: Gradient of one lookup.
        weights: [V, D] as they were at the lookup; read for "max" alone.
    """
    layout = gradient.layout
    if "max" not in layout.pooling:
        return gradient
    return gradient._replace(grad=key_gradients(gradient, weights), layout=layout.by_key, key_weights=None)


def key_gradients(gradient: BagGradient, weights: Tensor | None) -> Tensor:
    """Return the gradient float32[N, D] of the vector of each key, without a wait for a device.

    Args:
        gradient: Gradient of one lookup, which has checked the keys.
        weights: [V, D] as they were at the lookup; read for "max" alone.
    """
    keys, offsets, grad, layout, key_weights, places, _ = gradient
    if not layout.is_pooled:
        return grad
    located = locate_checked(keys, offsets, *layout.on(keys.device), key_weights)
    vectors = None
    if weights is not None and "max" in layout.pooling:
        vectors = weights[located.rows if places is None else places]
    return spread(located, grad, len(layout.feature_table), key_weights, vectors)


def summed_gradients(gradients: Sequence[BagGradient], weights: Tensor) -> Tensor:
    """Return the gradient float32[V, D] of all rows: zeros for those without a key.

    Args:
        gradients: Gradients of lookups in `weights`.
        weights: [V, D] as they were at the lookups.
    """
    total = torch.zeros(weights.shape, device=weights.device)
    row_update_(total, (), [per_key(gradient, weights) for gradient in gradients], _SUBTRACT, step=1)
    return total.neg_()


def group_keys(keys: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """Return (distinct keys int64[U], rising; the place of each key among them int64[N]).

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


def find_non_finite(gradients: Sequence[BagGradient]) -> str | None:
    """Return the names of feature and table of the first gradient with NaN or infinity; None if there is none.

    One pass over the gradients, which allocates nothing; the place is searched only if one is found.
    """
    for gradient in gradients:
        if not are_finite(gradient.grad):
            return _place(gradient)
    return None


def are_finite(values: Tensor) -> bool:
    """Return whether all numbers are finite, by one pass that allocates nothing if they lie in one piece."""
    if not values.numel():
        return True
    if values.is_contiguous():
        low, high = torch.aminmax(values)  # NaN if any is
        return math.isfinite(low) and math.isfinite(high)
    # A third of the time of the bounds where values lie apart; the sum of finite numbers may overflow.
    return math.isfinite(values.float().sum()) or bool(values.isfinite().all())


def _place(gradient: BagGradient) -> str:
    layout = gradient.layout
    row, column = (~gradient.grad.isfinite()).nonzero()[0].tolist()
    if layout.is_pooled:
        feature = column // layout.width
        where = f"sample {row}"
    else:
        batch_size = (gradient.offsets.numel() - 1) // len(layout.feature_names)
        # The first feature whose keys end behind `row`; `right=True` passes over features without keys.
        ends = gradient.offsets[batch_size::batch_size].contiguous()
        feature = int(torch.searchsorted(ends, row, right=True))
        where = f"key {int(gradient.keys[row])}"
    table = layout.table_names[layout.feature_table[feature]]
    value = float(gradient.grad[row, column])
    return f"feature {layout.feature_names[feature]!r} of table {table!r}: got the gradient {value} for {where}"
