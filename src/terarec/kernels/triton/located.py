"""The keys of one or more gradients, located: their arena rows, and where their gradients are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from terarec.kernels.contract import LaidGradient
from terarec.kernels.triton import layouts, status, tiles
from terarec.kernels.triton.device.locate import locate_kernel, winners_kernel
from terarec.kernels.triton.layouts import DeviceLayout

_INT32_ROWS = 2**31 - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Located:
    """N keys, one gradient's after the other's.

    Attributes:
        rows: int32|int64[N], arena rows; V, which none is, for bad keys and keys of frozen tables.
        sources: int64[N], the row of all gradients, laid out as [R, D], that holds a key's.
        scales: float32[N], the factor of that gradient; empty if all are 1.
        places: int32[N], the key's place in a bag pooled by maximum, else -1; empty if none is.
        winners: int32[R, D], the place of the key that takes the gradient of such a bag; empty if none is.
        factors: float32[N], of the learning rate; empty if all are 1.
    """

    rows: Tensor
    sources: Tensor
    scales: Tensor
    places: Tensor
    winners: Tensor
    factors: Tensor

    def by_row(self) -> Located:
        """The keys sorted by row, equal ones in the order they have."""
        rows, order = torch.sort(self.rows, stable=True)

        def moved(values: Tensor) -> Tensor:
            return values[order] if values.shape[0] else values

        return Located(
            rows=rows,
            sources=moved(self.sources),
            scales=moved(self.scales),
            places=moved(self.places),
            winners=self.winners,
            factors=moved(self.factors),
        )


def locate(gradients: Sequence[LaidGradient], weights: Tensor, table_lr: Tensor | None, is_checked: bool) -> Located:
    """Locate the keys of `gradients`, which are of lookups in `weights`.

    Raises:
        BadKeyError: a key outside its table, if `is_checked`.
        ConfigError: offsets that fall or do not cover the keys, if `is_checked`.
    """
    device, (num_rows, width) = weights.device, weights.shape
    held = [layouts.on_device(gradient.layout, device) for gradient in gradients]
    num_keys = sum(gradient.keys.shape[0] for gradient in gradients)
    is_scaled = any(gradient.key_weights is not None for gradient in gradients) or any(on.is_scaled for on in held)
    has_max = any(on.has_max for on in held)
    row_type = torch.int32 if num_rows < _INT32_ROWS else torch.int64  # half the passes of the sort
    found = Located(
        rows=torch.full((num_keys,), num_rows, dtype=row_type, device=device),
        sources=torch.zeros(num_keys, dtype=torch.int64, device=device),
        scales=torch.ones(num_keys if is_scaled else 0, device=device),
        places=torch.full((num_keys if has_max else 0,), -1, dtype=torch.int32, device=device),
        winners=torch.empty(_sources(gradients, width) if has_max else 0, width, dtype=torch.int32, device=device),
        factors=torch.ones(num_keys if table_lr is not None else 0, device=device),
    )
    table_lr = None if table_lr is None else table_lr.to(device)
    first_key = first_source = 0
    for number, (gradient, on) in enumerate(zip(gradients, held, strict=True)):
        _locate_one(gradient, on, found, weights, table_lr, (first_key, first_source, number), is_checked)
        first_key += gradient.keys.shape[0]
        first_source += _sources([gradient], width)
    return found


def _sources(gradients: Sequence[LaidGradient], width: int) -> int:
    return sum(gradient.grad.numel() for gradient in gradients) // width


def _locate_one(
    gradient: LaidGradient,
    on: DeviceLayout,
    found: Located,
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
        status.check_no_bags(keys, offsets)
        return
    bad = status.new_status(keys.device)
    mine = slice(first_key, first_key + num_keys)
    bags, _ = tiles.whole_rows(1)
    locate_kernel[(triton.cdiv(batch_size, bags), num_features)](
        keys,
        found.scales if key_weights is None else key_weights.contiguous(),
        offsets,
        on.array,
        found.factors if table_lr is None else table_lr,
        found.rows[mine],
        found.sources[mine],
        found.scales[mine],
        found.places[mine],
        found.factors[mine],
        bad,
        num_keys,
        batch_size,
        first_source,
        weights.shape[0],
        BAGS=bags,
        COLUMNS=on.array.shape[1],
        IS_POOLED=on.is_pooled,
        IS_WEIGHTED=key_weights is not None,
        IS_PLAIN=found.scales.shape[0] == 0,
        HAS_MAX=found.places.shape[0] > 0,
        HAS_FACTORS=table_lr is not None,
    )
    if is_checked:
        status.raise_if_bad(bad, keys, offsets, gradient.layout, number)
    if on.has_max:
        _find_winners(weights, (keys, offsets), on, found.winners, bad, first_source)


def _find_winners(
    weights: Tensor,
    bags_of: tuple[Tensor, Tensor],
    on: DeviceLayout,
    winners: Tensor,
    bad: Tensor,
    first_source: int,
) -> None:
    """Write the winners of one gradient's bags, those that are pooled by maximum; `bags_of` are keys and offsets."""
    keys, offsets = bags_of
    num_features, width = on.array.shape[0], weights.shape[1]
    batch_size = (offsets.shape[0] - 1) // num_features
    bags, block = tiles.parts_of_rows(width)
    winners_kernel[(triton.cdiv(batch_size, bags), num_features, triton.cdiv(width, block))](
        weights,
        keys,
        offsets,
        on.array,
        winners,
        bad,
        keys.shape[0],
        batch_size,
        first_source,
        WIDTH=width,
        BLOCK=block,
        BAGS=bags,
        COLUMNS=on.array.shape[1],
    )
