# SPDX-License-Identifier: Apache-2.0
"""Rows with a value that a step or the data set rejects: bad input like lines that cannot be read."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from terarec.errors import FormatError
from terarec.etl import prepare
from terarec.etl.engine.phases import Progress
from terarec.etl.engine.score import EncodedFiles
from terarec.etl.ops import (
    Bucketize,
    Categorify,
    Clip,
    Explode,
    History,
    JoinTable,
    KeepRows,
    LambdaOp,
    LogOp,
    NegativeSampling,
    Normalize,
    Operator,
    SplitText,
)
from terarec.etl.workflow import Workflow
from terarec.spec import (
    LabelSpec,
    PrepareOptions,
    SourceColumn,
    SourceSpec,
    Split,
    SplitByFraction,
    SplitByTime,
    WorkflowSpec,
)
from tests.errors import at
from tests.etl.engine.contents import contents, read_split
from tests.etl.engine.logs import shop_lines, shop_workflow

SPLITS = [SplitByFraction(valid=0.1, test=0.05), SplitByTime(column="time", valid=0.1)]
BAD_ROWS = (3, 77, 78, 300, 590)


def shop_log(directory: Path, bad: dict[int, str]) -> list[Path]:
    """600 rows in one file, of which the label of some is another text."""
    directory.mkdir()
    lines = shop_lines(600)
    for row, label in bad.items():
        lines[row] = label + lines[row][1:]
    path = directory / "log.tsv"
    path.write_text("".join(line + "\n" for line in lines))
    return [path]


@pytest.mark.parametrize("split", SPLITS, ids=lambda split: split.kind)
@pytest.mark.parametrize("policy", ["skip", "missing"])
def test_rows_without_a_label_are_skipped_like_invalid_lines(tmp_path: Path, split: Split, policy: Any) -> None:
    whole = shop_log(tmp_path / "whole", dict.fromkeys(BAD_ROWS, "1\t1\t1\t1\t"))  # lines with too many fields
    prepare(shop_workflow(split), whole, tmp_path / "a", PrepareOptions(bad_input="skip", shuffle=True))
    log = shop_log(tmp_path / "raw", dict.fromkeys(BAD_ROWS, ""))
    report = prepare(shop_workflow(split), log, tmp_path / "b", PrepareOptions(bad_input=policy, shuffle=True))
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    assert report.bad_input.counts == {"label": 5}
    place = f"{log[0]}: line {{}}, column 'bought': got a missing value, expected a label in every row (bad_input="
    starts = [place.format(row + 1) for row in BAD_ROWS]
    assert [fault.startswith(start) for fault, start in zip(report.bad_input.first, starts, strict=True)] == [True] * 5
    by_name = {column.name: column.missing for column in report.inputs}
    assert by_name["bought"] == 5


@pytest.mark.parametrize("split", [None, *SPLITS], ids=lambda split: getattr(split, "kind", "none"))
def test_a_row_without_a_label_ends_the_run_in_the_first_pass(tmp_path: Path, split: Split | None) -> None:
    log = shop_log(tmp_path / "raw", {41: "", 90: ""})
    reported: list[Progress] = []
    with pytest.raises(FormatError, check=at(f"{tmp_path}/raw/log.tsv: line 42, column 'bought'")):
        prepare(shop_workflow(split), log, tmp_path / "out", PrepareOptions(), reported.append)
    assert {step.phase for step in reported} <= {"split", "group"}
    assert [path.name for path in tmp_path.iterdir()] == ["raw"]


def test_bad_lines_and_rejected_rows_are_reported_in_their_order(tmp_path: Path) -> None:
    bad = {row: ("", "x")[row % 2] for row in range(10, 24)}
    log = shop_log(tmp_path / "raw", bad)
    report = prepare(shop_workflow(), log, tmp_path / "out", PrepareOptions(bad_input="skip"))
    assert report.bad_input.counts == {"integer": 7, "label": 7}
    assert [fault.split(": ")[1].split(",")[0] for fault in report.bad_input.first] == [
        f"line {row + 1}" for row in range(10, 20)
    ]
    assert report.rows == 600 - 14


LOG = SourceSpec(
    format="delimited",
    columns=(
        SourceColumn(name="label", type="integer"),
        SourceColumn(name="price", type="number"),
        SourceColumn(name="items", type="text", separator=" "),
    ),
    delimiter=",",
)
LINES = ("1,2.5,a-1 b-0", "0,-7,a-0", ",1,", "1,,c-x d-1", "0,3,b-1 c-0", "1,1e300,a-1")


def small(steps: Sequence[Any], label: str = "label", dense: str = "price", categorical: str = "items") -> WorkflowSpec:
    """A workflow whose last step makes ids of `categorical`."""
    return WorkflowSpec(
        name="small",
        source=LOG,
        steps=(*steps, Categorify(columns=(categorical,))),
        labels=(LabelSpec(name=label),),
        dense=(dense,),
        categorical=(categorical,) if categorical != "items" else (),
    )


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (  # numbers that the data set does not hold
            small([]),
            [(3, "got a missing value"), (4, "got nan, expected a number that float32 holds"), (6, "got 1e+300")],
        ),
        (  # as they leave a step that learns, which only the last pass sees
            small([Normalize(columns=("price",), outputs=("normal",))], dense="normal"),
            [(3, "got a missing value"), (4, "got nan")],
        ),
        (
            small([LogOp(columns=("price",), outputs=("log",))], dense="log"),
            [(2, "got -7.0, expected more than -1.0"), (3, "got a missing value"), (4, "got nan")],
        ),
        (  # the item of a row alone
            small(
                [
                    Explode(columns=("items",)),
                    SplitText(columns=("items",), separator="-", outputs=("item", "hit"), types=("text", "integer")),
                    KeepRows(column="price", at_most=10.0),
                ],
                label="hit",
                categorical="item",
            ),
            [(4, "got 'c-x', expected a 64-bit integer as part 2")],
        ),
        (small([KeepRows(column="label", values=("0", "1")), KeepRows(column="price", at_most=10.0)]), []),
    ],
    ids=["dense", "after learning", "logarithm", "item", "kept rows"],
)
@pytest.mark.parametrize("policy", ["skip", "raise"])
def test_what_rejects_rows(tmp_path: Path, spec: WorkflowSpec, expected: list[tuple[int, str]], policy: Any) -> None:
    path = tmp_path / "log.csv"
    path.write_text("\n".join(LINES))
    options = PrepareOptions(bad_input=policy)
    if policy == "raise" and expected:
        number, fault = min(expected)
        with pytest.raises(FormatError) as caught:
            prepare(Workflow.of(spec), [path], tmp_path / "out", options)
        assert str(caught.value).startswith(f"{path}: line {number}, column ")
        assert fault in str(caught.value)
        return
    report = prepare(Workflow.of(spec), [path], tmp_path / "out", options)
    assert sum(report.bad_input.counts.values()) == len(expected)
    for line, (number, fault) in zip(report.bad_input.first, expected, strict=True):
        assert line.startswith(f"{path}: line {number}, column ")
        assert fault in line


PRICES = SourceSpec(
    format="delimited",
    columns=(SourceColumn(name="x", type="integer"), SourceColumn(name="price", type="number")),
    delimiter=",",
)
BEFORE_HISTORY: dict[str, list[Operator]] = {
    "user code": [
        LambdaOp(columns=("x",), outputs=("z",), function="tests.etl.ops.test_user_errors:root", output_type="number")
    ],
    "side table": [
        JoinTable(table="prices", on="x", columns=("price",)),
        LogOp(columns=("price",), outputs=("z",)),
    ],
}


def history_of(steps: Sequence[Operator], paths: Path) -> tuple[Workflow, PrepareOptions]:
    """A workflow with steps, one of which rejects x = -1, before a step that reads other rows."""
    columns = tuple(SourceColumn(name=name, type="integer") for name in ("label", "user", "t", "x"))
    workflow = Workflow(
        [
            *steps,
            Bucketize(columns=("z",), outputs=("b",), boundaries=(1.0, 1.5)),
            History(columns=("b",), outputs=("past",), group="user", order="t", max_length=3),
        ],
        source=SourceSpec(format="delimited", delimiter=",", columns=columns),
        tables={"prices": PRICES} if steps[0].side_table else {},
        labels=[LabelSpec(name="label")],
        dense=["x"],
        categorical=["past"],
    )
    table = paths / "prices.csv"
    table.write_text("".join(f"{x},{-5 if x < 0 else x}\n" for x in range(-1, 6)))
    return workflow, PrepareOptions(bad_input="skip", tables={"prices": (str(table),)} if workflow.spec.tables else {})


def lists_of(keys: Any) -> list[list[int]]:
    return [part.tolist() for part in np.split(keys.values, keys.offsets[1:-1])]


def write_visits(path: Path, values: Sequence[int]) -> Path:
    path.write_text("".join(f"1,{row % 2},{row},{x}\n" for row, x in enumerate(values) if x >= -1))
    return path


@pytest.mark.parametrize("name", BEFORE_HISTORY)
def test_a_step_before_one_that_reads_other_rows_rejects(tmp_path: Path, name: str) -> None:
    workflow, options = history_of(BEFORE_HISTORY[name], tmp_path)
    log = write_visits(tmp_path / "log", [1, 4, -1, 3, 2, 5, 2])
    whole = write_visits(tmp_path / "whole", [1, 4, -2, 3, 2, 5, 2])
    with pytest.raises(FormatError) as caught:
        prepare(workflow, [log], tmp_path / "out", dataclasses.replace(options, bad_input="raise"))
    assert caught.value.where.startswith(f"{log}: line 3")
    report = prepare(workflow, [log], tmp_path / "out", options)
    assert (report.rows, report.bad_input.counts) == (6, {"rejected": 1})
    prepare(workflow, [whole], tmp_path / "expected", options)
    past, expected = (lists_of(read_split(tmp_path / out, "train").keys[0]) for out in ("out", "expected"))
    assert past == expected
    scored = EncodedFiles(
        Workflow.load(tmp_path / "out" / "workflow", allow_import=("tests",)),
        [log],
        options=dataclasses.replace(options, earlier_rows="none"),
    )
    (block,) = scored.blocks()
    assert block.rows.tolist() == [0, 1, 3, 4, 5, 6]
    assert lists_of(block.records.keys[0]) == expected
    assert scored.bad_input.counts == {"rejected": 1}


VISITS = SourceSpec(
    format="delimited",
    delimiter=",",
    columns=tuple(SourceColumn(name=name, type="integer") for name in ("label", "user", "t", "x")),
)
PAST = History(columns=("t",), outputs=("past",), group="user", order="t", max_length=3)


def prepared(steps: Sequence[Operator], log: Path, out: Path, dense: str, policy: Any = "raise") -> Workflow:
    """The workflow of a data set of visits."""
    workflow = Workflow(steps, source=VISITS, labels=[LabelSpec(name="label")], dense=[dense], keys=["past"])
    prepare(workflow, [log], out, PrepareOptions(bad_input=policy))
    return Workflow.load(out / "workflow", allow_import=("tests",))


def scoring(workflow: Workflow, log: Path, **options: Any) -> EncodedFiles:
    return EncodedFiles(workflow, [log], options=PrepareOptions(earlier_rows="none", **options))


@pytest.mark.parametrize("output", ["x", "c"])
@pytest.mark.parametrize("policy", ["raise", "skip"])
def test_scoring_accepts_what_row_steps_mend(tmp_path: Path, output: str, policy: Any) -> None:
    """The pass for History left out the step before KeepRows that LogOp needs."""
    clip = Clip(columns=("x",), outputs=() if output == "x" else ("c",), low=0.0)
    steps = [clip, KeepRows(column="user", at_least=0), LogOp(columns=(output,)), PAST]
    log = tmp_path / "log"
    log.write_text("1,1,1,-5\n1,1,2,3\n")
    (block,) = scoring(prepared(steps, log, tmp_path / "out", output), log, bad_input=policy).blocks()
    assert lists_of(block.records.keys[0]) == [[], [1]]
    np.testing.assert_array_equal(block.records.dense, read_split(tmp_path / "out", "train").dense)


def test_a_row_step_rejects_in_all_passes(tmp_path: Path) -> None:
    """History saw rows that the last pass left out, where only a fitted step reads what the row step makes."""
    steps = [LogOp(columns=("x",)), KeepRows(column="user", at_least=0), PAST, Normalize(columns=("x",))]
    log = tmp_path / "log"
    log.write_text("1,1,1,4\n1,1,2,-5\n1,1,3,2\n")
    workflow = prepared(steps, log, tmp_path / "out", "x", policy="skip")
    assert lists_of(read_split(tmp_path / "out", "train").keys[0]) == [[], [1]]
    (block,) = scoring(workflow, log, bad_input="skip").blocks()
    assert lists_of(block.records.keys[0]) == [[], [1]]


@pytest.mark.parametrize("where", [{}, {"where": "label", "at_least": 1.0}], ids=["all", "labelled"])
def test_scored_rows_get_no_draws(tmp_path: Path, where: dict[str, Any]) -> None:
    columns = tuple(SourceColumn(name=name, type="integer") for name in ("item", "user", "t"))
    workflow = Workflow(
        [
            NegativeSampling(table="items", column="item", negatives=2),
            History(columns=("item",), outputs=("past",), group="user", order="t", max_length=3, **where),
        ],
        source=SourceSpec(format="delimited", delimiter=",", columns=columns),
        tables={"items": SourceSpec(format="delimited", columns=columns[:1])},
        labels=[LabelSpec(name="label")],
        keys=["item", "past"],
    )
    (tmp_path / "items").write_text("10\n20\n30\n40\n")
    log = tmp_path / "log"
    log.write_text("10,1,1\n20,1,2\n30,1,3\n40,1,4\n")
    prepare(workflow, [log], tmp_path / "out", PrepareOptions(tables={"items": (str(tmp_path / "items"),)}))
    (block,) = scoring(Workflow.load(tmp_path / "out" / "workflow"), log).blocks()
    assert block.rows.tolist() == [0, 1, 2, 3]
    assert block.records.keys[0].tolist() == [10, 20, 30, 40]
    assert lists_of(block.records.keys[1]) == [[], [10], [10, 20], [10, 20, 30]]
