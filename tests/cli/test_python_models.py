# SPDX-License-Identifier: Apache-2.0
"""A run never imports a model's code by itself, whatever command opens it."""

import sys
from pathlib import Path
from typing import Any

import pytest

from terarec.errors import ConfigError, UserCodeError
from terarec.models.artifact import load_model
from terarec.serve import InferenceSession
from tests.cli.conftest import figures, rejected
from tests.cli.test_train import prepare
from tests.errors import at

CODE = """
from torch import nn
from tests.models.factories import SmallModel

def make(dataset, *, num_outputs, seed, width):
    return SmallModel(dataset, num_outputs=num_outputs, seed=seed, width=width)
"""
MODEL = ["--model", "python", "--set", "model.factory=ranker.code:make", "--set", "model.options=width:3"]


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package `ranker` that can be imported."""
    folder = tmp_path / "site" / "ranker"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("")
    (folder / "code.py").write_text(CODE)
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.delitem(sys.modules, "ranker", raising=False)
    monkeypatch.delitem(sys.modules, "ranker.code", raising=False)
    return folder


@pytest.mark.usefixtures("package")
def test_every_command_asks_for_leave(tmp_path: Path) -> None:
    data, run, scores = prepare(tmp_path), tmp_path / "run", tmp_path / "scores.csv"
    raw = tmp_path / "data.csv"
    trained: list[Any] = ["train", *MODEL, "--data", data, "--out", run]
    readers: list[list[Any]] = [
        trained,
        ["evaluate", run, "--data", data],
        ["predict", run, "--data", data, "--out", scores],
        ["predict", run, raw, "--out", scores],
    ]
    rejected(*trained, where="model: factory 'ranker.code:make'", problem="--allow-import ranker")
    assert "ranker" not in sys.modules
    assert not run.exists()
    figures(*trained, "--allow-import", "ranker")
    for reader in readers[1:]:
        for name in ("ranker", "ranker.code"):
            sys.modules.pop(name, None)
        rejected(*reader, where="model: factory 'ranker.code:make'", problem="--allow-import ranker")
        assert "ranker" not in sys.modules
        figures(*reader, "--allow-import", "ranker")
        scores.unlink(missing_ok=True)
    with pytest.raises(ConfigError, check=at("model: factory 'ranker.code:make'")):
        load_model(run)
    with pytest.raises(ConfigError, check=at("model: factory 'ranker.code:make'")):
        InferenceSession.open(run)
    session = InferenceSession.open(run, allow_import=("ranker",))
    assert session.predict({"x": [0.5], "c": ["c1"]}).shape == (1, 1)
    resumed = figures(*trained, "--allow-import", "ranker.code", "--epochs", 2, "--resume")
    assert resumed["steps"] > 0


@pytest.mark.parametrize(
    ("code", "raised", "place"),
    [
        ("def make(dataset, **_):\n    return dataset.no_such_field\n", "AttributeError", "code.py:2, in make"),
        (
            "class Model:\n    pass\ndef make(dataset, **_):\n    import sys; sys.exit(0)\n",
            "SystemExit: 0",
            "code.py:4",
        ),
    ],
)
def test_an_exception_of_a_model_is_its_author_s(
    tmp_path: Path, package: Path, code: str, raised: str, place: str
) -> None:
    """Finding P1: it is shown with its file and line, and is no defect in terarec."""
    (package / "code.py").write_text(code)
    command = ["train", *MODEL, "--data", prepare(tmp_path), "--out", tmp_path / "run", "--allow-import", "ranker"]
    reported = rejected(*command, error=UserCodeError, problem=raised)
    assert reported["where"].startswith(place)
    assert "defect" not in reported["error"]
