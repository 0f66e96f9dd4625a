# SPDX-License-Identifier: Apache-2.0
"""Embedding tables, which keys and rows they keep, and the features that look them up."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Annotated, Any, ClassVar, Literal, get_args

from terarec.errors import ConfigError
from terarec.spec import checks
from terarec.spec.tiers import Tiers, check_tiers

Pooling = Literal["sum", "mean", "sqrtn", "max", "none"]


@dataclass(frozen=True, kw_only=True, slots=True)
class FeatureSpec(checks.Checked):
    """Input column whose keys look up one table; several features may share a table.

    Attributes:
        name: Name, unique among the features of a model; the name of the data set's categorical column.
        table: Name of the table.
        pooling: Reduction of the vectors of a bag to one: "sum", "mean", "sqrtn" (the sum divided by the root of the
            number of keys) or "max" (column by column); an empty bag gives zeros. "none" leaves them as a sequence.
        max_keys: Number of first keys of each bag to use; None for all.
    """

    name: checks.Name
    table: checks.Name
    pooling: Pooling = "sum"
    max_keys: checks.Width | None = None


MOST_FILTER_COUNT = 255  # a counting filter's cells are bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class FrequencyAdmission(checks.Checked):
    """Admission of a key in the batch with its `count`-th occurrence in training. Exact; made by `freq`.

    Keys without a row are counted in an index of up to 24 bytes a key.
    """

    kind: ClassVar[str] = "freq"
    count: checks.PositiveInt


@dataclass(frozen=True, kw_only=True, slots=True)
class ProbabilityAdmission(checks.Checked):
    """Admission of a key with this `probability` in each training batch. No memory; made by `prob`."""

    kind: ClassVar[str] = "prob"
    probability: checks.PositiveShare


@dataclass(frozen=True, kw_only=True, slots=True)
class FilterAdmission(checks.Checked):
    """Admission as `FrequencyAdmission`, counted in a fixed number of bytes, `num_bytes`; made by `counting_filter`.

    Keys that share all their cells with others may get a row before their `count`-th occurrence, never after it.
    """

    kind: ClassVar[str] = "counting_filter"
    count: Annotated[int, checks.whole(1, MOST_FILTER_COUNT)]
    num_bytes: Annotated[int, checks.whole(64)] = 64 * 2**20


AdmissionSpec = FrequencyAdmission | ProbabilityAdmission | FilterAdmission


def freq(count: int) -> FrequencyAdmission:
    """Admit a key in the batch of its `count`-th occurrence, counted exactly."""
    return FrequencyAdmission(count=count)


def prob(probability: float) -> ProbabilityAdmission:
    """Admit a key with this `probability` in each batch that holds it."""
    return ProbabilityAdmission(probability=probability)


def counting_filter(count: int, *, num_bytes: int = 64 * 2**20) -> FilterAdmission:
    """Admit a key at its `count`-th occurrence or, where the filter of `num_bytes` is crowded, before it."""
    return FilterAdmission(count=count, num_bytes=num_bytes)


ScoreFunction = Callable[[Any, Any, Any], Any]
"""(keys int64[n], counts int64[n], last steps int32[n]) -> scores [n]: tensors; the lowest scores go first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LRUEviction(checks.Checked):
    """Eviction of the least recently used rows: a full table loses this `share` of ``max_rows``; made by `lru`."""

    kind: ClassVar[str] = "lru"
    share: checks.PositiveShare = 0.1


@dataclass(frozen=True, kw_only=True, slots=True)
class LFUEviction(checks.Checked):
    """Eviction of the least frequently used rows: a full table loses this `share` of ``max_rows``; made by `lfu`."""

    kind: ClassVar[str] = "lfu"
    share: checks.PositiveShare = 0.1


