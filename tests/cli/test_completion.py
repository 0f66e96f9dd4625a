# SPDX-License-Identifier: Apache-2.0
"""Completions that bash proposes while a command is typed."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.params import in_every_run

ENTRY = f'exec {sys.executable} -c "from terarec.cli import main; main()" "$@"'


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the program ``terarec``, and the script that bash is given for it."""
    directory = tmp_path_factory.mktemp("bin")
    path = directory / "terarec"
    path.write_text(f"#!/bin/sh\n{ENTRY}\n")
    path.chmod(0o755)
    environment = {**os.environ, "_TERAREC_COMPLETE": "source_bash"}
    script = subprocess.run([path], env=environment, capture_output=True, text=True, check=True).stdout
    (directory / "script").write_text(script)
    return directory


def proposed(program: Path, *words: str) -> list[str]:
    """Completions that bash proposes for the last of the words after ``terarec``."""
    if shutil.which("bash") is None:
        pytest.skip("bash is not installed")
    line = " ".join(f"'{word}'" for word in ("terarec", *words))
    code = f"source script; COMP_WORDS=({line}); COMP_CWORD={len(words)}; _terarec_completion terarec; "
    environment = {**os.environ, "PATH": f"{program}:{os.environ['PATH']}"}
    ended = subprocess.run(
        ["bash", "-c", code + 'printf "%s\\n" "${COMPREPLY[@]}"; complete -p terarec'],
        cwd=program,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    *found, how = [line for line in ended.stdout.splitlines() if line]
    assert "-o default" in how  # where nothing is proposed, bash proposes files
    return found


def test_commands(program: Path) -> None:
    assert proposed(program, "pre") == ["prepare", "predict"]
    assert proposed(program, "generate", "m") == ["mind", "movielens"]
    assert "serve" in proposed(program, "")


def test_options(program: Path) -> None:
    assert proposed(program, "predict", "run", "--al") == ["--allow-import"]
    assert proposed(program, "prepare", "shop.json", "--sp") == ["--split"]
    assert proposed(program, "prepare", "shop.json", "--split", "t") == ["train", "test"]


@pytest.mark.parametrize(
    "line",
    in_every_run(
        ["predict run --data ", "prepare criteo ra"],
        ["inspect da", "predict run lo", "predict run --data ", "train co", "prepare criteo ra"],
    ),
)
def test_files_are_left_to_bash(program: Path, line: str) -> None:
    assert proposed(program, *line.split(" ")) == []


def test_completion_loads_nothing_heavy() -> None:
    code = "import sys; from terarec.cli.app import run; run([]); print(*sys.modules)"
    environment = {**os.environ, "_TERAREC_COMPLETE": "complete_bash", "COMP_WORDS": "terarec tr", "COMP_CWORD": "1"}
    out = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    ).stdout
    assert out.splitlines()[0] == "train"
    assert not {"torch", "numpy", "pyarrow", "matplotlib", "uvicorn"} & set(out.splitlines()[-1].split())
