# SPDX-License-Identifier: Apache-2.0
"""Finding P1: an exception of a user's code is the user's error, with the row and the line that cause it."""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from terarec.errors import ConfigError, FormatError, UserCodeError
from terarec.etl import prepare
from terarec.etl.ops import Clip, LambdaOp, MappedColumns, Operator, State
from terarec.etl.workflow import Workflow
from terarec.spec import LabelSpec, PrepareOptions, SourceColumn, SourceSpec
from terarec.spec.registry import imported
from tests.errors import at

FILE = Path(__file__).name


def root(numbers: pa.Array) -> pa.Array:
    values = numbers.to_pylist()
    if any(value is not None and value < 0 for value in values):
        raise ValueError("negative price")
    return pc.sqrt(numbers)


def root_of_record(number: float) -> float:
    return number**0.5 if number >= 0 else 1 / 0


def lookup(numbers: pa.Array) -> pa.Array:
    return pa.array([{1.0: 2.0, 4.0: 5.0}[value] for value in numbers.to_pylist()])


def broken(numbers: pa.Array) -> pa.Array:
    return numbers.no_such_method()


def leaves(numbers: pa.Array) -> pa.Array:
    sys.exit(0)


def only_together(numbers: pa.Array) -> pa.Array:
    if len(numbers) > 1:
        raise ValueError("too many")
    return numbers


@dataclass(frozen=True, kw_only=True)
class Reciprocal(MappedColumns):
    """1 / x, value by value."""

    kind = "test_reciprocal"  # type: ignore[misc]
    accepted = ("number",)  # type: ignore[misc]

    def transform_batch(self, batch: pa.RecordBatch, state: State | None) -> Mapping[str, pa.Array]:
        return {new: pa.array([1 / x for x in batch.column(old).to_pylist()]) for old, new in self.pairs}


def step_of(function: Callable[..., Any], **options: str) -> LambdaOp:
    name = f"{__name__}:{function.__name__}"
    return LambdaOp(columns=("x",), outputs=("y",), function=name, output_type="number", **options)  # type: ignore[arg-type]


def workflow(step: Operator) -> Workflow:
    columns = tuple(SourceColumn(name=name, type="number") for name in ("label", "x"))
    source = SourceSpec(format="delimited", delimiter=",", columns=columns)
    return Workflow([step], source=source, labels=[LabelSpec(name="label")], dense=["y"], name="prices")


def log(path: Path, values: list[float]) -> Path:
    path.write_text("".join(f"1,{value}\n" for value in values))
    return path


OWN = Reciprocal(columns=("x",), outputs=("y",))
REJECTED = {
    "lambda": (step_of(root), [4, -1, 1, -9]),
    "key": (step_of(lookup), [4, 3, 1, 2]),
    "own": (OWN, [4, 0, 1, 0]),
}


@pytest.mark.parametrize("name", REJECTED)
def test_a_row_is_rejected_as_bad_input(tmp_path: Path, name: str) -> None:
    step, values = REJECTED[name]
    path = log(tmp_path / "log", values)
    with pytest.raises(FormatError, check=at(f"{path}: line 2", "raised")) as caught:
        prepare(workflow(step), [path], tmp_path / "data")
    assert f"({FILE}:" in caught.value.problem
    assert not (tmp_path / "data").exists()
    report = prepare(workflow(step), [path], tmp_path / "data", PrepareOptions(bad_input="skip"))
    assert (report.rows, dict(report.bad_input.counts)) == (2, {"rejected": 2})
    assert [": ".join(line.split(": ")[:2]) for line in report.bad_input.first] == [
        f"{path}: line 2",
        f"{path}: line 4",
    ]


def test_functions_of_presets_reject_rows_and_records(tmp_path: Path) -> None:
    """30 February ended the run as a defect in terarec, and served records likewise."""
    function = "terarec.etl.ready.row_functions:avazu_hour_and_weekday"
    columns = tuple(SourceColumn(name=name, type="integer") for name in ("label", "hour"))
    step = LambdaOp(
        columns=("hour",),
        outputs=("h", "w"),
        function=function,
        record_function=f"{function}_of_record",
        output_type="integer",
    )
    source = SourceSpec(format="delimited", delimiter=",", columns=columns)
    made = Workflow([step], source=source, labels=[LabelSpec(name="label")], dense=["h", "w"])
    assert made.plan.validation.steps == (0,)
    path = log(tmp_path / "log", [14022812, 14023012])
    with pytest.raises(FormatError, check=at(f"{path}: line 2", "got 14023012")):
        prepare(made, [path], tmp_path / "data")
    report = prepare(made, [path], tmp_path / "data", PrepareOptions(bad_input="skip"))
    assert (report.rows, dict(report.bad_input.counts)) == (1, {"rejected": 1})
    for count in (1, 200):
        with pytest.raises(ConfigError, check=at(f"row {count - 1}", "got 14023012")):
            made.encode({"hour": [14022812] * (count - 1) + [14023012]})


@pytest.mark.parametrize("policy", ["raise", "skip", "missing"])
@pytest.mark.parametrize("function", [broken, leaves, only_together])
def test_a_function_that_takes_no_row_stops(tmp_path: Path, policy: Any, function: Callable[..., Any]) -> None:
    path = log(tmp_path / "log", [1, 2, 3])
    with pytest.raises(UserCodeError, check=at(f"LambdaOp {__name__}:{function.__name__}", "")) as caught:
        prepare(workflow(step_of(function)), [path], tmp_path / "data", PrepareOptions(bad_input=policy))
    assert f"in {function.__name__})" in caught.value.problem


def test_a_function_that_rejects_many_first_rows_stops(tmp_path: Path) -> None:
    path = log(tmp_path / "log", [-1.0] * 150 + [1.0])
    with pytest.raises(UserCodeError):
        prepare(workflow(step_of(root)), [path], tmp_path / "data", PrepareOptions(bad_input="skip"))


@pytest.mark.parametrize("count", [1, 3, 200])
@pytest.mark.parametrize("options", [{}, {"record_function": f"{__name__}:root_of_record"}])
def test_a_record_is_rejected(count: int, options: dict[str, str]) -> None:
    made = workflow(step_of(root, **options))
    with pytest.raises(ConfigError, check=at(f"row {count - 1}", "")) as caught:
        made.encode({"x": [1.0] * (count - 1) + [-1.0]})
    assert "raised ValueError: negative price" in caught.value.problem
    assert made.encode({"x": [1.0] * count}).dense.tolist() == [[1.0]] * count
    with pytest.raises(UserCodeError):
        workflow(step_of(broken)).encode({"x": [1.0]})


@pytest.mark.parametrize(
    ("code", "raised"),
    [
        ("raise ValueError('no licence')", "ValueError: no licence (mine.py:1"),
        ("{}.missing", "AttributeError"),
        ("def f(:", "SyntaxError: invalid syntax (mine.py:1)"),
        ("import sys; sys.exit(0)", "SystemExit: 0 (mine.py:1"),
    ],
)
def test_a_module_that_cannot_be_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, raised: str
) -> None:
    (tmp_path / "mine.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UserCodeError, check=at("module 'mine'", "cannot be imported")) as caught:
        imported("mine:f")
    assert raised in caught.value.problem


def test_an_error_of_our_own_operators_stays_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(self: Clip, numbers: Any, *params: Any) -> Any:
        raise ZeroDivisionError

    monkeypatch.setattr(Clip, "formula", fails)
    with pytest.raises(ZeroDivisionError):
        workflow(Clip(columns=("x",), outputs=("y",), low=0.0)).encode({"x": np.ones(200)})
