# SPDX-License-Identifier: Apache-2.0
"""Splits of rows, and the order statistics that bound splits by time."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from terarec.etl import prepare
from terarec.etl.columns import LEFT_OUT, Rows, array_of, is_missing
from terarec.etl.dry_run import preview
from terarec.etl.engine import split
from terarec.etl.engine.split import OrderStatistics, RowBounds, TimeBounds, assign, named_splits, share_counts
from terarec.etl.ops import FillMissing, KeepRows
from terarec.etl.workflow import Workflow
from terarec.spec import (
    LabelSpec,
    LeaveOneOut,
    PrepareOptions,
    SourceColumn,
    SourceSpec,
    Split,
    SplitByFiles,
    SplitByFraction,
    SplitByHash,
    SplitByTime,
    SplitByUser,
)
from terarec.spec.checks import FieldError
from tests.errors import at
from tests.etl.engine.contents import read_split
from tests.etl.engine.logs import SOURCE
from tests.kernels.plain_encoding import xxh64
from tests.params import examples


@settings(max_examples=examples(30), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.floats(allow_nan=False), min_size=1, max_size=60), st.data())
def test_order_statistics_equal_sorting(tmp_path: Path, values: list[float], data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, len(values) - 1))
    with OrderStatistics(tmp_path / "numbers") as numbers:
        for start in range(0, len(values), 7):
            numbers.add(np.array(values[start : start + 7]))
        assert numbers.count == len(values)
        assert numbers.at(rank) == sorted(values)[rank]
    assert not (tmp_path / "numbers").exists()


def test_more_numbers_than_are_read_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(split, "_CHUNK", 10)
    values = np.random.default_rng(0).normal(size=1000)
    with OrderStatistics(tmp_path / "numbers") as numbers:
        numbers.add(values)
        assert [numbers.at(rank) for rank in (0, 500, 999)] == np.sort(values)[[0, 500, 999]].tolist()


def block(rows: int = 1000, **columns: pa.Array) -> Rows:
    """A block without splits."""
    return Rows(columns, np.arange(rows))


def uniform(data: bytes, seed: int) -> float:
    """The share of a hash, by the formula of docs/workflows.md."""
    return ((xxh64(data, seed) >> 11) % 2**53) / 2**53


def by_share(value: float, valid: float, test: float) -> int:
    """The split of a row."""
    return 1 if value < valid else 2 if value < valid + test else 0


def write_times(path: Path, times: list[int]) -> Path:
    path.write_text("".join(f"{row % 2}\t{time}\tu{row % 3}\t{row}\t1\t\n" for row, time in enumerate(times)))
    return path


EMPTY: list[tuple[Split, list[int]]] = [
    (SplitByTime(column="time", valid=0.1), [5] * 40),
    (SplitByTime(column="time", valid=0.1, test=0.1), [5] * 20 + [6] * 20),
    (SplitByTime(column="time", valid_from=100.0), list(range(40))),
    (SplitByTime(column="time", valid_from=10.0, test_from=100.0), list(range(40))),
    (SplitByTime(column="time", test_from=-1.0), list(range(40))),
    (SplitByHash(valid=0.001), list(range(40))),
    (SplitByUser(column="user", valid=0.01), list(range(40))),
    (LeaveOneOut(column="user", order="time", min_rows=20), list(range(40))),
    (SplitByFraction(valid=0.1), list(range(40))),
    (SplitByFiles(valid_fraction=0.1, test=1, valid=0), list(range(40))),
]
"""Splits that get no row for a part that they name; the steps keep times below 36."""


def keeping(split: Split) -> Workflow:
    steps = [KeepRows(column="time", at_most=35.0), FillMissing(columns=("price",), value=0.0)]
    return Workflow(steps, source=SOURCE, labels=[LabelSpec(name="bought")], dense=["price"], split=split)


@pytest.mark.parametrize(("split", "times"), EMPTY, ids=lambda value: getattr(value, "kind", None))
def test_a_split_without_rows_is_rejected_unless_allowed(tmp_path: Path, split: Split, times: list[int]) -> None:
    """Finding N5: they gave no validation or no test split, without a word."""
    files = [write_times(tmp_path / "a.tsv", times), write_times(tmp_path / "b.tsv", [99])]
    files = files if isinstance(split, SplitByFiles) else files[:1]
    with pytest.raises(FieldError, check=at("split")):
        prepare(keeping(split), files, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    report = prepare(keeping(split), files, tmp_path / "out", PrepareOptions(empty_splits="allow"))
    assert len(report.splits) < 1 + len(named_splits(split))
    preview(keeping(split), files)


def test_without_a_split_all_rows_are_for_training() -> None:
    assert set(assign(None, None)(block()).tolist()) == {0}


def test_by_hash_follows_the_formula() -> None:
    found = assign(SplitByHash(valid=0.2, test=0.1, seed=5), None)(block())
    expected = [by_share(uniform(row.to_bytes(8, "little"), 5), 0.2, 0.1) for row in range(1000)]
    assert found.tolist() == expected
    assert 150 < expected.count(1) < 250


def test_by_user_keeps_a_user_together() -> None:
    names = [f"u{row % 40}" for row in range(1000)]
    users = block(user=pa.array(names, pa.large_string()))
    found = assign(SplitByUser(column="user", valid=0.3, test=0.2, seed=1), None)(users)
    assert found.tolist() == [by_share(uniform(name.encode(), 1), 0.3, 0.2) for name in names]
    numbers = array_of(np.arange(1000) % 40, np.arange(1000) % 40 == 7)
    found = assign(SplitByUser(column="user", valid=0.3), None)(block(user=numbers))
    assert set(found[is_missing(numbers)].tolist()) == {1}
    assert len({*zip(numbers.to_pylist(), found.tolist(), strict=True)}) == 40


def test_by_time_with_thresholds() -> None:
    times = array_of(np.array([5, 9, 10, 19, 20, 0]), np.array([False] * 5 + [True]))
    split = assign(SplitByTime(column="t", valid_from=10, test_from=20), None)
    assert split(block(6, t=times)).tolist() == [0, 0, 1, 1, 2, 0]
    later = assign(SplitByTime(column="t", train_from=9, valid_from=10, test_from=20), None)
    assert later(block(6, t=times)).tolist() == [LEFT_OUT, 0, 1, 1, 2, LEFT_OUT]


@pytest.mark.parametrize(
    ("bound", "expected"),
    [(2**53 + 1, [0, 0, 1, 1, 0]), (-(2**63), [1, 1, 1, 1, 0]), (2**63 - 1, [0, 0, 0, 1, 0]), (2.0**63, [0] * 5)],
)
def test_by_time_of_integers_beyond_float64(bound: float, expected: list[int]) -> None:
    times = array_of(np.array([1 - 2**63, 2**53, 2**53 + 1, 2**63 - 1, 0]), np.array([False] * 4 + [True]))
    split = assign(SplitByTime(column="t", valid_from=bound), None)
    assert split(block(5, t=times)).tolist() == expected


def test_shares_of_integers_beyond_float64(tmp_path: Path) -> None:
    """Times less than 256 apart, such as nanoseconds, were equal."""
    columns = tuple(SourceColumn(name=name, type="integer") for name in ("label", "t"))
    made = Workflow(
        [],
        source=SourceSpec(format="delimited", delimiter=",", columns=columns),
        labels=[LabelSpec(name="label")],
        keys=["t"],
        split=SplitByTime(column="t", valid=0.25, test=0.25),
    )
    first = 1_700_000_000_000_000_000
    (tmp_path / "log").write_text("".join(f"1,{first + row}\n" for row in (3, 0, 2, 1)))
    prepare(made, [tmp_path / "log"], tmp_path / "out")
    found = [read_split(tmp_path / "out", split).keys[0] for split in ("train", "valid", "test")]
    assert [np.asarray(keys).tolist() for keys in found] == [[first, first + 1], [first + 2], [first + 3]]


def test_by_time_with_shares_keeps_equal_times_in_the_earlier_part() -> None:
    times = array_of(np.array([3.0, 1.0, 2.0, 3.0, 4.0, math.nan]))
    split = assign(SplitByTime(column="t", valid=0.3, test=0.1), TimeBounds(valid_after=2.0, test_after=3.0))
    assert split(block(6, t=times)).tolist() == [1, 0, 0, 1, 2, 0]


def test_by_position() -> None:
    split = assign(SplitByFraction(valid=0.5, test=0.2), RowBounds(valid_from=3, test_from=8, end=10))
    assert split(block(10)).tolist() == [0, 0, 0, 1, 1, 1, 1, 1, 2, 2]


@pytest.mark.parametrize(
    ("total", "valid", "test", "expected"),
    [(100, 0.1, 0.05, (10, 5)), (10, 0.01, 0.0, (1, 0)), (25, 0.1, 0.1, (2, 2)), (3, 0.0, 0.5, (0, 2))],
)
def test_counts_of_shares(total: int, valid: float, test: float, expected: tuple[int, int]) -> None:
    assert share_counts(total, valid, test) == expected
