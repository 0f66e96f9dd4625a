# SPDX-License-Identifier: Apache-2.0
"""Splits: which rows are for training, validation and test. Described in docs/workflows.md."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any, Literal, Self, TypeAlias

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from terarec.etl.columns import (
    LEFT_OUT,
    SPLIT_NAMES,
    TEST,
    TRAIN,
    VALID,
    Rows,
    is_missing,
    kind_of,
    numbers_of,
    numpy_values,
)
from terarec.etl.engine.left_out import map_list, splits_of
from terarec.etl.engine.passes import Passes, ReadRows
from terarec.etl.ops.values import hashes_of
from terarec.etl.source.blocks import RawBlock
from terarec.etl.source.source import Source
from terarec.etl.times import NANOSECONDS
from terarec.kernels.cpu.encoding import xxh64_int64
from terarec.spec import (
    LeaveOneOut,
    OneSplit,
    Split,
    SplitByFiles,
    SplitByFraction,
    SplitByHash,
    SplitByTime,
    SplitByUser,
)
from terarec.spec.checks import FieldError

_SHARE_BITS = 53
_HOLDBACK_FRACTION = 0.05
"""Share of the training text that waits until the rows are counted. Should the first lines be so much shorter than the
last ones that rows beyond the training part were observed, the pass is done again."""

EmptySplits: TypeAlias = Literal["raise", "allow"]
Assign: TypeAlias = Callable[[Rows], NDArray[np.uint8]]


@dataclass(frozen=True, kw_only=True, slots=True)
class RowBounds:
    """Splits by position: rows with ids from these on are for validation, and for test; ids end before `end`."""

    valid_from: int
    test_from: int
    end: int


@dataclass(frozen=True, kw_only=True, slots=True)
class TimeBounds:
    """Splits by time: rows later than these are for validation, and for test; infinite where there are none.

    They are numbers or integers of the column or, of times as the source has them, nanoseconds since 1970.
    """

    valid_after: float | int
    test_after: float | int


@dataclass(frozen=True, kw_only=True, slots=True)
class ListedRows:
    """Splits by row: those of the rows in the file `path` of `terarec.etl.engine.left_out`."""

    path: Path


Bounds: TypeAlias = RowBounds | TimeBounds | ListedRows


def assign(split: Split | None, bounds: Bounds | None) -> Assign:
    """Return the function that splits rows: uint8[n] for n rows.

    Args:
        split: Split of the workflow; None for training rows alone.
        bounds: Bounds that a phase found, where `needs_bounds`; passes before it do not split.
    """
    if split is None or isinstance(split, OneSplit):
        number = TRAIN if split is None else SPLIT_NAMES.index(split.split)
        return lambda rows: np.full(rows.num_rows, number, dtype=np.uint8)
    # By the id of a row and not by its values: equal rows are split by chance.
    if isinstance(split, SplitByHash):
        return lambda rows: _by_share(xxh64_int64(rows.ids, split.seed), split.valid, split.test)
    # By the hash of its user, so that all rows of one are in one split.
    if isinstance(split, SplitByUser):
        return lambda rows: _by_share(hashes(rows.columns[split.column], split.seed), split.valid, split.test)
    if isinstance(split, SplitByTime):
        return partial(_by_time, split, bounds)
    if isinstance(split, LeaveOneOut):
        return partial(splits_of, map_list(bounds.path if isinstance(bounds, ListedRows) else None), split)
    assert isinstance(bounds, RowBounds)
    return lambda rows: _marked(rows.ids >= bounds.valid_from, rows.ids >= bounds.test_from)


def share_counts(total: int, valid: float, test: float) -> tuple[int, int]:
    """Return the rows for validation and for test of `total` ones: rounded shares, at least 1 row for each above 0."""
    counts = [max(round(total * share), 1) if share > 0 else 0 for share in (valid, test)]
    return counts[0], counts[1]


def _by_share(hashes: NDArray[np.int64], valid: float, test: float) -> NDArray[np.uint8]:
    # The 53 bits that a float64 holds exactly: all 64 could round up to 1.
    uniform = (hashes.view(np.uint64) >> np.uint64(64 - _SHARE_BITS)) / float(1 << _SHARE_BITS)
    is_valid = uniform < valid
    return _marked(is_valid, (uniform < valid + test) & ~is_valid)


_FIRST, _LAST = np.iinfo(np.int64).min, np.iinfo(np.int64).max

OrderedTimes: TypeAlias = NDArray[np.float64] | NDArray[np.int64]
"""Numbers that are in the order of times."""


def _by_time(split: SplitByTime, bounds: Bounds | None, rows: Rows) -> NDArray[np.uint8]:
    times = times_of(rows, split.column)
    if isinstance(bounds, TimeBounds):
        return _marked(times > bounds.valid_after, times > bounds.test_after)
    unit = NANOSECONDS if split.column in rows.nanoseconds else 1
    valid, test = (_are_from(times, split.bound(name), unit) for name in ("valid_from", "test_from"))
    splits = _marked(valid, test)
    if split.train_from is not None:
        splits[~_are_from(times, split.bound("train_from"), unit)] = LEFT_OUT
    return splits


def _are_from(times: OrderedTimes, bound: Fraction | None, unit: int) -> NDArray[np.bool_]:
    """Return which times, of so many units a second, are at or after a bound, bool[n]; none without one."""
    if bound is not None and times.dtype != np.int64:
        return times >= float(bound)
    # Integers are at or after a bound if they are at or after the next one.
    first = _LAST + 1 if bound is None else max(math.ceil(bound * unit), _FIRST + 1)
    return times >= first if first <= _LAST else np.zeros(len(times), dtype=np.bool_)


def times_of(rows: Rows, name: str) -> OrderedTimes:
    """Return the times of a column, n numbers; missing ones before all others.

    They are int64 nanoseconds since 1970 of times as the source has them, of which those before 1678 or after 2261
    are equal; else the numbers of the column as float64, or its integers as int64.
    """
    array = rows.columns[name]
    if kind_of(array) == "number":
        times = numbers_of(array)
        return np.where(np.isnan(times), -np.inf, times)
    if name not in rows.nanoseconds:
        return np.where(is_missing(array), _FIRST, numpy_values(array))
    # Their product with nanoseconds would wrap around beyond int64.
    seconds = np.clip(numpy_values(array), _FIRST // NANOSECONDS + 1, _LAST // NANOSECONDS - 1)
    exact: NDArray[np.int64] = seconds * NANOSECONDS + rows.nanoseconds[name]
    return np.where(is_missing(array), _FIRST, exact)


def _marked(is_valid: NDArray[np.bool_], is_test: NDArray[np.bool_]) -> NDArray[np.uint8]:
    splits = np.where(is_valid, VALID, TRAIN).astype(np.uint8)
    # A row beyond the bound of test is beyond that of validation, too.
    splits[is_test] = TEST
    return splits


def hashes(array: pa.Array, seed: int) -> NDArray[np.int64]:
    """Return the hash of each value of an array, int64[n]; 0 for a missing one."""
    return np.where(is_missing(array), 0, hashes_of(array, seed))


def needs_bounds(split: Split | None) -> bool:
    """Return whether the rows, or their times, must be counted before they can be split."""
    # Thresholds name times themselves; only shares need those of all rows.
    by_share = isinstance(split, SplitByTime) and bool(split.valid or split.test)
    return by_share or isinstance(split, SplitByFraction | SplitByFiles | LeaveOneOut)


def find_bounds(
    split: Split,
    passes: Passes,
    preprocess: Callable[[ReadRows], Rows],
    directory: Path,
    empty_splits: EmptySplits = "raise",
) -> RowBounds | TimeBounds:
    """Count the sources for a `split` that needs bounds.

    Raises:
        ConfigError: Nothing would be left for training, or for another split that gets a share.
        OSError: The disk is full.
    """
    if isinstance(split, SplitByTime):
        # On the disk, since the times of all rows may not fit in memory.
        with OrderStatistics(directory / "times") as times:
            with closing(passes.map(lambda read: times_of(preprocess(read), split.column))) as times_of_blocks:
                for values in times_of_blocks:
                    times.add(values)
            return time_bounds(split, times.count, times.at, empty_splits)
    assert isinstance(split, SplitByFiles | SplitByFraction)
    return counted_bounds(split, passes, passes.count_rows())


def counted_bounds(split: SplitByFiles | SplitByFraction, passes: Passes, counts: Sequence[int]) -> RowBounds:
    """Return the bounds of the rows of sources whose files hold `counts` rows.

    Raises:
        ConfigError: Nothing would be left for training.
        FormatError: The same, and bad input at the beginning is the likely reason (policy "raise").
    """
    try:
        return row_bounds(split, counts, passes.item_bits)
    except FieldError:
        # Too few rows are often lines that do not parse: then this raises the error that says so.
        passes.read_first()
        raise


def row_bounds(split: SplitByFiles | SplitByFraction, counts: Sequence[int], item_bits: int) -> RowBounds:
    """Return the bounds of the split of files with these numbers of rows."""
    if isinstance(split, SplitByFiles):
        return _file_bounds(split, counts, item_bits)
    total = sum(counts)
    valid, test = share_counts(total, split.valid, split.test)
    check_shares(total - valid - test, total)
    return _shifted(total - valid - test, total - test, total, item_bits)


def _file_bounds(split: SplitByFiles, counts: Sequence[int], item_bits: int) -> RowBounds:
    if len(counts) <= split.valid + split.test:
        raise FieldError(
            "",
            "split",
            f"got {len(counts)} files of which {split.valid} are for validation and {split.test} for test, "
            "expected at least one more for training, or a split that takes all rows",
        )
    first_test = len(counts) - split.test
    others = sum(counts[: first_test - split.valid])
    # The last rows of the files before those for validation are for validation, too, where a share says so.
    training = others - share_counts(others, split.valid_fraction, 0.0)[0]
    check_shares(training, others)
    return _shifted(training, sum(counts[:first_test]), sum(counts), item_bits)


def _shifted(valid_from: int, test_from: int, end: int, item_bits: int) -> RowBounds:
    # The items of a row that a step cuts have ids from that of the row, shifted, on.
    return RowBounds(valid_from=valid_from << item_bits, test_from=test_from << item_bits, end=end << item_bits)


def time_bounds(
    split: SplitByTime, count: int, at: Callable[[int], float | int], empty_splits: EmptySplits
) -> TimeBounds:
    """Return the bounds of shares of rows."""
    valid, test = share_counts(count, split.valid, split.test)
    training = count - valid - test
    check_shares(training, count)
    valid_after, latest = at(training - 1), at(count - 1)
    # Without a share for test, no row is late enough for it.
    test_after = at(training + valid - 1) if test else math.inf
    splits = {"valid": (valid_after, min(test_after, latest)), "test": (test_after, latest)}
    # Rows of equal times stay together, which may leave nothing for a split.
    for name in named_splits(split)[1:] if empty_splits == "raise" else ():
        after, until = splits[name]
        if after >= until:
            raise empty_split(split, name, count)
    return TimeBounds(valid_after=valid_after, test_after=test_after)


def time_range(array: pa.Array) -> tuple[float, float]:
    """Return the least and the last of the times of an array, infinite if all are missing."""
    times = numbers_of(array)
    known = times[~np.isnan(times)]
    return float(known.min(initial=math.inf)), float(known.max(initial=-math.inf))


def named_splits(split: Split | None) -> tuple[str, ...]:
    """Return the splits that are to have rows."""
    if split is None:
        return ("train",)
    if isinstance(split, OneSplit):
        return (split.split,)
    if isinstance(split, LeaveOneOut):
        return SPLIT_NAMES

    def is_named(name: str) -> bool:
        has_share = any(getattr(split, field, 0) for field in (name, f"{name}_fraction"))
        return has_share or getattr(split, f"{name}_from", None) is not None

    return ("train", *filter(is_named, ("valid", "test")))


def check_splits(
    split: Split | None,
    rows: Mapping[str, int],
    time_range: Callable[[str], tuple[float, float]],
    limit: int | None = None,
) -> None:
    """Raise `ConfigError` if a split of `named_splits` has no rows."""
    for name in named_splits(split):
        if split is None or rows.get(name):
            continue
        total = sum(rows.values())
        if limit is not None:
            problem = f"got none of the first {total:,} rows for {name!r}, expected a limit above {limit:,}, or none"
            raise FieldError("", "split", f"{problem}, or {_ALLOWED}")
        # Thresholds may lie beyond all times, which the error then shows. Bounds of shares were counted.
        by_times = isinstance(split, SplitByTime) and not needs_bounds(split)
        times = time_range(split.column) if by_times and isinstance(split, SplitByTime) else None
        raise empty_split(split, name, total, times)


_ALLOWED = "empty_splits='allow' (--empty-splits allow)"


def empty_split(split: Split, name: str, rows: int, times: tuple[float, float] | None = None) -> FieldError:
    """Return the error that the split `name` gets none of so many `rows`, with what to ask instead."""
    if isinstance(split, SplitByTime) and times is not None:
        names = (*(["train_from"] if split.train_from is not None else []), "valid_from", "test_from")
        reason = ", ".join(f"{name} {getattr(split, name)!r}" for name in names)
        reason = f"{reason}, where {split.column!r} is from {times[0]!r} to {times[1]!r}"
        advice = "thresholds between these, or one split for all rows (--split)"
    elif isinstance(split, SplitByTime):
        reason = f"rows of equal {split.column!r} stay together, in the earlier part"
        advice = "finer times, a larger share, thresholds (valid_from, test_from), or by_fraction"
    elif isinstance(split, SplitByUser):
        reason, advice = f"all rows of a {split.column!r} are in one split", "more of them, a larger share, or by_hash"
    elif isinstance(split, LeaveOneOut):
        reason = f"no {split.column!r} has {split.min_rows} rows with a {split.order!r}"
        advice = f"more rows of each {split.column!r}, or another split"
    elif isinstance(split, SplitByHash):
        reason, advice = "each row is in a split by chance", "more rows, a larger share, or by_fraction"
    else:
        reason = "the steps leave out all of its rows, or they are bad input"
        advice = "other files or shares, or one split for all rows (--split)"
    return FieldError(
        "", "split", f"got none of {rows:,} rows for {name!r}: {reason}; expected {advice}, or {_ALLOWED}"
    )


def check_shares(training: int, total: int) -> None:
    """Raise `ConfigError` if none of `total` rows is left for training."""
    if total < 1:
        raise FieldError(
            "", "split", "got no rows: all are bad input, or the steps leave them out; expected at least one"
        )
    if training < 1:
        raise FieldError("", "split", f"leaves {max(training, 0)} of {total} rows for training, expected at least one")


class TrainingPrefix:
    """Blocks that are surely for training; iterating reads the source to its end and counts all rows.

    Attributes:
        counts: Rows of each file.
        last: Last block that was yielded.
        end: Rows up to its end.
        skipped_bytes: Bytes of the blocks that were not yielded.
    """

    def __init__(self, source: Source, split: SplitByFiles | SplitByFraction) -> None:
        self.counts = [0] * len(source.files)
        self.last: RawBlock | None = None
        self.end = self.skipped_bytes = 0
        self._source = source
        self._split = split

    def __iter__(self) -> Iterator[RawBlock]:
        read = 0
        for raw in self._source.raw_blocks():
            # All blocks are counted, but only those that are yielded are parsed.
            self.counts[raw.file] += raw.num_rows
            read += raw.read_bytes
            if self._is_training(raw, read):
                self.last, self.end = raw, raw.first_row + raw.num_rows
                yield raw
            else:
                self.skipped_bytes += raw.read_bytes

    def _is_training(self, raw: RawBlock, read: int) -> bool:
        split, files, training = self._split, self._source.files, 1.0
        if isinstance(split, SplitByFiles):
            files = files[: len(files) - split.valid - split.test]
            # Whole files are for training: no count can change that.
            if not split.valid_fraction:
                return raw.file < len(files)
            training -= split.valid_fraction
        else:
            training -= split.valid + split.test
        # By bytes: the number of all rows is known when the last block has been read.
        return read <= (1 - _HOLDBACK_FRACTION) * training * sum(file.bytes for file in files)


def bounds_to_data(bounds: RowBounds | TimeBounds) -> dict[str, Any]:
    """Return `bounds` as JSON."""
    # As text, since a bound may be infinite, which JSON cannot hold; repr gives the same bits back.
    return {name: repr(value) for name, value in dataclasses.asdict(bounds).items()}


def bounds_from_data(data: Mapping[str, str]) -> RowBounds | TimeBounds:
    """Return the bounds that `bounds_to_data` wrote."""
    if "valid_from" in data:
        return RowBounds(**{name: int(value) for name, value in data.items()})
    return TimeBounds(valid_after=_number(data["valid_after"]), test_after=_number(data["test_after"]))


def _number(text: str) -> float | int:
    # An integer of 64 bits is no float64.
    return int(text) if text.lstrip("-").isdecimal() else float(text)


_CHUNK = 1 << 20
# Counts of 32 bits at once would take two passes in place of four, and 32 GiB.
_DIGIT_BITS = 16
_KEY_BITS = 64


class OrderStatistics:
    """Numbers in a file, 8 bytes each, of which those of given ranks are found in four passes.

    Args:
        path: File to make; it is removed at the end of the block.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("w+b")
        self._dtype: np.dtype[Any] = np.dtype(np.float64)
        self.count = 0

    def add(self, values: OrderedTimes) -> None:
        """Append ``values[n]``, none of them NaN; all are of one type."""
        self._dtype = values.dtype
        self._file.write(values.tobytes())
        self.count += len(values)

    def at(self, rank: int) -> float | int:
        """Return the number with exactly `rank` others before it in rising order."""

        def count(digits: int, shift: int) -> NDArray[np.int64]:
            counts = np.zeros(1 << _DIGIT_BITS, dtype=np.int64)
            for keys in self._keys():
                counts += digit_counts(digits, shift, keys)
            return counts

        return number_at(rank, count, self._dtype)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
        self._path.unlink(missing_ok=True)

    def _keys(self) -> Iterator[NDArray[np.uint64]]:
        self._file.seek(0)
        while content := self._file.read(8 * _CHUNK):
            yield sort_keys(np.frombuffer(content, dtype=self._dtype))


