"""Encoded rows -> the shards of a data set, in the order of the local engine."""

from __future__ import annotations

import dataclasses
import os
import shutil
from collections.abc import Mapping, Sequence
from itertools import accumulate, islice
from pathlib import Path

import pyarrow.parquet as pq
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from terarec.errors import StorageError
from terarec.etl.columns import SPLIT_NAMES, TRAIN
from terarec.etl.spark.expressions import ROW, SPLIT, column, hashed
from terarec.etl.spark.ranks import number_below, values_at
from terarec.formats import default_group_rows, even_sizes, shard_path
from terarec.spec import DatasetSpec, ShardSpec

_SHARD, _KEY = "__terarec_shard", "__terarec_key"
_LARGEST_GROUP = 1 << 30
"""Bytes, far above those of a row group: its rows alone end it."""


class Shards:
    """Writes the shards of all splits of a data set.

    Args:
        spec: the data set.
        directory: where it is made.
        rows_per_shard: most rows of a file.
        seed: of the shuffle of the train split; None keeps the order of the sources.
    """

    def __init__(self, spec: DatasetSpec, directory: Path, rows_per_shard: int, seed: int | None) -> None:
        self._spec = spec
        self._directory = directory
        self._rows_per_shard = rows_per_shard
        self._key = _order(seed)

    def write(self, encoded: DataFrame, rows: DataFrame) -> DatasetSpec:
        """Write the rows, each shard by one task.

        Args:
            encoded: columns `ROW`, `SPLIT` and those of the data set.
            rows: columns `ROW` and `SPLIT` of the same rows, cheaper to compute.

        Returns:
            The data set with its shards.
        """
        counts = {row[SPLIT]: row["count"] for row in rows.groupBy(SPLIT).count().collect()}
        sizes = {split: self._sizes(count) for split, count in sorted(counts.items())}
        placed = encoded.withColumns({_SHARD: self._shard(rows, sizes), _KEY: self._key})
        gathered = placed.repartition(max(sum(map(len, sizes.values())), 1), SPLIT, _SHARD)
        ordered = gathered.sortWithinPartitions(SPLIT, _SHARD, _KEY, ROW)
        written = self._directory / "work" / "shards"
        writer = ordered.select(SPLIT, _SHARD, *map(column, self._spec.column_names)).write.mode("overwrite")
        writer = writer.option("parquet.block.row.count.limit", default_group_rows(self._spec))
        writer.option("parquet.block.size", _LARGEST_GROUP).partitionBy(SPLIT, _SHARD).parquet(str(written))
        splits = {SPLIT_NAMES[split]: _placed(written, self._spec, self._directory, split) for split in sizes}
        shutil.rmtree(written)
        return dataclasses.replace(self._spec, splits=splits)

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


def _placed(written: Path, spec: DatasetSpec, directory: Path, split: int) -> tuple[ShardSpec, ...]:
    """Move the files that Spark wrote for `split` to where they belong."""
    shards = []
    folders: Sequence[Path] = sorted(
        (written / f"{SPLIT}={split}").iterdir(), key=lambda path: int(path.name.split("=")[1])
    )
    for number, folder in enumerate(folders):
        files = list(folder.glob("*.parquet"))
        if len(files) != 1:
            raise StorageError(f"{folder}: Spark wrote {len(files)} files, expected one for each shard")
        path = shard_path(directory, spec, SPLIT_NAMES[split], number)
        path.parent.mkdir(parents=True, exist_ok=True)
        os.replace(files[0], path)
        shards.append(ShardSpec(file=f"{path.parent.name}/{path.name}", rows=pq.read_metadata(path).num_rows))
    return tuple(shards)
