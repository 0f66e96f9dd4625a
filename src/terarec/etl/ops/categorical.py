# SPDX-License-Identifier: Apache-2.0
"""The operator that encodes values as ids, and its vocabularies. See docs/workflows.md."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from typing_extensions import override

from terarec.errors import ConfigError, FormatError
from terarec.etl.columns import ColumnType, Rows, array_of, like
from terarec.etl.ops.base import MISSING, RARE, ColumnTypes, MappedColumns, Stage
from terarec.etl.ops.fitted_params import check_counts
from terarec.etl.ops.states import SpillOptions, State, Statistic, read_table, table_path, write_table
from terarec.etl.ops.values import RecordFunction
from terarec.etl.values import VALUE_TYPES, ValueCounts, ValueIds, encoding_bytes, find_each, lookup_kind
from terarec.kernels.cpu.encoding import TablesOfColumns
from terarec.ragged import flat_values, like_values
from terarec.spec import checks
from terarec.spec.dataset import MISSING_ID
from terarec.spec.registry import register

JOINT = "joint"
"""Name of the vocabulary that all columns share."""


@dataclass(frozen=True, slots=True)
class Vocabularies:
    """State of `Categorify`.

    Attributes:
        ids: Input column, or `JOINT` -> its values and their ids.
        counts: Input column, or `JOINT` -> occurrences of each value in training, int64 array [V].
    """

    ids: Mapping[str, ValueIds]
    counts: Mapping[str, pa.Array]

    def save(self, directory: Path, name: str) -> None:
        """Write ``<name>-<column>.parquet`` for each vocabulary: columns value and count, in the order of the ids."""
        for column, ids in self.ids.items():
            table = pa.table({"value": ids.values, "count": self.counts[column]})
            write_table(table_path(directory, name, column), table)


@register("categorify")
@dataclass(frozen=True, kw_only=True)
class Categorify(MappedColumns):
    """Value -> id by frequency: 0 missing, then `hash_buckets` ids for rare and unseen values, then the kept values.

    Attributes:
        min_count: Values that occur less often in the training part are rare.
        max_size: Maximum number of values to keep, the most frequent ones.
        hash_buckets: A rare or unseen value has id ``1 + hash mod hash_buckets``.
        joint: One vocabulary for all `columns`.
    """

    stage: ClassVar[Stage] = "fitted"
    accepted: ClassVar[tuple[str, ...]] = ("text", "integer", "hex32")
    min_count: checks.PositiveInt = 1
    max_size: checks.PositiveInt | None = None
    hash_buckets: Annotated[int, checks.whole(1, 2**31 - 1)] = 1
    joint: bool = False

    @override
    def output_types(self, types: ColumnTypes) -> ColumnTypes:
        # The inputs of a joint vocabulary are of one kind.
        inputs = {name: self.input_type(types, name) for name in self.columns}
        first = self.columns[0]
        for name, column_type in inputs.items():
            if self.joint and column_type.kind != inputs[first].kind:
                raise ConfigError(
                    f"column {name!r}",
                    f"holds {column_type}, expected {inputs[first].kind} as column {first!r}: they share a vocabulary",
                )
        id_types = [ColumnType("id", kind.is_list, kind.max_length) for kind in inputs.values()]
        return dict(zip(self.writes, id_types, strict=True))

    def vocabulary(self, column: str) -> str:
        """Return the name of the vocabulary of the input `column`."""
        return JOINT if self.joint else column

    @override
    def cardinalities(self, rows: Mapping[str, int], state: State | None) -> Mapping[str, int]:
        assert isinstance(state, Vocabularies)
        return {output: state.ids[self.vocabulary(name)].num_ids for name, output in self.pairs}

    @override
    def transform(self, rows: Rows, state: State | None) -> Rows:
        assert isinstance(state, Vocabularies)
        arrays = [rows.columns[name] for name in self.columns]
        # All columns in one call, so that threads wait for the GIL once a block and not once a column.
        ids_of_columns = find_each([state.ids[self.vocabulary(name)] for name in self.columns], arrays)
        outputs = [like(array, array_of(ids, are_ids=True)) for array, ids in zip(arrays, ids_of_columns, strict=True)]
        return rows.with_columns(dict(zip(self.writes, outputs, strict=True)))

    @override
    def record_functions(self, types: ColumnTypes, state: State | None) -> Sequence[RecordFunction]:
        assert isinstance(state, Vocabularies)
        ids = [state.ids[self.vocabulary(name)] for name in self.columns]
        tables = TablesOfColumns([one.table for one in ids])
        of_lists = any(types[name].is_list for name in self.columns)
        call = partial(_found_lists if of_lists else _known_ids, tables, ids)
        return [RecordFunction(self.columns, self.writes, call, takes="raw")]

    @override
    def reserved_ids(self, is_id: bool) -> int:
        return 1 + self.hash_buckets

    @override
    def vocabularies(self, state: State | None) -> Mapping[str, ValueIds]:
        assert isinstance(state, Vocabularies)
        return {output: state.ids[self.vocabulary(name)] for name, output in self.pairs}

    @override
    def describe_ids(self, column: str, ids: NDArray[np.int64], state: State | None) -> Sequence[str]:
        assert isinstance(state, Vocabularies)
        values = self.values_of_ids(column, ids.tolist(), state)
        names = {MISSING_ID: MISSING}
        return [
            names.get(int(number), RARE) if value is None else str(value)
            for number, value in zip(ids, values, strict=True)
        ]

    def values_of_ids(self, column: str, ids: Iterable[int], state: Vocabularies) -> list[str | int | None]:
        """Return the values of ids of the input `column`; None for missing and for rare or unseen ones.

        Raises:
            IndexError: No such id.
        """
        return state.ids[self.vocabulary(column)].inverse(ids)

    @override
    def statistic(self, types: ColumnTypes, memory: SpillOptions) -> VocabularyStatistic:
        return VocabularyStatistic(self, types, memory)

    @override
    def load_state(self, directory: Path, name: str) -> Vocabularies:
        ids: dict[str, ValueIds] = {}
        counts: dict[str, pa.Array] = {}
        for part in dict.fromkeys(map(self.vocabulary, self.columns)):
            path = table_path(directory, name, part)
            table = read_table(path, {"value": tuple(VALUE_TYPES), "count": (pa.int64(),)})
            check_counts(table, path)
            values, counts[part] = (column.combine_chunks() for column in table.columns)
            ids[part] = ValueIds(VALUE_TYPES[values.type], values, self.hash_buckets)
            try:
                # Built now, since this finds values that occur twice.
                _ = ids[part].table
            except ValueError as error:
                raise FormatError(path, error) from error
        return Vocabularies(ids, counts)


def _known_ids(tables: TablesOfColumns, each: Sequence[ValueIds], *columns: Any) -> NDArray[np.int64]:
    """Find the ids int64[c, n] of c columns of n values each."""
    return _find(tables, each, columns).reshape(len(columns), -1)


def _find(tables: TablesOfColumns, each: Sequence[ValueIds], columns: Sequence[Any]) -> NDArray[np.int64]:
    """Find the ids of the values of all columns, one column after another."""
    if set(map(type, columns)) == {list}:
        return tables.find_lists(list(columns))
    return np.concatenate([ids.find_values(values) for ids, values in zip(each, columns, strict=True)])


def _found_lists(tables: TablesOfColumns, each: Sequence[ValueIds], *columns: Any) -> Sequence[Any]:
    """Find ids where some are columns of lists."""
    values = [flat_values(column) for column in columns]
    ids, begin, lists = _find(tables, each, values), 0, []
    for column, items in zip(columns, values, strict=True):
        lists.append(like_values(column, ids[begin : begin + len(items)]))
        begin += len(items)
    return lists


class VocabularyStatistic(Statistic):
    """Counts the values of all inputs of a `Categorify`."""

    def __init__(self, op: Categorify, types: ColumnTypes, memory: SpillOptions) -> None:
        self._op = op
        self._memory_bytes = memory.memory_bytes
        self._kinds = {op.vocabulary(name): lookup_kind(types[name].kind) for name in op.columns}
        self._counts = ValueCounts(self._kinds, memory.directory, memory.memory_bytes)

    @override
    def observe(self, rows: Rows) -> None:
        """Count the values of some training rows."""
        for name in self._op.columns:
            # Into tables that all threads share: partial counts of each block would have to be merged by one thread.
            self._counts.add(self._op.vocabulary(name), rows.columns[name])
        self._counts.maybe_spill()

    def merge(self, partial: None) -> None:
        """Do nothing: `observe` counts, in any order of the blocks."""

    in_order = False

    def split(self, partial: None) -> tuple[Mapping[str, pa.Table], None]:
        """Return the counts so far, and free them."""
        return {name: self._counts.drain(name) for name in self._kinds}, None

    def merge_rest(self, rest: None) -> None:
        """Do nothing: there is no rest."""

    def merge_rows(self, rows: Mapping[str, pa.Table]) -> None:
        """Add counts."""
        for name, counted in rows.items():
            self._counts.add_counts(name, counted)

    def reduced(self, name: str) -> pa.Table:
        """Return the counts of those values that may be kept."""
        return self._counts.kept(name, self._op.min_count, self._op.max_size, None)

    @override
    def finish(self) -> Vocabularies:
        """Return the vocabularies.

        Raises:
            StorageError: They would not fit in memory; names the column, its size, and what helps.
        """
        op, left = self._op, self._memory_bytes
        ids: dict[str, ValueIds] = {}
        counts: dict[str, pa.Array] = {}
        for part, kind in self._kinds.items():
            kept = self._counts.kept(part, op.min_count, op.max_size, left)
            # All vocabularies of the step are in memory together when rows are transformed.
            left = None if left is None else left - encoding_bytes(kept)
            values, counts[part] = (column.combine_chunks() for column in kept.columns)
            ids[part] = ValueIds(kind, values, op.hash_buckets)
        return Vocabularies(ids, counts)
