"""`row_update_`: move the rows that a batch touched, each once, in place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from terarec.errors import ConfigError
from terarec.kernels.contract import RULE_KINDS, BadKeyError, LaidGradient, RowRule, RuleKind
from terarec.kernels.registry import choose
from terarec.ops import checks
from terarec.ops.layout import BagLayout

__all__ = ["BagGradient", "RowRule", "row_update_", "state_shapes"]


@dataclass(frozen=True)
class BagGradient:
    """The gradient of one `bag_lookup`.

    Attributes:
        keys: int64[N] that were looked up.
        offsets: int64[S * B + 1] of the lookup.
        grad: gradient of its result: float32[B, S * D], or float32[N, D] for a layout without pooling.
        layout: the layout of the lookup.
    """

    keys: Tensor
    offsets: Tensor
    grad: Tensor
    layout: BagLayout


def state_shapes(kind: RuleKind, rows: int, width: int) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Name and shape of each state tensor of a rule, in the order in which `row_update_` takes them.

    Args:
        kind: kind of the `RowRule`.
        rows: arena rows V.
        width: length D of a vector.

    Raises:
        ConfigError: an unknown kind.
    """
    matrix, vector = (rows, width), (rows,)
    if kind == "sgd":
        return ()
    if kind == "adagrad":
        return (("sum", matrix),)
    if kind == "rowwise_adagrad":
        return (("sum", vector),)
    if kind == "adam":
        return (("exp_avg", matrix), ("exp_avg_sq", matrix))
    raise ConfigError(f"kind: got {kind!r}, expected one of {', '.join(map(repr, RULE_KINDS))}")


def row_update_(
    weights: Tensor,
    state: tuple[Tensor, ...],
    gradients: Sequence[BagGradient],
    rule: RowRule,
    *,
    step: int,
    implementation: str = "auto",
) -> None:
    """Update every row that `gradients` touch, once, with the sum of its gradients; no other row moves.

    The result is the same bit for bit whatever the number of threads.

    Args:
        weights: float32[V, D], the arena.
        state: the rule's state as `state_shapes` lists it.
        gradients: of all lookups of this step in these weights.
        rule: how a row moves.
        step: number of this update, from 1.
        implementation: "auto", or one of `terarec.kernels.registry.IMPLEMENTATIONS` by name.

    Raises:
        KeyOutOfRangeError: a key outside its table; nothing is changed.
        ConfigError: tensors that do not fit the layouts, the rule or each other; nothing is changed.
        KernelError: an implementation asked for by name that cannot run here.
    """
    if not gradients:
        return
    _check(weights, state, gradients, rule, step)
    laid = [LaidGradient(held.keys, held.offsets, held.grad, held.layout.array) for held in gradients]
    try:
        if torch.compiler.is_compiling() or type(weights) is not Tensor:
            keys, offsets, grads, layouts = (list(column) for column in zip(*laid, strict=True))
            numbers = [rule.lr, rule.eps, rule.beta1, rule.beta2]
            _row_update_op(
                weights, list(state), keys, offsets, grads, layouts, rule.kind, numbers, step, implementation
            )
        else:
            _run(weights, state, laid, rule, step, implementation)
    except BadKeyError as error:
        raise checks.named(error, gradients[error.gradient].layout) from None


def _check(
    weights: Tensor, state: tuple[Tensor, ...], gradients: Sequence[BagGradient], rule: RowRule, step: int
) -> None:
    for held in gradients:
        checks.weights_fit(weights, held.layout)
        checks.bags_fit(held.keys, held.offsets, held.layout)
        checks.gradient_fits(held.grad, held.keys, held.offsets, held.layout)
        checks.same_device((weights, *state, held.keys, held.offsets, held.grad))
    expected = tuple(shape for _, shape in state_shapes(rule.kind, *weights.shape))
    if tuple(tuple(held.shape) for held in state) != expected or any(held.dtype != torch.float32 for held in state):
        got = ", ".join(f"{held.dtype}{list(held.shape)}" for held in state) or "nothing"
        wanted = ", ".join(f"float32{list(shape)}" for shape in expected) or "nothing"
        raise ConfigError(f"state: got {got}, expected {wanted} for {rule.kind!r}")
    if step < 1:
        raise ConfigError(f"step: got {step}, expected at least 1")


def _run(
    weights: Tensor,
    state: Sequence[Tensor],
    gradients: Sequence[LaidGradient],
    rule: RowRule,
    step: int,
    implementation: str,
) -> None:
    choose("row_update_", weights.device.type, implementation)(weights, state, gradients, rule, step)
    torch.autograd.graph.increment_version((weights, *state))


# `numbers` are the rule's lr, eps, beta1 and beta2; the other lists have an entry for each gradient.
def _row_update(
    weights: Tensor,
    state: Sequence[Tensor],
    keys: Sequence[Tensor],
    offsets: Sequence[Tensor],
    grads: Sequence[Tensor],
    layouts: Sequence[Tensor],
    kind: str,
    numbers: Sequence[float],
    step: int,
    implementation: str,
) -> None:
    lr, eps, beta1, beta2 = numbers
    rule = RowRule(kind=cast(RuleKind, kind), lr=lr, eps=eps, beta1=beta1, beta2=beta2)
    laid = [LaidGradient(*parts) for parts in zip(keys, offsets, grads, layouts, strict=True)]
    choose("row_update_", weights.device.type, implementation)(weights, state, laid, rule, step)


_row_update_op = torch.library.custom_op("terarec::row_update_", mutates_args=("weights", "state"))(_row_update)


@_row_update_op.register_fake
def _fake(*arguments: object) -> None:
    """Nothing to shape: the op returns nothing."""