def sort_keys(values: OrderedTimes) -> NDArray[np.uint64]:
    """Return unsigned integers in the order of the numbers: of floats below 0 all bits are flipped, else the sign."""
    sign = np.uint64(1 << 63)
    if values.dtype == np.int64:
        return values.view(np.uint64) ^ sign
    bits = (values + 0.0).view(np.uint64)  # one zero instead of two
    return np.where(bits & sign != 0, ~bits, bits | sign)


def digit_counts(
    prefix: int, shift: int, keys: NDArray[np.uint64], rows: NDArray[np.int64] | None = None
) -> NDArray[np.int64]:
    """Return how many of `keys`, whose digits above those at bit `shift` are those of `prefix`, have each digit there.

    Args:
        prefix: Higher digits.
        shift: Lowest bit of the digits to count.
        keys: Keys of `sort_keys`.
        rows: Number of occurrences of each key; None for one each.
    """
    # The highest digit has no digits above it, and a shift by all 64 bits is undefined.
    above = np.uint64(shift + _DIGIT_BITS)
    if above < _KEY_BITS:
        same = keys >> above == np.uint64(prefix) >> above
        keys, rows = keys[same], None if rows is None else rows[same]
    digits = keys >> np.uint64(shift) & np.uint64((1 << _DIGIT_BITS) - 1)
    return np.bincount(digits.astype(np.int64), rows, 1 << _DIGIT_BITS).astype(np.int64)


def number_at(rank: int, count: Callable[[int, int], NDArray[np.int64]], dtype: np.dtype[Any]) -> float | int:
    """Return the number with exactly `rank` others before it, whose key is found digit by digit from the highest.

    Args:
        rank: Number of lower numbers.
        count: Function that returns the `digit_counts` of all keys.
        dtype: Type of the numbers, float64 or int64.
    """
    digits = 0
    for shift in range(_KEY_BITS - _DIGIT_BITS, -1, -_DIGIT_BITS):
        counts = count(digits, shift)
        # The first digit up to which there are more than `rank` numbers, which passes over digits without any.
        digit = int(np.searchsorted(np.cumsum(counts), rank, side="right"))
        # From here on the rank is one among the numbers with these digits.
        rank -= int(counts[:digit].sum())
        digits |= digit << shift
    # The inverse of `sort_keys`.
    key, sign = np.array([digits], dtype=np.uint64), np.uint64(1 << 63)
    if dtype == np.int64:
        return int((key ^ sign).view(np.int64)[0])
    return float(np.where(key & sign != 0, key & ~sign, ~key).view(np.float64)[0])
