"""Rows that are read for coming batches while the present one trains."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from terarec.errors import TerarecError
from terarec.kernels.slots import RowBatch, row_set
from terarec.storage.row_format import RowFormat
from terarec.storage.row_levels import RowLevel

_MOST_BATCHES = 4  # whose rows are staged; what an older one left is forgotten


class TakenRows(NamedTuple):
    """Rows of one coming batch that somebody needs now.

    Attributes:
        values: uint8[m, row_bytes].
        places: int64[n], the row of `values` of each row asked for; -1 where it is not here or not in the slower tier.
        is_staged: bool[n], which rows asked for need not be looked for in the slower tier.
    """

    values: Tensor
    places: Tensor
    is_staged: Tensor


class StagedRows:
    """Distinct rows of one coming batch on their way from a slower tier.

    Attributes:
        batch: The rows, in the order in which the batch has them.

    Args:
        batch: Rows in host memory, which may repeat.
        of: Format of a row.
    """

    def __init__(self, batch: RowBatch, of: RowFormat) -> None:
        self._set = row_set(batch.rows)
        self.batch = batch.part(self._set.firsts)
        count = self.batch.rows.numel()
        self._values = of.new_rows(count)
        self._found = torch.zeros(0, dtype=torch.bool)
        self._is_valid = torch.ones(count, dtype=torch.bool)
        self._is_read = threading.Event()

    def fill(self, level: RowLevel) -> None:
        """Read the rows; what goes wrong is left to whoever reads them then."""
        try:
            self._found = level.read(self.batch, self._values)
        except TerarecError:
            self._is_valid[:] = False
        finally:
            self._is_read.set()

    def places(self, rows: Tensor) -> Tensor:
        """Return the places int64[n] of ``rows int64[n]``, -1 where one is not staged."""
        places = self._set.find(rows)
        here = (places >= 0).nonzero()[:, 0]
        places[here] = torch.where(self._is_valid[places[here]], places[here], -1)
        return places

    @property
    def is_used_up(self) -> bool:
        """Whether all rows were taken or dropped."""
        return not bool(self._is_valid.any())

    def take(self, batch: RowBatch) -> TakenRows | None:
        """Return staged rows of `batch`, which are no longer staged then; None if it has none.

        A row that another key had when it was staged is not taken: its key may be in the slower tier.
        """
        places = self.places(batch.rows)
        here = (places >= 0).nonzero()[:, 0]
        here = here[self.batch.keys[places[here]] == batch.keys[here]]
        if not here.numel():
            return None
        self._is_read.wait()
        if not self._found.numel():  # the read failed
            return None
        mine = places[here]
        self._is_valid[mine] = False
        is_staged = torch.zeros_like(places, dtype=torch.bool)
        is_staged[here] = True
        places.fill_(-1)
        places[here] = torch.where(self._found[mine], mine, -1)
        return TakenRows(self._values, places, is_staged)

    def drop(self, rows: Tensor) -> None:
        """Forget ``rows int64[n]``, which have changed."""
        places = self.places(rows)
        self._is_valid[places[places >= 0]] = False


class Lookahead:
    """The staged rows of all coming batches. A row is staged for the first batch that wants it alone.

    The caller holds a lock; only `StagedRows.fill` runs without.
    """

    def __init__(self) -> None:
        self._staged: list[StagedRows] = []

    def reserve(self, batch: RowBatch, of: RowFormat) -> StagedRows:
        """Return room for those of the rows of a coming batch that are not staged yet, to be filled at once.

        Args:
            batch: Rows in host memory, which may repeat.
            of: Format of a row.
        """
        for staged in self._staged:
            batch = batch.part((staged.places(batch.rows) < 0).nonzero()[:, 0])
        held = StagedRows(batch, of)
        self._staged = [*self._staged[1 - _MOST_BATCHES :], held]
        return held

    def take(self, batch: RowBatch) -> Iterator[TakenRows]:
        """Yield what `StagedRows.take` returns, of all coming batches that have rows of `batch`."""
        for staged in self._staged:
            taken = staged.take(batch)
            if taken is not None:
                yield taken
        self._staged = [staged for staged in self._staged if not staged.is_used_up]

    def drop(self, rows: Tensor) -> None:
        """Forget ``rows int64[n]``, which have changed."""
        for staged in self._staged:
            staged.drop(rows.cpu())

    def clear(self) -> None:
        """Forget everything."""
        self._staged = []
