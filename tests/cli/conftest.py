# SPDX-License-Identifier: Apache-2.0
"""Commands run as a user runs them, in this process: torch is loaded once for all tests."""

import contextlib
import io
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
import pytest

from terarec.cli.app import command_line, run
from terarec.cli.train import SETTINGS, TrainOptions
from terarec.errors import ConfigError


def commands(group: Any = None) -> dict[str, Any]:
    """The commands of a group by name, loaded; of ``terarec`` itself if none is named."""
    listed = (group or command_line()).commands
    return {name: command.load() if hasattr(command, "load") else command for name, command in listed.items()}


def train_options(**flags: Any) -> TrainOptions:
    """Options of ``terarec train`` by the names of its flags."""
    settings = {SETTINGS[name].path: str(flags.pop(name)) for name in [*flags] if name in SETTINGS}
    return TrainOptions(**flags, settings=settings)


@dataclass(frozen=True)
class Ended:
    """Exit code and output of a command."""

    code: int
    out: str
    err: str

    @property
    def figures(self) -> dict[str, Any]:
        """The JSON object in the last line of stdout; constants that JSON does not have are rejected."""
        return json.loads(self.out.splitlines()[-1], parse_constant=pytest.fail)


def terarec(*arguments: object) -> Ended:
    """Run ``terarec ARGUMENTS``."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = run([str(argument) for argument in arguments])
    return Ended(code, out.getvalue(), err.getvalue())


def figures(*arguments: object) -> dict[str, Any]:
    """Run a command with ``--json``; it must succeed."""
    ended = terarec(*arguments, "--json")
    assert ended.code == 0, ended.err
    return ended.figures


def rejected(
    *arguments: object, error: type[Exception] = ConfigError, where: str | Path | None = None, problem: str = ""
) -> dict[str, str]:
    """Run a command that must fail with one line and the exit code of `error`; returns its JSON object.

    Args:
        arguments: Arguments of the command.
        error: The error's class.
        where: The error's place, as typed: option, JSON path, or place in a file; None to look at it in the result.
        problem: Part of the line, such as the received value, where several errors have the same place.
    """
    ended = terarec(*arguments, "--json")
    lines = [line for line in ended.err.splitlines() if line.startswith("terarec: ")]
    assert (ended.code, len(lines)) == (2 if issubclass(error, ConfigError) else 1, 1), ended.err
    assert "Traceback" not in ended.err
    reported = ended.figures
    assert lines == [f"terarec: error: {reported['error']}"]
    assert reported["type"] == error.__name__, reported
    assert where is None or reported["where"] == str(where), reported
    assert problem in reported["error"], reported
    return reported


@pytest.fixture(scope="module", autouse=True)
def _no_reports() -> Iterator[None]:
    """Leave the extra "report" out of the installation: drawing takes half of the time of a training."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "matplotlib", None)
        yield


@pytest.fixture
def reports(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the extra "report"."""
    monkeypatch.setitem(sys.modules, "matplotlib", mpl)


@dataclass(frozen=True)
class Workshop:
    """Results of the first commands of a newcomer: raw logs, two data sets and a trained run."""

    raw: Path
    data: Path
    raw_format: Path
    run: Path
    generated: dict[str, Any]
    prepared: dict[str, Any]
    trained: dict[str, Any]


@pytest.fixture(scope="session")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    """2,000 rows in two days, generated, prepared in both formats and trained for one epoch."""
    root = tmp_path_factory.mktemp("workshop")
    raw, data, fixed, out = root / "raw", root / "data", root / "fixed", root / "run"
    generated = figures("generate", "criteo", "--rows", 2000, "--days", 2, "--out", raw, "--seed", 7)
    days = [raw / "day_0.tsv", raw / "day_1.tsv"]
    prepared = figures("prepare", "criteo", *days, "--out", data, "--min-count", 2, "--valid-fraction", 0.25)
    figures("prepare", "criteo", *days, "--out", fixed, "--min-count", 2, "--format", "raw", "--valid-last-day")
    shape = ["--width", 4, "--bottom", "8-4", "--top", "8", "--batch-size", 128]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "matplotlib", mpl)
        trained = figures("train", "--model", "dlrm", "--data", data, "--out", out, *shape)
    return Workshop(raw, data, fixed, out, generated, prepared, trained)
