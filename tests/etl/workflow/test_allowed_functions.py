# SPDX-License-Identifier: Apache-2.0
"""S1: a workflow of another author names no code that its reader has not allowed."""

import json
import os
import subprocess
import sys
import types
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from terarec.errors import ConfigError
from terarec.etl import prepare
from terarec.etl.ops import LambdaOp
from terarec.etl.ready import PRESETS, criteo
from terarec.etl.workflow import Workflow, workflow_of
from terarec.etl.workflow.workflow import PRESET_FUNCTIONS
from terarec.spec import LabelSpec, SourceColumn, SourceSpec, WorkflowSpec
from terarec.spec.registry import imported
from tests.errors import at

system = os.system  # what another module defines


def double(numbers: pa.Array) -> pa.Array:
    return pc.multiply(numbers, 2.0)


def double_of_record(number: float) -> float:
    return 2.0 * number


def doubling(**functions: str) -> WorkflowSpec:
    named = {"function": f"{__name__}:double", **functions}
    return WorkflowSpec(
        name="shop",
        source=SourceSpec(
            format="delimited",
            columns=(SourceColumn(name="label", type="number"), SourceColumn(name="x", type="number")),
        ),
        steps=(LambdaOp(columns=("x",), outputs=("y",), output_type="number", **named),),
        labels=(LabelSpec(name="label"),),
        dense=("y",),
    )


def saved(directory: Path, **functions: str) -> Path:
    """A fitted workflow, saved, whose step names these functions in the place of harmless ones."""
    Workflow.of(doubling()).save(directory)
    path = directory / "workflow.json"
    content = json.loads(path.read_text())
    content["workflow"]["steps"][0].update(functions)
    path.write_text(json.dumps(content))
    return directory


def test_a_function_is_rejected_by_name_before_its_module_is_imported(tmp_path: Path) -> None:
    module = tmp_path / "somebodys_code.py"
    module.write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\ndef f(x): return x\n")
    directory = saved(tmp_path / "workflow", function="somebodys_code:f")
    program = f"from terarec.etl.workflow import Workflow; Workflow.load({str(directory)!r})"
    ended = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, "PYTHONPATH": str(tmp_path)}, capture_output=True, text=True
    )
    assert "steps[0] LambdaOp: function 'somebodys_code:f'" in ended.stderr.splitlines()[-1]
    assert "allow_import=('somebodys_code',)" in ended.stderr
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("field", ["function", "record_function"])
@pytest.mark.parametrize(
    "name",
    [
        "os:system",
        "posix:system",
        "subprocess:run",
        "builtins:eval",
        "terarec.cli.app:command_line",
        "terarec.etl.ready.row_functions:pc",
        "terarec.etl.ready.row_functions:_modulo",
        "terarec.etl.ready.row_functionsx:length",
        "terarec.etl.ops.columns:imported",
    ],
)
def test_names_that_are_not_allowed(field: str, name: str, tmp_path: Path) -> None:
    harmless = "terarec.etl.ready.row_functions:length"
    directory = saved(tmp_path / "workflow", **{"function": harmless, field: name})
    place = f"{directory}/workflow.json: steps[0] LambdaOp: {field} '{name}'"
    for read in (Workflow.load, lambda path: Workflow.from_json(path / "workflow.json")):
        with pytest.raises(ConfigError, check=at(place, "allow_import=")) as caught:
            read(directory)
        assert "\n" not in str(caught.value)
        assert repr(name) in str(caught.value)


def test_what_a_package_only_reaches_is_not_defined_in_it(tmp_path: Path) -> None:
    """Neither another module's function under a name of the package, nor a module that it imports."""
    package = __name__.partition(".")[0]
    with pytest.raises(
        ConfigError,
        check=at(f"{tmp_path}/1/workflow.json: steps[0] LambdaOp: function '{__name__}:system'", "defined in posix"),
    ):
        Workflow.load(saved(tmp_path / "1", function=f"{__name__}:system"), allow_import=(package,))
    with pytest.raises(ConfigError, check=at("steps[0] LambdaOp: function 'terarec.cli.os:system'")):
        Workflow.load(saved(tmp_path / "2", function="terarec.cli.os:system"), allow_import=("terarec",))
    with pytest.raises(ConfigError, check=at(f"{tmp_path}/3/workflow.json: steps[0] LambdaOp: function 'os:system'")):
        Workflow.load(saved(tmp_path / "3", function="os:system"), allow_import=("os",))
    place = f"{tmp_path}/4/workflow.json: steps[0] LambdaOp: function '{__name__}:double'"
    with pytest.raises(ConfigError, check=at(place, "allow_import=")):  # no prefix of the text
        Workflow.load(saved(tmp_path / "4", function=f"{__name__}:double"), allow_import=(package[:-1],))
    with pytest.raises(ConfigError, check=at("allow_import", "a list of packages")):
        Workflow.load(saved(tmp_path / "5"), allow_import=package)


def test_another_module_of_an_allowed_name_in_the_table_of_modules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shop = types.ModuleType("shop")
    shop.__path__ = []  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "shop", shop)
    monkeypatch.setitem(sys.modules, "shop.os", os)
    with pytest.raises(
        ConfigError, check=at(f"{tmp_path}/workflow/workflow.json: steps[0] LambdaOp: function 'shop.os:system'")
    ):
        Workflow.load(saved(tmp_path / "workflow", function="shop.os:system"), allow_import=("shop",))


@pytest.mark.parametrize("allowed", [__name__, __name__.partition(".")[0]])
def test_an_allowed_package(allowed: str, tmp_path: Path) -> None:
    directory = saved(tmp_path / "workflow", record_function=f"{__name__}:double_of_record")
    workflow = Workflow.load(directory, allow_import=("json", allowed))
    assert workflow.encode({"x": [1.5]}).dense.tolist() == [[3.0]]


def test_a_workflow_made_in_python_may_name_any_function() -> None:
    assert Workflow.of(doubling()).encode({"x": [2.0]}).dense.tolist() == [[4.0]]


def test_presets_load_without_an_allowance(tmp_path: Path) -> None:
    used: set[Any] = set()
    makes = {**PRESETS, "10": partial(criteo, modulo=10_000_000), "40": partial(criteo, modulo=40_000_000)}
    for name, make in makes.items():
        spec = make()
        Workflow.of(spec).to_json(tmp_path / f"{name}.json")
        assert Workflow.from_json(tmp_path / f"{name}.json").spec == spec
        lambdas = [step for step in spec.steps if isinstance(step, LambdaOp)]
        used |= {name for step in lambdas for name in (step.function, step.record_function)}
    assert used == PRESET_FUNCTIONS
    assert {imported(name).__module__ for name in PRESET_FUNCTIONS} == {"terarec.etl.ready.row_functions"}


def test_the_workflow_of_a_data_set_is_read_the_same_way(tmp_path: Path) -> None:
    log = tmp_path / "log.tsv"
    log.write_text("1\t2\n0\t3\n")
    prepare(Workflow.of(doubling()), [log], tmp_path / "data")
    with pytest.raises(
        ConfigError,
        check=at(
            f"{tmp_path}/data/workflow/workflow.json: steps[0] LambdaOp: function '{__name__}:double'",
            "allow_import=('tests',)",
        ),
    ):
        workflow_of(tmp_path / "data")
    assert workflow_of(tmp_path / "data", allow_import=("tests",)).is_fitted
