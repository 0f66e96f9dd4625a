"""The keys of one or more gradients, sorted by the arena row that they touch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from terarec.kernels.contract import LaidGradient
from terarec.kernels.triton import tiles
from terarec.kernels.triton.device.segments import (
    CHUNK,
    heads_kernel,
    key_parts_kernel,
    part_parts_kernel,
    starts_kernel,
)
from terarec.kernels.triton.located import Located, locate

_BLOCK = 1024
_INT32_KEYS = 2**31 - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Segments:
    """N keys by rows; what the fused update reads.

    Attributes:
        grads: float32[R, D].
        located: the keys, sorted by row.
        segments: [N], the number of distinct rows up to and with each sorted position.
        starts: int64[U + 1, and more], the first sorted position of each segment.
        key_parts: float32[2 * blocks, D], see `device.segments`.
        part_parts: float32[2 * blocks of blocks, D].
    """

    grads: Tensor
    located: Located
    segments: Tensor
    starts: Tensor
    key_parts: Tensor
    part_parts: Tensor

    @property
    def num_keys(self) -> int:
        """N."""
        return self.located.rows.shape[0]

    @property
    def is_plain(self) -> bool:
        """Whether no gradient is scaled."""
        return self.located.scales.shape[0] == 0

    @property
    def has_max(self) -> bool:
        """Whether a bag is pooled by its maximum."""
        return self.located.places.shape[0] > 0

    @property
    def has_factors(self) -> bool:
        """Whether tables have learning rates of their own; of no keys it does not matter."""
        return self.located.factors.shape[0] > 0

    @property
    def factors(self) -> Tensor:
        """Factors float32[N] of the learning rate; empty if all are 1."""
        return self.located.factors

    def of_keys(self) -> tuple[Tensor, ...]:
        """The kernels' arguments from ``grads`` to ``winners``."""
        located = self.located
        return self.grads, located.sources, located.scales, located.places, located.winners

    def of_rows(self) -> tuple[Tensor, ...]:
        """The kernels' arguments from ``sorted_rows`` to ``part_parts``."""
        return self.located.rows, self.segments, self.starts, self.key_parts, self.part_parts


def segments_of(
    gradients: Sequence[LaidGradient], weights: Tensor, table_lr: Tensor | None, is_checked: bool
) -> Segments:
    """Sort the keys of `gradients` and sum the parts of long segments.

    Args:
        gradients: of one or more lookups in `weights`.
        weights: [V, D].
        table_lr: float32[T] in host memory, factors of the learning rate; keys of tables with 0 have no effect.
        is_checked: wait for the keys' check and raise what is wrong; if not, bad keys have no effect.

    Raises:
        BadKeyError: a key outside its table.
        ConfigError: offsets that fall or do not cover the keys.
    """
    width, device = weights.shape[1], weights.device
    located = locate(gradients, weights, table_lr, is_checked).by_row()
    segments, starts = _cut(located.rows)
    grads = [gradient.grad.reshape(-1, width) for gradient in gradients]
    held = Segments(
        grads=torch.cat(grads) if len(grads) > 1 else grads[0].contiguous(),
        located=located,
        segments=segments,
        starts=starts,
        key_parts=_parts(located.rows.shape[0], CHUNK.value, width, device),
        part_parts=_parts(located.rows.shape[0], CHUNK.value**2, width, device),
    )
    _sum_parts(held)
    return held


def _cut(sorted_rows: Tensor) -> tuple[Tensor, Tensor]:
    """`Segments.segments` and `Segments.starts`."""
    num_keys, device = sorted_rows.shape[0], sorted_rows.device
    heads = torch.empty(num_keys, dtype=torch.int32, device=device)
    starts = torch.empty(num_keys + 1, dtype=torch.int64, device=device)
    if num_keys == 0:
        return heads, starts
    grid = (triton.cdiv(num_keys, _BLOCK),)
    heads_kernel[grid](sorted_rows, heads, num_keys, BLOCK=_BLOCK)
    segments = torch.cumsum(heads, 0, dtype=torch.int32 if num_keys <= _INT32_KEYS else torch.int64)
    starts_kernel[grid](sorted_rows, segments, starts, num_keys, BLOCK=_BLOCK)
    return segments, starts


def _parts(num_keys: int, unit: int, width: int, device: torch.device) -> Tensor:
    """Room for the parts of segments of more than `unit` keys."""
    slots = 2 * triton.cdiv(num_keys, unit) if num_keys > unit else 0
    return torch.empty(slots, width, device=device)


def _sum_parts(held: Segments) -> None:
    width = held.grads.shape[1]
    tile_rows, block = tiles.whole_rows(width)
    tile_rows = min(tile_rows, CHUNK.value)
    if held.num_keys > CHUNK.value:
        key_parts_kernel[(triton.cdiv(held.num_keys, CHUNK.value),)](
            *held.of_keys(),
            held.segments,
            held.starts,
            held.key_parts,
            held.num_keys,
            WIDTH=width,
            BLOCK=block,
            ROWS=tile_rows,
            IS_PLAIN=held.is_plain,
            HAS_MAX=held.has_max,
        )
    if held.num_keys > CHUNK.value**2:
        part_parts_kernel[(triton.cdiv(held.num_keys, CHUNK.value**2),)](
            held.key_parts,
            held.segments,
            held.starts,
            held.part_parts,
            held.num_keys,
            WIDTH=width,
            BLOCK=block,
            ROWS=tile_rows,
        )
