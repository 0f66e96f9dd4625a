"""Columns that hardly vary are dropped."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from terarec.errors import FormatError
from terarec.etl.columns import Block, to_arrow
from terarec.etl.operators.contract import ColumnTypes, SpillOptions, Stage, State
from terarec.etl.operators.state_files import read_figures, write_figures
from terarec.etl.operators.step_code import StepCode
from terarec.etl.values.value_kind import as_values
from terarec.spec import DropLowCardinality


@dataclass(frozen=True, slots=True)
class DistinctCounts:
    """The state of `DropLowCardinality`.

    Attributes:
        columns: input column -> its distinct values in training, counted up to ``min_distinct``.
        dropped: the columns that have fewer.
    """

    columns: Mapping[str, int]
    dropped: tuple[str, ...]

    def save(self, directory: Path, name: str) -> None:
        """Write ``<name>.json``."""
        state = {"columns": self.columns, "dropped": self.dropped}
        write_figures(directory, name, DropLowCardinality.kind, state)


class DropLowCardinalityCode(StepCode[DropLowCardinality]):
    """Code of `DropLowCardinality`."""

    stage: Stage = "fitted"
    accepted = ("text", "integer", "hex32", "id")

    def output_types(self, types: ColumnTypes) -> ColumnTypes:
        """Nothing is written."""
        for name in self.spec.columns:
            self.input_type(types, name)
        return {}

    def apply(self, block: Block, state: State | None) -> Block:
        """Leave the columns out; a served record may lack them."""
        assert isinstance(state, DistinctCounts)
        return block.only([name for name in block.columns if name not in state.dropped])

    def statistic(self, types: ColumnTypes, memory: SpillOptions) -> DistinctStatistic:
        """Looks for enough distinct values."""
        return DistinctStatistic(self.spec)

    def load_state(self, directory: Path, name: str) -> DistinctCounts:
        """Read what `DistinctCounts.save` wrote."""
        columns = read_figures(directory, name, self.spec.kind).get("columns")
        counts = columns if isinstance(columns, dict) else {}
        if not all(isinstance(counts.get(column), int) for column in self.spec.columns):
            raise FormatError(f"{directory / name}.json: $.state.columns is {columns!r}, expected a count of each")
        return _state(self.spec, counts)


class DistinctStatistic:
    """Collects distinct values until a column has enough."""

    def __init__(self, spec: DropLowCardinality) -> None:
        self._spec = spec
        self._seen: dict[str, set[object]] = {name: set() for name in spec.columns}

    def observe(self, block: Block) -> Mapping[str, pa.Array]:
        """The first distinct values of the columns that do not have enough yet."""
        enough = self._spec.min_distinct
        short = [name for name, seen in self._seen.items() if len(seen) < enough]
        return {name: to_arrow(as_values(block.columns[name])).drop_null().unique().slice(0, enough) for name in short}

    def merge(self, partial: Mapping[str, pa.Array]) -> None:
        """Take in those of a block."""
        for name, values in partial.items():
            self._seen[name].update(values.to_pylist())

    def finish(self) -> DistinctCounts:
        """Which columns go."""
        counts = {name: min(len(seen), self._spec.min_distinct) for name, seen in self._seen.items()}
        return _state(self._spec, counts)


def _state(spec: DropLowCardinality, counts: Mapping[str, int]) -> DistinctCounts:
    return DistinctCounts(counts, tuple(name for name, count in counts.items() if count < spec.min_distinct))
