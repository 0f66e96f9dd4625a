"""Which split each row belongs to. Described in docs/workflows.md."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from terarec.errors import ConfigError
from terarec.etl.columns import SPLIT_NAMES, TEST, TRAIN, VALID
from terarec.etl.ops.base import operators
from terarec.etl.ops.lists import ITEM_BITS
from terarec.etl.spark.expressions import ROW, column, hashed
from terarec.etl.spark.ranks import values_at
from terarec.spec import OneSplit, SplitByFiles, SplitByFraction, SplitByHash, SplitByTime, SplitByUser, WorkflowSpec

_SHARE_BITS = 53


@dataclass(frozen=True, slots=True)
class _Parts:
    """Conditions that a row is for validation, and for test; those for test go first."""

    valid: Column
    test: Column

    def column(self) -> Column:
        return F.when(self.test, TEST).when(self.valid, VALID).otherwise(TRAIN).cast("int")


def split_column(spec: WorkflowSpec, rows: DataFrame, file_rows: Sequence[int]) -> Column:
    """The split of each of `rows`, which the row steps have left.

    Args:
        spec: the workflow.
        rows: have row ids and the column that splits them.
        file_rows: rows of each file before any step.

    Raises:
        ConfigError: nothing would be left for training.
    """
    split = spec.split
    bits = ITEM_BITS if any(step.explodes for step in operators(spec.steps)) else 0
    if split is None or isinstance(split, OneSplit):
        return F.lit(TRAIN if split is None else SPLIT_NAMES.index(split.split)).cast("int")
    if isinstance(split, SplitByFiles):
        return _by_files(split, file_rows, bits)
    if isinstance(split, SplitByFraction):
        total = sum(file_rows)
        valid, test = _share_counts(total, split.valid, split.test)
        return _from_rows((total - valid - test) << bits, (total - test) << bits)
    if isinstance(split, SplitByTime):
        return _by_time(split, rows)
    if isinstance(split, SplitByHash):
        return _by_share(hashed(F.col(ROW), split.seed), split)
    user = column(split.column)
    return _by_share(F.when(user.isNull(), F.lit(0).cast("bigint")).otherwise(hashed(user, split.seed)), split)


def _from_rows(valid_from: int, test_from: int) -> Column:
    return _Parts(F.col(ROW) >= valid_from, F.col(ROW) >= test_from).column()


def _by_files(split: SplitByFiles, file_rows: Sequence[int], bits: int) -> Column:
    first_test = len(file_rows) - split.test
    first_valid = first_test - split.valid
    if first_valid < 1:
        raise ConfigError(
            f"split: got {len(file_rows)} files of which {split.valid} are for validation and {split.test} for test, "
            "expected at least one more for training, or a split that takes all rows"
        )
    others = sum(file_rows[:first_valid])
    training = others - _share_counts(others, split.valid_fraction, 0.0)[0]
    return _from_rows(training << bits, sum(file_rows[:first_test]) << bits)


def _by_share(hashes: Column, split: SplitByHash | SplitByUser) -> Column:
    uniform = F.shiftrightunsigned(hashes, 64 - _SHARE_BITS).cast("double") / float(1 << _SHARE_BITS)
    is_valid = uniform < split.valid
    return _Parts(is_valid, (uniform < split.valid + split.test) & ~is_valid).column()


def _by_time(split: SplitByTime, rows: DataFrame) -> Column:
    times = F.coalesce(column(split.column).cast("double"), F.lit(-math.inf))
    if not (split.valid or split.test):
        never = F.lit(False)
        return _Parts(
            never if split.valid_from is None else times >= split.valid_from,
            never if split.test_from is None else times >= split.test_from,
        ).column()
    absent = F.sum(column(split.column).isNull().cast("bigint"))
    ((total, missing),) = rows.agg(F.count("*"), absent).collect()
    valid, test = _share_counts(total, split.valid, split.test)
    ranks = [total - valid - test - 1, total - test - 1]  # of the last rows for training, and before those for test
    present = sorted({rank - missing for rank in ranks if rank >= missing})
    known = dict(zip(present, values_at(rows.where(times > -math.inf), times, present), strict=True))
    valid_after, test_after = (known.get(rank - missing, -math.inf) for rank in ranks)
    return _Parts(times > valid_after, times > test_after if test else F.lit(False)).column()


def _share_counts(total: int, valid: float, test: float) -> tuple[int, int]:
    """Rows for validation and for test of `total` ones: the rounded shares, at least one row for a share above 0."""
    counts = [max(round(total * share), 1) if share > 0 else 0 for share in (valid, test)]
    if total - sum(counts) < 1:
        raise ConfigError(f"split: leaves {total - sum(counts)} of {total} rows for training, expected at least one")
    return counts[0], counts[1]