@dataclass(frozen=True, kw_only=True, slots=True)
class TTLEviction(checks.Checked):
    """Eviction of rows that no training batch used in the last `steps` batches of the table; made by `ttl`.

    The table looks for them when it is full, and every ``steps * share`` batches.
    """

    kind: ClassVar[str] = "ttl"
    steps: checks.PositiveInt
    share: checks.PositiveShare = 0.1


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoreEviction:
    """Eviction of the lowest scores of a function; made by `by_score`. Python only: no file holds a function."""

    kind: ClassVar[str] = "score"
    score: ScoreFunction
    share: checks.PositiveShare = 0.1

    def __post_init__(self) -> None:
        checks.check_fields(self)
        if not callable(self.score):
            checks.fail(self, "score", "a function of keys, counts and last steps")


EvictionSpec = LRUEviction | LFUEviction | TTLEviction | ScoreEviction


def lru(*, share: float = 0.1) -> LRUEviction:
    """Evict the least recently used rows first."""
    return LRUEviction(share=share)


def lfu(*, share: float = 0.1) -> LFUEviction:
    """Evict the least frequently used rows first."""
    return LFUEviction(share=share)


def ttl(steps: int, *, share: float = 0.1) -> TTLEviction:
    """Evict rows that no training batch used in the last `steps` batches."""
    return TTLEviction(steps=steps, share=share)


def by_score(score: ScoreFunction, *, share: float = 0.1) -> ScoreEviction:
    """Evict the rows of the lowest ``score(keys, counts, last_steps)`` first."""
    return ScoreEviction(score=score, share=share)


