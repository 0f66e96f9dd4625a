# SPDX-License-Identifier: Apache-2.0
"""Data sets: the content of dataset.json, and of records.json for HugeCTR's files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Annotated, Literal, TypeAlias, get_args

from terarec.errors import ConfigError
from terarec.spec import checks
from terarec.spec.checks import did_you_mean, quoted

MISSING_ID = 0
"""Id of a missing value in every column whose ids are not those of the source."""
FIRST_ID = 1
"""Lowest id of a value in such a column."""
MISSING_KEY = -(2**63)
"""Key of a missing value in a column whose keys are the raw integers."""
GENERATED_FILE = "generated.json"
"""File that a generator of synthetic logs writes next to them, with the best AUC that a model of them can reach."""
MetadataType: TypeAlias = Literal["int64", "float64", "string"]


@dataclass(frozen=True, kw_only=True, slots=True)
class LabelColumn(checks.Checked):
    """Target. Stored as float32."""

    name: checks.Name


@dataclass(frozen=True, kw_only=True, slots=True)
class DenseColumn(checks.Checked):
    """Number per sample. Stored as float32, as the model takes it."""

    name: checks.Name


@dataclass(frozen=True, kw_only=True, slots=True)
class CategoricalColumn(checks.Checked):
    """Keys per sample: ids 0 <= key < rows, or any int64.

    Attributes:
        rows: Number of distinct ids, reserved ones included: the rows that a static table for it needs. None: keys are
            the raw integers, any int64, for dynamic tables; a missing one is the lowest int64.
        hotness: 1 for one key a sample (a scalar column); more for a list column, the most keys of a list.
        vocabulary: Name, within the data set, of the vocabulary that made the ids: columns of different ones share no
            table. None where it is not known. It does not count when columns are compared.
        given: Whether the ids are those of the source, among which `MISSING_ID` is a value as any other; None where no
            workflow made them. It does not count when columns are compared.
        rare_ids: Number of the ids behind `MISSING_ID` that rare and unseen values share, where a vocabulary has
            several; None for one, or none. It does not count when columns are compared.
    """

    name: checks.Name
    rows: checks.PositiveInt | None = None
    hotness: checks.Width = 1
    vocabulary: str | None = field(default=None, compare=False)
    given: bool | None = field(default=None, compare=False)
    rare_ids: checks.PositiveInt | None = field(default=None, compare=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class MetadataColumn(checks.Checked):
    """Value per sample that no model reads, such as the id of a user; missing values are null.

    It may have the name of a column that a model reads: that holds what a workflow made of the values.

    Attributes:
        type: "int64", "float64" or "string".
    """

    name: checks.Name
    type: MetadataType


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardSpec(checks.Checked):
    """Data file: path relative to dataset.json with forward slashes, and its number of samples."""

    file: checks.InnerPath
    rows: checks.NonNegativeInt


DatasetStorage: TypeAlias = Literal[
    "parquet",
    "raw",
]
DATASET_STORAGES: tuple[DatasetStorage, ...] = get_args(DatasetStorage)
"""Formats of the shards of a data set, each of which has a row in `terarec.formats.shard.SHARD_FORMATS`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DatasetSpec:
    """Columns of a data set and the files of its samples.

    Attributes:
        storage: Format of the shards: "parquet", or "raw" for records of a fixed width. Described in docs/formats.md.
        splits: Split name ("train", "valid", "test") -> its shards, in sample order.
        best_auc: The AUC of the model that generated the labels, for synthetic data.
        workflow: Directory of the feature workflow that made the columns, relative to dataset.json. None: raw values
            are what the columns hold.
        weight: Name of the column of sample weights, float32 and >= 0; None: every sample counts alike.
        metadata: Columns that no model reads, such as ids; for "parquet" only.
    """

    name: checks.Name
    storage: DatasetStorage
    labels: tuple[LabelColumn, ...]
    dense: tuple[DenseColumn, ...]
    categorical: tuple[CategoricalColumn, ...]
    splits: Mapping[str, tuple[ShardSpec, ...]] = field(default_factory=dict)
    best_auc: checks.Share | None = None
    workflow: checks.InnerPath | None = None
    weight: checks.Name | None = None
    metadata: tuple[MetadataColumn, ...] = ()

    def __post_init__(self) -> None:
        checks.check_fields(self)
        for split in self.splits:
            if not checks.is_name(split):
                checks.reject(self, "splits", f"got {quoted(split)}, expected {checks.NAME}")
        if self.metadata and self.storage == "raw":
            names = ", ".join(repr(column.name) for column in self.metadata)
            checks.reject(
                self, "metadata", f"got {names} for storage 'raw', whose records hold none; expected 'parquet'"
            )
        # On their own, since metadata may share names with the other columns, whose file columns then differ.
        checks.distinct(self, "metadata", tuple(column.name for column in self.metadata))
        checks.distinct(self, "columns", self.file_columns)
        if not self.labels:
            checks.reject(self, "labels", "got no column, expected at least one")
        if not self.dense and not self.categorical:
            checks.reject(self, "", "got neither dense nor categorical columns, expected at least one")

    @property
    def column_names(self) -> tuple[str, ...]:
        """Labels, dense and categorical columns, which models read or predict, in the order of the files."""
        return (
            *(column.name for column in self.labels),
            *(column.name for column in self.dense),
            *(column.name for column in self.categorical),
        )

    @property
    def file_columns(self) -> tuple[str, ...]:
        """All columns in the order in which files hold them: `column_names`, the weight, metadata."""
        return (*self._fixed_columns, *self.metadata_file_columns)

    @property
    def metadata_file_columns(self) -> tuple[str, ...]:
        """File column of each metadata column: its name, after ``metadata.`` where another column has that name."""
        # A file column has one name, but an id and its raw value may both be wanted.
        fixed = self._fixed_columns
        return tuple(f"metadata.{column.name}" if column.name in fixed else column.name for column in self.metadata)

    @property
    def _fixed_columns(self) -> tuple[str, ...]:
        return self.column_names if self.weight is None else (*self.column_names, self.weight)

    def shards(self, split: str) -> tuple[ShardSpec, ...]:
        """Return the shards of `split`; raise `ConfigError` with the nearest name and all splits if there is none."""
        if split not in self.splits:
            accepted = (
                f"one of {', '.join(map(repr, sorted(self.splits)))}" if self.splits else "a data set with splits"
            )
            hint = did_you_mean(split, self.splits)
            raise ConfigError(f"data set {self.name!r}", f"has no split {split!r}{hint}, expected {accepted}")
        return self.splits[split]

    def num_rows(self, split: str) -> int:
        """Return the number of samples in `split`."""
        return sum(shard.rows for shard in self.shards(split))

    def missing_key(self, name: str) -> int:
        """Return the key of a missing value of a categorical column: `MISSING_KEY`, which is no id, if it has none."""
        for column in self.categorical:
            is_given = self.workflow is None if column.given is None else column.given
            if column.name == name and column.rows is not None and not is_given:
                return MISSING_ID
        return MISSING_KEY

    def first_id(self, name: str) -> int:
        """Return the lowest id of a value of a categorical column of ids."""
        return FIRST_ID if self.missing_key(name) == MISSING_ID else 0


