"""Which sink writes which storage."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from terarec.etl.sink.dataset_sink import DatasetSink
from terarec.etl.sink.records_sink import RecordsSink
from terarec.etl.sink.shuffled_sink import ShuffledSink
from terarec.etl.sink.sink import Sink
from terarec.formats.hugectr import RecordKind
from terarec.spec import DatasetSpec

RECORD_KINDS: Mapping[str, RecordKind] = {
    "norm": "norm",
    "hugectr_parquet": "parquet",
    "hugectr_raw": "raw",
    "hugectr_raw_async": "raw_async",
}
"""Storage -> the kind of HugeCTR's files; other storages are a data set's own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SinkOptions:
    """What to write.

    Attributes:
        storage: "parquet", "raw", or one of `RECORD_KINDS`.
        rows_per_shard: most rows of a file.
        seed: of the shuffle of the train split; None leaves the rows in order.
        memory_bytes: what shuffling may take.
        estimated_bytes: about the bytes of all rows.
        expected: rows of each split, where they are known.
    """

    storage: str
    rows_per_shard: int
    seed: int | None
    memory_bytes: int
    estimated_bytes: int
    expected: Mapping[str, int]


def create_sink(spec: DatasetSpec, directory: Path, location: Path, options: SinkOptions) -> Sink:
    """The sink for a data set of `spec`'s columns, made in `directory`, which will lie at `location`.

    Raises:
        ConfigError: columns that the storage cannot hold.
    """
    sink = ordered_sink(spec, directory, location, options.storage, options.rows_per_shard, options.expected)
    if options.seed is None:
        return sink
    return ShuffledSink(
        sink,
        directory / "shuffle",
        seed=options.seed,
        estimated_bytes=options.estimated_bytes,
        memory_bytes=options.memory_bytes,
    )


def ordered_sink(
    spec: DatasetSpec, directory: Path, location: Path, storage: str, rows_per_shard: int, expected: Mapping[str, int]
) -> Sink:
    """The same for rows that come in the order in which they are to lie; `SinkOptions` tells what the last three are.

    Raises:
        ConfigError: columns that the storage cannot hold.
    """
    if storage in RECORD_KINDS:
        return RecordsSink(directory, location, spec, RECORD_KINDS[storage], rows_per_shard, expected)
    return DatasetSink(directory, location, spec, rows_per_shard, expected)
