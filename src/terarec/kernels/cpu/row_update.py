# SPDX-License-Identifier: Apache-2.0
"""Launcher of the exact row update, and of the norm of the rows' gradients."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from terarec.errors import KernelError
from terarec.kernels.contract import KernelGradient
from terarec.kernels.cpu.host import Report, _embedding, error_of
from terarec.kernels.row_rules import RowRule, number_names

_MAX_KEYS = 2**32 - 1  # the core counts the gradients of a table in 32 bits


def row_update_(
    weights: Tensor,
    state: Sequence[Tensor],
    gradients: Sequence[KernelGradient],
    rule: RowRule,
    step: int,
    table_lr: Tensor | None = None,
    rounding_seed: int = 0,
    row_numbers: Tensor | None = None,
) -> None:
    """Update rows; see `terarec.kernels.ref.row_update.row_update_`. It gives the same bits for any number of threads.

    Raises:
        KernelError: Rows that are not contiguous, or 2^32 keys and more; besides the errors there.
    """
    if not all(tensor.is_contiguous() for tensor in (weights, *state)):
        raise KernelError("row_update_", "got weights or state that are not contiguous, expected contiguous tensors")
    _check_count(gradients)
    states: tuple[Tensor | None, ...] = (*(state[:-1] if rule.catches_up else state), None, None)
    # Checked by the core in full before its first write, so a report means that nothing has changed.
    report = _embedding.row_update(
        weights=weights,
        state0=states[0],
        state1=states[1],
        last_steps=state[-1] if rule.catches_up else None,
        gradients=gradients,
        rule=_compiled(rule),
        step=step,
        rounding_seed=rounding_seed,
        table_lr=table_lr,
        threads=torch.get_num_threads(),
        **({} if row_numbers is None else {"row_numbers": row_numbers}),
    )
    if report[0]:
        raise _error_of(report, gradients)


def row_gradient_norm(
    weights: Tensor,
    gradients: Sequence[KernelGradient],
    rule: RowRule,
    table_lr: Tensor | None = None,
    first_row: int = 0,
) -> float:
    """Return a norm; see `terarec.kernels.ref.row_update.row_gradient_norm`.

    Raises:
        KernelError: 2^32 keys and more; besides the errors there.
    """
    _check_count(gradients)
    report, squares = _embedding.gradient_squares(weights, first_row, gradients, table_lr, torch.get_num_threads())
    if report[0]:
        raise _error_of(report, gradients)
    return abs(rule.grad_scale) * math.sqrt(squares)


def _check_count(gradients: Sequence[KernelGradient]) -> None:
    """Raise `KernelError` for more keys than the core counts."""
    if sum(gradient.keys.numel() for gradient in gradients) > _MAX_KEYS:
        raise KernelError("row_update_", f"got more than {_MAX_KEYS} keys, expected fewer in one update")


def _error_of(report: Report, gradients: Sequence[KernelGradient]) -> Exception:
    return error_of(
        report, [gradient.keys.shape[0] for gradient in gradients], [gradient.layout for gradient in gradients]
    )


# A schedule makes a new rule at each step: bounded, so that a long run does not keep all of them.
@lru_cache(maxsize=256)
def _compiled(rule: RowRule) -> _embedding.RowRule:
    """Convert the rule to the core's structure, field by field."""
    # By name, not by position: a field that the core lacks raises here.
    compiled = _embedding.RowRule(rule.kind)
    for name in (*number_names(type(rule)), "updates_all_rows", "catches_up"):
        setattr(compiled, name, getattr(rule, name))
    return compiled
