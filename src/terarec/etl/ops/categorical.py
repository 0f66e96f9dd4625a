"""Operators that make ids, and their vocabularies. See docs/workflows.md."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import methodcaller
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from terarec.errors import ConfigError, FormatError
from terarec.etl.columns import (
    REFUSED_SHOWN,
    ColumnType,
    RowFaultError,
    Rows,
    array_of,
    flat,
    is_missing,
    kind_of,
    like,
    list_offsets,
    lookup_values,
    null_mask,
    numpy_values,
    texts_of,
)
from terarec.etl.ops.base import (
    MISSING,
    RARE,
    ColumnsOperator,
    ColumnTypes,
    MappedColumns,
    SpillOptions,
    Stage,
    State,
    check_column,
)
from terarec.etl.ops.record_values import RecordFunction, each, item_function
from terarec.etl.ops.states import read_params, read_table, table_path, write_params, write_table
from terarec.etl.ops.values import accepted_list, hashes_of, rejected
from terarec.etl.value_counts import ValueCounts, encoding_bytes
from terarec.etl.values import VALUE_TYPES, ValueIds, find_each, lookup_kind
from terarec.kernels.cpu.encoding import TablesOfColumns, xxh64_list
from terarec.kernels.encoding_types import InvalidValueError
from terarec.ragged import Ragged, flat_values, like_values, map_values
from terarec.spec import MISSING_ID, checks, register

if TYPE_CHECKING:  # it loads torch
    from terarec.etl.tensors import DeviceColumn, TensorBlock, TensorDevice, TensorFunction

JOINT = "joint"
"""Name of the vocabulary that all columns share."""


@dataclass(frozen=True, slots=True)
class Vocabularies:
    """State of `Categorify`.

    Attributes:
        ids: Input column, or `JOINT` -> its values and their ids.
        counts: The same -> number of training values of each, int64 array [V].
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
        max_size: Most values to keep, the most frequent ones.
        hash_buckets: A rare or unseen value has id ``1 + hash mod hash_buckets``.
        joint: One vocabulary for all `columns`.
    """

    stage: ClassVar[Stage] = "fitted"
    runs_on_tensors: ClassVar[bool] = True
    accepted: ClassVar[tuple[str, ...]] = ("text", "integer", "hex32")
    min_count: int = 1
    max_size: int | None = None
    hash_buckets: int = 1
    joint: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.positive_int(self, "min_count")
        checks.int64(self, "hash_buckets", minimum=1)
        if self.max_size is not None:
            checks.positive_int(self, "max_size")
        checks.one_of(self, "joint", (False, True))

    def output_types(self, types: ColumnTypes) -> ColumnTypes:
        """Return ids; the inputs of a joint vocabulary are of one kind."""
        inputs = {name: self.input_type(types, name) for name in self.columns}
        first = self.columns[0]
        for name, found in inputs.items():
            if self.joint and found.kind != inputs[first].kind:
                raise ConfigError(
                    f"column {name!r}",
                    f"holds {found}, expected {inputs[first].kind} as column {first!r}: they share a vocabulary",
                )
        made = [ColumnType("id", found.is_list, found.max_length) for found in inputs.values()]
        return dict(zip(self.writes, made, strict=True))

    def vocabulary(self, column: str) -> str:
        """Return the name of the vocabulary of the input `column`."""
        return JOINT if self.joint else column

    def cardinalities(self, rows: Mapping[str, int], state: State | None) -> Mapping[str, int]:
        """Count kept values, the ids of rare ones and that of missing ones."""
        assert isinstance(state, Vocabularies)
        return {output: state.ids[self.vocabulary(name)].num_ids for name, output in self.pairs}

    def transform(self, rows: Rows, state: State | None) -> Rows:
        """Look the ids up."""
        assert isinstance(state, Vocabularies)
        arrays = [rows.columns[name] for name in self.columns]
        found = find_each([state.ids[self.vocabulary(name)] for name in self.columns], arrays)
        made = [like(array, array_of(ids, are_ids=True)) for array, ids in zip(arrays, found, strict=True)]
        return rows.with_columns(dict(zip(self.writes, made, strict=True)))

    def record_functions(self, types: ColumnTypes, state: State | None) -> Sequence[RecordFunction]:
        """Return one function that looks all columns up."""
        assert isinstance(state, Vocabularies)
        tables = TablesOfColumns([state.ids[self.vocabulary(name)].table for name in self.columns])
        of_lists = any(types[name].is_list for name in self.columns)
        call = partial(_found_lists if of_lists else _found, tables)
        return [RecordFunction(self.columns, self.writes, call, takes="raw")]

    def tensor_function(self, state: State | None, device: TensorDevice) -> TensorFunction:
        """Return a function that looks ids up in hash indexes on the device."""
        assert isinstance(state, Vocabularies)
        tables = {name: device.ids(ids) for name, ids in state.ids.items()}
        return lambda block: {
            output: map_values(block.columns[name], tables[self.vocabulary(name)].find) for name, output in self.pairs
        }

    def reserved_ids(self, is_id: bool) -> int:
        """Count the ids of missing, rare and unseen values."""
        return 1 + self.hash_buckets

    def vocabularies(self, state: State | None) -> Mapping[str, ValueIds]:
        """Return the vocabularies of all outputs."""
        assert isinstance(state, Vocabularies)
        return {output: state.ids[self.vocabulary(name)] for name, output in self.pairs}

    def describe_ids(self, column: str, ids: NDArray[np.int64], state: State | None) -> Sequence[str]:
        """Return the values."""
        assert isinstance(state, Vocabularies)
        found = self.values_of_ids(column, ids.tolist(), state)
        names = {MISSING_ID: MISSING}
        return [
            names.get(int(number), RARE) if value is None else str(value)
            for number, value in zip(ids, found, strict=True)
        ]

    def values_of_ids(self, column: str, ids: Iterable[int], state: Vocabularies) -> list[str | int | None]:
        """Return the values of ids of the input `column`; None for missing and for rare or unseen ones.

        Raises:
            IndexError: No such id.
        """
        return state.ids[self.vocabulary(column)].inverse(ids)

    def statistic(self, types: ColumnTypes, memory: SpillOptions) -> VocabularyStatistic:
        """Return a statistic that counts the values."""
        return VocabularyStatistic(self, types, memory)

    def load_state(self, directory: Path, name: str) -> Vocabularies:
        """Read the state."""
        ids: dict[str, ValueIds] = {}
        counts: dict[str, pa.Array] = {}
        for part in dict.fromkeys(map(self.vocabulary, self.columns)):
            path = table_path(directory, name, part)
            table = read_table(path, {"value": tuple(VALUE_TYPES), "count": (pa.int64(),)})
            values, counts[part] = (column.combine_chunks() for column in table.columns)
            ids[part] = ValueIds(VALUE_TYPES[values.type], values, self.hash_buckets)
            try:
                _ = ids[part].table
            except ValueError as error:
                raise FormatError(path, error) from error
        return Vocabularies(ids, counts)


def _found(tables: TablesOfColumns, *columns: list[Any]) -> NDArray[np.int64]:
    """Find the ids int64[c, n] of c columns of n values each."""
    return tables.find_lists(list(columns)).reshape(len(columns), -1)


def _found_lists(tables: TablesOfColumns, *columns: Any) -> Sequence[Any]:
    """Find ids where some are columns of lists."""
    values = [flat_values(column) for column in columns]
    ids, begin, found = tables.find_lists(values), 0, []
    for column, items in zip(columns, values, strict=True):
        found.append(like_values(column, ids[begin : begin + len(items)]))
        begin += len(items)
    return found


class VocabularyStatistic:
    """Counts the values of all inputs of a `Categorify`.

    Args:
        op: The step.
        types: Types of the columns before it.
        memory: Bound of the counts, and of the vocabularies made of them.
    """

    def __init__(self, op: Categorify, types: ColumnTypes, memory: SpillOptions) -> None:
        self._op = op
        self._memory_bytes = memory.memory_bytes
        self._kinds = {op.vocabulary(name): lookup_kind(types[name].kind) for name in op.columns}
        self._counts = ValueCounts(self._kinds, memory.directory, memory.memory_bytes)

    def observe(self, rows: Rows) -> None:
        """Count the values of some training rows.

        Raises:
            StorageError: The disk is full.
        """
        for name in self._op.columns:
            self._counts.add(self._op.vocabulary(name), rows.columns[name])
        self._counts.maybe_spill()

    def merge(self, partial: None) -> None:
        """Do nothing: `observe` counts, in any order of the blocks."""

    in_order = False

    def split(self, partial: None) -> tuple[Mapping[str, pa.Table], None]:
        """Return the counts so far, which are gone afterwards."""
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
            left = None if left is None else left - encoding_bytes(kept)
            values, counts[part] = (column.combine_chunks() for column in kept.columns)
            ids[part] = ValueIds(kind, values, op.hash_buckets)
        return Vocabularies(ids, counts)


@register("hash_bucket")
@dataclass(frozen=True, kw_only=True)
class HashBucket(MappedColumns):
    """Value -> id without fitting: 0 missing, else ``1 + hash mod buckets``."""

    runs_on_tensors: ClassVar[bool] = True
    accepted: ClassVar[tuple[str, ...]] = ("text", "integer", "hex32")
    buckets: int
    seed: int = 42

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.int64(self, "buckets", minimum=1)
        checks.int64(self, "seed", minimum=0)

    def output_types(self, types: ColumnTypes) -> ColumnTypes:
        """Return ids."""
        return {
            output: ColumnType("id", found.is_list, found.max_length)
            for output, found in super().output_types(types).items()
        }

    def cardinalities(self, rows: Mapping[str, int], state: State | None) -> Mapping[str, int]:
        """Count the buckets and the missing value's id."""
        return dict.fromkeys(self.writes, self.buckets + 1)

    def transform(self, rows: Rows, state: State | None) -> Rows:
        """Compute 1 + hash mod buckets."""
        made = {}
        for name, output in self.pairs:
            array = rows.columns[name]
            ids = self._ids(hashes_of(array, self.seed))
            ids[is_missing(array)] = MISSING_ID
            made[output] = like(array, array_of(ids, are_ids=True))
        return rows.with_columns(made)

    def record_functions(self, types: ColumnTypes, state: State | None) -> Sequence[RecordFunction]:
        """Return functions of single values."""
        return [
            item_function(
                name,
                output,
                self._ids_of_digits if types[name].kind == "hex32" else self._ids_of_values,
                is_list=types[name].is_list,
            )
            for name, output in self.pairs
        ]

    def tensor_function(self, state: State | None, device: TensorDevice) -> TensorFunction:
        """Return 1 + hash mod buckets."""
        ids = methodcaller("bucket_ids", self.buckets, self.seed)
        return lambda block: {output: map_values(block.columns[name], ids) for name, output in self.pairs}

    def _ids(self, hashes: NDArray[np.int64]) -> NDArray[np.int64]:
        return hashes % self.buckets + 1

    def _ids_of_values(self, values: list[Any]) -> NDArray[np.int64]:
        ids = self._ids(xxh64_list(values, self.seed))
        if None in values or "" in values:
            ids[[value is None or value == "" for value in values]] = MISSING_ID
        return ids

    def _ids_of_digits(self, values: list[str | None]) -> NDArray[np.int64]:
        return self._ids_of_values([int(digits, 16) if digits else None for digits in values])


