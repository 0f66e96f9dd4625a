"""Rows that are read for coming batches while the present one trains."""

from __future__ import annotations

import threading

import torch
from torch import Tensor

from terarec.errors import TerarecError
from terarec.storage.row_levels import RowLevel
from terarec.storage.slots import RowBatch

_MOST_BATCHES = 4  # whose rows are staged; what an older one left is forgotten


class StagedRows:
    """Distinct rows of one coming batch on their way from a slower tier.

    Attributes:
        batch: The rows, rising.
    """

    def __init__(self, batch: RowBatch, row_bytes: int) -> None:
        self.batch = batch
        self._values = torch.empty(batch.rows.numel(), row_bytes, dtype=torch.uint8)
        self._found = torch.zeros(0, dtype=torch.bool)
        self._is_valid = torch.ones(batch.rows.numel(), dtype=torch.bool)
        self._is_read = threading.Event()

    def fill(self, level: RowLevel) -> None:
        """Read the rows; what goes wrong is left to whoever reads them then."""
        try:
            self._found = level.read(self.batch, self._values)
        except TerarecError:
            self._is_valid[:] = False
        finally:
            self._is_read.set()

    def places(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return which of ``rows int64[n]`` are staged, bool[n], and the places int64[m] of those."""
        mine = self.batch.rows
        if not mine.numel() or not rows.numel():
            return torch.zeros(rows.numel(), dtype=torch.bool), rows[:0]
        places = torch.searchsorted(mine, rows).clamp_(max=mine.numel() - 1)
        is_here = (mine[places] == rows) & self._is_valid[places]
        return is_here, places[is_here]

    @property
    def is_used_up(self) -> bool:
        """Whether all rows were taken or dropped."""
        return not bool(self._is_valid.any())

    def take(self, batch: RowBatch, out: Tensor, found: Tensor) -> Tensor:
        """Copy staged rows to ``out uint8[n, row_bytes]``, note in ``found bool[n]`` which are in the slower tier.

        A row that another key had when it was staged is not taken: its key may be in the slower tier.

        Returns:
            Which rows of `batch` were staged, bool[n]; they are no longer.
        """
        is_here, places = self.places(batch.rows)
        if not places.numel():
            return is_here
        is_same = self.batch.keys[places] == batch.keys[is_here]
        is_here[is_here.clone()] = is_same
        places = places[is_same]
        self._is_read.wait()
        if not self._found.numel():  # the read failed
            return torch.zeros_like(is_here)
        there = self._found[places]
        targets = is_here.nonzero()[:, 0]
        out[targets[there]] = self._values[places[there]]
        found[targets] = there
        self._is_valid[places] = False
        return is_here

    def drop(self, rows: Tensor) -> None:
        """Forget ``rows int64[n]``, which have changed."""
        self._is_valid[self.places(rows)[1]] = False


class Lookahead:
    """The staged rows of all coming batches. A row is staged for the first batch that wants it alone.

    The caller holds a lock; only `StagedRows.fill` runs without.
    """

    def __init__(self) -> None:
        self._staged: list[StagedRows] = []

    def reserve(self, batch: RowBatch, row_bytes: int) -> StagedRows:
        """Return room for those of the rows of a coming batch that are not staged yet, to be filled at once.

        Args:
            batch: Rows in host memory, which may repeat.
            row_bytes: Bytes of a row.
        """
        rows, order = batch.rows.sort()
        is_first = torch.ones_like(rows, dtype=torch.bool)
        is_first[1:] = rows[1:] != rows[:-1]
        for staged in self._staged:
            is_first &= ~staged.places(rows)[0]
        held = StagedRows(batch.part(order[is_first]), row_bytes)
        self._staged = [*self._staged[1 - _MOST_BATCHES :], held]
        return held

    def take(self, batch: RowBatch, out: Tensor, found: Tensor) -> Tensor:
        """See `StagedRows.take`; of all coming batches."""
        taken = torch.zeros(batch.rows.numel(), dtype=torch.bool)
        for staged in self._staged:
            taken |= staged.take(batch, out, found)
        self._staged = [staged for staged in self._staged if not staged.is_used_up]
        return taken

    def drop(self, rows: Tensor) -> None:
        """Forget ``rows int64[n]``, which have changed."""
        for staged in self._staged:
            staged.drop(rows.cpu())

    def clear(self) -> None:
        """Forget everything."""
        self._staged = []
