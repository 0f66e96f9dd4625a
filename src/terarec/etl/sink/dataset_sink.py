"""Encoded rows -> a data set: shards of even size, and ``dataset.json``."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from terarec.etl.columns import SPLIT_NAMES
from terarec.formats import ColumnBlock, FileWriter, SplitFiles, create_shard, even_sizes, shard_path, write_dataset
from terarec.spec import DatasetSpec, ShardSpec


class DatasetSink:
    """Writes the splits of a data set; see `Sink`.

    Args:
        directory: where the data set is made.
        location: where it will lie.
        spec: its columns and storage.
        rows_per_shard: most rows of a file.
        expected: rows of each split, where they are known: its files get equally many then.
    """

    def __init__(
        self, directory: Path, location: Path, spec: DatasetSpec, rows_per_shard: int, expected: Mapping[str, int]
    ) -> None:
        self._directory = directory
        self._location = location
        self._spec = spec
        self._splits = {name: self._files(name, even_sizes(expected.get(name), rows_per_shard)) for name in SPLIT_NAMES}

    def write(self, split: str, rows: NDArray[np.int64], block: ColumnBlock) -> None:
        """See `Sink`."""
        del rows
        self._splits[split].write(block)

    def close(self) -> None:
        """See `Sink`."""
        for files in self._splits.values():
            files.close()
        shards = {
            name: tuple(ShardSpec(file=f"{name}/{path.name}", rows=rows) for path, rows in files.files)
            for name, files in self._splits.items()
            if files.files
        }
        write_dataset(dataclasses.replace(self._spec, splits=shards), self._directory, location=self._location)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for files in self._splits.values():
            files.abort()

    def _files(self, split: str, sizes: object) -> SplitFiles:
        def create(index: int) -> tuple[Path, FileWriter]:
            path = shard_path(self._directory, self._spec, split, index)
            return path, create_shard(self._spec, path)

        return SplitFiles(create, sizes)  # type: ignore[arg-type]