@register("given_ids")
@dataclass(frozen=True, kw_only=True)
class GivenIds(MappedColumns):
    """Integer -> the same number as an id or a key, for data whose ids are made already.

    Attributes:
        rows: Number of ids of each of `columns`, 0 <= id < rows, none missing; None: its integers are keys.
        max_length: The longest list where `columns` are lists; a longer one is invalid.
    """

    accepted: ClassVar[tuple[str, ...]] = ("integer",)
    may_reject: ClassVar[bool] = True
    keeps_values: ClassVar[bool] = True
    runs_on_tensors: ClassVar[bool] = True
    rows: tuple[int | None, ...]
    max_length: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.rows) != len(self.columns):
            checks.fail(self, "rows", f"{len(self.columns)} numbers, one for each of columns")
        for rows in self.rows:
            if rows is not None and (isinstance(rows, bool) or not isinstance(rows, int) or rows < 1):
                checks.fail(self, "rows", "an integer >= 1 or None for each of columns")
        if self.max_length is not None:
            checks.positive_int(self, "max_length")

    @property
    def max_list_length(self) -> int | None:
        """The longest list."""
        return self.max_length

    def output_types(self, types: ColumnTypes) -> ColumnTypes:
        """Return ids, or integers where there are keys; lists of at most `max_length`."""
        made: dict[str, ColumnType] = {}
        for (name, output), rows in zip(self.pairs, self.rows, strict=True):
            found = self.input_type(types, name)
            bounds = [bound for bound in (found.max_length, self.max_length) if bound is not None]
            longest = min(bounds, default=None) if found.is_list else None
            made[output] = ColumnType("integer" if rows is None else "id", found.is_list, longest)
        return made

    def cardinalities(self, rows: Mapping[str, int], state: State | None) -> Mapping[str, int]:
        """Return the provided numbers; keys have none."""
        return {output: rows for output, rows in zip(self.writes, self.rows, strict=True) if rows is not None}

    def transform(self, rows: Rows, state: State | None) -> Rows:
        """Check the numbers."""
        made = {}
        for (name, output), num_ids in zip(self.pairs, self.rows, strict=True):
            self._check_lengths(rows, name)
            array = rows.columns[name]
            if num_ids is not None:
                ids = numpy_values(flat(array))
                wrong = (ids < 0) | (ids >= num_ids) | is_missing(array)
                if wrong.any():
                    raise rejected(rows, name, wrong, accepted_id(num_ids))
                array = like(array, array_of(ids, are_ids=True))
            made[output] = array
        return rows.with_columns(made)

    def tensor_function(self, state: State | None, device: TensorDevice) -> TensorFunction:
        """Return a function that checks the numbers."""

        def call(block: TensorBlock) -> Mapping[str, DeviceColumn]:
            made = {}
            for (name, output), rows in zip(self.pairs, self.rows, strict=True):
                column = block.columns[name]
                if isinstance(column, Ragged) and self.max_length is not None:
                    long = column.offsets.diff() > self.max_length
                    block.reject(name, long, accepted_list(self.max_length), of_lengths=True)
                if rows is not None:
                    found = flat_values(column)
                    wrong = (found.values < 0) | (found.values >= rows) | found.is_missing()
                    block.reject(name, wrong, accepted_id(rows))
                    column = like_values(column, device.values("id", found.values))
                made[output] = column
            return made

        return call

    def _check_lengths(self, rows: Rows, name: str) -> None:
        offsets, most = list_offsets(rows.columns[name]), self.max_length
        if offsets is None or most is None:
            return
        lengths = np.diff(offsets)
        long = np.flatnonzero(lengths > most)
        if long.size:
            got = [f"got a list of {length}" for length in lengths[long][:REFUSED_SHOWN].tolist()]
            raise RowFaultError(name, rows.ids[long], got, accepted_list(most))

    def record_functions(self, types: ColumnTypes, state: State | None) -> Sequence[RecordFunction]:
        """Return functions that check Python integers."""
        return [
            RecordFunction((name,), (output,), partial(self._convert, rows), takes="values" if rows is None else "raw")
            for (name, output), rows in zip(self.pairs, self.rows, strict=True)
        ]

    def _convert(self, rows: int | None, values: Any) -> Sequence[Any]:
        items = flat_values(values)
        if rows is not None:
            for row, value in enumerate(items):
                if type(value) is not int or not 0 <= value < rows:
                    raise InvalidValueError(row)
            items = np.array(items, dtype=np.int64)
        most = self.max_length
        if most is not None and isinstance(values, Ragged) and max(map(len, each(values)), default=0) > most:
            raise InvalidValueError(0)
        return (like_values(values, items),)


