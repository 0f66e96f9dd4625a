"""Launcher of the exact row update."""

from __future__ import annotations

import math
from collections.abc import Sequence

import triton
from torch import Tensor

from terarec.errors import KernelError
from terarec.kernels.contract import RULE_KINDS, LaidGradient, RowRule
from terarec.kernels.triton import tiles
from terarec.kernels.triton.device.update import update_kernel
from terarec.kernels.triton.segments import segments_of


def row_update_(
    weights: Tensor,
    state: Sequence[Tensor],
    gradients: Sequence[LaidGradient],
    rule: RowRule,
    step: int,
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
        is_checked: wait for the keys' check and raise what is wrong; if not, bad keys have no effect.

    Raises:
        BadKeyError: a key outside its table; nothing is changed.
        ConfigError: offsets that fall or do not cover the keys; nothing is changed.
        KernelError: rows that are not contiguous.
    """
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
