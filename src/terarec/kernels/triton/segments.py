# SPDX-License-Identifier: Apache-2.0
"""The keys of one or more gradients, located and sorted by the arena row that they touch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from terarec.kernels.contract import KernelGradient
from terarec.kernels.triton.device.segments import (
    CHUNK,
    heads_kernel,
    key_parts_kernel,
    locate_kernel,
    part_parts_kernel,
    starts_kernel,
    winners_kernel,
)
from terarec.kernels.triton.launch import (
    UNFUSED,
    DeviceLayout,
    check_no_bags,
    layout_on_device,
    new_status,
    parts_of_rows,
    raise_if_bad,
    whole_rows,
)

_INT32_ROWS = 2**31 - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class LocatedKeys:
    """N keys, those of one gradient after those of another.

    Attributes:
        rows: int32|int64[N], arena rows; `no_row` for bad keys and keys of frozen tables.
        targets: int64[N], the rows of the weights in which they lie; empty if each lies in its own.
        sources: int64[N], the row of all gradients, in the shape [R, D], that holds a key's.
        scales: float32[N], the factor of that gradient; empty if all are 1.
        places: int32[N], the key's place in a bag pooled by maximum, else -1; empty if none is.
        winners: int32[R, D], the place of the key that gets the gradient of such a bag; empty if there is none.
        factors: float32[N], of the learning rate; empty if all are 1.
        no_row: Number that means no row, after the last arena row.
    """

    rows: Tensor
    targets: Tensor
    sources: Tensor
    scales: Tensor
    places: Tensor
    winners: Tensor
    factors: Tensor
    no_row: int

    def by_row(self) -> LocatedKeys:
        """Return the keys sorted by row, equal ones in the order they have."""
        # Stable, so that gradients of a row are added in the order of the keys, and the bits repeat.
        rows, order = torch.sort(self.rows, stable=True)

        def moved(values: Tensor) -> Tensor:
            return values[order] if values.shape[0] else values

        return LocatedKeys(
            rows=rows,
            targets=moved(self.targets),
            sources=moved(self.sources),
            scales=moved(self.scales),
            places=moved(self.places),
            winners=self.winners,
            factors=moved(self.factors),
            no_row=self.no_row,
        )


def locate(
    gradients: Sequence[KernelGradient], weights: Tensor, table_lr: Tensor | None, is_checked: bool
) -> LocatedKeys:
    """Locate the keys of `gradients`, which are of lookups in `weights`.

    Raises:
        BadKeyError: A key outside its table, if `is_checked`.
        ConfigError: Offsets that decrease or do not cover the keys, if `is_checked`.
    """
    device, (num_rows, width) = weights.device, weights.shape
    has_targets = any(gradient.places is not None for gradient in gradients)
    # Arena rows may then lie behind those of the weights, which are the slots of a tier: `no_row` comes after them.
    if has_targets:
        num_rows = max(int(gradient.layout[:, :2].sum(dim=1).max()) for gradient in gradients)
    layouts = [layout_on_device(gradient.layout, device) for gradient in gradients]
    num_keys = sum(gradient.keys.shape[0] for gradient in gradients)
    is_scaled = any(gradient.key_weights is not None for gradient in gradients) or any(on.is_scaled for on in layouts)
    has_max = any(on.has_max for on in layouts)
    # Radix sorts take half the passes over 32 bits.
    row_type = torch.int32 if num_rows < _INT32_ROWS else torch.int64
    # Keys of bags with bad offsets are not written: they keep `no_row`, which sorts behind all rows.
    located = LocatedKeys(
        rows=torch.full((num_keys,), num_rows, dtype=row_type, device=device),
        targets=torch.zeros(num_keys if has_targets else 0, dtype=torch.int64, device=device),
        sources=torch.zeros(num_keys, dtype=torch.int64, device=device),
        scales=torch.ones(num_keys if is_scaled else 0, device=device),
        places=torch.full((num_keys if has_max else 0,), -1, dtype=torch.int32, device=device),
        winners=torch.empty(_sources(gradients, width) if has_max else 0, width, dtype=torch.int32, device=device),
        factors=torch.ones(num_keys if table_lr is not None else 0, device=device),
        no_row=num_rows,
    )
    table_lr = None if table_lr is None else table_lr.to(device)
    # Keys and sources of all gradients are numbered through, as if they came from one lookup.
    first_key = first_source = 0
    for number, (gradient, on) in enumerate(zip(gradients, layouts, strict=True)):
        _locate_one(gradient, on, located, weights, table_lr, (first_key, first_source, number), is_checked)
        first_key += gradient.keys.shape[0]
        first_source += _sources([gradient], width)
    return located


def _sources(gradients: Sequence[KernelGradient], width: int) -> int:
    return sum(gradient.grad.numel() for gradient in gradients) // width


def _locate_one(
    gradient: KernelGradient,
    on: DeviceLayout,
    located: LocatedKeys,
    weights: Tensor,
    table_lr: Tensor | None,
    place: tuple[int, int, int],
    is_checked: bool,
) -> None:
    """Locate the keys of the gradient whose first key, first source and number are `place`."""
    keys, offsets, key_weights = gradient.keys.contiguous(), gradient.offsets.contiguous(), gradient.key_weights
    first_key, first_source, number = place
    num_features, num_keys = on.array.shape[0], keys.shape[0]
    batch_size = (offsets.shape[0] - 1) // num_features
    if batch_size == 0:
        check_no_bags(keys, offsets)
        return
    bad = new_status(keys.device)
    mine = slice(first_key, first_key + num_keys)
    if gradient.places is not None:
        located.targets[mine] = gradient.places
    bags, _ = whole_rows(1)
    locate_kernel[(triton.cdiv(batch_size, bags), num_features)](
        keys,
        located.scales if key_weights is None else key_weights.contiguous(),
        offsets,
        on.array,
        located.factors if table_lr is None else table_lr,
        located.rows[mine],
        located.sources[mine],
        located.scales[mine],
        located.places[mine],
        located.factors[mine],
        bad,
        num_keys,
        batch_size,
        first_source,
        located.no_row,
        BAGS=bags,
        COLUMNS=on.array.shape[1],
        IS_POOLED=on.is_pooled,
        IS_WEIGHTED=key_weights is not None,
        IS_PLAIN=located.scales.shape[0] == 0,
        HAS_MAX=located.places.shape[0] > 0,
        HAS_FACTORS=table_lr is not None,
        **UNFUSED,
    )
    if is_checked and on.is_checked:
        raise_if_bad(bad, keys, offsets, gradient.layout, number)
    if on.has_max:
        array = on.array
        if gradient.places is not None:
            # The winners are searched in the weights, whose rows the places name; arena rows may lie behind them.
            keys, array = gradient.places.contiguous(), _of_places(array, weights.shape[0])
        _find_winners(weights, (keys, offsets), array, located.winners, bad, first_source)


def _of_places(layout: Tensor, num_rows: int) -> Tensor:
    """Return `layout` for keys that are rows of the weights."""
    layout = layout.clone()
    layout[:, 0], layout[:, 1] = 0, num_rows
    return layout


def _find_winners(
    weights: Tensor,
    bags_of: tuple[Tensor, Tensor],
    layout: Tensor,
    winners: Tensor,
    bad: Tensor,
    first_source: int,
) -> None:
    """Write the winners of one gradient's bags, those that are pooled by maximum; `bags_of` are keys and offsets."""
    keys, offsets = bags_of
    num_features, width = layout.shape[0], weights.shape[1]
    batch_size = (offsets.shape[0] - 1) // num_features
    bags, block = parts_of_rows(width)
    winners_kernel[(triton.cdiv(batch_size, bags), num_features, triton.cdiv(width, block))](
        weights,
        keys,
        offsets,
        layout,
        winners,
        bad,
        keys.shape[0],
        batch_size,
        first_source,
        WIDTH=width,
        BLOCK=block,
        BAGS=bags,
        COLUMNS=layout.shape[1],
    )


