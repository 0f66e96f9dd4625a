# SPDX-License-Identifier: Apache-2.0
"""Fitted steps on numbers against their formulas in plain Python."""

import json
import math
import statistics
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from terarec.errors import ConfigError, FormatError
from terarec.etl.columns import ColumnType, kind_of
from terarec.etl.ops import (
    Bucketize,
    DropLowCardinality,
    FillMissing,
    LogOp,
    Normalize,
    NormalizeMinMax,
    TargetEncoding,
)
from terarec.etl.ops.states import SpillOptions
from tests.errors import at
from tests.etl.column_values import block_of, values_of
from tests.etl.ops.fitting import fit

NUMBERS = st.lists(st.none() | st.integers(-(10**9), 10**9).map(lambda number: number / 64), max_size=30)


def present(values):
    return [value for value in values if value is not None]


def close(made, expected, **tolerance):
    assert [value is None for value in made] == [value is None for value in expected]
    assert present(made) == pytest.approx(present(expected), **tolerance)


def outcome(step, train, later):
    """What a step makes of the number column x, and its state."""
    code, state = step, fit(step, [block_of(x=("number", train))])
    return values_of(code.transform(block_of(x=("number", later)), state).columns[step.writes[0]]), code, state


@given(train=NUMBERS, later=NUMBERS)
def test_normalize(train, later):
    made, code, state = outcome(Normalize(columns=("x",)), train, later)
    numbers = [Fraction(value) for value in present(train)]
    mean = float(sum(numbers) / len(numbers)) if numbers else 0.0
    deviation = statistics.pstdev(numbers) if numbers else 0.0
    expected = [None if value is None else (value - mean) / (float(deviation) or 1.0) for value in later]
    close(made, expected, rel=1e-12)
    back = code.inverse("x", np.array(present(made)), state)
    assert back == pytest.approx(present(later), rel=1e-9, abs=1e-6)


@given(train=NUMBERS, later=NUMBERS)
def test_normalize_min_max(train, later):
    made, code, state = outcome(NormalizeMinMax(columns=("x",)), train, later)
    low, high = (min(present(train)), max(present(train))) if present(train) else (0.0, 0.0)
    scaled = {True: lambda value: (value - low) / (high - low), False: lambda value: 0.0}[high > low]
    assert made == [None if value is None else scaled(value) for value in later]
    if high > low:
        assert code.inverse("x", np.array(present(made)), state) == pytest.approx(present(later), rel=1e-9, abs=1e-6)


@given(train=NUMBERS, later=NUMBERS)
def test_log_with_a_learnt_shift(train, later):
    made, code, state = outcome(LogOp(columns=("x",), shift=None), train, later)
    shift = 1.0 - min(present(train), default=0.0)
    expected = [None if value is None else math.log(max(value, 1.0 - shift) + shift) for value in later]
    close(made, expected, rel=1e-12)
    raised = [max(value, 1.0 - shift) for value in present(later)]
    assert code.inverse("x", np.array(present(made)), state) == pytest.approx(raised, rel=1e-7, abs=1e-6)


def test_a_learnt_shift_of_large_numbers():
    """The shift is rounded: the least value had the logarithm of 0."""
    least = 1.7e18
    made, _, _ = outcome(LogOp(columns=("x",), shift=None), [least, least + 1e9], [0.0, least, least + 1e9])
    assert made[:2] == [0.0, 0.0]
    assert made[2] == pytest.approx(math.log(1e9 + 1))


@given(train=NUMBERS, later=NUMBERS)
def test_fill_with_the_median(train, later):
    made, _, _ = outcome(FillMissing(columns=("x",), median=True), train, later)
    median = statistics.median_low(present(train)) if present(train) else 0.0
    assert made == [median if value is None else value for value in later]


def test_the_median_of_integers_is_one_of_them_and_reported_with_its_position():
    step = FillMissing(columns=("i",), median=True, indicator=True)
    block = block_of(i=("integer", [4, None, 1, 9, None, 7]))
    made = step.transform(block, fit(step, [block]))
    assert kind_of(made.columns["i"]) == "integer"
    assert values_of(made.columns["i"]) == [4, 4, 1, 9, 4, 7]
    assert values_of(made.columns["i_missing"]) == [0.0, 1.0, 0.0, 0.0, 1.0, 0.0]


@given(train=NUMBERS, later=NUMBERS, intervals=st.integers(2, 6))
def test_intervals_of_equal_counts(train, later, intervals):
    made, code, state = outcome(Bucketize(columns=("x",), intervals=intervals), train, later)
    rising, boundaries = sorted(present(train)), []
    for k in range(1, intervals):
        reached = [value for place, value in enumerate(rising, start=1) if place * intervals >= k * len(rising)]
        above = [value for value in rising if reached and value > reached[0]]
        boundaries += above[:1]
    boundaries = sorted(set(boundaries))
    assert made == [0 if x is None else 1 + sum(bound <= x for bound in boundaries) for x in later]
    assert code.cardinalities({}, state) == {"x": len(boundaries) + 2}


def test_items_of_lists_count_one_by_one():
    block = block_of(x=("number", [[1.0, 3.0], [], [None, 8.0]]))
    step = Normalize(columns=("x",), outputs=("y",))
    made = step.transform(block, fit(step, [block])).columns["y"]
    deviation = statistics.pstdev([1.0, 3.0, 8.0])
    expected = [[-3.0 / deviation, -1.0 / deviation], [], [None, 4.0 / deviation]]
    assert [pytest.approx(items) for items in values_of(made)] == expected


