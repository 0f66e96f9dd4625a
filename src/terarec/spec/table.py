"""What a table is: a storage fact, independent of the features that look it up."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

from terarec.spec import checks
from terarec.spec.admission import AdmissionSpec
from terarec.spec.eviction import EvictionSpec, TTLEviction

Initializer = Literal["uniform", "normal", "zeros"]
RowType = Literal["float32", "bfloat16", "float16"]
ROW_TYPES: tuple[RowType, ...] = get_args(RowType)
DEFAULT_OPTIMIZER = "default"
"""Name of the rule that moves a table which names no other."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TableSpec:
    """A static embedding table: ``rows`` vectors of ``width`` numbers, key == row.

    Attributes:
        name: unique among the tables of a model.
        rows: number of rows V.
        width: length D of a vector.
        initializer: distribution of the first weights.
        init_scale: half-width of the uniform, or standard deviation of the normal distribution; None takes
            1 / sqrt(rows), as the DLRM paper's code does (Naumov et al. 2019).
        dtype: element type of the rows; lookups give float32 whatever it is.
        optimizer: name of the rule that moves the rows, where `terarec.optim.RowOptimizer` is given rules by name.
    """

    kind: ClassVar[str] = "static"
    name: str
    rows: int
    width: int
    initializer: Initializer = "uniform"
    init_scale: float | None = None
    dtype: RowType = "float32"
    optimizer: str = DEFAULT_OPTIMIZER

    def __post_init__(self) -> None:
        checks.name(self)
        checks.name(self, "optimizer")
        checks.positive_int(self, "rows")
        checks.positive_int(self, "width")
        checks.one_of(self, "initializer", ("uniform", "normal", "zeros"))
        checks.one_of(self, "dtype", ROW_TYPES)
        if self.init_scale is not None:
            checks.finite_float(self, "init_scale", low=0.0, open_low=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class DynamicTableSpec:
    """A table of any int64 keys: a key gets its row at first sight in training, never in evaluation.

    Attributes:
        name: unique among the tables of a model.
        width: length D of a vector.
        initializer: distribution of a row's first weights, which depend on (table name, key, seed) alone.
        init_scale: half-width of the uniform, or standard deviation of the normal distribution; 0.05 is what
            HugeCTR's hash tables take, as there is no number of rows to derive it from.
        dtype: element type of the rows; lookups give float32 whatever it is.
        default: the vector of a key without a row: one number for all columns, or `width` of them.
        admit: which unseen keys get a row in training (`freq`, `prob`, `counting_filter`); None: all.
        evict: which rows go when the table is full (`lru`, `lfu`, `ttl`, `by_score`); None: a full table is an error.
        max_rows: most rows; None: as many as memory holds.
        track_uses: count each row's occurrences and note its last batch even if `evict` needs no such thing, for
            calls of ``evict`` with other policies. 12 bytes a row.
        report_evicted: keep the keys that went until ``take_evicted`` is called. 8 bytes a key.
        optimizer: name of the rule that moves the rows, where `terarec.optim.RowOptimizer` is given rules by name.
    """

    kind: ClassVar[str] = "dynamic"
    name: str
    width: int
    initializer: Initializer = "uniform"
    init_scale: float = 0.05
    dtype: RowType = "float32"
    default: float | tuple[float, ...] = 0.0
    admit: AdmissionSpec | None = None
    evict: EvictionSpec | None = None
    max_rows: int | None = None
    track_uses: bool = False
    report_evicted: bool = True
    optimizer: str = DEFAULT_OPTIMIZER

    def __post_init__(self) -> None:
        checks.name(self)
        checks.name(self, "optimizer")
        checks.positive_int(self, "width")
        checks.one_of(self, "initializer", ("uniform", "normal", "zeros"))
        checks.finite_float(self, "init_scale", low=0.0, open_low=True)
        checks.one_of(self, "dtype", ROW_TYPES)
        checks.one_of(self, "track_uses", (False, True))
        checks.one_of(self, "report_evicted", (False, True))
        if isinstance(self.default, tuple):
            is_finite = all(isinstance(value, int | float) and math.isfinite(value) for value in self.default)
            if len(self.default) != self.width or not is_finite:
                checks.fail(self, "default", f"one finite number or {self.width} (the width) of them")
        else:
            checks.finite_float(self, "default")
        check_policies(self, self.evict, self.max_rows)


def check_policies(owner: object, evict: EvictionSpec | None, max_rows: int | None) -> None:
    """Raise unless ``owner.admit``, ``owner.evict`` and ``owner.max_rows`` are what a dynamic table takes."""
    checks.instance(owner, "admit", AdmissionSpec | None, "freq(n), prob(p), counting_filter(n) or None")
    checks.instance(owner, "evict", EvictionSpec | None, "lru(), lfu(), ttl(steps), by_score(function) or None")
    if max_rows is not None:
        checks.positive_int(owner, "max_rows")
    elif evict is not None and not isinstance(evict, TTLEviction):
        checks.fail(owner, "max_rows", f"an integer >= 1, the size that evict={evict.kind!r} keeps")
