"""Sampling of negative examples."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from terarec.errors import ConfigError
from terarec.etl.columns import ColumnType, Rows, array_of
from terarec.etl.ops.base import ColumnTypes, Operator, SpillOptions, Stage, State, check_column, scalar_input
from terarec.etl.ops.joins import SideTable, SideTableStatistic, read_side_table
from terarec.etl.ops.lists import ITEM_BITS, MAX_ITEMS
from terarec.kernels.cpu.encoding import xxh64_int64
from terarec.spec import checks, register


@register("negative_sampling")
@dataclass(frozen=True, kw_only=True)
class NegativeSampling(Operator):
    """Each row, then `negatives` copies of it with other values of `column`, drawn from a side table.

    Draw i of row r has the row id ``r << 16 | i``, and takes value ``hash(row id) mod m`` of the m values of the side
    table other than the row's own, in the order of the table: draws are uniform, with replacement, and the same
    whatever blocks and threads. Served and scored records stay single.

    Attributes:
        table: Name in ``WorkflowSpec.tables`` of the table of candidates, one row each.
        column: Column of that name, of one type, on both sides; distinct in the side table, not missing in the rows.
        negatives: Number of draws for each row.
        label: Name of the number column that the step adds: 1 for the row itself, 0 for its draws.
        seed: Seed of the hash.
    """

    stage: ClassVar[Stage] = "rows"
    explodes: ClassVar[bool] = True
    samples: ClassVar[bool] = True
    table: str
    column: str
    negatives: int
    label: str = "label"
    seed: int = 42

    def __post_init__(self) -> None:
        checks.name(self, "table")
        check_column(self, "column")
        check_column(self, "label")
        if self.label == self.column:
            checks.fail(self, "label", "a name other than that of column")
        checks.positive_int(self, "negatives")
        if self.negatives >= MAX_ITEMS:
            checks.fail(self, "negatives", f"less than {MAX_ITEMS}")
        checks.int64(self, "seed", minimum=0)

    @property
    def reads(self) -> tuple[str, ...]:
        """Columns that the step reads while a data set is prepared."""
        return (self.column,)

    @property
    def writes(self) -> tuple[str, ...]:
        """Columns that the step adds or replaces."""
        return (self.column, self.label)

    @property
    def side_table(self) -> str | None:
        """The table."""
        return self.table

    @property
    def side_columns(self) -> tuple[str, ...]:
        """The column of the candidates."""
        return (self.column,)

    def output_types(self, types: ColumnTypes) -> ColumnTypes:
        """Return the type of the column, and a number."""
        found = scalar_input(types, self.column, ("text", "integer", "hex32"))
        return {self.column: found, self.label: ColumnType("number")}

    def transform(self, rows: Rows, state: State | None) -> Rows:
        """Add the draws.

        Raises:
            ConfigError: The side table has less than two rows.
        """
        assert isinstance(state, SideTable)
        candidates = state.ids.values
        if len(candidates) < 2:
            raise ConfigError(f"table {self.table!r}", f"got {len(candidates)} rows, expected at least 2 to draw from")
        each = self.negatives + 1
        source = np.repeat(np.arange(rows.num_rows), each)
        repeated = rows.take(source)
        place = np.tile(np.arange(each), rows.num_rows)
        ids = (repeated.ids << ITEM_BITS) | place
        own = rows.columns[self.column]
        drawn = np.flatnonzero(place)
        positions = self._draw(ids[drawn], np.repeat(state.positions(own), self.negatives), len(candidates))
        # The values of the rows, and behind them those of the draws, put in the order of the rows.
        values = pa.concat_arrays([own, candidates.take(array_of(positions))])
        source[drawn] = rows.num_rows + np.arange(len(drawn))
        made = {self.column: values.take(array_of(source)), self.label: array_of((place == 0).astype(np.float64))}
        return Rows({**repeated.columns, **made}, ids, repeated.split)

    def _draw(self, rows: NDArray[np.int64], own: NDArray[np.int64], count: int) -> NDArray[np.int64]:
        """Return positions of candidates, other than `own`, which is `count` where a row's value is no candidate."""
        hashes = xxh64_int64(rows, self.seed).view(np.uint64)
        others = (count - (own < count)).astype(np.uint64)
        positions = (hashes % others).astype(np.int64)
        return positions + (positions >= own)

    def statistic(self, types: ColumnTypes, memory: SpillOptions) -> SideTableStatistic:
        """Return a statistic that keeps the candidates."""
        return SideTableStatistic(self.table, (self.column,), types, memory.memory_bytes)

    def load_state(self, directory: Path, name: str) -> SideTable:
        """Read the candidates."""
        return read_side_table(directory, name, self.column, ())
