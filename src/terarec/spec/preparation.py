# SPDX-License-Identifier: Apache-2.0
"""Options of preparation and conversion: logs, columns of a table in CSV, HugeCTR's files of data and models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal, TypeAlias, get_args

from terarec.spec import checks
from terarec.spec.dataset import DATASET_STORAGES, DatasetStorage, RecordKind
from terarec.spec.workflow import LeaveOneOut, Split

BadInputPolicy = Literal["raise", "skip", "missing"]
"""Policy for bad input: "raise" ends with it, "skip" leaves its row out, "missing" makes its field missing."""

BAD_INPUT_POLICIES: tuple[BadInputPolicy, ...] = ("raise", "skip", "missing")

RecordStorage: TypeAlias = Literal["norm", "hugectr_parquet", "hugectr_raw", "hugectr_raw_async"]
Storage: TypeAlias = DatasetStorage | RecordStorage
STORAGES = (*DATASET_STORAGES, *get_args(RecordStorage))
"""A data set's shards, or HugeCTR's files."""

_LEAST_MEMORY = 1 << 26


@dataclass(frozen=True, kw_only=True, slots=True)
class PrepareOptions:
    """Options for preparing logs.

    Attributes:
        engine: Engine of the preparation: "local" for this machine, "spark" for a cluster.
        bad_input: Handling of a field or a line that cannot be read: "raise" an error, "skip" the line, or take
            the field as "missing".
        storage: Format of the files: "parquet" or "raw" shards of a data set; or HugeCTR's "norm", "hugectr_parquet",
            "hugectr_raw", "hugectr_raw_async".
        rows_per_shard: Maximum number of rows of a file.
        shuffle: Whether to shuffle the train split across all of its files; other splits keep their order.
        parts: Number of parts of the train split, for training part by part; None for none. Files of HugeCTR's formats
            are parts in any case.
        keysets: Whether to write the distinct keys of each part.
        seed: Shuffle seed.
        threads: Threads that parse, encode and count; None for as many as there are cores.
        memory_bytes: Bound of what counting and sorting hold in memory before they spill to the disk; None takes half
            of the memory that is free.
        limit: Number of rows to take from the start of the sources, in their order; None for all. Local engine only.
        empty_splits: Handling of a split that the workflow names and that gets no row: "raise" an error, or "allow" it.
        earlier_rows: Earlier rows that steps on other rows, such as `History`, continue from: None for those that a
            fitted workflow keeps of the files that were prepared before, "none" for no rows, or the directory of a data
            set that was prepared before, or of its workflow.
        late_rows: Handling of a row that is earlier than earlier rows of its group: "raise" an error, or "allow" it,
            which sees only those of them that were kept.
        restart: Whether to discard what an interrupted run left.
        tables: Files of the side tables of the workflow, by name.
        spark_master: URL of Spark's master, such as ``local[2]`` or ``spark://host:7077``; None for Spark's setting.
        spark_conf: Further settings of the Spark session, by name.
    """

    engine: Literal["local", "spark"] = "local"
    bad_input: BadInputPolicy = "raise"
    storage: Storage = "parquet"
    rows_per_shard: checks.PositiveInt = 1 << 21
    shuffle: bool = False
    parts: checks.Width | None = None
    keysets: bool = False
    seed: checks.NonNegativeInt64 = 0
    threads: checks.Threads | None = None
    memory_bytes: Annotated[int, checks.whole(_LEAST_MEMORY)] | None = None
    limit: checks.PositiveInt | None = None
    empty_splits: Literal["raise", "allow"] = "raise"
    earlier_rows: str | None = None
    late_rows: Literal["raise", "allow"] = "raise"
    restart: bool = False
    tables: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    spark_master: str | None = None
    spark_conf: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        checks.check_fields(self)
        if self.earlier_rows == "":
            checks.reject(self, "earlier_rows", "got '', expected 'none' or a directory")
        # HugeCTR trains with one file after the other, so that each of its files is a part already.
        if self.parts is not None and self.storage not in DATASET_STORAGES:
            checks.reject(
                self,
                "parts",
                f"got {self.parts} for storage {self.storage!r}, each file of which is a part, "
                "expected 'parquet' or 'raw'",
            )
        if self.keysets and self.parts is None:
            checks.reject(self, "keysets", "got true without parts, expected the number of parts")
        if self.limit is not None and self.engine != "local":
            checks.reject(self, "limit", f"got {self.limit} for engine {self.engine!r}, expected engine 'local'")
        if self.engine == "local" and (self.spark_master or self.spark_conf):
            checks.reject(self, "spark_master", "got a setting of Spark for engine 'local', expected engine 'spark'")


@dataclass(frozen=True, kw_only=True, slots=True)
class CsvOptions:
    """Content of the columns of a table. Columns that are not named are left out.

    Attributes:
        label: Column to predict.
        positives: Values of the label that mean 1, others meaning 0; none for a label of numbers from 0 to 1.
        dense: Columns of numbers, standardized to mean 0 and deviation 1. Both are those of the training part; a
            missing number becomes the mean.
        log: Columns of counts with a long tail: their logarithm. It is ln(x + shift); missing is 0.
        categorical: Columns of texts: ids by frequency.
        ids: Columns of integers, such as user ids: ids by frequency. Of a column x that is a number as well (in
            `dense` or `log`) the ids are in the column ``x_id``.
        buckets: Columns x of numbers, each with its number of quantile buckets: ids in a further column ``x_bucket``. A
            column may be a number or an integer of the lists above as well.
        keys: Columns of integers that stay as they are, any int64: keys of dynamic tables.
        weight: Column of numbers >= 0: sample weights, in training and in metrics; None for none.
        metadata: Columns to keep unchanged, which reports and scores may have but models do not read, such as user ids.
            They may be among the other lists as well; one that is in no other list is read as text.
        min_count: Count below which the values of a category share one id.
        split: Rows for validation and test; None for none.
        delimiter: Text between the fields, one character or several. White space around a field is dropped, and it may
            be quoted.
        names: Names of all columns in order, for files without a header line.
        missing: Words that mean a missing value, as an empty field does.
        name: Name of the data set.
    """

    label: str
    positives: tuple[str, ...] = ()
    dense: tuple[str, ...] = ()
    log: tuple[str, ...] = ()
    categorical: tuple[str, ...] = ()
    ids: tuple[str, ...] = ()
    buckets: Mapping[str, int] = field(default_factory=dict)
    keys: tuple[str, ...] = ()
    weight: str | None = None
    metadata: tuple[str, ...] = ()
    min_count: checks.PositiveInt = 1
    split: Split | None = None
    delimiter: str = ","
    names: tuple[str, ...] = ()
    missing: tuple[str, ...] = ("", "?")
    name: checks.Name = "csv"

    def __post_init__(self) -> None:
        checks.check_fields(self)
        for column in self.categorical:
            if column in self.integers or column in self.numbers:
                checks.reject(self, "categorical", f"column {column!r} is also read as a number, expected it in ids")
        if not (self.categorical or self.integers or self.numbers):
            checks.reject(
                self,
                "",
                "got no column to learn from, expected dense, log, categorical, ids, buckets or keys",
            )
        if self.weight in (self.label, *self.categorical, *self.integers, *self.numbers):
            checks.reject(self, "weight", f"column {self.weight!r} is in another list as well, expected one of its own")
        for column, count in self.buckets.items():
            if not checks.integer(2, checks.MOST).accepts(count):
                checks.reject(self, "buckets", f"got {count!r} for {column!r}, expected an integer >= 2")
        for column in self.columns if self.names else ():
            if column not in self.names:
                checks.reject(self, "names", f"got no column {column!r}, expected it among {', '.join(self.names)}")

    @property
    def numbers(self) -> tuple[str, ...]:
        """Columns that are read as numbers."""
        return (*self.dense, *self.log, *self.buckets)

    @property
    def integers(self) -> tuple[str, ...]:
        """Columns that are read as integers."""
        return (*self.ids, *self.keys)

    @property
    def columns(self) -> tuple[str, ...]:
        """The distinct columns to read from the files."""
        # Distinct, as a column may be a number and an id at once.
        named = (self.label, *self.dense, *self.log, *self.categorical, *self.ids, *self.buckets, *self.keys)
        weight = () if self.weight is None else (self.weight,)
        split = (self.split.column, self.split.order) if isinstance(self.split, LeaveOneOut) else ()
        return tuple(dict.fromkeys((*named, *weight, *self.metadata, *split)))

    def id_name(self, column: str) -> str:
        """Return the column that holds the ids of the integers of `column`."""
        # The column of numbers keeps its name, so that the ids need another.
        return f"{column}_id" if column in self.dense or column in self.log else column


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordOptions(checks.Checked):
    """Options of HugeCTR's files to write.

    Attributes:
        kind: "norm", "parquet", "raw" or "raw_async".
        key_bytes: Bytes of a key, 4 or 8; None for 4 if all keys with offsets fit.
        checksum: Whether Norm files have checksums.
        keysets: Whether to write a keyset of each split, and of each of its parts: the files of Norm and Parquet.
    """

    kind: RecordKind
    key_bytes: Annotated[int, checks.choices((None, 4, 8))] | None = None
    checksum: bool = True
    keysets: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedModel(checks.Checked):
    """Files of a model that HugeCTR or the facade saved, and settings for a RUN made of them.

    Attributes:
        graph: JSON file of the graph.
        records: Description of the model's data: ``records.json``, or its directory.
        dense: Dense weights.
        sparse: Rows of each embedding, in the order of the graph. Each is a folder or a file; embedding collections
            have one dump.
        dense_states: States of the dense optimizer; None for new ones.
        sparse_states: Optimizer states of each embedding; empty for new ones.
        step: Iterations that the files were trained for. The training continues behind this many batches.
        batch_size: Samples in an iteration.
        lr: Learning rate of continued training.
        seed: Seed of new rows and dropout.
    """

    graph: Path
    records: Path
    dense: Path
    sparse: tuple[Path, ...] = ()
    dense_states: Path | None = None
    sparse_states: tuple[Path, ...] = ()
    step: checks.NonNegativeInt = 0
    batch_size: checks.BatchSize = 2048
    lr: float = 0.001
    seed: checks.PositiveInt = 1
