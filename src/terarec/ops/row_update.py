"""`row_update_`: move rows by the gradients of a batch, each once, in place; and the norm of those gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any, NamedTuple

import torch
from torch import Tensor

from terarec.errors import ConfigError
from terarec.kernels.contract import LAST_UPDATE, BadKeyError, LaidGradient, RowRule, RuleKind, UpdateMode
from terarec.kernels.registry import choose
from terarec.ops import checks
from terarec.ops.layout import BagLayout
from terarec.ops.tracing import is_traced

__all__ = ["BagGradient", "RowRule", "row_gradient_norm", "row_update_", "state_dtype", "state_shapes"]

_RULE_FIELDS = tuple(field.name for field in fields(RowRule))


class BagGradient(NamedTuple):
    """The gradient of one `bag_lookup`.

    Attributes:
        keys: int64[N] that were looked up.
        offsets: int64[S * B + 1] of the lookup.
        grad: gradient of its result: float32[B, S * D], or float32[N, D] for a layout without pooling.
        layout: the layout of the lookup.
        key_weights: float32[N] of the lookup, or None.
    """

    keys: Tensor
    offsets: Tensor
    grad: Tensor
    layout: BagLayout
    key_weights: Tensor | None = None


def state_shapes(
    kind: RuleKind, rows: int, width: int, *, mode: UpdateMode = "local"
) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Name and shape of each state tensor of a rule, in the order in which `row_update_` takes them.

    Args:
        kind: kind of the `RowRule`.
        rows: arena rows V.
        width: length D of a vector.
        mode: mode of the `RowRule`.

    Raises:
        ConfigError: an unknown kind or mode.
    """
    return _shapes_of(RowRule(kind=kind, lr=1.0, mode=mode), rows, width)


def state_dtype(name: str) -> torch.dtype:
    """The type of the state tensor `name`: int32 for the step counters of "lazy_global", else float32."""
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
    implementation: str = "auto",
) -> None:
    """Update the rows that move under `rule`, each once, by the sum of its gradients.

    The result is the same bit for bit whatever the number of threads.

    Args:
        weights: float32, bfloat16 or float16 [V, D], the arena.
        state: the rule's state as `state_shapes` lists it.
        gradients: of all lookups of this step in these weights.
        rule: which rows move, and how.
        step: number of this update, from 1.
        table_lr: float32[T] in host memory, factors of the learning rate for the tables of the layouts; 0 leaves a
            table's rows and state as they are.
        rounding_seed: of the random bits with which weights of 16 bits are rounded.
        implementation: "auto", or one of `terarec.kernels.registry.IMPLEMENTATIONS` by name.

    Raises:
        KeyOutOfRangeError: a key outside its table; nothing is changed.
        ConfigError: tensors that do not fit the layouts, the rule or each other; nothing is changed.
        KernelError: an implementation asked for by name that cannot run here.
    """
    if not gradients:
        return
    traced = is_traced(weights)
    _check_gradients(weights, gradients, traced)
    _check_state(weights, state, rule, step)
    _check_factors(table_lr, gradients, rule)
    laid = _laid(gradients)
    try:
        if traced:
            kind, mode, *numbers = [getattr(rule, name) for name in _RULE_FIELDS]
            places = [part for held in laid for part in (held.keys, held.offsets, held.layout)]
            grads, key_weights = [held.grad for held in laid], [held.key_weights for held in laid]
            words, counters = f"{kind} {mode} {implementation}", [step, rounding_seed]
            _row_update_op(weights, list(state), places, grads, key_weights, words, numbers, counters, table_lr)
        else:
            kernel = choose("row_update_", weights.device, implementation)
            kernel(weights, state, laid, rule, step, table_lr, rounding_seed)
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
    """The L2 norm over the summed gradients of all rows, times ``rule.grad_scale``.

    The result is the same bit for bit whatever the number of threads.

    Args:
        weights: float32[V, D], the arena; not changed.
        gradients: of all lookups of a step in it.
        rule: for its `grad_scale`.
        table_lr: as for `row_update_`; tables with the factor 0 do not count.
        first_row: arena rows before it do not count.
        implementation: "auto", or one of `terarec.kernels.registry.IMPLEMENTATIONS` by name.

    Raises:
        KeyOutOfRangeError: a key outside its table.
        ConfigError: tensors that do not fit the layouts or each other.
        KernelError: an implementation asked for by name that cannot run here.
    """
    if not gradients:
        return 0.0
    _check_gradients(weights, gradients, is_traced(weights))
    _check_factors(table_lr, gradients, rule)
    kernel = choose("row_gradient_norm", weights.device, implementation)
    try:
        norm: float = kernel(weights, _laid(gradients), rule, table_lr, first_row)
        return norm
    except BadKeyError as error:
        raise checks.named(error, gradients[error.gradient].layout) from None


