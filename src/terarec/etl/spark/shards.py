"""Encoded rows -> files of rows in the order of the local engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate, islice
from pathlib import Path

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from terarec.errors import FormatError, StorageError
from terarec.etl.columns import SPLIT_NAMES, TRAIN
from terarec.etl.spark.expressions import ROW, SPLIT, column, hashed
from terarec.etl.spark.ranks import number_below, values_at
from terarec.formats import default_group_rows, even_sizes
from terarec.spec import DatasetSpec

_SHARD, _KEY = "__terarec_shard", "__terarec_key"
_LARGEST_GROUP = 1 << 30
"""Bytes, far above those of a row group: its rows alone end it."""


@dataclass(frozen=True, slots=True)
class OrderedRows:
    """Rows in files.

    Attributes:
        rows: split -> its rows.
        files: split -> its Parquet shards in order, of equally many rows.
    """

    rows: Mapping[str, int]
    files: Mapping[str, tuple[Path, ...]]


class RowOrder:
    """The order of rows and where it is cut into files.

    Args:
        rows_per_shard: most rows of a file.
        seed: of the shuffle of the train split; None keeps the order of the sources.
    """

    def __init__(self, rows_per_shard: int, seed: int | None) -> None:
        self._rows_per_shard = rows_per_shard
        self._key = _order(seed)

    def write(self, encoded: DataFrame, rows: DataFrame, spec: DatasetSpec, directory: Path) -> OrderedRows:
        """Write rows, each file by one task.

        Args:
            encoded: columns `ROW`, `SPLIT` and those of the data set.
            rows: columns `ROW` and `SPLIT` of the same rows, cheaper to compute.
            spec: the data set.
            directory: to make for the files.

        Raises:
            FormatError: there is no row.
            StorageError: Spark has lost or repeated files.
        """
        counts = {row[SPLIT]: row["count"] for row in rows.groupBy(SPLIT).count().collect()}
        if not counts:
            raise FormatError("the sources hold no row that the workflow keeps, expected at least one")
        sizes = {split: self._sizes(count) for split, count in sorted(counts.items())}
        placed = encoded.withColumns({_SHARD: self._shard(rows, sizes), _KEY: self._key})
        gathered = placed.repartition(sum(map(len, sizes.values())), SPLIT, _SHARD)
        ordered = gathered.sortWithinPartitions(SPLIT, _SHARD, _KEY, ROW)
        writer = ordered.select(SPLIT, _SHARD, *map(column, spec.file_columns)).write
        writer = writer.option("parquet.block.row.count.limit", default_group_rows(spec))
        writer.option("parquet.block.size", _LARGEST_GROUP).partitionBy(SPLIT, _SHARD).parquet(str(directory))
        return OrderedRows(
            {SPLIT_NAMES[split]: counts[split] for split in sizes},
            {SPLIT_NAMES[split]: _files(directory / f"{SPLIT}={split}") for split in sizes},
        )

    def _sizes(self, count: int) -> list[int]:
        return list(islice(even_sizes(count, self._rows_per_shard), -(-count // self._rows_per_shard)))

    def _shard(self, rows: DataFrame, sizes: Mapping[int, list[int]]) -> Column:
        """The shard of each row in its split."""
        shard = F.lit(0)
        for split, counts in sizes.items():
            starts = list(accumulate(counts))[:-1]
            bounds = values_at(rows.where(F.col(SPLIT) == split), self._key, starts)
            shard = F.when(F.col(SPLIT) == split, number_below(self._key, bounds)).otherwise(shard)
        return shard.cast("int")


def _order(seed: int | None) -> Column:
    if seed is None:
        return F.col(ROW)
    # Hashes count as unsigned where rows are shuffled: turning the sign bit gives signed numbers that order.
    shuffled = hashed(F.col(ROW), seed).bitwiseXOR(F.lit(-(2**63)))
    return F.when(F.col(SPLIT) == TRAIN, shuffled).otherwise(F.col(ROW))


def _files(directory: Path) -> tuple[Path, ...]:
    """The file that Spark wrote for each shard of a split."""
    files = []
    for folder in sorted(directory.iterdir(), key=lambda path: int(path.name.split("=")[1])):
        found = list(folder.glob("*.parquet"))
        if len(found) != 1:
            raise StorageError(f"{folder}: Spark wrote {len(found)} files, expected one for each shard")
        files.append(found[0])
    return tuple(files)
