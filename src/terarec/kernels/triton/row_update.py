"""Launcher of the exact row update."""

from __future__ import annotations

import math
from collections.abc import Sequence

import triton
from torch import Tensor

from terarec.errors import KernelError
from terarec.kernels.contract import RULE_KINDS, LaidGradient, RowRule
from terarec.kernels.ref import row_update as ref_row_update
from terarec.kernels.triton import tiles
from terarec.kernels.triton.device.update import update_kernel
from terarec.kernels.triton.segments import segments_of

KINDS = RULE_KINDS[:4]  # that the kernel numbers


def row_update_(
    weights: Tensor,
    state: Sequence[Tensor],
    gradients: Sequence[LaidGradient],
    rule: RowRule,
    step: int,
    table_lr: Tensor | None = None,
    rounding_seed: int = 0,
    *,
    is_checked: bool = True,
) -> None:
    """Update the touched rows of `weights` and `state` in place; the same bits every time.

    Args:
        weights: [V, D], contiguous, of any floating type.
        state: the rule's state, each float32[V, D] or float32[V], contiguous.
        gradients: of one or more lookups in these weights.
        rule: what to do with a row's gradient.
        step: number of this update, from 1; Adam's bias correction needs it.
        table_lr: None, no factors yet.
        rounding_seed: not used: weights of 16 bits are rounded to the nearest yet.
        is_checked: wait for the keys' check and raise what is wrong; if not, bad keys have no effect.

    Raises:
        BadKeyError: a key outside its table; nothing is changed.
        ConfigError: offsets that fall or do not cover the keys; nothing is changed.
        KernelError: rows that are not contiguous, or a rule or factors that this kernel does not know.
    """
    plain = RowRule(kind=rule.kind, lr=rule.lr, eps=rule.eps, beta1=rule.beta1, beta2=rule.beta2)
    if table_lr is not None or rule != plain or rule.kind not in KINDS:
        raise KernelError(f"row_update_: got {rule} and table_lr {table_lr}, expected one of {', '.join(KINDS)} alone")
    if not all(held.is_contiguous() for held in (weights, *state)):
        raise KernelError("row_update_: got weights or state that are not contiguous, expected contiguous tensors")
    num_rows, width = weights.shape
    held = segments_of(gradients, num_rows, width, is_checked)
    if held is None:
        return
    num_keys = held.rows.shape[0]
    tile_rows, block = tiles.whole_rows(width)
    update_kernel[(triton.cdiv(num_keys, tile_rows),)](
        weights,
        *(*state, weights, weights)[:2],
        held.grads,
        held.order,
        held.sources,
        held.scales,
        held.rows,
        held.segments,
        held.starts,
        held.key_parts,
        held.part_parts,
        num_keys,
        num_rows,
        *_constants(rule, step),
        RULE=RULE_KINDS.index(rule.kind),
        WIDTH=width,
        BLOCK=block,
        SEGMENTS=tile_rows,
        IS_PLAIN=held.is_plain,
    )


def _constants(rule: RowRule, step: int) -> tuple[float, ...]:
    """lr, eps, beta2, 1 - beta1, 1 - beta2 and Adam's factor of the root, Adam's lr being corrected for its bias."""
    lr, root_scale = rule.lr, 1.0
    if rule.kind == "adam":
        lr /= 1.0 - rule.beta1**step
        root_scale = 1.0 / math.sqrt(1.0 - rule.beta2**step)
    return lr, rule.eps, rule.beta2, 1.0 - rule.beta1, 1.0 - rule.beta2, root_scale


def row_gradient_norm(
    weights: Tensor,
    gradients: Sequence[LaidGradient],
    rule: RowRule,
    table_lr: Tensor | None = None,
    first_row: int = 0,
) -> float:
    """As `terarec.kernels.ref.row_update.row_gradient_norm`, whose operations run where the tensors are."""
    return ref_row_update.row_gradient_norm(weights, gradients, rule, table_lr, first_row)
