"""Which split each row belongs to. Described in docs/workflows.md."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from terarec.etl.columns import SPLIT_NAMES, TEST, TRAIN, VALID, Block, Column, text_buffers
from terarec.kernels.cpu.hashes import xxh64_int64, xxh64_text
from terarec.spec import OneSplit, Split, SplitByHash, SplitByTime, SplitByUser

_SHARE_BITS = 53

Assign: TypeAlias = Callable[[Block], NDArray[np.uint8]]


@dataclass(frozen=True, kw_only=True, slots=True)
class RowBounds:
    """Splits by position: rows with ids from these on are for validation, and for test; ids end before `end`."""

    valid_from: int
    test_from: int
    end: int


@dataclass(frozen=True, kw_only=True, slots=True)
class TimeBounds:
    """Splits by time: rows later than these are for validation, and for test; infinite where there are none."""

    valid_after: float
    test_after: float


Bounds: TypeAlias = RowBounds | TimeBounds


def assign(split: Split | None, bounds: Bounds | None) -> Assign:
    """The function that gives uint8[n] for a block of n rows.

    Args:
        split: of the workflow; None for training rows alone.
        bounds: what had to be counted for it; see `terarec.etl.engine.bounds`.
    """
    if split is None or isinstance(split, OneSplit):
        number = TRAIN if split is None else SPLIT_NAMES.index(split.split)
        return lambda block: np.full(block.num_rows, number, dtype=np.uint8)
    if isinstance(split, SplitByHash):
        return lambda block: _by_share(xxh64_int64(block.rows, split.seed), split.valid, split.test)
    if isinstance(split, SplitByUser):
        return lambda block: _by_share(hashes(block.columns[split.column], split.seed), split.valid, split.test)
    if isinstance(split, SplitByTime):
        return lambda block: _by_time(block.columns[split.column], split, bounds)
    assert isinstance(bounds, RowBounds)
    return lambda block: _marked(block.rows >= bounds.valid_from, block.rows >= bounds.test_from)


def share_counts(total: int, valid: float, test: float) -> tuple[int, int]:
    """Rows for validation and for test of `total` ones: the rounded shares, at least one row for a share above 0."""
    counts = [max(round(total * share), 1) if share > 0 else 0 for share in (valid, test)]
    return counts[0], counts[1]


def _by_share(hashes: NDArray[np.int64], valid: float, test: float) -> NDArray[np.uint8]:
    uniform = (hashes.view(np.uint64) >> np.uint64(64 - _SHARE_BITS)) / float(1 << _SHARE_BITS)
    is_valid = uniform < valid
    return _marked(is_valid, (uniform < valid + test) & ~is_valid)


def _by_time(column: Column, split: SplitByTime, bounds: Bounds | None) -> NDArray[np.uint8]:
    times = times_of(column)
    if isinstance(bounds, TimeBounds):
        return _marked(times > bounds.valid_after, times > bounds.test_after)
    valid_from = math.inf if split.valid_from is None else split.valid_from
    test_from = math.inf if split.test_from is None else split.test_from
    return _marked(times >= valid_from, times >= test_from)


def times_of(column: Column) -> NDArray[np.float64]:
    """The times of a column as float64[n]; missing ones before all others."""
    times = np.asarray(column.values, dtype=np.float64)
    return np.where(column.is_missing(), -np.inf, times)


def _marked(is_valid: NDArray[np.bool_], is_test: NDArray[np.bool_]) -> NDArray[np.uint8]:
    splits = np.where(is_valid, VALID, TRAIN).astype(np.uint8)
    splits[is_test] = TEST
    return splits


def hashes(column: Column, seed: int) -> NDArray[np.int64]:
    """The hash of each value of a column, int64[n]; 0 for a missing one."""
    if column.type == "text":
        found = xxh64_text(*text_buffers(column.values), seed)
    else:
        found = xxh64_int64(np.asarray(column.values, dtype=np.int64), seed)
    return np.where(column.is_missing(), 0, found)
