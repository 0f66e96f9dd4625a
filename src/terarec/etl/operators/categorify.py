"""Values to ids by frequency."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from terarec.errors import ConfigError, FormatError
from terarec.etl.columns import Block, Column, ColumnType
from terarec.etl.operators.contract import ColumnTypes, SpillOptions, Stage, State
from terarec.etl.operators.plain_function import PlainFunction, PlainLists
from terarec.etl.operators.state_files import read_table, table_path, write_table
from terarec.etl.operators.step_code import StepCode
from terarec.etl.values.value_counts import ValueCounts, encoding_bytes
from terarec.etl.values.value_ids import ValueIds, find_each
from terarec.etl.values.value_kind import VALUE_TYPES, lookup_kind
from terarec.kernels.cpu.ids import TablesOfColumns
from terarec.spec import Categorify

JOINT = "joint"
"""Name of the vocabulary that all columns share."""


@dataclass(frozen=True, slots=True)
class Vocabularies:
    """The state of `Categorify`.

    Attributes:
        ids: input column, or `JOINT` -> its values and their ids.
        counts: the same -> how often each value occurred in training, int64 array [V].
    """

    ids: Mapping[str, ValueIds]
    counts: Mapping[str, pa.Array]

    def save(self, directory: Path, name: str) -> None:
        """Write ``<name>-<column>.parquet`` for each vocabulary: columns value and count, in the order of the ids."""
        for column, ids in self.ids.items():
            table = pa.table({"value": ids.values, "count": self.counts[column]})
            write_table(table_path(directory, name, column), table)


class CategorifyCode(StepCode[Categorify]):
    """Code of `Categorify`."""

    stage: Stage = "fitted"
    accepted = ("text", "integer", "hex32")

    def output_types(self, types: ColumnTypes) -> ColumnTypes:
        """Ids; the inputs of a joint vocabulary are of one kind."""
        inputs = {name: self.input_type(types, name) for name in self.spec.columns}
        first = self.spec.columns[0]
        for name, found in inputs.items():
            if self.spec.joint and found.kind != inputs[first].kind:
                raise ConfigError(
                    f"column {name!r} holds {found}, expected {inputs[first].kind} as column {first!r}: "
                    "they share a vocabulary"
                )
        made = [ColumnType("id", found.is_list, found.max_length) for found in inputs.values()]
        return dict(zip(self.writes, made, strict=True))

    def vocabulary(self, column: str) -> str:
        """Name of the vocabulary of the input `column`."""
        return JOINT if self.spec.joint else column

    def cardinalities(self, rows: Mapping[str, int], state: State | None) -> Mapping[str, int]:
        """Kept values, ids of rare ones and that of missing ones."""
        assert isinstance(state, Vocabularies)
        return {output: state.ids[self.vocabulary(name)].num_ids for name, output in self.spec.pairs}

    def apply(self, block: Block, state: State | None) -> Block:
        """Look the ids up."""
        assert isinstance(state, Vocabularies)
        columns = [block.columns[name] for name in self.spec.columns]
        found = find_each([state.ids[self.vocabulary(name)] for name in self.spec.columns], columns)
        made = [column.like(Column("id", ids)) for column, ids in zip(columns, found, strict=True)]
        return block.with_columns(dict(zip(self.writes, made, strict=True)))

    def plain_functions(self, types: ColumnTypes, state: State | None) -> Sequence[PlainFunction]:
        """All columns looked up in one call."""
        assert isinstance(state, Vocabularies)
        tables = TablesOfColumns([state.ids[self.vocabulary(name)].table for name in self.spec.columns])
        of_lists = any(types[name].is_list for name in self.spec.columns)
        call = partial(_found_lists if of_lists else _found, tables)
        return [PlainFunction(self.spec.columns, self.writes, call, takes="raw")]

    def inverse(self, column: str, ids: Iterable[int], state: Vocabularies) -> list[str | int | None]:
        """Raw values of ids of the input `column`; None for missing and for rare or unseen ones.

        Raises:
            IndexError: no such id.
        """
        return state.ids[self.vocabulary(column)].inverse(ids)

    def statistic(self, types: ColumnTypes, memory: SpillOptions) -> VocabularyStatistic:
        """Counts the values."""
        return VocabularyStatistic(self, types, memory)

    def load_state(self, directory: Path, name: str) -> Vocabularies:
        """Read what `Vocabularies.save` wrote."""
        ids: dict[str, ValueIds] = {}
        counts: dict[str, pa.Array] = {}
        for part in dict.fromkeys(map(self.vocabulary, self.spec.columns)):
            path = table_path(directory, name, part)
            table = read_table(path, {"value": tuple(VALUE_TYPES), "count": (pa.int64(),)})
            values, counts[part] = (column.combine_chunks() for column in table.columns)
            ids[part] = ValueIds(VALUE_TYPES[values.type], values, self.spec.hash_buckets)
            try:
                _ = ids[part].table
            except ValueError as error:
                raise FormatError(f"{path}: {error}") from error
        return Vocabularies(ids, counts)


def _found(tables: TablesOfColumns, *columns: list[Any]) -> NDArray[np.int64]:
    """Ids int64[c, n] of c columns of n values each."""
    return tables.find_lists(list(columns)).reshape(len(columns), -1)


def _found_lists(tables: TablesOfColumns, *columns: list[Any] | PlainLists) -> Sequence[Any]:
    """The same where some are columns of lists."""
    flat = [column.items if isinstance(column, PlainLists) else column for column in columns]
    ids, begin, found = tables.find_lists(flat), 0, []
    for column, items in zip(columns, flat, strict=True):
        part, begin = ids[begin : begin + len(items)], begin + len(items)
        found.append(PlainLists(part, column.offsets) if isinstance(column, PlainLists) else part)
    return found


class VocabularyStatistic:
    """Counts the values of all inputs of a `Categorify`.

    Args:
        code: of the step.
        types: of the columns before it.
        memory: bound of the counts, and of the vocabularies made of them.
    """

    def __init__(self, code: CategorifyCode, types: ColumnTypes, memory: SpillOptions) -> None:
        self._code = code
        self._memory_bytes = memory.memory_bytes
        self._kinds = {code.vocabulary(name): lookup_kind(types[name].kind) for name in code.spec.columns}
        self._counts = ValueCounts(self._kinds, memory.directory, memory.memory_bytes)

    def observe(self, block: Block) -> None:
        """Count the values of a block of training rows.

        Raises:
            StorageError: the disk is full.
        """
        for name in self._code.spec.columns:
            self._counts.add(self._code.vocabulary(name), block.columns[name])
        self._counts.relieve()

    def merge(self, partial: None) -> None:
        """Nothing is left to do: counts do not depend on the order of blocks."""

    def finish(self) -> Vocabularies:
        """The vocabularies.

        Raises:
            StorageError: they would not fit in memory; names the column, its size, and what helps.
        """
        spec, left = self._code.spec, self._memory_bytes
        ids: dict[str, ValueIds] = {}
        counts: dict[str, pa.Array] = {}
        for part, kind in self._kinds.items():
            kept = self._counts.kept(part, spec.min_count, spec.max_size, left)
            left = None if left is None else left - encoding_bytes(kept)
            values, counts[part] = (column.combine_chunks() for column in kept.columns)
            ids[part] = ValueIds(kind, values, spec.hash_buckets)
        return Vocabularies(ids, counts)
