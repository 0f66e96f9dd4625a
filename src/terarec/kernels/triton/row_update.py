# SPDX-License-Identifier: Apache-2.0
"""Launcher of the exact row update, and of the norm of the rows' gradients."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from terarec.errors import KernelError
from terarec.kernels.contract import KernelGradient, full_update_ranges
from terarec.kernels.ref.row_update import rounding_numbers
from terarec.kernels.row_rules import RULE_KINDS, RowRule
from terarec.kernels.triton.device.update import squares_kernel, update_kernel
from terarec.kernels.triton.launch import UNFUSED, on_its_device, step_stream, whole_rows
from terarec.kernels.triton.segments import Segments, segments_of


@on_its_device
def row_update_(
    weights: Tensor,
    state: Sequence[Tensor],
    gradients: Sequence[KernelGradient],
    rule: RowRule,
    step: int,
    table_lr: Tensor | None = None,
    rounding_seed: int = 0,
    row_numbers: Tensor | None = None,
    *,
    is_checked: bool = True,
) -> None:
    """Update rows; see `terarec.kernels.ref.row_update.row_update_`. It gives the same bits every time.

    With `is_checked`, it waits for the check of the keys and raises its error; otherwise bad keys have no effect.

    Raises:
        KernelError: Rows that are not contiguous; besides the errors there.
    """
    if not all(tensor.is_contiguous() for tensor in (weights, *state)):
        raise KernelError("row_update_", "got weights or state that are not contiguous, expected contiguous tensors")
    segments = segments_of(gradients, weights, table_lr, is_checked)
    # A byte a row of the arena, so only for rules that need to know the other rows.
    touched = torch.zeros(weights.shape[0] if rule.updates_all_rows else 0, dtype=torch.uint8, device=weights.device)
    update = _Update(weights, tuple(state), touched, segments, rule, step, step_stream(rounding_seed, step))
    if segments.num_keys:
        numbers = None
        if row_numbers is not None:
            rows = segments.located.rows.long()
            # `no_row` lies behind all rows.
            known = rows.clamp(max=row_numbers.shape[0] - 1) if row_numbers.dim() == 1 else rows
            numbers = rounding_numbers(known, row_numbers)
        update.launch(segments.num_keys, rule.rate, 0, numbers, is_rest=False)
    if rule.updates_all_rows:
        # A second launch, as programs of the first are sorted by key and do not see rows without one.
        for base, count, factor in full_update_ranges(gradients, table_lr):
            numbers = None
            if row_numbers is not None:
                numbers = rounding_numbers(torch.arange(base, base + count, device=weights.device), row_numbers)
            update.launch(count, rule.rate * factor, base, numbers, is_rest=True)


class _Update(NamedTuple):
    """Shared arguments of all launches of an update.

    Attributes:
        weights: [V, D].
        state: The rule's state.
        touched: uint8[V] for a rule that updates all rows: 1 where the first launch updated the row.
        segments: The keys.
        rule: Update rule.
        step: Number of the update.
        stream: Stream of the random bits that round.
    """

    weights: Tensor
    state: tuple[Tensor, ...]
    touched: Tensor
    segments: Segments
    rule: RowRule
    step: int
    stream: int

    def launch(self, rows: int, lr: float, first_row: int, numbers: Tensor | None, *, is_rest: bool) -> None:
        """Update the rows of `rows` sorted keys, or those of the `rows` from `first_row` on that no key touched.

        `numbers` are those on which the roundings of these rows depend; None for the rows themselves.
        """
        weights, segments, rule = self.weights, self.segments, self.rule
        wide_state = self.state[:-1] if rule.catches_up else self.state
        tile_rows, block = whole_rows(weights.shape[1])
        # As many segments as keys, the most there can be: reading their number back would wait for the device.
        update_kernel[(triton.cdiv(rows, tile_rows),)](
            weights,
            # Any pointer does for a state that the rule does not have: the kernel does not read it.
            *(*wide_state, weights, weights)[:2],
            self.state[-1] if rule.catches_up else weights,
            self.touched,
            *segments.of_keys(),
            segments.factors,
            segments.located.targets,
            segments.located.targets if numbers is None else numbers,
            *segments.of_rows(),
            segments.num_keys,
            segments.located.no_row,
            first_row,
            rows,
            self.step,
            self.stream,
            float(lr),
            **_constants(rule, self.step),
            RULE=RULE_KINDS.index(rule.kind),
            STATES=len(wide_state),
            WIDTH=weights.shape[1],
            BLOCK=block,
            SEGMENTS=tile_rows,
            IS_PLAIN=segments.is_plain,
            HAS_MAX=segments.has_max,
            HAS_FACTORS=segments.has_factors,
            HAS_TARGETS=segments.has_targets,
            HAS_NUMBERS=numbers is not None,
            IS_TRANSFORMED=rule.is_transformed,
            CATCHES_UP=rule.catches_up,
            UPDATES_ALL=rule.updates_all_rows,
            IS_REST=is_rest,
            **UNFUSED,
        )


@on_its_device
def row_gradient_norm(
    weights: Tensor,
    gradients: Sequence[KernelGradient],
    rule: RowRule,
    table_lr: Tensor | None = None,
    first_row: int = 0,
) -> float:
    """Return a norm; see `terarec.kernels.ref.row_update.row_gradient_norm`."""
    segments = segments_of(gradients, weights, table_lr, is_checked=True)
    if segments.num_keys == 0:
        return 0.0
    tile_rows, block = whole_rows(weights.shape[1])
    # Zeros: there are as many numbers as keys, and only segments write theirs.
    squares = torch.zeros(segments.num_keys, dtype=torch.float64, device=weights.device)
    squares_kernel[(triton.cdiv(segments.num_keys, tile_rows),)](
        *segments.of_keys(),
        *segments.of_rows(),
        squares,
        segments.num_keys,
        segments.located.no_row,
        first_row,
        WIDTH=weights.shape[1],
        BLOCK=block,
        SEGMENTS=tile_rows,
        IS_PLAIN=segments.is_plain,
        HAS_MAX=segments.has_max,
        **UNFUSED,
    )
    return abs(rule.grad_scale) * math.sqrt(float(squares.sum()))


def _constants(rule: RowRule, step: int) -> dict[str, float]:
    """Return the kernel's numbers by name, zeros for those that the rule does not have."""
    names = ("eps", "eps_hat", "beta1", "beta2", "weight_decay", "beta")
    numbers: dict[str, float] = {name: getattr(rule, name, 0.0) for name in names}
    for name in ("l1", "l2", "grad_scale", "clip_value", "clip_norm"):
        numbers[name] = getattr(rule, name)
    # In double here: in float32 1 - beta would lose four digits.
    numbers["one_less_beta1"], numbers["one_less_beta2"] = 1.0 - numbers["beta1"], 1.0 - numbers["beta2"]
    numbers["first_scale"], numbers["root_scale"] = rule.scales(step)
    numbers["coupled_l1"], numbers["coupled_l2"] = rule.coupled
    # Triton types an argument by its Python value: another type would compile the kernel once more, for that type.
    return {name: float(number) for name, number in numbers.items()}
