# SPDX-License-Identifier: Apache-2.0
"""Histories and differences against loops over the rows in plain Python."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from terarec.errors import ConfigError
from terarec.etl.columns import ColumnType, Rows, array_of, ids_as_integers, kind_of, lists_of
from terarec.etl.ops import DifferenceLag, History, Pad
from tests.errors import at
from tests.etl.column_values import column_of, values_of
from tests.params import examples

GROUPS = {
    "text": st.none() | st.sampled_from(["a", "b", "\u00fc"]),
    "integer": st.none() | st.integers(0, 2),
    "hex32": st.none() | st.sampled_from([0, 2**32 - 1]),
}
ITEMS = {
    "text": st.none() | st.sampled_from(["x", "y", "zz"]),
    "integer": st.none() | st.integers(-5, 5),
    "number": st.none() | st.sampled_from([0.5, -1.25, 3.0]),
    "hex32": st.none() | st.integers(0, 3),
    "id": st.integers(0, 4),
}


@st.composite
def logs(draw, item_kind):
    """Rows in any order with row ids that rise, some without a group or a time, many at equal times."""
    number = draw(st.integers(0, 30))

    def some(values):
        return draw(st.lists(values, min_size=number, max_size=number))

    group_kind, time_kind = draw(st.sampled_from(sorted(GROUPS))), draw(st.sampled_from(["integer", "number"]))
    groups, items = some(GROUPS[group_kind]), some(ITEMS[item_kind])
    times = some(st.none() | st.integers(0, 6))
    columns = {
        "user": column_of(group_kind, groups),
        "time": column_of(time_kind, times),
        "item": column_of(item_kind, items),
    }
    return list(zip(groups, times, items, strict=True)), Rows(columns, np.arange(number) * 2)


def earlier_rows(rows, row):
    """Rows of the same group before `row`, by (time, row), the last one last; None is without a place."""
    group, time, _ = rows[row]
    if group is None or time is None:
        return None
    places = [
        (rows[other][1], other) for other in range(len(rows)) if rows[other][0] == group and rows[other][1] is not None
    ]
    return [other for _, other in sorted(place for place in places if place < (time, row))]


@pytest.mark.parametrize("kind", ITEMS)
@settings(max_examples=examples(40))
@given(data=st.data(), max_length=st.integers(1, 4), where=st.sampled_from([None, "event", "rating"]))
def test_history_holds_strictly_earlier_rows(kind, data, max_length, where):
    rows, block = data.draw(logs(kind))
    draw = data.draw(st.lists(st.sampled_from(["view", "buy", None]), min_size=len(rows), max_size=len(rows)))
    ratings = [{"view": 1.0, "buy": 4.5, None: None}[event] for event in draw]
    columns = {"event": column_of("text", draw), "rating": column_of("number", ratings)}
    block = block.with_columns({**block.columns, **columns})
    condition = {None: {}, "event": {"values": ("buy",)}, "rating": {"at_least": 4.0, "at_most": 5.0}}[where]
    step = History(
        columns=("item",),
        group="user",
        order="time",
        max_length=max_length,
        outputs=("seen",),
        where=where,
        **condition,
    )
    made = step.transform(block, None).columns["seen"]
    expected = []
    for row, (_, time, _) in enumerate(rows):
        earlier = [other for other in earlier_rows(rows, row) or [] if rows[other][1] < time]
        before = [rows[other][2] for other in earlier if where is None or draw[other] == "buy"]
        expected.append(before[-max_length:])
    assert kind_of(made) == kind
    assert values_of(made) == [
        [None if kind == "id" and item is None else item for item in items] for items in expected
    ]


@pytest.mark.parametrize("kind", ["integer", "number"])
@settings(max_examples=examples(40))
@given(data=st.data(), lag=st.integers(1, 3))
def test_difference_to_an_earlier_row(kind, data, lag):
    rows, block = data.draw(logs(kind))
    step = DifferenceLag(columns=("item",), group="user", order="time", lag=lag, outputs=("gap",))
    made = step.transform(block, None).columns["gap"]
    expected = []
    for row, (_, _, item) in enumerate(rows):
        before = earlier_rows(rows, row) or []
        other = rows[before[-lag]][2] if len(before) >= lag else None
        expected.append(None if item is None or other is None else item - other)
    assert kind_of(made) == kind
    assert values_of(made) == expected


LAST = 2**63 - 1


@pytest.mark.parametrize(
    ("values", "unit", "expected"),
    [
        ([LAST, -LAST, -1, -LAST, 2], None, [None, None, LAST - 1, 1 - LAST, None]),
        ([-5, LAST, LAST - 1], None, [None, None, -1]),
        ([LAST, -1, 0], None, [None, None, 1]),  # -2^63 is a missing value
        ([0, 9_000_000_000, 18_300_000_000, 0], "ns", [None, 9 * 10**18, None, None]),
        ([0, 9_300_000_000, 0], "s", [None, 9_300_000_000, -9_300_000_000]),
    ],
)
def test_a_difference_beyond_64_bits_is_missing(values, unit, expected):
    """It wrapped around."""
    columns = {"user": column_of("integer", [1] * len(values)), "time": column_of("integer", list(range(len(values))))}
    rows = Rows({**columns, "item": column_of("integer", values)}, np.arange(len(values)))
    step = DifferenceLag(columns=("item",), group="user", order="time", outputs=("gap",), unit=unit)
    assert values_of(step.transform(rows, None).columns["gap"]) == expected


def test_padding_beyond_the_ids_of_a_vocabulary():
    """Vocabularies give ids of 32 bits."""
    ids = lists_of(array_of(np.array([1, 2, 3], dtype=np.int32), are_ids=True), np.array([0, 2, 3]))
    step = Pad(columns=("ids",), length=2, value=2**31)
    made = step.transform(Rows({"ids": ids}, np.arange(2)), None).columns["ids"]
    assert values_of(ids_as_integers(made)) == [[1, 2], [3, 2**31]]


def test_nothing_later_or_simultaneous_leaks_into_a_history():
    generator = np.random.default_rng(3)
    users, times = generator.integers(0, 5, 300), generator.integers(0, 40, 300)
    items = generator.integers(0, 1000, 300)
    code = History(columns=("item",), group="user", order="time", max_length=9, outputs=("seen",))

    def seen(values):
        columns = {"user": column_of("integer", users.tolist()), "time": column_of("integer", times.tolist())}
        return values_of(
            code.transform(
                Rows({**columns, "item": column_of("integer", values.tolist())}, np.arange(300)), None
            ).columns["seen"]
        )

    before = seen(items)
    for moment in (0, 7, 20, 39):
        changed = np.where(times >= moment, items + 5000, items)
        after = seen(changed)
        untouched = np.flatnonzero(times <= moment)
        assert [after[row] for row in untouched] == [before[row] for row in untouched]


def test_groups_do_not_depend_on_the_block_that_they_stand_in():
    generator = np.random.default_rng(8)
    users = generator.integers(0, 12, 200)
    columns = {
        "user": column_of("text", [f"u{user}" for user in users]),
        "time": column_of("number", generator.integers(0, 30, 200).astype(float).tolist()),
        "item": column_of("text", [f"i{item}" for item in generator.integers(0, 99, 200)]),
    }
    block = Rows(columns, np.arange(200), np.zeros(200, dtype=np.uint8))
    code = History(columns=("item",), group="user", order="time", max_length=5, outputs=("seen",))
    whole = values_of(code.transform(block, None).columns["seen"])
    for part in (
        np.flatnonzero(users < 5),
        np.flatnonzero(users >= 5),
        generator.permutation(np.flatnonzero(users % 2 == 0)),
    ):
        made = values_of(code.transform(block.take(part), None).columns["seen"])
        assert made == [whole[row] for row in part]


@pytest.mark.parametrize(
    ("step", "place"),
    [
        (
            History(columns=("l",), group="t", order="x", max_length=2),
            ("column 'l'",),
        ),
        (History(columns=("t",), group="x", order="x", max_length=2), ("column 'x'",)),
        (
            History(columns=("x",), group="t", order="x", max_length=2, where="t", at_least=1.0),
            ("column 't'", "holds text"),
        ),
        (
            History(columns=("x",), group="t", order="x", max_length=2, where="l", values=("1",)),
            ("column 'l'",),
        ),
        (DifferenceLag(columns=("t",), group="t", order="x"), ("column 't'", "holds text")),
        (DifferenceLag(columns=("x",), group="t", order="t"), ("column 't'", "holds text")),
    ],
)
def test_inputs_of_other_kinds_are_rejected(step, place):
    types = {"t": ColumnType("text"), "l": ColumnType("integer", is_list=True), "x": ColumnType("number")}
    with pytest.raises(ConfigError, check=at(*place)):
        step.output_types(types)


def test_histories_are_lists_of_a_bounded_length():
    code = History(columns=("t",), group="t", order="x", max_length=2, outputs=("h",))
    assert code.output_types({"t": ColumnType("text"), "x": ColumnType("number")}) == {
        "h": ColumnType("text", is_list=True, max_length=2)
    }
    assert code.stage == "grouped"


@pytest.mark.parametrize(
    ("fields", "place"),
    [
        ({"values": ("buy",)}, ("History.where", "got none")),
        ({"where": "event"}, ("expected either values, or at_least",)),
        ({"where": "event", "values": ("buy",), "at_most": 1.0}, ("expected either values, or at_least",)),
    ],
)
def test_a_condition_that_is_none_is_rejected(fields, place):
    with pytest.raises(ConfigError) as error:
        History(columns=("item",), group="user", order="time", max_length=2, **fields)
    assert all(part in str(error.value) for part in place)