def accepted_id(rows: int) -> str:
    """Describe one of `rows` ids."""
    return f"an id, 0 <= id < {rows}"


SEPARATOR = "\x1f"
_DIGITS = np.frombuffer(b"0123456789abcdef", dtype=np.uint8)
_SHIFTS = np.arange(28, -1, -4, dtype=np.uint32)


@register("cross")
@dataclass(frozen=True, kw_only=True)
class Cross(ColumnsOperator):
    r"""Several columns -> one text column: their values joined by ``"\x1f"``; a missing part is empty."""

    accepted: ClassVar[tuple[str, ...]] = ("text", "integer", "hex32")
    output: str

    def __post_init__(self) -> None:
        super().__post_init__()
        check_column(self, "output")
        if len(self.columns) < 2:
            checks.fail(self, "columns", "at least two column names")

    @property
    def writes(self) -> tuple[str, ...]:
        """Columns that the step adds or replaces."""
        return (self.output,)

    def output_types(self, types: ColumnTypes) -> ColumnTypes:
        """Return text."""
        for name in self.columns:
            if self.input_type(types, name).is_list:
                raise ConfigError(f"column {name!r}", f"holds {types[name]}, expected one value a row")
        return {self.output: ColumnType("text")}

    def transform(self, rows: Rows, state: State | None) -> Rows:
        """Join the values by the unit separator."""
        arrays = [rows.columns[name] for name in self.columns]
        joined = pc.binary_join_element_wise(*map(_texts, arrays), pa.scalar(SEPARATOR, pa.large_string()))
        all_missing = np.logical_and.reduce(list(map(is_missing, arrays)))
        if all_missing.any():
            joined = pc.if_else(pa.array(all_missing), pa.scalar(None, pa.large_string()), joined)
        return rows.with_columns({self.output: joined})

    def record_functions(self, types: ColumnTypes, state: State | None) -> Sequence[RecordFunction]:
        """Return functions of single values."""
        spell = [_SPELLINGS[types[name].kind] for name in self.columns]

        def call(*columns: list[Any]) -> Sequence[Any]:
            spelled = [[one(value) for value in values] for one, values in zip(spell, columns, strict=True)]
            return ([SEPARATOR.join(parts) if any(parts) else None for parts in zip(*spelled, strict=True)],)

        return [RecordFunction(self.columns, (self.output,), call)]


_SPELLINGS: Mapping[str, Callable[[Any], str]] = {
    "text": lambda text: text or "",
    "integer": lambda number: "" if number is None else str(number),
    "hex32": lambda digits: digits.lower().zfill(8) if digits else "",
}


def _texts(array: pa.Array) -> pa.LargeStringArray:
    """Return the values as text, "" where missing."""
    if kind_of(array) != "hex32":
        return array.cast(pa.large_string()).fill_null("")
    digits = _DIGITS[(numpy_values(array)[:, None] >> _SHIFTS) & np.uint32(15)]
    offsets = np.arange(0, 8 * len(array) + 1, 8, dtype=np.int64)
    return texts_of(np.ascontiguousarray(digits).reshape(-1), offsets, null_mask(array)).fill_null("")


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
    """Drops those of `columns` that have fewer than `min_distinct` values in the training part; missing is none."""

    stage: ClassVar[Stage] = "fitted"
    accepted: ClassVar[tuple[str, ...]] = ("text", "integer", "hex32", "id")
    min_distinct: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.positive_int(self, "min_distinct", minimum=2)

    @property
    def serving_reads(self) -> tuple[str, ...]:
        """Columns that the step reads when a record is served: what is dropped is never made."""
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