RecordKind = Literal["norm", "parquet", "raw", "raw_async"]
"""Formats of HugeCTR's files."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SparseInput(checks.Checked):
    """Slots of a sample, read together under one name.

    Attributes:
        name: Name of the input; its slots are the features ``<name>.0``, ``<name>.1``, ...
        nnz_per_slot: Maximum number of keys of a sample in each slot.
        is_fixed_length: Whether every sample holds the same number of keys. Files that state the numbers are
            believed instead; only RawAsync needs it, and then takes exactly `nnz_per_slot` keys.
    """

    name: checks.Name
    nnz_per_slot: checks.Widths
    is_fixed_length: bool

    @property
    def slot_num(self) -> int:
        """Number of slots."""
        return len(self.nnz_per_slot)


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordLayout:
    """Columns of HugeCTR's data files. The files themselves do not name them.

    Attributes:
        label_dim: Labels of a sample.
        dense_dim: Dense numbers of a sample.
        inputs: The sparse inputs, in the order in which a sample holds their slots.
        key_bytes: 4 or 8 bytes a key.
        slot_sizes: Distinct keys of each slot, for the formats whose reader adds the sizes of the slots before to every
            key; empty adds nothing.
    """

    label_dim: checks.Width
    dense_dim: Annotated[int, checks.whole(0, checks.MOST_WIDTH)]
    inputs: tuple[SparseInput, ...]
    key_bytes: Annotated[int, checks.choices((4, 8))] = 4
    slot_sizes: Annotated[tuple[int, ...], checks.list_of(checks.integer(0, checks.MOST))] = ()

    def __post_init__(self) -> None:
        checks.check_fields(self)
        checks.distinct(self, "inputs", [sparse.name for sparse in self.inputs])
        if self.slot_sizes and len(self.slot_sizes) < self.num_slots:
            problem = (
                f"got {len(self.slot_sizes)} sizes for {self.num_slots} slots, expected one for each slot, or none"
            )
            checks.reject(self, "slot_sizes", problem)

    @property
    def num_slots(self) -> int:
        """Number of slots of all inputs, S."""
        return sum(sparse.slot_num for sparse in self.inputs)

    @property
    def slot_names(self) -> tuple[str, ...]:
        """Names of the features, ``<input>.<slot>``, in the order of the files."""
        return tuple(f"{sparse.name}.{slot}" for sparse in self.inputs for slot in range(sparse.slot_num))

    @property
    def most_keys(self) -> tuple[int, ...]:
        """Most keys of a sample in each slot."""
        return tuple(count for sparse in self.inputs for count in sparse.nnz_per_slot)

    @property
    def key_offsets(self) -> tuple[int, ...]:
        """Sum of the sizes of the slots before each slot; zeros without `slot_sizes`."""
        # One sum more than slots, as the last one is that of all sizes.
        sums = tuple(accumulate(self.slot_sizes, initial=0))
        return sums[: self.num_slots] if self.slot_sizes else (0,) * self.num_slots


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordSplit:
    """Location of the samples of a split.

    Attributes:
        path: Path of the file list (Norm, Parquet) or of the file; relative to ``records.json``, absolute, or a URL.
        rows: Number of samples.
    """

    path: str
    rows: checks.NonNegativeInt

    def __post_init__(self) -> None:
        checks.check_fields(self)
        if not isinstance(self.path, str) or not self.path:
            checks.fail(self, "path", "the path of a file")


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordsSpec:
    """HugeCTR's files that belong together: the content of ``records.json``.

    Attributes:
        kind: The files' format.
        layout: Layout of a sample.
        splits: Split name ("train", "valid") -> where its samples lie.
        label_names: Names of the labels, in order.
        dense_names: Names of the dense numbers, in order.
        checksum: Whether Norm files have checksums.
        float_label_dense: Whether Raw files hold labels and dense numbers, and RawAsync files dense ones, as float32.
        keys: What batches hold: "columns" for keys from 0 on in each slot; "as_read" for what the files hold, where
            `slot_sizes` of the layout are bounds, 0 for none; "with_offsets" for what HugeCTR's hash tables see, with
            the sizes of the slots before added to the keys of Parquet and Raw files.
        multi_hot: Whether RawAsync files hold `nnz_per_slot` keys a slot and int32 labels; otherwise they are laid out
            as Raw files.
        shuffles_rows: Whether shuffling mixes the samples of several groups; otherwise complete groups move, as in
            HugeCTR.
        given: Of each slot, whether `MISSING_ID` is a value as any other, and no missing one; empty for all.
    """

    kind: RecordKind
    layout: RecordLayout
    splits: Mapping[str, RecordSplit]
    label_names: tuple[str, ...]
    dense_names: tuple[str, ...]
    checksum: bool = True
    float_label_dense: bool = True
    keys: Literal["columns", "as_read", "with_offsets"] = "columns"
    multi_hot: bool = True
    shuffles_rows: bool = True
    given: tuple[bool, ...] = ()

    def __post_init__(self) -> None:
        checks.check_fields(self)
        for name, names, expected in (
            ("label_names", self.label_names, self.layout.label_dim),
            ("dense_names", self.dense_names, self.layout.dense_dim),
        ):
            if len(names) != expected:
                checks.reject(self, name, f"got {len(names)} names, expected {expected} as in the layout")
        if self.given and len(self.given) != self.layout.num_slots:
            checks.reject(
                self, "given", f"got {len(self.given)}, expected one for each of {self.layout.num_slots} slots"
            )
        checks.distinct(self, "names", self.column_names)

    @property
    def key_names(self) -> tuple[str, ...]:
        """Column name of each slot: the input's own name if that is its only slot."""
        return tuple(
            sparse.name if sparse.slot_num == 1 else f"{sparse.name}.{slot}"
            for sparse in self.layout.inputs
            for slot in range(sparse.slot_num)
        )

    @property
    def column_names(self) -> tuple[str, ...]:
        """Labels, dense numbers and slots, in the order in which files hold them."""
        return (*self.label_names, *self.dense_names, *self.key_names)

    def split(self, name: str) -> RecordSplit:
        """Return the split `name`; raise `ConfigError` with the existing names if there is none."""
        if name not in self.splits:
            raise ConfigError("split", f"got {name!r}, expected one of {', '.join(map(repr, sorted(self.splits)))}")
        return self.splits[name]
