# SPDX-License-Identifier: Apache-2.0
"""Which steps a pass does, and what is rejected before any row is read."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from terarec.errors import ConfigError
from terarec.etl import prepare
from terarec.etl.ops import (
    Bucketize,
    Clip,
    DifferenceLag,
    Explode,
    FillMissing,
    HashBucket,
    History,
    KeepRows,
    ListSlice,
    LogOp,
    Operator,
    Rename,
    SplitText,
)
from terarec.etl.workflow import Workflow, plan
from terarec.ragged import Ragged
from terarec.spec import LabelSpec, LeaveOneOut, SourceColumn, SourceSpec, Split, SplitByTime, SplitByUser, WorkflowSpec
from tests.errors import at
from tests.etl.engine.contents import read_split

SOURCE = SourceSpec(
    format="delimited",
    columns=(
        SourceColumn(name="user", type="integer"),
        SourceColumn(name="time", type="time"),
        SourceColumn(name="price", type="number"),
        SourceColumn(name="brand", type="text"),
        SourceColumn(name="shown", type="text", separator=" "),
        SourceColumn(name="clicks", type="integer"),
    ),
)


def spec(*steps: Operator, split: Split | None = None, **results: object) -> WorkflowSpec:
    fields = {"labels": (LabelSpec(name="clicks"),), "dense": ("price",), **results}
    return WorkflowSpec(name="w", source=SOURCE, steps=steps, split=split, **fields)  # type: ignore[arg-type]


def test_a_pass_runs_only_the_steps_that_its_results_need() -> None:
    planned = plan(
        spec(
            FillMissing(columns=("price",), value=0.0),
            HashBucket(columns=("brand",), buckets=9),
            LogOp(columns=("price",), outputs=("log_price",)),
            Clip(columns=("price",), high=9.0),
            dense=("log_price",),
        )
    )
    work = planned.transform_pass()
    assert work.steps == (0, 2)
    assert work.reads == ("price", "clicks")
    assert planned.validation.steps == (0, 2)  # every pass looks for labels and numbers that are rejected
    assert planned.row_pass().reads == ("price", "clicks")


def test_rows_are_chosen_before_the_rest() -> None:
    planned = plan(
        spec(
            ListSlice(columns=("shown",), stop=9),
            Explode(columns=("shown",)),
            SplitText(columns=("shown",), separator="-", outputs=("item", "clicked"), types=("text", "integer")),
            HashBucket(columns=("item",), buckets=9),
            labels=(LabelSpec(name="clicked"),),
            dense=(),
            categorical=("item",),
        )
    )
    assert planned.row_steps == (0, 1)
    work = planned.transform_pass()
    assert (work.row_steps, work.steps, work.reads) == ((0, 1), (2, 3), ("shown",))
    assert planned.types[-1]["item"].kind == "id"


def test_steps_up_to_the_column_that_splits_are_done_before_the_split() -> None:
    steps = (
        Clip(columns=("price",), low=0.0),
        SplitText(columns=("brand",), separator=":", outputs=("owner", "model"), types=("integer", "text")),
        LogOp(columns=("price",)),
    )
    by_owner = plan(spec(*steps, split=SplitByUser(column="owner", valid=0.1)))
    assert by_owner.row_steps == (0, 1)
    assert (by_owner.row_pass().row_steps, by_owner.validation.steps) == ((0, 1), (2,))
    assert by_owner.row_pass().reads == ("price", "brand", "clicks")
    assert by_owner.transform_pass().reads == ("price", "brand", "clicks")
    by_time = plan(spec(*steps, split=SplitByTime(column="time", valid=0.1)))
    assert (by_time.row_steps, by_time.validation.steps) == ((), (0, 2))  # nothing uses what the second step makes
    assert by_time.row_pass().reads == ("time", "price", "clicks")


def test_a_column_that_a_later_step_replaces_is_the_earlier_one_before_it() -> None:
    planned = plan(
        spec(
            Bucketize(columns=("price",), boundaries=(1.0,), outputs=("band",)),
            FillMissing(columns=("price",), value=0.0),
            Rename(names={"price": "cost"}),
            dense=("cost",),
            categorical=("band",),
        )
    )
    assert planned.transform_pass().steps == (0, 1, 2)
    assert "price" not in planned.types[-1]


@pytest.mark.parametrize(
    ("made", "place"),
    [
        (
            lambda: spec(Clip(columns=("x",), low=0)),
            ("steps[0] Clip: column 'x'", "does not exist here; there are 'user', 'time'"),
        ),
        (
            lambda: spec(Rename(names={"price": "cost"}), Clip(columns=("price",), low=0)),
            ("steps[1] Clip: column 'price'", "does not exist here"),
        ),
        (lambda: spec(LogOp(columns=("brand",))), ("steps[0] LogOp: column 'brand'", "holds text")),
        (lambda: spec(dense=("cost",)), ("dense", "column 'cost' does not exist after the last step")),
        (lambda: spec(dense=("brand",)), ("dense", "column 'brand' holds text")),
        (lambda: spec(categorical=("brand",)), ("categorical", "column 'brand' holds text")),
        (lambda: spec(keys=("price2",)), ("keys", "column 'price2' does not exist")),
        (
            lambda: spec(HashBucket(columns=("shown",), buckets=2), categorical=("shown",)),
            ("categorical", "'shown' holds lists of any length"),
        ),
        (lambda: spec(labels=(LabelSpec(name="brand"),)), ("label 'brand'", "column 'brand' holds text")),
        (lambda: spec(labels=(LabelSpec(name="clicks", positives=("x",)),)), ("label 'clicks'", "got 'x'")),
        (lambda: spec(split=SplitByUser(column="who")), ("split", "column 'who' does not exist")),
        (lambda: spec(split=SplitByTime(column="brand", valid=0.1)), ("split", "column 'brand' holds text")),
        (lambda: spec(split=LeaveOneOut(column="who", order="time")), ("split", "column 'who' does not exist")),
        (lambda: spec(split=LeaveOneOut(column="brand", order="when")), ("split", "column 'when' does not exist")),
        (lambda: spec(split=LeaveOneOut(column="time", order="brand")), ("split", "column 'brand' holds text")),
        (
            lambda: spec(KeepRows(column="shown", values=("a",))),
            ("steps[0] KeepRows: column 'shown'", "holds lists of text"),
        ),
    ],
)
def test_what_does_not_fit_is_reported_with_its_step(made: object, place: tuple[str, str]) -> None:
    with pytest.raises(ConfigError, check=at(*place)):
        plan(made())  # type: ignore[operator]


@pytest.mark.parametrize("between", [(), (Bucketize(columns=("gap",), boundaries=(9.0,)),)])
def test_a_step_on_other_rows_takes_no_output_of_another(between: tuple[Operator, ...]) -> None:
    """All of them run in one pass, which has the rows of a block alone."""
    gap = DifferenceLag(columns=("time",), outputs=("gap",), group="user", order="time")
    past = History(columns=("gap",), outputs=("past",), group="user", order="time", max_length=3)
    with pytest.raises(ConfigError, check=at(f"steps[{1 + len(between)}] History, column 'gap'", "steps[0] Diff")):
        plan(spec(gap, *between, past))
    with pytest.raises(ConfigError, check=at(f"steps[{2 + len(between)}] History, column 'price'", "steps[0] Diff")):
        plan(
            spec(
                gap,
                *between,
                Rename(names={"gap": "price", "price": "gap"}),
                replace(past, columns=("price",)),
                dense=(),
                keys=("user",),
            )
        )
    # A column of that name which a later step makes of a row alone is none.
    plan(spec(gap, Clip(columns=("price",), outputs=("gap",), low=0.0), past))


BESIDE: list[Operator] = [
    Clip(columns=("gap", "price"), low=0.0),
    FillMissing(columns=("gap", "price"), value=1.0),
    LogOp(columns=("gap", "price")),
    Bucketize(columns=("gap", "price"), boundaries=(2.0,)),
    Rename(names={"gap": "pause", "price": "cost"}),
]


@pytest.mark.parametrize("beside", BESIDE, ids=lambda operator: operator.kind)
def test_a_column_beside_the_output_of_a_step_on_other_rows(tmp_path: Path, beside: Operator) -> None:
    """The plan rejected it, as if each output of a step depended on all of its inputs."""
    name, ids = beside.writes[1], Bucketize(columns=("past",), boundaries=(1.2, 2.5, 4.0))
    steps = [
        DifferenceLag(columns=("time",), outputs=("gap",), group="user", order="time"),
        beside,
        History(columns=(name,), outputs=("past",), group="user", order="time", max_length=3),
        *([] if isinstance(beside, Bucketize) else [ids]),
    ]
    source = replace(SOURCE, delimiter=",", columns=(*SOURCE.columns[:3], SOURCE.columns[-1]))
    made = WorkflowSpec(
        name="w", source=source, steps=tuple(steps), labels=(LabelSpec(name="clicks"),), categorical=("past",)
    )
    (tmp_path / "log").write_text("1,9,3,0\n1,4,1,1\n1,12,2,1\n")
    prepare(Workflow.of(made), [tmp_path / "log"], tmp_path / "out")
    past = read_split(tmp_path / "out", "train").keys[0]
    prices = {"bucketize": [2, 1], "log_op": [2, 1]}.get(beside.kind, [3, 1])
    assert isinstance(past, Ragged)
    assert [part.tolist() for part in np.split(past.values, past.offsets[1:-1])] == [prices[1:], [], prices[::-1]]
