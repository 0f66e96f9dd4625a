"""Large row groups of Parquet files, decoded piece by piece."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from threading import Lock
from typing import Any

import pyarrow as pa

PIECE_ROWS = 131_072
"""Rows that are decoded at once: 42 MB of Criteo's as 8-byte keys. Row groups of no more are decoded as wholes."""


class RowGroupPieces:
    """The pieces of one row group, for any thread and in any order.

    Parquet has no way to begin inside a row group, so that one reader decodes all pieces one after the other. Who asks
    for a piece decodes those before it, which wait for those who ask for them: in order, as many as there are threads.

    Args:
        opened: opens the file.
        group: number of the row group.
        columns: which columns.
        piece_rows: rows of a piece; the last may have fewer.
    """

    def __init__(
        self,
        opened: Callable[[], AbstractContextManager[Any]],
        group: int,
        columns: Sequence[str],
        *,
        piece_rows: int = PIECE_ROWS,
    ) -> None:
        self._opened, self._group = opened, group
        self._columns, self._piece_rows = list(columns), piece_rows
        self._lock = Lock()
        self._waiting: dict[int, pa.Table] = {}
        self._decoded = 0
        self._stream: Iterator[pa.RecordBatch] = iter(())

    def take(self, piece: int) -> pa.Table:
        """The rows of a piece; asked for again, the row group is decoded again from its start."""
        with self._lock:
            if piece not in self._waiting:
                self._decode_to(piece)
            return self._waiting.pop(piece)

    def _decode_to(self, piece: int) -> None:
        if piece < self._decoded or not self._decoded:
            self._waiting, self._decoded, self._stream = {}, 0, self._batches()
        try:
            while self._decoded <= piece:
                batch = next(self._stream, None)
                if batch is None:
                    raise pa.ArrowInvalid(f"row group {self._group} ends before its piece {piece}")
                self._waiting[self._decoded] = pa.Table.from_batches([batch])
                self._decoded += 1
        except (pa.ArrowException, OSError):
            self._decoded = 0  # who asks again starts over
            raise

    def _batches(self) -> Iterator[pa.RecordBatch]:
        with ExitStack() as stack:
            file = stack.enter_context(self._opened())
            yield from file.iter_batches(
                self._piece_rows, row_groups=[self._group], columns=self._columns, use_threads=False
            )
