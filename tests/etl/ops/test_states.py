# SPDX-License-Identifier: Apache-2.0
"""Sums, moments and samples against exact arithmetic, whatever the blocks."""

import math
import statistics
import sys
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from terarec.etl.ops.quantiles import GrowingSample, NumberSample
from terarec.etl.ops.states import Moments, NumberRange, exact_sum, exact_sum_of_squares, table_path
from tests.processes import run_new_python

FINITE = st.floats(allow_nan=False, allow_infinity=False)
NUMBERS = st.lists(FINITE, max_size=50)


@given(values=NUMBERS)
def test_sums_are_exact(values):
    numbers = np.array(values, dtype=np.float64)
    exact = [Fraction(value) for value in values]
    assert exact_sum(numbers) == sum(exact)
    assert exact_sum_of_squares(numbers) == sum(value * value for value in exact)


def test_sums_of_many_chunks_are_exact():
    numbers = np.random.default_rng(3).standard_normal(150_001) * np.exp(np.linspace(-20, 20, 150_001))
    assert float(exact_sum(numbers)) == math.fsum(numbers.tolist())
    assert exact_sum_of_squares(numbers) == sum((Fraction(number) ** 2 for number in numbers.tolist()), Fraction(0))


@given(values=st.lists(FINITE | st.just(math.nan), max_size=40), cut=st.integers(0, 40))
def test_moments_of_parts_add_up_to_those_of_the_whole(values, cut):
    numbers = np.array(values, dtype=np.float64)
    whole = Moments.of(numbers)
    assert Moments.of(numbers[cut:]) + Moments.of(numbers[:cut]) == whole
    found = NumberRange.of(numbers[cut:]) + NumberRange.of(numbers[:cut])
    assert found == NumberRange.of(numbers)
    present = [value for value in values if not math.isnan(value)]
    assert whole.count == len(present)
    assert bool(found) is bool(present)
    if present:
        assert (found.minimum, found.maximum) == (min(present), max(present))
        exact = [Fraction(value) for value in present]
        assert whole.mean == float(sum(exact) / len(exact))


@given(values=st.lists(st.integers(-(10**6), 10**6).map(lambda number: number / 64 + 1e9), min_size=1, max_size=40))
def test_deviation_is_the_populations(values):
    assert Moments.of(np.array(values)).deviation == pytest.approx(statistics.pstdev(values) or 1.0, rel=1e-15)


def test_deviation_beyond_the_range_of_squares():
    assert Moments.of(np.array([1e200, -1e200])).deviation == 1e200
    assert Moments.of(np.array([1e-200, -1e-200])).deviation == 1e-200
    assert Moments().deviation == 1.0
    assert Moments().mean == 0.0


def sample_of(numbers, block_rows, hashes):
    growing = GrowingSample()
    for start in range(0, len(numbers), block_rows):
        part = slice(start, start + block_rows)
        growing.add(NumberSample(hashes[part], numbers[part]))
    return growing.sample()


@pytest.mark.parametrize("block_rows", [1, 7, 64, 1000])
def test_the_sample_holds_the_lowest_hashes_for_any_blocks(monkeypatch, block_rows):
    monkeypatch.setattr("terarec.etl.ops.quantiles.SAMPLE_SIZE", 50)
    generator = np.random.default_rng(1)
    numbers, hashes = generator.random(500), generator.permutation(500).astype(np.int64)
    sample = sample_of(numbers, block_rows, hashes)
    assert sorted(sample.numbers.tolist()) == sorted(numbers[hashes < 50].tolist())


@given(values=st.lists(st.integers(0, 12).map(float), max_size=60), intervals=st.integers(1, 9))
def test_boundaries_follow_their_definition(values, intervals):
    expected = []
    for k in range(1, intervals):
        reached = [v for v in values if sum(other <= v for other in values) * intervals >= k * len(values)]
        above = [v for v in values if reached and v > min(reached)]
        if above and min(above) not in expected:
            expected.append(min(above))
    numbers = np.array(values, dtype=np.float64)
    assert NumberSample(np.zeros(len(values), dtype=np.int64), numbers).boundaries(intervals) == tuple(expected)


@given(values=NUMBERS)
def test_median(values):
    found = NumberSample(np.zeros(len(values), dtype=np.int64), np.array(values, dtype=np.float64)).median()
    assert found == (statistics.median_low(values) if values else 0.0)


@given(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=8))
def test_integers_count_as_the_numbers_that_they_are_nearest_to(values: list[int]) -> None:
    integers = np.array(values, dtype=np.int64)
    assert NumberRange.of(integers) == NumberRange.of(integers.astype(np.float64))
    assert Moments.of(integers) == Moments.of(integers.astype(np.float64))


READ = """
import os, sys
from pathlib import Path
import pyarrow as pa
from terarec.etl.ops.states import read_table, write_table

path = Path(sys.argv[1]) / "table.parquet"
table = pa.table({"value": [str(number) for number in range(5000)], "count": list(range(5000))})
write_table(path, table)
before = len(os.listdir("/proc/self/task"))
found = read_table(path, {"value": (pa.string(),), "count": (pa.int64(),)})
print(found.equals(table), len(os.listdir("/proc/self/task")) - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="threads are counted in /proc")
def test_tables_of_states_are_read_without_threads(tmp_path):
    """Finding K5: a prediction waited for ever for a thread of Arrow while it read such a table."""
    ended = run_new_python(READ, tmp_path)
    assert ended.stdout == "True 0\n", ended.stderr


def test_a_state_has_a_file_whatever_the_name_of_its_column():
    """Finding Q: that of a Chinese column of 26 characters was too long for the disk."""
    parts = ["C1", "../a", "\u540d" * 23, "\u540d" * 26, "\u540d" * 27, "x" * 300]
    paths = [table_path(Path("states"), "00-categorify", part) for part in parts]
    assert len(set(paths)) == len(parts)
    assert all(path.parent == Path("states") and len(path.name) < 240 for path in paths)
    assert paths[0].name == "00-categorify-C1.parquet"
