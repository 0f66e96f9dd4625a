"""The Spark engine gives the data set of the local one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pyarrow.parquet as pq
import pytest

from terarec.errors import ConfigError, FormatError
from terarec.etl import spark as spark_engine
from terarec.etl.engine import PrepareOptions, Progress, prepare
from terarec.etl.workflow import Workflow
from terarec.spec import (
    Categorify,
    Explode,
    FillMissing,
    GivenIds,
    LabelSpec,
    LambdaOp,
    ListSlice,
    LogOp,
    Operator,
    SourceColumn,
    SourceSpec,
    SplitByTime,
    WorkflowSpec,
)
from tests.cli.conftest import figures
from tests.etl.engine.contents import contents
from tests.etl.engine.logs import shop_files, shop_workflow
from tests.etl.spark.comparing import assert_same
from tests.etl.spark.conftest import on_spark
from tests.etl.spark.shop import every_operator, exploded, one_of_each, write_log, write_users

pytestmark = pytest.mark.usefixtures("spark")


def both(spec: WorkflowSpec, paths: list[Path], directory: Path, **options: Any) -> tuple[Any, Any]:
    """The reports of both engines, whose data sets lie in ``spark/`` and ``local/``."""
    asked, told = PrepareOptions(**options), list[Progress]()
    reports = (
        spark_engine.prepare(Workflow.of(spec), paths, directory / "spark", on_spark(asked), told.append),
        prepare(Workflow.of(spec), paths, directory / "local", asked),
    )
    assert_same(directory / "spark", directory / "local")
    assert list(dict.fromkeys(progress.phase for progress in told)) == [phase.name for phase in reports[0].phases]
    assert [progress.done_bytes for progress in told] == sorted(progress.done_bytes for progress in told)
    assert (told[-1].done_bytes, told[-1].seconds_left) == (told[-1].total_bytes, 0.0)
    assert told[-1].rows == reports[0].phases[-1].rows > 0
    return reports


@pytest.mark.parametrize(
    "workflow", [one_of_each, pytest.param(every_operator, marks=pytest.mark.slow)], ids=lambda made: made.__name__
)
def test_every_operator_gives_the_same_data_set_and_states(
    tmp_path: Path, workflow: Callable[[], WorkflowSpec]
) -> None:
    spec = workflow()
    assert {type(step) for step in spec.steps} == set(get_args(Operator)) - {Explode}
    paths = write_log(tmp_path)
    tables = {"users": (str(write_users(tmp_path / "users.tsv")),)}
    ours, theirs = both(spec, paths, tmp_path, tables=tables, shuffle=True, seed=3, rows_per_shard=100)
    for part in ("rows", "splits", "columns", "inputs", "tables", "input_bytes"):
        assert getattr(ours, part) == getattr(theirs, part)
    names = sorted(path.name for path in (tmp_path / "local" / "workflow" / "states").iterdir())
    assert names == sorted(path.name for path in (tmp_path / "spark" / "workflow" / "states").iterdir())
    for name in names:
        if "categorify" in name:
            tables_read = [
                pq.read_table(tmp_path / engine / "workflow" / "states" / name) for engine in ("spark", "local")
            ]
            assert tables_read[0].equals(tables_read[1])
    assert not list(tmp_path.glob("*.partial"))


def test_exploded_rows_split_by_time_are_the_same(tmp_path: Path) -> None:
    both(exploded(SplitByTime(column="time", valid=0.2, test=0.1)), write_log(tmp_path, rows=150), tmp_path)


def test_a_fitted_workflow_transforms_only(tmp_path: Path) -> None:
    log = shop_files(tmp_path / "raw")
    prepare(shop_workflow(), log[:1], tmp_path / "fitted", PrepareOptions())
    settings = [
        part for name, value in on_spark(PrepareOptions()).spark_conf.items() for part in ("--conf", f"{name}={value}")
    ]
    asked = ["--engine", "spark", "--master", "local[2]", "--shuffle", *settings]
    told = figures("prepare", tmp_path / "fitted" / "workflow", log[1], "--out", tmp_path / "spark", *asked)
    assert [phase["name"] for phase in told["phases"]] == ["rows", "write"]
    fitted = Workflow.load(tmp_path / "fitted" / "workflow")
    prepare(fitted, log[1:], tmp_path / "local", PrepareOptions(shuffle=True))
    assert_same(tmp_path / "spark", tmp_path / "local")
    assert contents(tmp_path / "spark" / "workflow") == contents(tmp_path / "fitted" / "workflow")


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


def test_bad_input_is_told_with_file_and_line(tmp_path: Path) -> None:
    path = tmp_path / "bad.csv"
    path.write_bytes(BAD_LINES)
    with pytest.raises(FormatError, match=r"bad\.csv: line 3, column 'code': got 'g0', expected up to 8 hex"):
        _prepare(_small(CSV, ("word", "code")), [path], tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "out.partial").exists()


@pytest.mark.parametrize(
    ("step", "problem"),
    [
        (
            LogOp(columns=("price",)),
            "column 'price', row 1: got -3.5, expected more than -1.0 for a logarithm (Clip raises lower ones)",
        ),
        (
            GivenIds(columns=("label",), outputs=("id",), rows=(1,)),
            "column 'label', row 0: got 1, expected an id, 0 <= id < 1",
        ),
    ],
)
def test_values_that_a_step_refuses_are_told_in_one_line(tmp_path: Path, step: Any, problem: str) -> None:
    path = tmp_path / "log.csv"
    path.write_text("label,word,price,code\n1,a,2,1\n0,b,-3.5,2\n")
    base = _small(CSV, ("word",))
    categories = ("word", *step.outputs)
    spec = dataclasses.replace(base, steps=(step, *base.steps[1:]), dense=("price",), categorical=categories)
    with pytest.raises(FormatError) as caught:
        _prepare(spec, [path], tmp_path / "out")
    assert str(caught.value) == problem


def test_labels_that_are_no_probabilities_or_never_positive_are_told(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    path.write_text("label,word,price,code\n1,a,2,1\n2,b,3,2\n")
    strict = dataclasses.replace(_small(CSV, ("word",)), labels=(LabelSpec(name="label", is_probability=True),))
    with pytest.raises(FormatError, match="column 'label', row 1: got 2, expected a number from 0 to 1, or positives"):
        _prepare(strict, [path], tmp_path / "out")
    sold = dataclasses.replace(strict, labels=(LabelSpec(name="label", positives=("3",)),))
    with pytest.raises(ConfigError, match=r"no row of the training part holds '3'; it holds '[12]', '[12]'"):
        _prepare(sold, [path], tmp_path / "out")


def test_what_spark_cannot_do_is_told_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    path.write_text("label,word,price,code\n1,a,2,1\n")
    base = _small(CSV, ("word",))
    function = LambdaOp(columns=("price",), outputs=("x",), function="math:sqrt", output_type="number")
    spec = WorkflowSpec(name="log", source=CSV, steps=(function,), labels=base.labels, dense=("x",))
    with pytest.raises(ConfigError, match=r"steps\[0\] LambdaOp: 'math:sqrt' has no spark_function"):
        _prepare(spec, [path], tmp_path / "out")
    with pytest.raises(ConfigError, match=r"source.format: got 'arrow', expected 'delimited', 'json_lines' or 'parq"):
        _prepare(dataclasses.replace(base, source=dataclasses.replace(CSV, format="arrow")), [path], tmp_path / "out")
    with pytest.raises(ConfigError, match="occurs twice"):
        _prepare(base, [path, path], tmp_path / "out")


def _prepare(spec: WorkflowSpec, paths: list[Path], out: Path, **options: Any) -> None:
    spark_engine.prepare(Workflow.of(spec), paths, out, PrepareOptions(engine="spark", **options))