def _shapes_of(rule: RowRule, rows: int, width: int) -> tuple[tuple[str, tuple[int, ...]], ...]:
    one_a_row = {LAST_UPDATE, "sum"} if rule.kind == "rowwise_adagrad" else {LAST_UPDATE}
    return tuple((name, (rows,) if name in one_a_row else (rows, width)) for name in rule.state_names)


def _laid(gradients: Sequence[BagGradient]) -> list[LaidGradient]:
    return [LaidGradient(held.keys, held.offsets, held.grad, held.layout.array, held.key_weights) for held in gradients]


def _check_gradients(weights: Tensor, gradients: Sequence[BagGradient], traced: bool) -> None:
    for keys, offsets, grad, layout, key_weights in gradients:
        checks.lookup_fits(weights, keys, offsets, layout, key_weights, grad, traced=traced)


def _check_state(weights: Tensor, state: tuple[Tensor, ...], rule: RowRule, step: int) -> None:
    if state or rule.state_names:
        checks.same_device(weights, state)
        expected = [(state_dtype(name), shape) for name, shape in _shapes_of(rule, *weights.shape)]
        held_shapes = [(held.dtype, tuple(held.shape)) for held in state]
        if held_shapes != expected:
            got = _listed(held_shapes)
            raise ConfigError(f"state: got {got}, expected {_listed(expected)} for {rule.kind!r}")
    if not 1 <= step < 2**31:
        raise ConfigError(f"step: got {step}, expected 1 <= step < 2^31")


def _check_factors(table_lr: Tensor | None, gradients: Sequence[BagGradient], rule: RowRule) -> None:
    if table_lr is None:
        return
    for held in gradients:
        tables = len(held.layout.table_names)
        if table_lr.device.type != "cpu" or table_lr.dtype != torch.float32 or tuple(table_lr.shape) != (tables,):
            got = f"{_listed([(table_lr.dtype, tuple(table_lr.shape))])} on {table_lr.device}"
            raise ConfigError(f"table_lr: got {got}, expected float32[{tables}] in host memory, one for each table")
        if rule.sweeps and len({*held.layout.table_base}) < tables and bool((table_lr != table_lr[0]).any()):
            raise ConfigError(
                f"table_lr: got {table_lr.tolist()} for tables that share rows, expected one factor for all of them in "
                "mode 'global'"
            )


def _listed(tensors: Sequence[tuple[torch.dtype, tuple[int, ...]]]) -> str:
    names = [f"{str(dtype).removeprefix('torch.')}{list(shape)}" for dtype, shape in tensors]
    return ", ".join(names) or "nothing"


# `words` are the rule's kind and mode and the implementation, `numbers` the rule's other fields in their order,
# `counters` the step and the rounding seed. `places` are each gradient's keys, offsets and layout in turn.
def _row_update(
    weights: Tensor,
    state: Sequence[Tensor],
    places: Sequence[Tensor],
    grads: Sequence[Tensor],
    key_weights: Sequence[Tensor | None],
    words: str,
    numbers: Sequence[float],
    counters: Sequence[int],
    table_lr: Tensor | None,
) -> None:
    kind, mode, implementation = words.split()
    named: dict[str, Any] = dict(zip(_RULE_FIELDS, (kind, mode, *numbers), strict=True))
    rule = RowRule(**named)
    parts = zip(places[0::3], places[1::3], grads, places[2::3], key_weights, strict=True)
    laid = [LaidGradient(*held) for held in parts]
    step, rounding_seed = counters
    kernel = choose("row_update_", weights.device, implementation)
    kernel(weights, state, laid, rule, step, table_lr, rounding_seed)


_row_update_op = torch.library.custom_op("terarec::row_update_", mutates_args=("weights", "state"))(_row_update)


@_row_update_op.register_fake
def _fake(*arguments: object) -> None:
    """Nothing to shape: the op returns nothing."""
