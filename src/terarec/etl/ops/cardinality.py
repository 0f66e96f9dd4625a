"""The operator that drops columns with few distinct values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import pyarrow as pa

from terarec.errors import FormatError
from terarec.etl.columns import (
    Rows,
    lookup_values,
)
from terarec.etl.ops.base import (
    ColumnsOperator,
    ColumnTypes,
    SpillOptions,
    Stage,
    State,
)
from terarec.etl.ops.states import read_params, write_params
from terarec.spec import checks, register

if TYPE_CHECKING:  # it loads torch
    pass


@dataclass(frozen=True, slots=True)
class DistinctCounts:
    """State of `DropLowCardinality`.

    Attributes:
        columns: Input column -> its distinct values in training, counted up to ``min_distinct``.
        dropped: Columns that have fewer.
    """

    columns: Mapping[str, int]
    dropped: tuple[str, ...]

    def save(self, directory: Path, name: str) -> None:
        """Write ``<name>.json``."""
        state = {"columns": self.columns, "dropped": self.dropped}
        write_params(directory, name, DropLowCardinality.kind, state)


@register("drop_low_cardinality")
@dataclass(frozen=True, kw_only=True)
class DropLowCardinality(ColumnsOperator):
    """Drops those of `columns` that have fewer than `min_distinct` values in the training part, missing ones apart."""

    stage: ClassVar[Stage] = "fitted"
    accepted: ClassVar[tuple[str, ...]] = ("text", "integer", "hex32", "id")
    min_distinct: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.positive_int(self, "min_distinct", minimum=2)

    @property
    def serving_reads(self) -> tuple[str, ...]:
        """Columns that the step reads when a record is served: none that the step drops."""
        return ()

    @property
    def writes(self) -> tuple[str, ...]:
        """Columns that the step adds or replaces."""
        return ()

    def output_types(self, types: ColumnTypes) -> ColumnTypes:
        """Return nothing: no column is written."""
        for name in self.columns:
            self.input_type(types, name)
        return {}

    def transform(self, rows: Rows, state: State | None) -> Rows:
        """Leave the columns out; a served record may lack them."""
        assert isinstance(state, DistinctCounts)
        return rows.select([name for name in rows.columns if name not in state.dropped])

    @property
    def may_drop(self) -> tuple[str, ...]:
        """All inputs."""
        return self.columns

    def dropped(self, state: State | None) -> tuple[str, ...]:
        """Return the columns that have too few values."""
        return state.dropped if isinstance(state, DistinctCounts) else ()

    def statistic(self, types: ColumnTypes, memory: SpillOptions) -> DistinctStatistic:
        """Return a statistic that looks for enough distinct values."""
        return DistinctStatistic(self)

    def load_state(self, directory: Path, name: str) -> DistinctCounts:
        """Read the state."""
        columns = read_params(directory, name, self.kind).get("columns")
        counts = columns if isinstance(columns, dict) else {}
        if not all(isinstance(counts.get(column), int) for column in self.columns):
            raise FormatError(f"{directory / name}.json: $.state.columns", f"got {columns!r}, expected a count of each")
        return _distinct_counts(self, counts)


class DistinctStatistic:
    """Collects distinct values until a column has enough."""

    def __init__(self, op: DropLowCardinality) -> None:
        self._op = op
        self._seen: dict[str, set[object]] = {name: set() for name in op.columns}

    def observe(self, rows: Rows) -> Mapping[str, pa.Array]:
        """Return the first distinct values of the columns that do not have enough yet."""
        enough = self._op.min_distinct
        short = [name for name, seen in self._seen.items() if len(seen) < enough]
        return {name: lookup_values(rows.columns[name]).drop_null().unique().slice(0, enough) for name in short}

    def merge(self, partial: Mapping[str, pa.Array | Sequence[object]]) -> None:
        """Add the partial state of a block, or of another statistic."""
        for name, values in partial.items():
            self._seen[name].update(values.to_pylist() if isinstance(values, pa.Array) else values)

    def partial(self) -> Mapping[str, Sequence[object]]:
        """Return the values so far."""
        return {name: list(seen) for name, seen in self._seen.items()}

    def finish(self) -> DistinctCounts:
        """Return the columns that are dropped."""
        counts = {name: min(len(seen), self._op.min_distinct) for name, seen in self._seen.items()}
        return _distinct_counts(self._op, counts)


def _distinct_counts(op: DropLowCardinality, counts: Mapping[str, int]) -> DistinctCounts:
    return DistinctCounts(counts, tuple(name for name, count in counts.items() if count < op.min_distinct))
