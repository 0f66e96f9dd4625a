"""Statistics taken block by block equal those of the whole column."""

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from terarec.etl import column_statistics
from terarec.etl.column_statistics import Moments, Quantiles, ValueCounts

NUMBERS = st.lists(st.integers(-1000, 1000).map(float) | st.just(float("nan")), max_size=60)


def blocks_of(values, cuts):
    return np.split(np.array(values, dtype=np.float64), sorted(cut % (len(values) + 1) for cut in cuts))


@given(values=NUMBERS, cuts=st.lists(st.integers(0, 60), max_size=4))
def test_moments_do_not_depend_on_blocks(values, cuts):
    moments = Moments()
    for block in blocks_of(values, cuts):
        moments.add(block)
    present = np.array(values)[~np.isnan(values)] if values else np.array([])
    assert (moments.count, moments.missing) == (len(present), len(values) - len(present))
    if len(present):
        assert moments.mean == pytest.approx(present.mean(), abs=1e-9)
        assert moments.minimum == present.min()
        assert moments.deviation == pytest.approx(present.std() or 1.0, rel=1e-9)


def test_moments_of_nothing_still_encode():
    assert (Moments().mean, Moments().deviation) == (0.0, 1.0)


def test_moments_are_stable_far_from_zero():
    moments = Moments()
    for block in np.split(1e9 + np.arange(1000.0), 10):
        moments.add(block)
    assert moments.deviation == pytest.approx(np.arange(1000.0).std(), rel=1e-9)


@given(values=st.lists(st.sampled_from(["a", "b", "", "cc", None]), max_size=50), size=st.integers(1, 20))
def test_counts_do_not_depend_on_blocks(values, size):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(column_statistics, "_COMPACT_ROWS", 2)
        counts = ValueCounts(pa.string())
        for start in range(0, len(values), size):
            counts.add(pa.array(values[start : start + size], type=pa.string()))
        table = counts.table()
    found = dict(zip(table["value"].to_pylist(), table["count"].to_pylist(), strict=True))
    assert found == {value: values.count(value) for value in values if value is not None}


def test_bounds_cut_into_equal_counts():
    quantiles = Quantiles()
    for block in np.split(np.arange(1000.0), 10):
        quantiles.add(block)
    assert quantiles.bounds(4) == (250.0, 500.0, 750.0)


def test_a_value_that_fills_intervals_gets_one_of_its_own():
    quantiles = Quantiles()
    quantiles.add(np.array([0.0] * 900 + [5.0, 7.0] * 50))
    assert quantiles.bounds(10) == (5.0,)
    assert quantiles.bounds(21) == (5.0, 7.0)


@pytest.mark.parametrize("values", [[], [3.0], [3.0, 3.0], [float("nan")]])
def test_a_column_that_does_not_vary_has_no_bounds(values):
    quantiles = Quantiles()
    quantiles.add(np.array(values))
    assert quantiles.bounds(10) == ()


def test_many_numbers_are_sampled_evenly(monkeypatch):
    monkeypatch.setattr(column_statistics, "_SAMPLE_ROWS", 4_000)
    quantiles = Quantiles()
    for block in np.split(np.arange(100_000.0), 50):  # in order, so a sample of the first would be far off
        quantiles.add(block)
    assert quantiles.bounds(4) == pytest.approx((25_000, 50_000, 75_000), abs=3_000)
