"""Ordered rows -> the files of a storage."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import numpy as np

from terarec.etl.sink import ordered_sink
from terarec.etl.spark.shards import OrderedRows
from terarec.formats import open_shard, shard_path, write_dataset
from terarec.spec import DatasetSpec, PrepareOptions, ShardSpec


def store(ordered: OrderedRows, spec: DatasetSpec, directory: Path, location: Path, options: PrepareOptions) -> None:
    """Make what `options` ask for in `directory`, which will lie at `location`.

    Parquet shards are as Spark wrote them. Files of other storages depend on the rows before, so the driver writes
    them, as the local engine does.

    Raises:
        ConfigError: columns that the storage cannot hold.
        StorageError: the disk is full.
    """
    if options.storage == "parquet":
        write_dataset(_placed(ordered, spec, directory), directory, location=location)
        return
    written = dataclasses.replace(spec, storage="parquet")
    with ordered_sink(spec, directory, location, options.storage, options.rows_per_shard, ordered.rows) as sink:
        for split, files in ordered.files.items():
            place = 0
            for path in files:
                shard = open_shard(written, path)
                for group, num_rows in enumerate(shard.group_rows):
                    sink.write(split, np.arange(place, place + num_rows), shard.read_group(group))
                    place += num_rows
        sink.close()


def _placed(ordered: OrderedRows, spec: DatasetSpec, directory: Path) -> DatasetSpec:
    """Move the files that Spark wrote to where they belong; returns the data set with them."""
    splits = {}
    for split, files in ordered.files.items():
        shards = []
        for number, file in enumerate(files):
            rows = open_shard(spec, file).num_rows
            path = shard_path(directory, spec, split, number)
            path.parent.mkdir(exist_ok=True)
            os.replace(file, path)
            shards.append(ShardSpec(file=f"{split}/{path.name}", rows=rows))
        splits[split] = tuple(shards)
    return dataclasses.replace(spec, splits=splits)
