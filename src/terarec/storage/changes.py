# SPDX-License-Identifier: Apache-2.0
"""`ChangedRows`: which rows of an arena changed since a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

from terarec.kernels import memory
from terarec.kernels.pages import untouched_zeros

_BITS = 8
# Bytes of bits that are scanned at a time: 2 M rows, whose numbers take 16 MiB if all of them changed.
_SCANNED_BYTES = 1 << 18


class ChangedRows:
    """A bit for each row of an arena, which is set when the row changes.

    Attributes:
        since: Id of the checkpoint since which all changes were recorded; None if that is not known.

    Args:
        num_rows: Number of rows V.
        device: Device of the rows.
    """

    def __init__(self, num_rows: int, device: torch.device) -> None:
        self.since: str | None = None
        self._powers = (2 ** torch.arange(_BITS)).to(torch.uint8).to(device)
        self._bits = _zeros(num_rows, device)

    def resize(self, num_rows: int) -> None:
        """Make room for more rows, which have not changed."""
        if num_rows > self._bits.numel() * _BITS:
            # An eighth more than requested, so that an arena that grows often does not copy the bits each time.
            bits = _zeros(num_rows + num_rows // _BITS, self._bits.device)
            bits[: self._bits.numel()] = self._bits
            self._bits = bits

    def move(self, device: torch.device) -> None:
        """Move to `device`."""
        self._bits, self._powers = self._bits.to(device), self._powers.to(device)

    def follow(self, since: str) -> None:
        """Forget all changes, which the checkpoint `since` holds."""
        self._bits.zero_()
        self.since = since

    def discard(self) -> None:
        """Record that unknown rows changed."""
        # The bits may stay: they are read only where `since` is known.
        self.since = None

    def mark(self, rows: Tensor) -> None:
        """Record that ``rows int64[n]``, which may repeat, changed."""
        if self.since is None:
            return
        rows = rows[~self.contains(rows)]  # few: most rows of a batch were in those before
        groups, places = rows >> 3, rows & 7
        for place in range(_BITS):  # so that no two distinct rows of a call share a byte
            mine = groups[places == place]
            self._bits[mine] = self._bits[mine] | (1 << place)

    def contains(self, rows: Tensor) -> Tensor:
        """Return which of ``rows int64[n]`` changed, bool[n]."""
        return (self._bits[rows >> 3] & self._powers[rows & 7]) != 0

    def between(self, begin: int, end: int) -> Iterator[Tensor]:
        """Yield the rows ``begin <= row < end`` that changed, rising, as int64[n]."""
        # The first and last byte may have bits of other tables, which are left out below.
        for first in range(begin >> 3, (end + _BITS - 1) >> 3, _SCANNED_BYTES):
            part = self._bits[first : min(first + _SCANNED_BYTES, (end + _BITS - 1) >> 3)]
            places = part.nonzero()[:, 0]
            is_set = (part[places][:, None] & self._powers) != 0
            rows = ((places + first)[:, None] * _BITS + torch.arange(_BITS, device=part.device))[is_set]
            rows = rows[(rows >= begin) & (rows < end)]
            if rows.numel():
                yield rows


class DirectWrites:
    """Aliases of the tensors of an arena that are given to others, who may write to them.

    An alias shares memory with its tensor, but has a version counter of its own, which tells writes to it
    from updates. Writes through NumPy or addresses leave no trace.
    """

    def __init__(self) -> None:
        self._aliases: dict[str, tuple[Tensor, Tensor, int]] = {}
        self._are_new = False

    def alias(self, name: str, owner: Tensor) -> Tensor:
        """Return the alias of ``owner``, the present tensor of that name."""
        known = self._aliases.get(name)
        if known is not None and known[0] is owner:
            return known[1]
        # Writes through the alias that is replaced are noted first; its version would be forgotten with it.
        self._look()
        # `data` has a version counter of its own, whereas a view would share that of its tensor, which updates raise,
        # too.
        alias = owner.data
        self._aliases[name] = (owner, alias, alias._version)
        return alias

    def taken(self) -> bool:
        """Return whether there were writes since the last call."""
        self._look()
        are_new, self._are_new = self._are_new, False
        return are_new

    def _look(self) -> None:
        for name, (owner, alias, version) in self._aliases.items():
            if alias._version != version:
                self._are_new = True
                self._aliases[name] = (owner, alias, alias._version)


class ChangingArena(Protocol):
    """An arena that records which of its rows change."""

    num_rows: int
    changes: ChangedRows | None

    @property
    def device(self) -> torch.device:
        """Device of the rows."""


def follow_changes(arena: ChangingArena, since: str) -> None:
    """Begin to record which rows of `arena` change after the checkpoint `since`.

    Raises:
        StorageError: Not enough memory.
    """
    if arena.changes is None:
        arena.changes = ChangedRows(arena.num_rows, arena.device)
    arena.changes.follow(since)


def mark_changes(arena: ChangingArena, rows: Tensor) -> None:
    """Record that ``rows int64[n]`` of `arena` changed."""
    if arena.changes is not None:
        arena.changes.mark(rows)


def discard_changes(arena: ChangingArena) -> None:
    """Record that unknown rows of `arena` changed."""
    if arena.changes is not None:
        arena.changes.discard()


def changes_since(arena: ChangingArena) -> str | None:
    """Return the id of the checkpoint after which all changes of `arena` are known; None if they are not."""
    return None if arena.changes is None else arena.changes.since


def _zeros(num_rows: int, device: torch.device) -> Tensor:
    num_bytes = -(-num_rows // _BITS)
    if device.type != "cpu":
        return torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    purpose = f"a bit for each of {num_rows:,} rows, which delta checkpoints need"
    memory.require(num_bytes, purpose)
    # Pages without a set bit take no memory: most rows of a large table do not change.
    return untouched_zeros(num_bytes, torch.uint8, purpose)
