"""What must be counted before rows can be split: a phase of its own, before all that learns."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from terarec.etl.columns import Block
from terarec.etl.engine.order_statistics import OrderStatistics
from terarec.etl.engine.passes import Passes, ReadRows
from terarec.etl.engine.splits import Bounds, RowBounds, TimeBounds, share_counts, times_of
from terarec.spec import FieldError, Split, SplitByFiles, SplitByFraction, SplitByTime


def needs_bounds(split: Split | None) -> bool:
    """Whether the sources must be counted for `split`."""
    by_share = isinstance(split, SplitByTime) and bool(split.valid or split.test)
    return by_share or isinstance(split, SplitByFraction | SplitByFiles)


def find_bounds(split: Split, passes: Passes, enter: Callable[[ReadRows], Block], directory: Path) -> Bounds:
    """Count what `split`, one of those that `needs_bounds`, has to know.

    Args:
        split: of the workflow.
        passes: the sources.
        enter: gives the rows that take part.
        directory: for a file of the rows' times.

    Raises:
        ConfigError: nothing would be left for training.
        OSError: the disk is full.
    """
    if isinstance(split, SplitByTime):
        return _time_bounds(split, passes, enter, directory / "times")
    assert isinstance(split, SplitByFiles | SplitByFraction)
    return counted_bounds(split, passes, passes.count_rows())


def counted_bounds(split: SplitByFiles | SplitByFraction, passes: Passes, counts: Sequence[int]) -> RowBounds:
    """The bounds of the rows of sources whose files hold so many.

    Raises:
        ConfigError: nothing would be left for training.
        FormatError: the same, and with the policy "raise" there is bad input at the beginning, which tells more.
    """
    try:
        return _row_bounds(split, counts, passes.item_bits)
    except FieldError:
        passes.read_first()
        raise


def _row_bounds(split: SplitByFiles | SplitByFraction, counts: Sequence[int], item_bits: int) -> RowBounds:
    if isinstance(split, SplitByFiles):
        return _file_bounds(split, counts, item_bits)
    total = sum(counts)
    valid, test = share_counts(total, split.valid, split.test)
    _check_training(total - valid - test, total)
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
    training = others - share_counts(others, split.valid_fraction, 0.0)[0]
    _check_training(training, others)
    return _shifted(training, sum(counts[:first_test]), sum(counts), item_bits)


def _shifted(valid_from: int, test_from: int, end: int, item_bits: int) -> RowBounds:
    return RowBounds(valid_from=valid_from << item_bits, test_from=test_from << item_bits, end=end << item_bits)


def _time_bounds(split: SplitByTime, passes: Passes, enter: Callable[[ReadRows], Block], path: Path) -> TimeBounds:
    def work(rows: ReadRows) -> NDArray[np.float64]:
        return times_of(enter(rows).columns[split.column])

    with OrderStatistics(path) as times:
        with closing(passes.map(work)) as found:
            for values in found:
                times.add(values)
        valid, test = share_counts(times.count, split.valid, split.test)
        training = times.count - valid - test
        _check_training(training, times.count)
        return TimeBounds(
            valid_after=times.at(training - 1),
            test_after=times.at(training + valid - 1) if test else math.inf,
        )


def _check_training(training: int, total: int) -> None:
    if training < 1:
        raise FieldError("", "split", f"leaves {max(training, 0)} of {total} rows for training, expected at least one")


def bounds_to_data(bounds: Bounds) -> dict[str, Any]:
    """`bounds` as JSON; the opposite of `bounds_from_data`."""
    return {name: repr(value) for name, value in dataclasses.asdict(bounds).items()}


def bounds_from_data(data: Mapping[str, str]) -> Bounds:
    """What `bounds_to_data` was given."""
    if "valid_from" in data:
        return RowBounds(**{name: int(value) for name, value in data.items()})
    return TimeBounds(valid_after=float(data["valid_after"]), test_after=float(data["test_after"]))