_BLOCK = 1024
_INT32_KEYS = 2**31 - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Segments:
    """N keys grouped by rows, the input of the fused update.

    Attributes:
        grads: float32[R, D].
        located: The keys, sorted by row.
        segments: [N], the number of distinct rows up to and with each sorted position.
        starts: int64[U + 1, and more], the first sorted position of each segment.
        key_parts: float32[2 * blocks, D], see `device.segments`.
        part_parts: float32[2 * blocks of blocks, D].
    """

    grads: Tensor
    located: LocatedKeys
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
    def has_targets(self) -> bool:
        """Whether rows lie elsewhere than in their order."""
        return self.located.targets.shape[0] > 0

    @property
    def factors(self) -> Tensor:
        """Factors float32[N] of the learning rate; empty if all are 1."""
        return self.located.factors

    def of_keys(self) -> tuple[Tensor, ...]:
        """Return the kernels' arguments from ``grads`` to ``winners``."""
        located = self.located
        return self.grads, located.sources, located.scales, located.places, located.winners

    def of_rows(self) -> tuple[Tensor, ...]:
        """Return the kernels' arguments from ``sorted_rows`` to ``part_parts``."""
        return self.located.rows, self.segments, self.starts, self.key_parts, self.part_parts


def segments_of(
    gradients: Sequence[KernelGradient], weights: Tensor, table_lr: Tensor | None, is_checked: bool
) -> Segments:
    """Sort the keys of `gradients` and sum the parts of long segments.

    Args:
        gradients: Gradients of one or more lookups in `weights`.
        weights: [V, D].
        table_lr: float32[T] in host memory, factors of the learning rate; keys of tables with 0 have no effect.
        is_checked: Whether to wait for the check of the keys and raise its error; otherwise bad keys have no effect.

    Raises:
        BadKeyError: A key outside its table.
        ConfigError: Offsets that decrease or do not cover the keys.
    """
    width, device = weights.shape[1], weights.device
    located = locate(gradients, weights, table_lr, is_checked).by_row()
    segments, starts = _cut(located.rows)
    grads = [gradient.grad.reshape(-1, width) for gradient in gradients]
    of_rows = Segments(
        # Most steps have one lookup, whose gradient is not copied.
        grads=torch.cat(grads) if len(grads) > 1 else grads[0].contiguous(),
        located=located,
        segments=segments,
        starts=starts,
        key_parts=_parts(located.rows.shape[0], CHUNK.value, width, device),
        part_parts=_parts(located.rows.shape[0], CHUNK.value**2, width, device),
    )
    _sum_parts(of_rows)
    return of_rows


