# SPDX-License-Identifier: Apache-2.0
"""Rows that are read for coming batches while the present one trains."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from terarec.errors import TerarecError
from terarec.kernels.slots import RowBatch, row_set
from terarec.memory.level import Level
from terarec.memory.row_format import RowFormat

_MOST_BATCHES = 4  # whose rows are staged; what an older one left is forgotten
STAGED_BYTES = 64 << 20
"""Bytes of staged rows of coming batches, in addition to the budget; a batch reads the others when it needs them."""


class TakenRows(NamedTuple):
    """Staged rows of a coming batch that are needed now.

    Attributes:
        values: uint8[m, row_bytes].
        places: int64[n], the row of `values` of each requested row; -1 where it is not here or not in the slower tier.
        is_staged: bool[n], which requested rows need not be looked for in the slower tier.
    """

    values: Tensor
    places: Tensor
    is_staged: Tensor


class StagedRows:
    """Distinct rows of one coming batch that are read from a slower tier.

    Attributes:
        batch: The rows, in the order in which the batch has them.
        num_bytes: Bytes that they take.

    Args:
        batch: Rows in host memory, which may repeat.
        of: Format of a row.
    """

    def __init__(self, batch: RowBatch, of: RowFormat) -> None:
        self._set = row_set(batch.rows)
        self.batch = batch.part(self._set.firsts)
        self._values = of.new_rows(self.batch.rows.numel())
        self.num_bytes = self._values.numel()
        self._is_there: Tensor | None = None
        self._is_read = threading.Event()

    def fill(self, level: Level) -> None:
        """Read the rows, ignoring errors: the batch reads the rows itself then."""
        try:
            self._is_there = level.read(self.batch, self._values)
        except TerarecError:
            # No error here: the batch reads the rows itself when it needs them, and gets the error then.
            self._is_there = None
        finally:
            self._is_read.set()

    def are_staged(self, rows: Tensor) -> Tensor:
        """Return which of ``rows int64[n]`` are staged, bool[n]."""
        return self._set.find(rows) >= 0

    @property
    def is_used_up(self) -> bool:
        """Whether all rows were taken or dropped."""
        return self._set.num_left == 0

    def take(self, batch: RowBatch) -> TakenRows | None:
        """Return staged rows of `batch`, all distinct, which are no longer staged then; None if it has none.

        A row that another key had when it was staged is not taken: its key may be in the slower tier.
        """
        left = self._set.num_left
        places = self._set.take(batch.rows)
        if self._set.num_left == left:
            return None
        # The thread that reads them never waits for the lock that the caller holds, so this ends.
        self._is_read.wait()
        if self._is_there is None:
            return None
        known = places.clamp(min=0)
        is_staged = (places >= 0) & (self.batch.keys[known] == batch.keys)
        return TakenRows(self._values, torch.where(is_staged & self._is_there[known], places, -1), is_staged)

    def drop(self, rows: Tensor) -> None:
        """Forget ``rows int64[n]``, which have changed."""
        self._set.take(rows)


class Lookahead:
    """The staged rows of all coming batches, and of the next part, each row once, for the first batch that needs it.

    The caller holds a lock; only `StagedRows.fill` runs without.
    """

    def __init__(self) -> None:
        self._staged: list[StagedRows] = []
        self._of_part: StagedRows | None = None

    def reserve(self, batch: RowBatch, of: RowFormat) -> StagedRows:
        """Return room for those of the rows of a coming batch that are not staged yet, to be filled at once.

        Args:
            batch: Rows in host memory, which may repeat. Those beyond `STAGED_BYTES` get no room.
            of: Format of a row.
        """
        kept = self._staged[1 - _MOST_BATCHES :]
        others = self._others(batch)
        most = max(0, STAGED_BYTES - sum(staged.num_bytes for staged in kept)) // of.num_bytes
        if others.rows.numel() > most:
            others = others.part(row_set(others.rows).firsts[:most])
        room = StagedRows(others, of)
        self._staged = [*kept, room]
        return room

    def reserve_part(self, batch: RowBatch, of: RowFormat) -> StagedRows:
        """Return room for rows of the next part, which stay until they are taken, or others are reserved."""
        # First: otherwise rows of the former part that are requested again would be skipped as staged, and be lost.
        self._of_part = None
        self._of_part = StagedRows(self._others(batch), of)
        return self._of_part

    def take(self, batch: RowBatch) -> Iterator[TakenRows]:
        """Yield the results of `StagedRows.take` of all coming batches that have rows of `batch`."""
        for staged in self._all():
            taken = staged.take(batch)
            if taken is not None:
                yield taken
        self._staged = [staged for staged in self._staged if not staged.is_used_up]
        if self._of_part is not None and self._of_part.is_used_up:
            self._of_part = None

    def drop(self, rows: Tensor) -> None:
        """Forget ``rows int64[n]``, which have changed."""
        for staged in self._all():
            staged.drop(rows.cpu())

    def clear(self) -> None:
        """Remove all staged rows."""
        self._staged, self._of_part = [], None

    def _all(self) -> list[StagedRows]:
        return [*self._staged, *([] if self._of_part is None else [self._of_part])]

    def _others(self, batch: RowBatch) -> RowBatch:
        """Return the rows of `batch` that are not staged."""
        for staged in self._all():
            batch = batch.part((~staged.are_staged(batch.rows)).nonzero()[:, 0])
        return batch