def test_texts_have_no_median():
    with pytest.raises(ConfigError, check=at("column 't'")):
        FillMissing(columns=("t",), median=True).output_types({"t": ColumnType("text")})


@pytest.mark.parametrize(
    ("content", "place"),
    [
        ('{"format": "terarec.state", "version": 1, "kind": "log_op", "state": {}}', ("/s.json: $.kind",)),
        ('{"format": "terarec.state", "version": 1, "kind": "normalize", "state": 3}', ("/s.json: $.state",)),
        (
            '{"format": "terarec.state", "version": 1, "kind": "normalize", "state": {"columns": {"x": {"mean": 1}}}}',
            ("/s.json: $.state.columns.x", "field 'deviation' is missing"),
        ),
        (
            '{"format": "terarec.state", "version": 1, "kind": "normalize", "state": {"columns": {}}}',
            ("/s.json: $.state.columns.x", "got null"),
        ),
    ],
)
def test_damaged_states_are_rejected(tmp_path, content, place):
    (tmp_path / "s.json").write_text(content)
    with pytest.raises(FormatError, check=at(f"{tmp_path}{place[0]}", *place[1:])):
        Normalize(columns=("x",)).load_state(tmp_path, "s")


def state_file(tmp_path, kind, state):
    content = {"format": "terarec.state", "version": 1, "kind": kind, "state": state}
    (tmp_path / "s.json").write_text(json.dumps(content))
    return f"{tmp_path}/s.json: $.state"


@pytest.mark.parametrize(
    ("step", "params", "field"),
    [
        (Normalize(columns=("x",)), {"mean": 0, "deviation": -3}, ".deviation"),
        (Normalize(columns=("x",)), {"mean": 0, "deviation": 0}, ".deviation"),
        (Normalize(columns=("x",)), {"mean": float("inf"), "deviation": 1}, ".mean"),
        (Normalize(columns=("x",)), {"mean": "0", "deviation": 1}, ".mean"),
        (Normalize(columns=("x",)), 7, ""),
        (NormalizeMinMax(columns=("x",)), {"minimum": 2, "maximum": 1}, ".maximum"),
        (Bucketize(columns=("x",), intervals=3), {"boundaries": [2, 1]}, ".boundaries"),
        (Bucketize(columns=("x",), intervals=3), {"boundaries": 3}, ".boundaries"),
        (FillMissing(columns=("x",), median=True), {"median": None}, ".median"),
    ],
    ids=str,
)
def test_numbers_out_of_range_are_rejected(tmp_path, step, params, field):
    """Finding Q5: they passed, and 0 was divided by; finding Q6: a number for an object was a defect."""
    where = state_file(tmp_path, step.kind, {"columns": {"x": params}})
    with pytest.raises(FormatError, check=at(f"{where}.columns.x{field}")):
        step.load_state(tmp_path, "s")


@pytest.mark.parametrize(
    "state", [{"columns": 3}, {"columns": {"x": -1}}, {"columns": {"x": "1"}}, {"columns": {}}, {}]
)
def test_counts_that_are_none_are_rejected(tmp_path, state):
    """Finding Q5: negative counts passed; finding Q6: a number for an object was a defect."""
    step = DropLowCardinality(columns=("x",))
    state_file(tmp_path, step.kind, state)
    with pytest.raises(FormatError):
        step.load_state(tmp_path, "s")


@pytest.mark.parametrize("count", [[-1, 2], [1], 3, [True, 1], [1, 2**70]], ids=str)
def test_totals_that_are_none_are_rejected(tmp_path, count):
    """Finding Q5."""
    step = TargetEncoding(columns=("x",), target="y", folds=2)
    state_file(tmp_path, step.kind, {"count": count, "sum": [0.5, 1.0]})
    with pytest.raises(FormatError):
        step.load_state(tmp_path, "s")


def test_a_huge_deviation_has_an_inverse(tmp_path):
    """Finding Q6: it was a defect of the rounding."""
    step = Normalize(columns=("x",))
    state_file(tmp_path, step.kind, {"columns": {"x": {"mean": 0, "deviation": 1e308}}})
    with np.errstate(over="ignore"):
        step.inverse("x", np.array([-5.0, 5.0]), step.load_state(tmp_path, "s"), is_float32=True)


@pytest.mark.parametrize("median", [2**53 + 1, 2**63 - 1, -(2**63) + 1])
def test_the_median_of_integers_beyond_float64(tmp_path, median):
    step = FillMissing(columns=("i",), median=True)
    statistic = step.statistic({}, SpillOptions(directory=tmp_path))
    empty = step.statistic({}, SpillOptions(directory=tmp_path))
    for part in (empty.partial(), statistic.observe(block_of(i=("integer", [median, None]))), empty.partial()):
        statistic.merge(part)  # as on a cluster, where pieces may have no training rows
    state = statistic.finish()
    state.save(tmp_path, "step")
    for known in (state, step.load_state(tmp_path, "step")):
        made = values_of(step.transform(block_of(i=("integer", [None, 5])), known).columns["i"])
        assert made == [median, 5]
        assert step.fill_of("i", "integer", known) == median