Initializer = Literal["uniform", "normal", "zeros"]
RowType = Literal["float32", "bfloat16", "float16"]
ROW_TYPES: tuple[RowType, ...] = get_args(RowType)
DEFAULT_OPTIMIZER = "default"
"""Name of the rule that moves a table which names no other."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TableSpec:
    """Static embedding table: ``rows`` vectors of ``width`` numbers, key == row.

    Attributes:
        name: Name, unique among the tables of a model.
        rows: Number of rows V.
        width: Length D of a vector.
        initializer: Distribution of the initial weights.
        init_scale: Half-width of the uniform, or standard deviation of the normal distribution; None takes
            1 / sqrt(rows), as the DLRM paper's code does (Naumov et al. 2019).
        dtype: Element type of the rows; lookups give float32 whatever it is.
        optimizer: Name of the rule that moves the rows, where `terarec.optim.RowOptimizer` is given rules by name.
        tiers: Memories of the rows, where they do not all stay in one; None for all in the memory of the device.
    """

    kind: ClassVar[str] = "static"
    name: checks.Name
    rows: checks.Rows
    width: checks.Width
    initializer: Initializer = "uniform"
    init_scale: checks.Positive | None = None
    dtype: RowType = "float32"
    optimizer: checks.Name = DEFAULT_OPTIMIZER
    tiers: Tiers | None = None

    def __post_init__(self) -> None:
        checks.check_fields(self)
        check_tiers(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class DynamicTableSpec:
    """Table of any int64 keys: a key gets its row when it first occurs in training, never in evaluation.

    Attributes:
        name: Name, unique among the tables of a model.
        width: Length D of a vector.
        initializer: Distribution of a row's initial weights, which depend on (table name, key, seed) alone.
        init_scale: Half-width of the uniform, or standard deviation of the normal distribution; 0.05 is what
            HugeCTR's hash tables take, as there is no number of rows to derive it from.
        dtype: Element type of the rows; lookups give float32 whatever it is.
        default: The vector of a key without a row: one number for all columns, or `width` of them.
        admit: Rule for unseen keys that get a row in training (`freq`, `prob`, `counting_filter`); None: all.
        evict: Rule for rows that are removed when the table is full (`lru`, `lfu`, `ttl`, `by_score`); None: a full
            table is an error.
        max_rows: Maximum number of rows; None: as many as memory holds.
        track_uses: Whether to count each row's occurrences and record its last batch even if `evict` needs no such
            thing, for calls of ``evict`` with other policies. 12 bytes a row.
        report_evicted: Whether to keep evicted keys until ``take_evicted`` is called. 8 bytes a key.
        optimizer: Name of the rule that moves the rows, where `terarec.optim.RowOptimizer` is given rules by name.
        tiers: Memories of the rows, where they do not all stay in one; None for all in the memory of the device.
    """

    kind: ClassVar[str] = "dynamic"
    name: checks.Name
    width: checks.Width
    initializer: Initializer = "uniform"
    init_scale: checks.Positive = 0.05
    dtype: RowType = "float32"
    default: float | tuple[float, ...] = 0.0
    admit: AdmissionSpec | None = None
    evict: EvictionSpec | None = None
    max_rows: int | None = None
    track_uses: bool = False
    report_evicted: bool = True
    optimizer: checks.Name = DEFAULT_OPTIMIZER
    tiers: Tiers | None = None

    def __post_init__(self) -> None:
        checks.check_fields(self)
        check_tiers(self)
        # The width is known here alone, so that no rule of one field can check the vector.
        if isinstance(self.default, tuple):
            is_finite = all(isinstance(value, int | float) and math.isfinite(value) for value in self.default)
            if len(self.default) != self.width or not is_finite:
                checks.fail(self, "default", f"one finite number or {self.width} (the width) of them")
        else:
            checks.finite_float(self, "default")
        check_policies(self, self.evict, self.max_rows)


def check_policies(owner: object, evict: EvictionSpec | None, max_rows: int | None) -> None:
    """Raise unless ``owner.admit``, ``owner.evict`` and ``owner.max_rows`` are valid for a dynamic table."""
    checks.instance(owner, "admit", AdmissionSpec | None, "freq(n), prob(p), counting_filter(n) or None")
    checks.instance(owner, "evict", EvictionSpec | None, "lru(), lfu(), ttl(steps), by_score(function) or None")
    if max_rows is not None:
        checks.positive_int(owner, "max_rows", maximum=checks.MOST_ROWS)
    # Rows time out in a table of any size; the other policies act where it is full.
    elif evict is not None and not isinstance(evict, TTLEviction):
        checks.fail(owner, "max_rows", f"an integer >= 1, the size that evict={evict.kind!r} keeps")


@dataclass(frozen=True, kw_only=True, slots=True)
class StaticTablesSpec:
    """Static tables with one row for each id of a column in the data set.

    Attributes:
        dtype: Element type of the rows of every table.
        initializer: Distribution of the initial weights; None for a model's own, which is uniform for most.
        init_scale: Half-width of the uniform, or standard deviation of the normal distribution; None for
            1 / sqrt(rows).
        optimizers: Pattern of table names, such as "item*" -> name of the rule that moves the tables it matches; the
            first pattern that matches a table counts, and "default" moves the tables that none matches.
        shared: Column -> the column of the same ids whose tables it looks up, too, instead of having its own.
        tiers: Memories of the rows of all tables, which share the budgets; None for all in the memory of the device.
    """

    kind: ClassVar[str] = "static"
    dtype: RowType = "float32"
    initializer: Initializer | None = None
    init_scale: checks.Positive | None = None
    optimizers: Mapping[str, str] = field(default_factory=dict)
    shared: Mapping[str, str] = field(default_factory=dict)
    tiers: Tiers | None = None

    def __post_init__(self) -> None:
        checks.check_fields(self)
        _check_optimizers(self, self.optimizers)
        _check_shared(self, self.shared)
        check_tiers(self)

    def table(
        self, name: str, *, rows: int | None, width: int, initializer: Initializer | None = None
    ) -> TableSpec | DynamicTableSpec:
        """Return the table `name` for a column of ids ``0 <= id < rows``; `initializer` overrides this spec's own.

        Raises:
            ConfigError: A column of any keys.
        """
        if rows is None:
            # There is no number of rows to allocate, and no key is a row number.
            raise ConfigError(
                "tables",
                f"got 'static', but the keys of table {name!r} are any integers, expected model.tables.kind=dynamic",
            )
        return TableSpec(
            name=name,
            rows=rows,
            width=width,
            initializer=initializer or self.initializer or "uniform",
            init_scale=self.init_scale,
            dtype=self.dtype,
            optimizer=_optimizer_of(name, self.optimizers),
            tiers=self.tiers,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class DynamicTablesSpec:
    """Dynamic tables with a row for each key in training; the fields are those of `DynamicTableSpec`, for every table.

    Attributes:
        initializer: Distribution of the initial weights; None for a model's own, which is uniform for most.
        init_scale: Scale of the initial weights.
        admit: Rule for unseen keys that get a row; None: all.
        evict: Rule for rows that are removed when a table is full; None: a full table is an error.
        max_rows: Maximum number of rows of each table; None: as many as memory holds.
        optimizers: Rules by pattern, as in `StaticTablesSpec`.
        shared: Columns that look up the tables of others, as in `StaticTablesSpec`.
        tiers: Memories of the rows of all tables, which share the budgets; None for all in the memory of the device.
    """

    kind: ClassVar[str] = "dynamic"
    initializer: Initializer | None = None
    init_scale: checks.Positive = 0.05
    admit: AdmissionSpec | None = None
    evict: LRUEviction | LFUEviction | TTLEviction | None = None
    max_rows: int | None = None
    optimizers: Mapping[str, str] = field(default_factory=dict)
    shared: Mapping[str, str] = field(default_factory=dict)
    tiers: Tiers | None = None

    def __post_init__(self) -> None:
        checks.check_fields(self)
        _check_optimizers(self, self.optimizers)
        _check_shared(self, self.shared)
        check_tiers(self)
        check_policies(self, self.evict, self.max_rows)

    def table(
        self, name: str, *, rows: int | None, width: int, initializer: Initializer | None = None
    ) -> TableSpec | DynamicTableSpec:
        """Return the table `name`; `rows` is not needed, and `initializer` overrides this spec's own."""
        return DynamicTableSpec(
            name=name,
            width=width,
            initializer=initializer or self.initializer or "uniform",
            init_scale=self.init_scale,
            admit=self.admit,
            evict=self.evict,
            max_rows=self.max_rows,
            report_evicted=False,  # a run does not read them
            optimizer=_optimizer_of(name, self.optimizers),
            tiers=self.tiers,
        )


