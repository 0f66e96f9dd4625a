"""One way to read and write shards, whatever their format."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from terarec.formats.block import ColumnBlock
from terarec.formats.parquet import ParquetShard, ParquetShardWriter
from terarec.formats.raw import RawShard, RawShardWriter
from terarec.formats.writer import ShardWriter
from terarec.spec import DatasetSpec

_SUFFIX = {"parquet": ".parquet", "raw": ".bin"}


class Shard(Protocol):
    """A data file, read group by group.

    Attributes:
        path: the file.
        num_rows: samples in the file.
        group_rows: samples in each row group.
    """

    path: Path
    num_rows: int
    group_rows: tuple[int, ...]

    def read_group(self, index: int) -> ColumnBlock:
        """The rows of row group `index`, checked; safe to call from several threads."""
        ...


def shard_path(directory: Path, spec: DatasetSpec, split: str, index: int) -> Path:
    """Where shard `index` of `split` belongs: ``<directory>/<split>/part-00000.parquet`` or ``.bin``."""
    return directory / split / f"part-{index:05d}{_SUFFIX[spec.storage]}"


def open_shard(spec: DatasetSpec, path: Path, num_rows: int | None = None) -> Shard:
    """Open a shard of a data set whose columns and storage are `spec`'s.

    Args:
        spec: the data set.
        path: the file.
        num_rows: rows that ``dataset.json`` promises; None to take the file's word.

    Raises:
        DataNotFoundError: there is no such file.
        FormatError: the file does not hold what `spec` promises.
    """
    return (ParquetShard if spec.storage == "parquet" else RawShard)(path, spec, num_rows)


def create_shard(spec: DatasetSpec, path: Path) -> ShardWriter:
    """A writer for a new shard at `path`, in `spec`'s storage; see `ShardWriter`."""
    return (ParquetShardWriter if spec.storage == "parquet" else RawShardWriter)(path, spec)
