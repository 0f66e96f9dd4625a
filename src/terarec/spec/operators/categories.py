"""Operators that make ids, and what is learnt about categories. See docs/workflows.md."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from terarec.spec import checks
from terarec.spec.operators.mapped import InputColumns, MappedColumns, column_named


@dataclass(frozen=True, kw_only=True, slots=True)
class Categorify(MappedColumns):
    """Value -> id by frequency: 0 missing, then `hash_buckets` ids for rare and unseen values, then the kept values.

    Attributes:
        min_count: values that occur less often in the training part are rare.
        max_size: keep at most so many values, the most frequent ones.
        hash_buckets: a rare or unseen value has id ``1 + hash mod hash_buckets``.
        joint: one vocabulary for all `columns`.
    """

    kind: ClassVar[str] = "categorify"
    min_count: int = 1
    max_size: int | None = None
    hash_buckets: int = 1
    joint: bool = False

    def __post_init__(self) -> None:
        MappedColumns.__post_init__(self)
        checks.positive_int(self, "min_count")
        checks.int64(self, "hash_buckets", minimum=1)
        if self.max_size is not None:
            checks.positive_int(self, "max_size")
        checks.one_of(self, "joint", (False, True))


@dataclass(frozen=True, kw_only=True, slots=True)
class HashBucket(MappedColumns):
    """Value -> id without learning: 0 missing, else ``1 + hash mod buckets``."""

    kind: ClassVar[str] = "hash_bucket"
    buckets: int
    seed: int = 42

    def __post_init__(self) -> None:
        MappedColumns.__post_init__(self)
        checks.int64(self, "buckets", minimum=1)
        checks.int64(self, "seed", minimum=0)


@dataclass(frozen=True, kw_only=True, slots=True)
class GivenIds(MappedColumns):
    """Integer -> the same number as an id or a key, for data whose ids are made already.

    Attributes:
        rows: of each of `columns` the number of its ids, 0 <= id < rows, none missing; None: its integers are keys.
        max_length: the longest list where `columns` are lists; a longer one is refused.
    """

    kind: ClassVar[str] = "given_ids"
    rows: tuple[int | None, ...]
    max_length: int | None = None

    def __post_init__(self) -> None:
        MappedColumns.__post_init__(self)
        if len(self.rows) != len(self.columns):
            checks.fail(self, "rows", f"{len(self.columns)} numbers, one for each of columns")
        for rows in self.rows:
            if rows is not None and (isinstance(rows, bool) or not isinstance(rows, int) or rows < 1):
                checks.fail(self, "rows", "an integer >= 1 or None for each of columns")
        if self.max_length is not None:
            checks.positive_int(self, "max_length")


@dataclass(frozen=True, kw_only=True, slots=True)
class Cross(InputColumns):
    r"""Several columns -> one text column: their values joined by ``"\x1f"``; a missing part is empty."""

    kind: ClassVar[str] = "cross"
    output: str

    def __post_init__(self) -> None:
        InputColumns.__post_init__(self)
        column_named(self, "output")
        if len(self.columns) < 2:
            checks.fail(self, "columns", "at least two column names")

    @property
    def writes(self) -> tuple[str, ...]:
        """Columns that the step adds or replaces."""
        return (self.output,)


@dataclass(frozen=True, kw_only=True, slots=True)
class TargetEncoding(MappedColumns):
    """Value -> (sum of the target + smoothing * prior) / (count + smoothing), the prior being the target's mean.

    Training rows take sum and count without the rows of their own fold; other rows, and records served, take all.

    Attributes:
        target: a number or integer column; never read at serving.
        folds: a row's fold is ``hash(row id) mod folds``.
        smoothing: how many values the prior counts for.
        seed: of that hash.
    """

    kind: ClassVar[str] = "target_encoding"
    target: str
    folds: int = 5
    smoothing: float = 20.0
    seed: int = 42

    def __post_init__(self) -> None:
        MappedColumns.__post_init__(self)
        column_named(self, "target")
        checks.positive_int(self, "folds", minimum=2)
        checks.finite_float(self, "smoothing", low=0.0)
        checks.int64(self, "seed", minimum=0)

    @property
    def reads(self) -> tuple[str, ...]:
        """Columns that the step reads while a data set is prepared."""
        return tuple(dict.fromkeys((*self.columns, self.target)))


@dataclass(frozen=True, kw_only=True, slots=True)
class DropLowCardinality(InputColumns):
    """Drops those of `columns` that have fewer than `min_distinct` values in the training part; missing is none."""

    kind: ClassVar[str] = "drop_low_cardinality"
    min_distinct: int = 2

    def __post_init__(self) -> None:
        InputColumns.__post_init__(self)
        checks.positive_int(self, "min_distinct", minimum=2)

    @property
    def serving_reads(self) -> tuple[str, ...]:
        """Columns that the step reads when a record is served: what is dropped is never made."""
        return ()

    @property
    def writes(self) -> tuple[str, ...]:
        """Columns that the step adds or replaces."""
        return ()
