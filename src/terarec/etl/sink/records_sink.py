"""Encoded rows -> HugeCTR's files, with metadata and keysets, and ``records.json``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from terarec.etl.columns import SPLIT_NAMES
from terarec.formats import ColumnBlock, even_sizes
from terarec.formats.hugectr import (
    RECORDS_FILE,
    RecordKind,
    RecordOptions,
    SplitRecords,
    describe_records,
    write_records,
)
from terarec.spec import DatasetSpec


class RecordsSink:
    """Writes the splits as files of one of HugeCTR's kinds; see `Sink`. What they hold is said by `describe_records`.

    Args:
        directory: where the files are made.
        location: where they will lie, which the file lists name.
        spec: the columns.
        kind: of the files.
        rows_per_file: most rows of a Norm or Parquet file, each of which is a part with a keyset of its own.
        expected: rows of each split, where they are known: its files get equally many then.

    Raises:
        ConfigError: columns that the files cannot hold.
    """

    def __init__(
        self,
        directory: Path,
        location: Path,
        spec: DatasetSpec,
        kind: RecordKind,
        rows_per_file: int,
        expected: Mapping[str, int],
    ) -> None:
        self._directory = directory
        self._spec = spec
        self._options = RecordOptions(kind=kind, keysets=True)
        records = describe_records(spec, self._options, {})
        self._splits = {
            name: SplitRecords(
                directory / name,
                location / name,
                records,
                even_sizes(expected.get(name), rows_per_file),
                keysets=True,
            )
            for name in SPLIT_NAMES
        }

    def write(self, split: str, rows: NDArray[np.int64], block: ColumnBlock) -> None:
        """See `Sink`."""
        del rows
        self._splits[split].write(block)

    def close(self) -> None:
        """See `Sink`."""
        for files in self._splits.values():
            files.close()
        rows = {name: files.num_rows for name, files in self._splits.items()}
        write_records(describe_records(self._spec, self._options, rows), self._directory / RECORDS_FILE)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for files in self._splits.values():
            files.abort()
