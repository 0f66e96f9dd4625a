# SPDX-License-Identifier: Apache-2.0
"""Items that a user does not have, drawn at random."""

from __future__ import annotations

import torch
from torch import Tensor

_MOST_DRAWS = 16


def draw_keys(
    shape: torch.Size, low: int, high: int, device: torch.device, generator: torch.Generator | None = None
) -> Tensor:
    """Return int64 keys of a shape, drawn uniformly from `low` to `high` - 1; see `draw_negatives`."""
    # A generator is one of the CPU, so that its draws are the same whatever the device.
    keys = torch.randint(low, high, shape, generator=generator, device=device if generator is None else "cpu")
    return keys.to(device)


def draw_negatives(
    owners: Tensor,
    positives: tuple[Tensor, Tensor],
    low: int,
    high: int,
    generator: torch.Generator | None = None,
) -> tuple[Tensor, Tensor]:
    """Draw a key for each owner uniformly from those of `low` to `high` - 1 that the owner does not have.

    Args:
        owners: int64[n], the number of a user for each key to draw.
        positives: int64[m] and int64[m], users and keys that they have.
        low: Lowest key.
        high: One more than the highest key.
        generator: Source of the draws; None for torch's global random state.

    Returns:
        int64[n] keys, and bool[n], False for owners who have all keys.
    """
    device = owners.device

    taken = (positives[0] * high + positives[1]).sort().values
    keys, is_free = draw_keys(owners.shape, low, high, device, generator), torch.ones_like(owners, dtype=torch.bool)
    is_taken = _are_among(owners * high + keys, taken)
    for _ in range(_MOST_DRAWS):
        if not is_taken.any():
            return keys, is_free
        keys = torch.where(is_taken, draw_keys(owners.shape, low, high, device, generator), keys)
        is_taken = _are_among(owners * high + keys, taken)
    # Owners of nearly all keys: one of the few free ones is chosen among these alone.
    for place in is_taken.nonzero().flatten().tolist():
        free = torch.ones(high - low, dtype=torch.bool, device=device)
        own = positives[1][positives[0] == owners[place]]
        free[own[(own >= low) & (own < high)] - low] = False
        choices = free.nonzero().flatten()
        if len(choices):
            keys[place] = low + choices[torch.randint(len(choices), (), generator=generator).to(device)]
        else:
            is_free[place] = False
    return keys, is_free


def _are_among(values: Tensor, ascending: Tensor) -> Tensor:
    if not len(ascending):
        return torch.zeros_like(values, dtype=torch.bool)
    places = torch.searchsorted(ascending, values).clamp(max=len(ascending) - 1)
    return ascending[places] == values
