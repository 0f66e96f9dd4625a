# SPDX-License-Identifier: Apache-2.0
"""The Spark engine gives the data set of the local one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from terarec.errors import ConfigError, FormatError
from terarec.etl import prepare
from terarec.etl.engine.phases import Progress
from terarec.etl.ops import (
    Categorify,
    Explode,
    FillMissing,
    GivenIds,
    ListSlice,
    LogOp,
    NegativeSampling,
    Normalize,
    Operator,
    SplitText,
)
from terarec.etl.spark.fit import _FAN_IN
from terarec.etl.spark.run import even_pieces
from terarec.etl.workflow import Workflow, workflow_of
from terarec.spec import (
    LabelSpec,
    LeaveOneOut,
    OneSplit,
    PrepareOptions,
    SourceColumn,
    SourceSpec,
    Split,
    SplitByTime,
    WorkflowSpec,
)
from terarec.spec.checks import FieldError
from tests.cli.conftest import figures
from tests.errors import at
from tests.etl.engine import test_time_resolution as resolution
from tests.etl.engine.contents import contents
from tests.etl.engine.logs import shop_files, shop_workflow
from tests.etl.engine.test_earlier_rows import workflow as days_workflow
from tests.etl.engine.test_earlier_rows import write_days
from tests.etl.engine.test_rejected_rows import BEFORE_HISTORY, history_of, write_visits
from tests.etl.engine.test_split import EMPTY, keeping, write_times
from tests.etl.spark.comparing import assert_same
from tests.etl.spark.conftest import on_spark
from tests.etl.spark.functions import Latest
from tests.etl.spark.shop import every_operator, exploded, one_of_each, write_log, write_users
from tests.params import in_every_run

pytestmark = pytest.mark.usefixtures("spark")


def both(spec: WorkflowSpec, paths: list[Path], directory: Path, **options: Any) -> tuple[Any, Any]:
    """The reports of both engines, whose data sets lie in ``spark/`` and ``local/``."""
    requested, reported = PrepareOptions(**options), list[Progress]()
    reports = (
        prepare(Workflow.of(spec), paths, directory / "spark", on_spark(requested), reported.append),
        prepare(Workflow.of(spec), paths, directory / "local", requested),
    )
    assert_same(directory / "spark", directory / "local")
    assert list(dict.fromkeys(progress.phase for progress in reported)) == [phase.name for phase in reports[0].phases]
    assert [progress.done_bytes for progress in reported] == sorted(progress.done_bytes for progress in reported)
    assert (reported[-1].done_bytes, reported[-1].seconds_left) == (reported[-1].total_bytes, 0.0)
    assert reported[-1].rows == reports[0].phases[-1].rows > 0
    return reports


@pytest.mark.slow
def test_a_later_day_continues_from_the_earlier_rows(tmp_path: Path) -> None:
    """Finding N11: the rows that steps keep, and the lists that continue from them, are those of the local engine."""
    first, second, _ = write_days(tmp_path, 1)
    prepare(days_workflow(split=None), [first], tmp_path / "first", PrepareOptions())
    later = workflow_of(tmp_path / "first").with_split(OneSplit(split="train"))
    reports = [
        prepare(later, [second], tmp_path / "spark", on_spark(PrepareOptions())),
        prepare(later, [second], tmp_path / "local", PrepareOptions()),
    ]
    assert_same(tmp_path / "spark", tmp_path / "local")
    assert reports[0].earlier_rows == reports[1].earlier_rows > 0
    again = workflow_of(tmp_path / "spark").with_split(OneSplit(split="train"))
    with pytest.raises(FormatError, match=r": row [\d,]+: is earlier than rows of its group"):
        prepare(again, [first], tmp_path / "late", on_spark(PrepareOptions()))
    counts = [
        prepare(again, [first], tmp_path / name, options).late_rows
        for name, options in (
            ("a", on_spark(PrepareOptions(late_rows="allow"))),
            ("b", PrepareOptions(late_rows="allow")),
        )
    ]
    assert counts[0] == counts[1] > 0


@pytest.mark.parametrize(
    "workflow", [one_of_each, pytest.param(every_operator, marks=pytest.mark.slow)], ids=lambda made: made.__name__
)
def test_every_operator_gives_the_same_data_set_and_states(
    tmp_path: Path, workflow: Callable[[], WorkflowSpec]
) -> None:
    spec = workflow()
    known = {kind for kind in Operator.members().values() if kind.__module__.startswith("terarec.")}
    assert {type(step) for step in spec.steps} == known - {Explode, NegativeSampling}
    paths = write_log(tmp_path)
    tables = {"users": (str(write_users(tmp_path / "users.tsv")),)}
    ours, theirs = both(spec, paths, tmp_path, tables=tables, shuffle=True, seed=3, rows_per_shard=100)
    for part in ("rows", "splits", "columns", "inputs", "tables", "input_bytes"):
        assert getattr(ours, part) == getattr(theirs, part)
    assert not list(tmp_path.glob("*.partial"))


@pytest.mark.slow
def test_states_of_many_pieces_are_merged_in_a_tree(tmp_path: Path) -> None:
    paths = write_log(tmp_path)[:2]
    tables = {"users": (str(write_users(tmp_path / "users.tsv")),)}
    requested = PrepareOptions(tables=tables)
    prepare(Workflow.of(one_of_each()), paths, tmp_path / "local", requested)
    requested = on_spark(requested)
    settings = {**requested.spark_conf, "spark.sql.files.maxPartitionBytes": "300"}
    assert sum(path.stat().st_size for path in paths) // 300 > _FAN_IN
    requested = dataclasses.replace(requested, spark_conf=settings)
    prepare(Workflow.of(one_of_each()), paths, tmp_path / "spark", requested)
    assert_same(tmp_path / "spark", tmp_path / "local")


@pytest.mark.parametrize("size", ["0", "-1", "0m"])
def test_pieces_of_no_size_are_reported_before_any_work(tmp_path: Path, size: str) -> None:
    log = shop_files(tmp_path / "raw")
    requested = dataclasses.replace(on_spark(PrepareOptions()), spark_conf={"spark.sql.files.maxPartitionBytes": size})
    with pytest.raises(FieldError) as caught:
        prepare(shop_workflow(), log, tmp_path / "out", requested)
    assert caught.value.field == "spark_conf"
    assert "spark.sql.files.maxPartitionBytes" in caught.value.problem
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("num_bytes", "most", "parallelism", "expected"),
    [
        (1 << 30, 1 << 27, 3, -(-(1 << 30) // 9)),  # 8 of the largest size would leave one core idle
        (1 << 30, 1 << 27, 8, 1 << 27),
        (1 << 20, 1 << 27, 8, 1 << 22),
        (0, 1 << 27, 8, 1 << 22),
        (1 << 30, 300, 2, 300),
    ],
)
def test_pieces_keep_all_cores_busy(num_bytes: int, most: int, parallelism: int, expected: int) -> None:
    assert even_pieces(num_bytes, most, parallelism) == expected


@pytest.mark.slow
def test_exploded_rows_split_by_time_are_the_same(tmp_path: Path) -> None:
    both(exploded(SplitByTime(column="time", valid=0.2, test=0.1)), write_log(tmp_path, rows=150), tmp_path)


@pytest.mark.slow
def test_weights_and_metadata_are_the_same(tmp_path: Path) -> None:
    spec = exploded(SplitByTime(column="time", valid=0.2, test=0.1))
    metadata = ("user", "time", "price", "stock")
    spec = dataclasses.replace(spec, weight="bought", labels=(LabelSpec(name="y", column="bought"),), metadata=metadata)
    both(spec, write_log(tmp_path, rows=150), tmp_path, shuffle=True, rows_per_shard=40)
    spec = dataclasses.replace(one_of_each(), metadata=metadata)
    tables = {"users": (str(write_users(tmp_path / "users.tsv")),)}
    log = write_log(tmp_path, rows=150)
    both(spec, log, tmp_path / "each", tables=tables)


@pytest.mark.slow
@pytest.mark.parametrize("bad", ["-2", "", "1e39"])
def test_bad_weights_are_reported_and_left_out_as_by_the_local_engine(tmp_path: Path, bad: str) -> None:
    log = tmp_path / "log.tsv"
    weights = [str(row / 4) for row in range(30)]
    weights[11] = bad
    log.write_text("".join(f"{row % 2}\t{row / 3}\t{weight}\n" for row, weight in enumerate(weights)))
    columns = tuple(SourceColumn(name=name, type="number") for name in ("label", "price", "w"))
    spec = WorkflowSpec(
        name="weighted",
        source=SourceSpec(format="delimited", columns=columns),
        labels=(LabelSpec(name="label"),),
        dense=("price",),
        weight="w",
    )
    messages = []
    for requested in (PrepareOptions(), on_spark(PrepareOptions())):
        with pytest.raises(FormatError, check=at(f"{log}: line 12, column 'w'")) as caught:
            prepare(Workflow.of(spec), [log], tmp_path / "rejected", requested)
        messages.append(str(caught.value))
    assert messages[0] == messages[1]
    ours, theirs = both(spec, [log], tmp_path, bad_input="skip")
    assert ours.bad_input == theirs.bad_input
    assert ours.rows == 29


def test_a_fitted_workflow_transforms_only(tmp_path: Path) -> None:
    log = shop_files(tmp_path / "raw")
    prepare(shop_workflow(), log[:1], tmp_path / "fitted", PrepareOptions())
    settings = [
        part for name, value in on_spark(PrepareOptions()).spark_conf.items() for part in ("--conf", f"{name}={value}")
    ]
    arguments = ["--engine", "spark", "--master", "local[2]", "--shuffle", "--earlier-rows", "none", *settings]
    shown = figures("prepare", tmp_path / "fitted" / "workflow", log[1], "--out", tmp_path / "spark", *arguments)
    assert [phase["name"] for phase in shown["phases"]] == ["count", "group", "write"]
    fitted = Workflow.load(tmp_path / "fitted" / "workflow")
    prepare(fitted, log[1:], tmp_path / "local", PrepareOptions(shuffle=True, earlier_rows="none"))
    assert_same(tmp_path / "spark", tmp_path / "local")
    assert contents(tmp_path / "spark" / "workflow" / "states") == contents(tmp_path / "fitted" / "workflow" / "states")


@pytest.mark.slow
def test_all_rows_in_one_split(tmp_path: Path) -> None:
    """D1: the split of a fitted workflow need not be in the way on a cluster either."""
    log = shop_files(tmp_path / "raw")
    prepare(shop_workflow(), log, tmp_path / "fitted", PrepareOptions())
    fitted = Workflow.load(tmp_path / "fitted" / "workflow").with_split(OneSplit(split="test"))
    report = prepare(fitted, log[1:], tmp_path / "spark", on_spark(PrepareOptions(late_rows="allow")))
    prepare(fitted, log[1:], tmp_path / "local", PrepareOptions(late_rows="allow"))
    assert report.splits == {"test": 300}
    assert_same(tmp_path / "spark", tmp_path / "local")


@pytest.mark.parametrize(("split", "times"), [EMPTY[0], EMPTY[2], EMPTY[7]], ids=["shares", "thresholds", "users"])
def test_a_split_without_rows_is_rejected(tmp_path: Path, split: Split, times: list[int]) -> None:
    """Finding N5, on a cluster; the message has the times of the data."""
    file = write_times(tmp_path / "a.tsv", times)
    problems = []
    for options in (on_spark(PrepareOptions()), PrepareOptions()):
        with pytest.raises(FieldError, check=at("split")) as error:
            prepare(keeping(split), [file], tmp_path / "out", options)
        problems.append(error.value.problem)
        assert not (tmp_path / "out").exists()
    assert problems[0] == problems[1]


@pytest.mark.parametrize("train", in_every_run(["last"], ["all", "last"]))
def test_the_last_rows_of_users_are_those_of_the_local_engine(tmp_path: Path, train: Literal["all", "last"]) -> None:
    split = LeaveOneOut(column="user", order="time", train=train)
    ours, theirs = both(shop_workflow(split).spec, shop_files(tmp_path / "raw"), tmp_path)
    assert ours.splits == theirs.splits


def _small(source: SourceSpec, categories: tuple[str, ...]) -> WorkflowSpec:
    lists = tuple(column.name for column in source.columns if column.separator)
    steps: list[Any] = [ListSlice(columns=lists, stop=3)] if lists else []
    return WorkflowSpec(
        name="small",
        source=source,
        steps=(*steps, FillMissing(columns=("price",), value=0.0), Categorify(columns=categories)),
        labels=(LabelSpec(name="label"),),
        dense=("price",),
        categorical=categories,
    )


CSV = SourceSpec(
    format="delimited",
    columns=tuple(
        SourceColumn(name=name, type=kind)  # type: ignore[arg-type]
        for name, kind in [("label", "integer"), ("word", "text"), ("price", "number"), ("code", "hex32")]
    ),
    delimiter=",",
    header=True,
    quote=True,
    trim=True,
)
BAD_LINES = b"""code,label,price, word
1f,1,0.5, "a ""b"", c"
g0,0,1.5,d
,1,1e999,"e

