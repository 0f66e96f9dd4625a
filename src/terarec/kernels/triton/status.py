"""The status that kernels leave: int64[2], the first offset and the position of the first key that do not hold."""

from __future__ import annotations

import torch
from torch import Tensor

from terarec.kernels.contract import BadKeyError, bad_offsets

NOTHING = 2**63 - 1
"""What each word holds while nothing is wrong."""


def new_status(device: torch.device) -> Tensor:
    """A status of which nothing is wrong."""
    return torch.full((2,), NOTHING, dtype=torch.int64, device=device)


def raise_if_bad(status: Tensor, keys: Tensor, offsets: Tensor, layout: Tensor, gradient: int = 0) -> None:
    """Wait for the kernels, read the status back and raise what it tells.

    Args:
        status: int64[2].
        keys: int64[N] of the call.
        offsets: int64[S * B + 1] of the call.
        layout: its layout array.
        gradient: number of the `LaidGradient` that the call is for.

    Raises:
        BadKeyError: a key outside its table.
        ConfigError: offsets that fall or do not cover the keys.
    """
    index, position = status.tolist()
    if index != NOTHING:
        raise bad_offsets(index, int(offsets[index]), keys.shape[0])
    if position != NOTHING:
        batch_size = (offsets.shape[0] - 1) // layout.shape[0]
        feature = int((offsets[::batch_size][1:] <= position).sum())
        raise BadKeyError(feature, position, int(keys[position]), int(layout[feature, 1]), gradient)


def check_no_bags(keys: Tensor, offsets: Tensor) -> None:
    """Raise `ConfigError` unless the offsets of a call without bags, for which no kernel runs, are those of no keys."""
    if int(offsets[0]) != 0 or keys.shape[0]:
        raise bad_offsets(0, int(offsets[0]), keys.shape[0])
