"""Sources of served tables: HugeCTR's sparse models and terarec's checkpoints, read in parts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from terarec.checkpoint import load
from terarec.checkpoint.directory import MANIFEST
from terarec.errors import DataNotFoundError, FormatError
from terarec.formats.hugectr import SparseFileLayout, SparseRows, open_sparse_folder, read_sparse_file
from terarec.spec import ServedTableSpec

CHUNK_ROWS = 1 << 16
"""Rows that are in memory at a time while a table is loaded: 32 MiB of vectors of width 128."""


class RowChunk(NamedTuple):
    """Some rows of a table: keys int64[n] and rows float32[n, D]."""

    keys: Tensor
    rows: Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class TableSource:
    """Rows of a table to load.

    Attributes:
        path: Where they are.
        num_rows: Number of rows.
        read: Yields them; errors are `FormatError`.
        has_first_values: Whether it leaves out rows that have the first weights of a training.
    """

    path: Path
    num_rows: int
    read: Callable[[], Iterator[RowChunk]]
    has_first_values: bool = False

    @property
    def identity(self) -> str:
        """Path, size and time of the source: other rows have another identity."""
        files = sorted(self.path.iterdir()) if self.path.is_dir() else [self.path]
        stats = [file.stat() for file in files]
        return f"{self.path.resolve()} {sum(stat.st_size for stat in stats)} {max(stat.st_mtime_ns for stat in stats)}"


def open_source(spec: ServedTableSpec) -> TableSource | None:
    """Open the source of a table, whose sizes are checked; None if the table has none.

    Raises:
        DataNotFoundError: No such file or folder.
        FormatError: A damaged file, or another width.
        ConfigError: A checkpoint without this table.
    """
    if spec.source is None:
        return None
    path = Path(spec.source)
    if (path / MANIFEST).is_file():
        return _checkpoint_source(path, spec)
    if path.is_dir():
        folder = open_sparse_folder(path, spec.width)
        return TableSource(path=path, num_rows=folder.count, read=lambda: _checked(path, folder.chunks(CHUNK_ROWS)))
    if not path.is_file():
        raise DataNotFoundError(path, "no such file or folder, expected a sparse model or a checkpoint")
    layout = SparseFileLayout(width=spec.width, key_bytes=spec.key_bytes, has_slots=spec.has_slots)
    num_rows = path.stat().st_size // layout.record.itemsize
    if path.stat().st_size % layout.record.itemsize:
        raise FormatError(path, f"holds {path.stat().st_size} bytes, expected entries of {layout.record.itemsize}")
    return TableSource(
        path=path, num_rows=num_rows, read=lambda: _checked(path, read_sparse_file(path, layout, CHUNK_ROWS))
    )


def _checkpoint_source(path: Path, spec: ServedTableSpec) -> TableSource:
    files = load(path).table_files()
    held = files.shape(spec.name)
    if held.width != spec.width:
        raise FormatError(path, f"table {spec.name!r} has rows of width {held.width}, expected {spec.width}")

    def read() -> Iterator[RowChunk]:
        for rows in files.rows(spec.name):
            for begin in range(0, rows.keys.numel(), CHUNK_ROWS):
                part = slice(begin, begin + CHUNK_ROWS)
                yield _finite(path, RowChunk(rows.keys[part], rows.weights[part].float()))

    has_first_values = held.seed is not None
    return TableSource(path=path, num_rows=held.num_rows, read=read, has_first_values=has_first_values)


def _checked(path: Path, chunks: Iterator[SparseRows]) -> Iterator[RowChunk]:
    for chunk in chunks:
        yield _finite(path, RowChunk(torch.from_numpy(chunk.keys), torch.from_numpy(chunk.vectors)))


def _finite(path: Path, chunk: RowChunk) -> RowChunk:
    is_finite = chunk.rows.isfinite().all(1)
    if not bool(is_finite.all()):
        key = int(chunk.keys[~is_finite][0])
        raise FormatError(path, f"key {key}: got a vector with NaN or infinity, expected finite numbers")
    return chunk