def _cut(sorted_rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return `Segments.segments` and `Segments.starts`."""
    num_keys, device = sorted_rows.shape[0], sorted_rows.device
    heads = torch.empty(num_keys, dtype=torch.int32, device=device)
    # Room for as many segments as keys, whose number is not read back: that would wait for the device.
    starts = torch.empty(num_keys + 1, dtype=torch.int64, device=device)
    if num_keys == 0:
        return heads, starts
    grid = (triton.cdiv(num_keys, _BLOCK),)
    heads_kernel[grid](sorted_rows, heads, num_keys, BLOCK=_BLOCK)
    segments = torch.cumsum(heads, 0, dtype=torch.int32 if num_keys <= _INT32_KEYS else torch.int64)
    starts_kernel[grid](sorted_rows, segments, starts, num_keys, BLOCK=_BLOCK)
    return segments, starts


def _parts(num_keys: int, unit: int, width: int, device: torch.device) -> Tensor:
    """Return room for the parts of segments of more than `unit` keys."""
    slots = 2 * triton.cdiv(num_keys, unit) if num_keys > unit else 0
    return torch.empty(slots, width, device=device)


def _sum_parts(segments: Segments) -> None:
    width = segments.grads.shape[1]
    tile_slots, block = whole_rows(width)
    key_slots, part_slots = segments.key_parts.shape[0], segments.part_parts.shape[0]
    if key_slots:
        key_parts_kernel[(triton.cdiv(key_slots, tile_slots),)](
            *segments.of_keys(),
            segments.segments,
            segments.starts,
            segments.key_parts,
            segments.num_keys,
            WIDTH=width,
            BLOCK=block,
            SLOTS=tile_slots,
            IS_PLAIN=segments.is_plain,
            HAS_MAX=segments.has_max,
            **UNFUSED,
        )
    if part_slots:
        part_parts_kernel[(triton.cdiv(part_slots, tile_slots),)](
            segments.key_parts,
            segments.segments,
            segments.starts,
            segments.part_parts,
            segments.num_keys,
            WIDTH=width,
            BLOCK=block,
            SLOTS=tile_slots,
        )
