"""What a data set is: the content of ``dataset.json``, written by etl, read by data, models and serve."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias, get_args

from terarec.errors import ConfigError
from terarec.spec import checks
from terarec.spec.nearest import did_you_mean
from terarec.spec.quoting import quoted

MISSING_ID = 0
"""Id of a missing value in every column whose ids a workflow made."""
MISSING_KEY = -(2**63)
"""Key of a missing value in a column whose keys are the raw integers."""
MetadataType: TypeAlias = Literal["int64", "float64", "string"]


@dataclass(frozen=True, kw_only=True, slots=True)
class LabelColumn:
    """A target. Stored as float32."""

    name: str

    def __post_init__(self) -> None:
        checks.name(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class DenseColumn:
    """A number per sample. Stored as float32, as the model takes it."""

    name: str

    def __post_init__(self) -> None:
        checks.name(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class CategoricalColumn:
    """Keys per sample: ids 0 <= key < rows, or any int64.

    Attributes:
        rows: number of distinct ids, reserved ones included: the rows that a static table for it needs. None: keys are
            the raw integers, any int64, for dynamic tables; a missing one is the lowest int64.
        hotness: 1 for one key a sample (a scalar column); more for a list column of at most so many keys.
    """

    name: str
    rows: int | None = None
    hotness: int = 1

    def __post_init__(self) -> None:
        checks.name(self)
        if self.rows is not None:
            checks.positive_int(self, "rows")
        checks.positive_int(self, "hotness")


@dataclass(frozen=True, kw_only=True, slots=True)
class MetadataColumn:
    """A value per sample that no model reads, such as the id of a user; missing values are null.

    It may have the name of a column that a model reads: that holds what a workflow made of the values.

    Attributes:
        type: "int64", "float64" or "string".
    """

    name: str
    type: MetadataType

    def __post_init__(self) -> None:
        checks.name(self)
        checks.one_of(self, "type", get_args(MetadataType))


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardSpec:
    """One data file: path relative to dataset.json with forward slashes, and its number of samples."""

    file: str
    rows: int

    def __post_init__(self) -> None:
        checks.positive_int(self, "rows", minimum=0)
        checks.inner_path(self, "file")


@dataclass(frozen=True, kw_only=True, slots=True)
class DatasetSpec:
    """The columns of a data set and where its samples are.

    Attributes:
        storage: "parquet" (one column a file column) or "raw" (fixed-width records, see docs/formats.md).
        splits: split name ("train", "valid", "test") -> its shards, in sample order.
        best_auc: the AUC of the model that generated the labels, for synthetic data.
        workflow: directory of the feature workflow that made the columns, relative to dataset.json. None: raw values
            are what the columns hold.
        weight: name of the column of sample weights, float32 and >= 0; None: every sample counts alike.
        metadata: columns that no model reads, such as ids; for "parquet" only.
    """

    name: str
    storage: Literal["parquet", "raw"]
    labels: tuple[LabelColumn, ...]
    dense: tuple[DenseColumn, ...]
    categorical: tuple[CategoricalColumn, ...]
    splits: Mapping[str, tuple[ShardSpec, ...]] = field(default_factory=dict)
    best_auc: float | None = None
    workflow: str | None = None
    weight: str | None = None
    metadata: tuple[MetadataColumn, ...] = ()

    def __post_init__(self) -> None:
        checks.name(self)
        checks.one_of(self, "storage", ("parquet", "raw"))
        if self.workflow is not None:
            checks.inner_path(self, "workflow")
        for split in self.splits:
            if not checks.is_name(split):
                checks.refuse(self, "splits", f"got {quoted(split)}, expected a non-empty name without slashes")
        if self.weight is not None:
            checks.name(self, "weight")
        if self.metadata and self.storage == "raw":
            names = ", ".join(repr(column.name) for column in self.metadata)
            checks.refuse(
                self, "metadata", f"got {names} for storage 'raw', whose records hold none; expected 'parquet'"
            )
        checks.distinct(self, "metadata", tuple(column.name for column in self.metadata))
        checks.distinct(self, "columns", self.file_columns)
        if self.best_auc is not None:
            checks.finite_float(self, "best_auc", low=0.0, high=1.0)
        if not self.labels:
            checks.refuse(self, "labels", "got no column, expected at least one")
        if not self.dense and not self.categorical:
            checks.refuse(self, "", "got neither dense nor categorical columns, expected at least one")

    @property
    def column_names(self) -> tuple[str, ...]:
        """Labels, dense and categorical columns: what a model reads or predicts, in the order of the files."""
        return (
            *(column.name for column in self.labels),
            *(column.name for column in self.dense),
            *(column.name for column in self.categorical),
        )

    @property
    def file_columns(self) -> tuple[str, ...]:
        """All columns in the order in which files hold them: `column_names`, the weight, metadata."""
        return (*self._beside_metadata, *self.metadata_file_columns)

    @property
    def metadata_file_columns(self) -> tuple[str, ...]:
        """The file column of each metadata column: its name, after ``metadata.`` where another column has that name."""
        taken = self._beside_metadata
        return tuple(f"metadata.{column.name}" if column.name in taken else column.name for column in self.metadata)

    @property
    def _beside_metadata(self) -> tuple[str, ...]:
        return self.column_names if self.weight is None else (*self.column_names, self.weight)

    def shards(self, split: str) -> tuple[ShardSpec, ...]:
        """The shards of `split`; raises `ConfigError` with the nearest name and all splits if there is none."""
        if split not in self.splits:
            accepted = (
                f"one of {', '.join(map(repr, sorted(self.splits)))}" if self.splits else "a data set with splits"
            )
            hint = did_you_mean(split, self.splits)
            raise ConfigError(f"data set {self.name!r} has no split {split!r}{hint}, expected {accepted}")
        return self.splits[split]

    def num_rows(self, split: str) -> int:
        """Number of samples in `split`."""
        return sum(shard.rows for shard in self.shards(split))