2,0,.5,f,g
2,1
3,99999999999999999999,7,\xff
3,1, nan ,h
"""


def test_bad_input_is_reported_with_file_and_line(tmp_path: Path) -> None:
    path = tmp_path / "bad.csv"
    path.write_bytes(BAD_LINES)
    with pytest.raises(FormatError, check=at(f"{path}: line 3, column 'code'", "got 'g0'")):
        _prepare(_small(CSV, ("word", "code")), [path], tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "out.partial").exists()


REFUSED = b"""label,word,price,code,ids,sizes,words
1,a:1,2,1,0|1,1|2,x|y
0,b:2,-3.5,2,,1,x
,c:3,1,3,,1,x
0,d:x,1,4,,1,x
1,e:9223372036854775808,1,5,,1,x
1,a:4,,5,2|5|9,1,x
1,a:4,0.5,5,1|1|1|1,1,x
1,a:4,x,5,1,1,x
1,a:4,1,5,1,1|2,x
1,a:4,1e39,5,1,2|1|0,x|y|z
2,a:4,1,5,1,1,x
1,a:4,3,5,1,,
"""


def refusing() -> WorkflowSpec:
    """A workflow of steps that reject something of most of the rows of `REFUSED`."""
    lists = [("ids", "integer"), ("sizes", "integer"), ("words", "text")]
    columns = tuple(SourceColumn(name=name, type=kind, separator="|") for name, kind in lists)  # type: ignore[arg-type]
    return WorkflowSpec(
        name="refusing",
        source=dataclasses.replace(CSV, columns=(*CSV.columns, *columns)),
        steps=(
            Explode(columns=("sizes", "words")),
            SplitText(columns=("word",), separator=":", outputs=("letter", "number"), types=("text", "integer")),
            GivenIds(columns=("ids",), rows=(6,), max_length=3),
            LogOp(columns=("price",), outputs=("log",)),
            FillMissing(columns=("number",), value=0.0),
            Categorify(columns=("letter", "sizes", "words")),
        ),
        labels=(LabelSpec(name="label", is_probability=True),),
        dense=("price", "log", "number"),
        categorical=("letter", "ids", "sizes", "words"),
    )


def test_rows_of_which_something_is_rejected_are_treated_by_the_policy(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    path.write_bytes(REFUSED)
    ours, theirs = both(refusing(), [path], tmp_path, bad_input="missing")
    assert ours.bad_input == theirs.bad_input
    assert ours.bad_input.counts == {"label": 1, "number": 1, "rejected": 11}
    assert (ours.rows, ours.inputs) == (theirs.rows, theirs.inputs)
    path.write_bytes(b"".join(REFUSED.splitlines(keepends=True)[:3]))
    _assert_same_error(refusing(), [path], tmp_path / "raised")


def test_values_that_a_fitted_step_makes_invalid_are_bad_input(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    path.write_text("label,word,price,code\n1,a,2,1\n0,b,-3.5,2\n")
    spec = _small(CSV, ("word",))
    steps = (Normalize(columns=("price",)), LogOp(columns=("price",), shift=0.5), *spec.steps)
    _assert_same_error(dataclasses.replace(spec, steps=steps), [path], tmp_path / "out")
    ours, theirs = both(dataclasses.replace(spec, steps=steps), [path], tmp_path, bad_input="skip")
    assert ours.bad_input == theirs.bad_input
    assert (ours.rows, ours.bad_input.counts) == (1, {"rejected": 1})


def test_a_step_before_one_that_reads_other_rows_rejects(tmp_path: Path) -> None:
    workflow, options = history_of(BEFORE_HISTORY["side table"], tmp_path)
    log = write_visits(tmp_path / "log", [1, 4, -1, 3, 2, 5, 2])
    ours, theirs = both(workflow.spec, [log], tmp_path, bad_input="skip", tables=options.tables)
    assert ours.bad_input == theirs.bad_input
    assert (ours.rows, ours.bad_input.counts) == (6, {"rejected": 1})


def test_parquet_under_a_workflow_of_text(tmp_path: Path) -> None:
    """The local engine reads what the names of the files say; with the parts of a second of their timestamps."""
    pq.write_table(resolution.moments([3, 1, 2, 2]), tmp_path / "log.parquet", row_group_size=2)
    spec = resolution.workflow(SplitByTime(column="when", valid=0.3), kind="delimited", unit="ms").spec
    ours, theirs = both(spec, [tmp_path / "log.parquet"], tmp_path)
    assert ours.splits == theirs.splits == {"train": 3, "valid": 1}


def test_labels_of_which_none_is_positive_are_reported(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    path.write_text("label,word,price,code\n1,a,2,1\n2,b,3,2\n")
    sold = dataclasses.replace(_small(CSV, ("word",)), labels=(LabelSpec(name="label", positives=("3",)),))
    with pytest.raises(ConfigError, check=at("label 'label'", "no row of the training part holds '3'")):
        _prepare(sold, [path], tmp_path / "out")


def test_arrow_files_and_line_ends_between_quotes_are_read(tmp_path: Path) -> None:
    columns = {"label": [0, 1, 1], "word": ["a", None, "b"], "price": [0.5, 1.0, None], "code": ["1f", "2", "3"]}
    paths = [tmp_path / f"log{number}.arrow" for number in range(2)]
    for path in paths:
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, pa.table(columns).schema) as file:
            file.write(pa.table(columns))
    spec = _small(dataclasses.replace(CSV, format="arrow", delimiter="\t"), ("word", "code"))
    both(spec, paths, tmp_path / "arrow")
    lines = "".join(f'{row % 2},"w{row % 5}\n1,{row},",{row},{row:x}\n' for row in range(2000))
    (tmp_path / "log.csv").write_text("label,word,price,code\n" + lines)
    ours, _ = both(_small(CSV, ("word", "code")), [tmp_path / "log.csv"], tmp_path / "quoted", rows_per_shard=500)
    assert ours.rows == 2000


def test_operators_of_users_are_fitted_by_the_driver(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    path.write_text("label,word,price,code\n" + "".join(f"{row % 2},a,{row},1\n" for row in range(2000)))
    spec = _small(CSV, ("word",))
    both(dataclasses.replace(spec, steps=(Latest(columns=("price",)), *spec.steps)), [path], tmp_path)


def _assert_same_error(spec: WorkflowSpec, paths: list[Path], out: Path) -> None:
    with pytest.raises(FormatError) as caught:
        _prepare(spec, paths, out)
    with pytest.raises(FormatError) as expected:
        prepare(Workflow.of(spec), paths, out, PrepareOptions())
    assert str(caught.value) == str(expected.value)


def _prepare(spec: WorkflowSpec, paths: list[Path], out: Path, **options: Any) -> None:
    prepare(Workflow.of(spec), paths, out, PrepareOptions(engine="spark", **options))


@pytest.mark.slow
def test_parts_of_a_second_count(tmp_path: Path) -> None:
    """Finding N3: histories, differences and shares by time are those of the local engine."""
    resolution.write(tmp_path / "log", "parquet", "ns", 60)
    split = SplitByTime(column="when", valid=0.2, test=0.1)
    _, report = both(resolution.workflow(split, unit="us").spec, [tmp_path / "log"], tmp_path)
    assert set(report.splits) == {"train", "valid", "test"}


def test_columns_in_the_names_of_directories_are_the_same(tmp_path: Path) -> None:
    """Finding N9."""
    for country in ("DE", "FR"):
        (tmp_path / "log" / f"country={country}").mkdir(parents=True)
        table = pa.table({"y": [0, 1, 1], "item": ["a", "b", "a"]})
        pq.write_table(table, tmp_path / "log" / f"country={country}" / "part.parquet")
    columns = tuple(SourceColumn(name=name, type="text") for name in ("item", "country"))
    source = SourceSpec(format="parquet", columns=(SourceColumn(name="y", type="integer"), *columns))
    made = Workflow(
        [Categorify(columns=("item", "country"))],
        source=source,
        labels=[LabelSpec(name="y")],
        categorical=["item", "country"],
    )
    report, _ = both(made.spec, [tmp_path / "log"], tmp_path)
    assert report.rows == 6