def _check_optimizers(owner: object, optimizers: object) -> None:
    expected = "a rule's name for each pattern of table names, such as {'item*': 'adam'}"
    checks.instance(owner, "optimizers", Mapping, expected)
    assert isinstance(optimizers, Mapping)
    for pattern, name in optimizers.items():
        if not isinstance(pattern, str) or not pattern or not checks.is_name(name):
            checks.fail(owner, "optimizers", expected)


def _check_shared(owner: object, shared: object) -> None:
    expected = "the column whose tables it looks up for each column, such as {'history': 'item'}"
    checks.instance(owner, "shared", Mapping, expected)
    assert isinstance(shared, Mapping)
    for column, other in shared.items():
        if not checks.is_name(column) or not checks.is_name(other):
            checks.fail(owner, "shared", expected)
        if other in shared:
            checks.reject(
                owner,
                "shared",
                f"got {other!r} for {column!r}, which looks up the tables of {shared[other]!r}, expected a column with "
                "tables of its own",
            )


def _optimizer_of(table: str, optimizers: Mapping[str, str]) -> str:
    # Not `fnmatch`, which ignores the case of names on Windows.
    matching = (name for pattern, name in optimizers.items() if fnmatchcase(table, pattern))
    return next(matching, DEFAULT_OPTIMIZER)


TablesSpec = StaticTablesSpec | DynamicTablesSpec
