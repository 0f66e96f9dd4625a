"""How a model makes the table of each categorical column."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import ClassVar, get_args

from terarec.errors import ConfigError
from terarec.spec import checks
from terarec.spec.admission import AdmissionSpec
from terarec.spec.eviction import LFUEviction, LRUEviction, TTLEviction
from terarec.spec.table import (
    DEFAULT_OPTIMIZER,
    ROW_TYPES,
    DynamicTableSpec,
    Initializer,
    RowType,
    TableSpec,
    check_policies,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class StaticTablesSpec:
    """As many rows as the data set says that the column has ids.

    Attributes:
        dtype: element type of the rows of every table.
        initializer: Distribution of the first weights; None for a model's own, which is uniform for most.
        init_scale: Half-width of the uniform, or standard deviation of the normal distribution; None for
            1 / sqrt(rows).
        optimizers: pattern of table names, such as "item*" -> name of the rule that moves the tables it matches; the
            first pattern that matches a table counts, and "default" moves the tables that none matches.
    """

    kind: ClassVar[str] = "static"
    dtype: RowType = "float32"
    initializer: Initializer | None = None
    init_scale: float | None = None
    optimizers: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        checks.one_of(self, "dtype", ROW_TYPES)
        checks.one_of(self, "initializer", (*get_args(Initializer), None))
        if self.init_scale is not None:
            checks.finite_float(self, "init_scale", low=0.0, open_low=True)
        _check_optimizers(self, self.optimizers)

    def table(
        self, name: str, *, rows: int | None, width: int, initializer: Initializer | None = None
    ) -> TableSpec | DynamicTableSpec:
        """The table `name` for a column of ids ``0 <= id < rows``; `initializer` goes before this spec's own.

        Raises:
            ConfigError: a column of any keys.
        """
        if rows is None:
            raise ConfigError(
                f"tables: got 'static', but the keys of table {name!r} are any integers, expected 'dynamic' "
                "(--tables dynamic)"
            )
        return TableSpec(
            name=name,
            rows=rows,
            width=width,
            initializer=initializer or self.initializer or "uniform",
            init_scale=self.init_scale,
            dtype=self.dtype,
            optimizer=_optimizer_of(name, self.optimizers),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class DynamicTablesSpec:
    """A row for each key that training meets; the fields are those of `DynamicTableSpec`, for every table.

    Attributes:
        initializer: Distribution of the first weights; None for a model's own, which is uniform for most.
        init_scale: of the first weights.
        admit: which unseen keys get a row; None: all.
        evict: which rows go when a table is full; None: a full table is an error.
        max_rows: most rows of each table; None: as many as memory holds.
        optimizers: as in `StaticTablesSpec`.
    """

    kind: ClassVar[str] = "dynamic"
    initializer: Initializer | None = None
    init_scale: float = 0.05
    admit: AdmissionSpec | None = None
    evict: LRUEviction | LFUEviction | TTLEviction | None = None
    max_rows: int | None = None
    optimizers: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        checks.one_of(self, "initializer", (*get_args(Initializer), None))
        checks.finite_float(self, "init_scale", low=0.0, open_low=True)
        _check_optimizers(self, self.optimizers)
        check_policies(self, self.evict, self.max_rows)

    def table(
        self, name: str, *, rows: int | None, width: int, initializer: Initializer | None = None
    ) -> TableSpec | DynamicTableSpec:
        """The table `name`; the column's number of ids is not needed, and `initializer` goes before this spec's own."""
        return DynamicTableSpec(
            name=name,
            width=width,
            initializer=initializer or self.initializer or "uniform",
            init_scale=self.init_scale,
            admit=self.admit,
            evict=self.evict,
            max_rows=self.max_rows,
            report_evicted=False,  # nobody asks while a run trains
            optimizer=_optimizer_of(name, self.optimizers),
        )


def _check_optimizers(owner: object, optimizers: object) -> None:
    expected = "a rule's name for each pattern of table names, such as {'item*': 'adam'}"
    checks.instance(owner, "optimizers", Mapping, expected)
    assert isinstance(optimizers, Mapping)
    for pattern, name in optimizers.items():
        if not isinstance(pattern, str) or not pattern or not checks.is_name(name):
            checks.fail(owner, "optimizers", expected)


def _optimizer_of(table: str, optimizers: Mapping[str, str]) -> str:
    matching = (name for pattern, name in optimizers.items() if fnmatchcase(table, pattern))
    return next(matching, DEFAULT_OPTIMIZER)


TablesSpec = StaticTablesSpec | DynamicTablesSpec
