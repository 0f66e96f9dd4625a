# SPDX-License-Identifier: Apache-2.0
"""docs/models.md keeps its promises: its Python runs, its command lines are read, it has a section for each model."""

import re
import shlex
from pathlib import Path
from typing import get_args

import pytest

from terarec.cli.train import SETTINGS, TrainOptions, run_spec
from terarec.config.files import read_graph
from terarec.spec import GraphModelSpec
from terarec.spec.model import ModelSpec
from tests.cli.conftest import commands, train_options
from tests.models.test_graph_runs import written

PAGE = (Path(__file__).parents[2] / "docs" / "models.md").read_text()
COMMANDS = re.findall(r"```sh\nterarec (train .*?)```", PAGE, re.DOTALL)
KINDS = [spec.kind for spec in get_args(ModelSpec)]


def test_the_python_runs() -> None:
    (block,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    exec(compile(block, "models.md", "exec"), {})


def test_every_model_has_a_section_and_a_row() -> None:
    assert re.findall(r"^## (\w+)$", PAGE, re.MULTILINE) == KINDS
    rows = re.findall(r"^\| \[`(\w+)`\]\(#(\w+)\) \| `(\w+)`", PAGE, re.MULTILINE)
    assert rows == [(spec.kind, spec.kind, spec.__name__) for spec in get_args(ModelSpec)]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: re.findall(r"--model (\w+)", command)[0])
def test_the_command_lines_describe_runs(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    graph = read_graph(written(tmp_path))
    words = shlex.split(command.replace("\\\n", " "))
    parsed = commands()["train"].make_context("train", words[1:]).params
    known = {*SETTINGS, *TrainOptions.__dataclass_fields__}
    options = {name: value for name, value in parsed.items() if name in known and value is not None}
    options |= {"assignments": re.findall(r"--set (?:'([^']*)'|(\S+))", command)}
    options["assignments"] = [quoted or plain for quoted, plain in options["assignments"]]
    model = run_spec(train_options(**{**options, "out": Path("run"), "data": Path("data")})).model
    assert model.kind == words[words.index("--model") + 1]
    assert not isinstance(model, GraphModelSpec) or model.graph == graph


def test_there_is_a_command_line_for_every_model() -> None:
    assert {re.findall(r"--model (\w+)", command)[0] for command in COMMANDS} == set(KINDS)
