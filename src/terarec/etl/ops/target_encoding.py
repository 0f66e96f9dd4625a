# SPDX-License-Identifier: Apache-2.0
"""Target encoding: values -> mean of the target in the training rows with this value."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeAlias

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from typing_extensions import override

from terarec.errors import FormatError
from terarec.etl.columns import TRAIN, ColumnType, Rows, array_of, numbers_of
from terarec.etl.ops.base import ColumnTypes, MappedColumns, Stage, scalar_input
from terarec.etl.ops.fitted_params import check_counts, decode_state
from terarec.etl.ops.states import (
    SpillOptions,
    State,
    Statistic,
    exact_sum,
    read_params,
    read_table,
    table_path,
    write_params,
    write_table,
)
from terarec.etl.ops.values import RecordFunction, item_function
from terarec.etl.partitions import sums_by_value
from terarec.etl.values import VALUE_TYPES, ValueIds, encoding_bytes, lookup_values
from terarec.kernels.cpu.encoding import HASH_SEED, xxh64_int64
from terarec.spec import checks
from terarec.spec.registry import register


class TargetMeans:
    """Fitted means of one column.

    Attributes:
        rows: Columns value (null: missing), fold (int32), count (int64) and sum (float64, of the target).
        ids: Ids of the values.
        encoded: float64[folds + 1, ids]; row f is without the rows of fold f, the last one is of all.
    """

    def __init__(self, rows: pa.Table, totals: FoldTotals, smoothing: float) -> None:
        self.rows = rows
        values = rows.column("value").combine_chunks()
        self.ids = ValueIds(VALUE_TYPES[values.type], values.drop_null().unique())
        folds = len(totals.counts)
        place = (rows.column("fold").to_numpy(), self.ids.find(values))
        counts, sums = np.zeros((folds, self.ids.num_ids)), np.zeros((folds, self.ids.num_ids))
        counts[place], sums[place] = rows.column("count").to_numpy(), rows.column("sum").to_numpy()
        self.encoded = np.empty((folds + 1, self.ids.num_ids))
        for left_out in range(folds + 1):
            # Summed again and not by subtraction, which would leave a trace of the fold in the last bits.
            others = [fold for fold in range(folds) if fold != left_out]
            weight = counts[others].sum(axis=0) + smoothing
            prior = totals.prior(others)
            # The value of ids without any row in the other folds, and without smoothing.
            shares = np.full(self.ids.num_ids, prior)
            np.divide(sums[others].sum(axis=0) + smoothing * prior, weight, out=shares, where=weight > 0.0)
            self.encoded[left_out] = shares

    def encode_values(self, values: list[Any] | NDArray[np.int64]) -> NDArray[np.float64]:
        """Encode n Python values of rows outside the training part, float64[n]."""
        return np.asarray(self.encoded[-1, self.ids.find_values(values)])


@dataclass(frozen=True, slots=True)
class FoldTotals:
    """The target in each fold: how many rows have one, and their sum."""

    counts: tuple[int, ...]
    sums: tuple[float, ...]

    def prior(self, folds: list[int]) -> float:
        """Return the mean of the target in these folds, 0 where they are empty."""
        count = sum(self.counts[fold] for fold in folds)
        return sum(self.sums[fold] for fold in folds) / count if count else 0.0


@dataclass(frozen=True, slots=True)
class TargetEncodings:
    """State of `TargetEncoding`: the target in each fold, and input column -> its means."""

    totals: FoldTotals
    columns: Mapping[str, TargetMeans]

    def save(self, directory: Path, name: str) -> None:
        """Write ``<name>.json``, the target in each fold, and ``<name>-<column>.parquet``, `TargetMeans.rows`."""
        totals = {"count": self.totals.counts, "sum": self.totals.sums}
        write_params(directory, name, TargetEncoding.kind, totals)
        for column, means in self.columns.items():
            write_table(table_path(directory, name, column), means.rows)


@register("target_encoding")
@dataclass(frozen=True, kw_only=True)
class TargetEncoding(MappedColumns):
    """Value -> (sum of the target + smoothing * prior) / (count + smoothing), the prior being the target's mean.

    Training rows take sum and count without the rows of their own fold; other rows, and records served, take all.

    Attributes:
        target: A number or integer column; never read at serving.
        folds: Number of folds; a row's fold is ``hash(row id) mod folds``.
        smoothing: Number of values that the prior counts for.
        seed: Seed of that hash.
    """

    stage: ClassVar[Stage] = "fitted"
    accepted: ClassVar[tuple[str, ...]] = ("text", "integer", "hex32", "id")
    target: checks.ColumnName
    folds: Annotated[int, checks.whole(2, checks.MOST_WIDTH)] = 5
    smoothing: checks.NonNegative = 20.0
    seed: checks.NonNegativeInt64 = HASH_SEED

    @property
    @override
    def reads(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((*self.columns, self.target)))

    @override
    def output_types(self, types: ColumnTypes) -> ColumnTypes:
        for name in self.columns:
            scalar_input(types, name, self.accepted)
        scalar_input(types, self.target, ("number", "integer"))
        return dict.fromkeys(self.writes, ColumnType("number"))

    @override
    def cardinalities(self, rows: Mapping[str, int], state: State | None) -> Mapping[str, int]:
        return {}

    def folds_of(self, rows: Rows) -> NDArray[np.int64]:
        """Return the fold of each row, int64[n]."""
        # NumPy's remainder has the sign of the divisor, so a negative hash has a fold, too.
        return xxh64_int64(rows.ids, self.seed) % self.folds

    @override
    def transform(self, rows: Rows, state: State | None) -> Rows:
        # Training rows without their own fold, others by all folds.
        assert isinstance(state, TargetEncodings)
        # The last row of `encoded`, which is of all folds.
        view = np.full(rows.num_rows, self.folds)
        if rows.split is not None:
            view = np.where(rows.split == TRAIN, self.folds_of(rows), view)
        outputs = {}
        for name, output in self.pairs:
            means = state.columns[name]
            outputs[output] = array_of(means.encoded[view, means.ids.find(rows.columns[name])])
        return rows.with_columns(outputs)

    @override
    def record_functions(self, types: ColumnTypes, state: State | None) -> Sequence[RecordFunction]:
        assert isinstance(state, TargetEncodings)
        return [
            item_function(name, output, state.columns[name].encode_values, is_list=False, takes="raw")
            for name, output in self.pairs
        ]

    @override
    def statistic(self, types: ColumnTypes, memory: SpillOptions) -> TargetStatistic:
        return TargetStatistic(self, types, memory)

    @override
    def load_state(self, directory: Path, name: str) -> TargetEncodings:
        params = read_params(directory, name, self.kind)
        totals = _read_totals(directory / f"{name}.json", params, self.folds)
        columns = {}
        for column in self.columns:
            path = table_path(directory, name, column)
            types = {"fold": (pa.int32(),), "count": (pa.int64(),), "sum": (pa.float64(),)}
            rows = read_table(path, {"value": tuple(VALUE_TYPES), **types}, nullable=("value",))
            folds = rows.column("fold").to_numpy()
            if len(folds) and not 0 <= folds.min() <= folds.max() < self.folds:
                raise FormatError(path, f"got fold {folds.max()}, expected 0 <= fold < {self.folds}")
            check_counts(rows, path)
            columns[column] = TargetMeans(rows, totals, self.smoothing)
        return TargetEncodings(totals, columns)


@dataclass(frozen=True, kw_only=True)
class _Totals(checks.Checked):
    """Samples and sum of the target of each fold, as in the file."""

    count: Annotated[tuple[int, ...], checks.list_of(checks.integer(0, checks.MOST))]
    sum: Annotated[tuple[float, ...], checks.list_of(checks.number())]


def _read_totals(path: Path, params: Mapping[str, object], folds: int) -> FoldTotals:
    totals = decode_state(_Totals, dict(params), f"{path}: $.state")
    if not len(totals.count) == len(totals.sum) == folds:
        problem = f"got {len(totals.count)} counts and {len(totals.sum)} sums, expected those of {folds} folds"
        raise FormatError(f"{path}: $.state", problem)
    return FoldTotals(totals.count, totals.sum)


_Partial: TypeAlias = tuple[Mapping[str, pa.Table], list[tuple[int, Fraction]]]


class TargetStatistic(Statistic):
    """Sums the target by value and fold."""

    def __init__(self, op: TargetEncoding, types: ColumnTypes, memory: SpillOptions) -> None:
        self._op = op
        self._memory_bytes = memory.memory_bytes
        numbers = {"fold": pa.int32(), "count": pa.int64(), "sum": pa.float64()}
        columns = {name: types[name] for name in op.columns}
        self._sums = sums_by_value(
            columns, numbers, {"count": "sum", "sum": "sum"}, memory.directory, self._memory_bytes
        )
        self._counts = [0] * op.folds
        self._totals = [Fraction(0)] * op.folds

    @override
    def observe(self, rows: Rows) -> _Partial:
        target = numbers_of(rows.columns[self._op.target])
        present = ~np.isnan(target)
        folds = self._op.folds_of(rows)
        totals = []
        for fold in range(self._op.folds):
            numbers = target[present & (folds == fold)]
            # Exact, as they are added up by block: the prior depends on no order.
            totals.append((len(numbers), exact_sum(numbers)))
        mask = pa.array(present)
        shared = {"fold": pa.array(folds.astype(np.int32)), "count": pa.array(present.astype(np.int64))}
        by_value = {
            name: pa.table({"value": lookup_values(rows.columns[name]), **shared, "sum": target}).filter(mask)
            for name in self._op.columns
        }
        return by_value, totals

    @override
    def merge(self, partial: _Partial) -> None:
        rows, totals = partial
        self.merge_rows(rows)
        self.merge_rest(totals)

    # Sums of floats depend on the order: on a cluster, too, rows are added in that of the sources.
    in_order = True

    def split(self, partial: _Partial) -> _Partial:
        """Return the rows by value, and the sums of the target in each fold."""
        return partial

    def merge_rest(self, rest: list[tuple[int, Fraction]]) -> None:
        """Add the sums of the target in each fold."""
        for fold, (count, total) in enumerate(rest):
            self._counts[fold] += count
            self._totals[fold] += total

    def merge_rows(self, rows: Mapping[str, pa.Table]) -> None:
        """Add rows by value, or the sums of values."""
        for name, table in rows.items():
            self._sums[name].add(table)

    def reduced(self, name: str) -> pa.Table:
        """Return the sums of the values of column `name`."""
        return self._sums[name].sums()

    @override
    def finish(self) -> TargetEncodings:
        """Return the encodings.

        Raises:
            StorageError: They would not fit in memory; names the column, its size, and what helps.
            OSError: The disk is full.
        """
        totals = FoldTotals(tuple(self._counts), tuple(map(float, self._totals)))
        columns, left = {}, self._memory_bytes
        for name, sums in self._sums.items():
            rows = sums.result(lambda rows: rows, left)
            left = None if left is None else left - encoding_bytes(rows)
            columns[name] = TargetMeans(rows, totals, self._op.smoothing)
        return TargetEncodings(totals, columns)
