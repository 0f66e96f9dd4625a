"""Rows in order -> the shards of the train and valid splits."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import TracebackType
from typing import Self

from terarec.formats import ColumnBlock, ShardWriter, create_shard, shard_path, slice_rows
from terarec.spec import DatasetSpec, ShardSpec


class SplitWriter:
    """Writes the first `train_rows` rows as the split "train" and the others as "valid".

    As a context manager it gives the shard that is being written up, unless `close` was called inside.

    Args:
        directory: of the data set.
        spec: its columns and storage.
        train_rows: rows of the train split.
        rows_per_shard: most rows of a file.
    """

    def __init__(self, directory: Path, spec: DatasetSpec, *, train_rows: int, rows_per_shard: int) -> None:
        self._directory = directory
        self._spec = spec
        self._train_rows = train_rows
        self._rows_per_shard = rows_per_shard
        self._num_rows = 0
        self._shards: dict[str, list[ShardSpec]] = {"train": [], "valid": []}
        self._writer: ShardWriter | None = None
        self._room = 0

    def write(self, block: ColumnBlock) -> None:
        """Append the rows of `block`.

        Raises:
            StorageError: the disk is full.
        """
        start = 0
        while start < block.num_rows:
            if self._writer is None:
                self._writer = self._open()
            count = min(self._room, block.num_rows - start)
            part = slice_rows(block, start, start + count)
            self._writer.write(part.label, part.dense, part.keys)
            start += count
            self._num_rows += count
            self._room -= count
            if self._room == 0:
                self._finish()

    def close(self) -> DatasetSpec:
        """Finish the last shard; returns the data set with the shards of its splits."""
        self._finish()
        splits = {split: tuple(shards) for split, shards in self._shards.items() if shards}
        return dataclasses.replace(self._spec, splits=splits)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._writer is not None:
            self._writer.abort()

    @property
    def _split(self) -> str:
        return "train" if self._num_rows < self._train_rows else "valid"

    def _open(self) -> ShardWriter:
        left = self._train_rows - self._num_rows if self._split == "train" else self._rows_per_shard
        self._room = min(self._rows_per_shard, left)
        path = shard_path(self._directory, self._spec, self._split, len(self._shards[self._split]))
        return create_shard(self._spec, path)

    def _finish(self) -> None:
        if self._writer is not None:
            shard = self._writer.close()
            self._shards[shard.file.split("/")[0]].append(shard)
            self._writer = None
