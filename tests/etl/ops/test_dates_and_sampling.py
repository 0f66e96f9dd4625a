# SPDX-License-Identifier: Apache-2.0
"""Date parts against Python's calendar, and properties of negative sampling."""

import dataclasses
from collections import Counter
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from terarec.errors import ConfigError
from terarec.etl import prepare
from terarec.etl.columns import Rows
from terarec.etl.ops import Categorify, DateParts, NegativeSampling
from terarec.etl.ops.sequences import ITEM_BITS
from terarec.etl.workflow import Workflow, plan
from terarec.spec import LabelSpec, PrepareOptions, SourceColumn, SourceSpec
from terarec.spec.checks import FieldError
from tests.errors import at
from tests.etl.column_values import block_of, values_of
from tests.etl.ops.fitting import apply, blocks_of, fit, saved


@given(
    seconds=st.lists(st.integers(-62_135_510_400, 253_402_214_399), min_size=1, max_size=20),
    offset=st.integers(-86_400, 86_400),
)
def test_date_parts_are_those_of_the_calendar(seconds: list[int], offset: int) -> None:
    parts = ("year", "month", "day", "day_of_year", "weekday", "hour", "minute", "second")
    made = DateParts(columns=("t",), parts=parts, utc_offset=offset).transform(block_of(t=("integer", seconds)), None)
    for row, value in enumerate(seconds):
        date = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(seconds=value + offset)
        expected = [date.year, date.month, date.day, date.timetuple().tm_yday, date.weekday()]
        expected += [date.hour, date.minute, date.second]
        assert [values_of(made.columns[f"t_{part}"])[row] for part in parts] == expected


def candidates(kind: str, values: list) -> object:
    return fit(SAMPLING, [block_of(item=(kind, values))])


SAMPLING = NegativeSampling(table="items", column="item", negatives=3, label="y")
ITEMS = [10, 20, 30, 40, 50]


def rows_with(items: list) -> Rows:
    return block_of(item=("integer", items), user=("text", [f"u{row}" for row in range(len(items))]))


@given(items=st.lists(st.sampled_from([*ITEMS, 99, None]), max_size=30), block_rows=st.integers(1, 8))
def test_draws_follow_their_row_and_differ_from_it_for_any_blocks(items: list, block_rows: int) -> None:
    state = candidates("integer", ITEMS)
    block = rows_with(items)
    made = SAMPLING.transform(block, state)
    values, labels = values_of(made.columns["item"]), values_of(made.columns["y"])
    assert labels == [1.0, 0.0, 0.0, 0.0] * len(items)
    assert made.ids.tolist() == [row << ITEM_BITS | place for row in range(len(items)) for place in range(4)]
    assert values_of(made.columns["user"]) == [f"u{row}" for row in range(len(items)) for _ in range(4)]
    for row, item in enumerate(items):
        assert values[4 * row] == item
        assert set(values[4 * row + 1 : 4 * row + 4]) <= set(ITEMS) - {item}
    parts = apply(SAMPLING, saved(SAMPLING, state), blocks_of(block, block_rows))
    assert values_of(parts.columns["item"]) == values


@pytest.mark.parametrize(("kind", "values"), [("text", ["a", "b", "c"]), ("hex32", [1, 2, 2**32 - 1])])
def test_draws_are_uniform_over_the_other_values_and_change_with_the_seed(kind: str, values: list) -> None:
    state = candidates(kind, values)
    block = block_of(item=(kind, [values[0]] * 4000))
    drawn = [v for place, v in enumerate(values_of(SAMPLING.transform(block, state).columns["item"])) if place % 4]
    counts = Counter(drawn)
    assert set(counts) == set(values[1:])
    assert abs(counts[values[1]] - 6000) < 5 * np.sqrt(3000)
    other = NegativeSampling(table="items", column="item", negatives=3, label="y", seed=1).transform(block, state)
    assert values_of(other.columns["item"]) != values_of(SAMPLING.transform(block, state).columns["item"])


def test_one_candidate_is_too_few() -> None:
    with pytest.raises(ConfigError, check=at("table 'items'")):
        SAMPLING.transform(rows_with([10]), candidates("integer", [10]))


@pytest.mark.parametrize(
    ("field", "value"), [("negatives", 0), ("negatives", 1 << ITEM_BITS), ("label", "item"), ("seed", -1)]
)
def test_fields_are_checked(field: str, value: object) -> None:
    with pytest.raises(FieldError) as caught:
        NegativeSampling(**{"table": "items", "column": "item", "negatives": 3, "label": "y", field: value})
    assert caught.value.field == field


def shop() -> Workflow:
    return Workflow(
        [SAMPLING, DateParts(columns=("time",), parts=("hour",)), Categorify(columns=("item", "time_hour"))],
        source=SourceSpec(
            format="delimited",
            delimiter=",",
            columns=(SourceColumn(name="item", type="integer"), SourceColumn(name="time", type="time")),
        ),
        tables={
            "items": SourceSpec(format="delimited", delimiter=",", columns=(SourceColumn(name="item", type="integer"),))
        },
        labels=[LabelSpec(name="clicked", column="y")],
        categorical=["item", "time_hour"],
        name="shop",
    )


def test_rows_are_multiplied_once() -> None:
    spec = shop().spec
    with pytest.raises(ConfigError, check=at("steps[1] NegativeSampling")):
        plan(dataclasses.replace(spec, steps=(SAMPLING, *spec.steps)))


def test_a_data_set_of_positives_gets_negatives_and_records_stay_single(tmp_path: Path) -> None:
    log, items = tmp_path / "log.csv", tmp_path / "items.csv"
    log.write_text("".join(f"{ITEMS[row % 5]},{3600 * row}\n" for row in range(200)))
    items.write_text("".join(f"{item}\n" for item in ITEMS))
    found = []
    for threads in (1, 3):
        out = tmp_path / f"out{threads}"
        options = PrepareOptions(tables={"items": (str(items),)}, threads=threads)
        report = prepare(shop(), [str(log)], out, options)
        assert report.rows == 800
        found.append(pq.read_table(sorted((out / "train").glob("*.parquet"))))
    assert found[0].equals(found[1])
    assert found[0].column("clicked").to_pylist() == [1.0, 0.0, 0.0, 0.0] * 200
    records = Workflow.load(tmp_path / "out1" / "workflow").encode({"item": [10, 20], "time": [0, 3600]})
    assert [len(keys) for keys in records.keys] == [2, 2]
