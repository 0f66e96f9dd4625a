# SPDX-License-Identifier: Apache-2.0
"""The modules that a command loads, and Ctrl-C while they load."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from terarec import __version__
from tests.cli.conftest import Workshop
from tests.processes import run_new_python


@pytest.mark.parametrize(
    "name",
    ["typer", "terarec.cli.app", *(pytest.param(name, marks=pytest.mark.slow) for name in ("terarec.serve", "torch"))],
)
def test_ctrl_c_while_modules_load_is_one_line(name: str) -> None:
    program = f"""
import os, signal, sys
class Press:
    def find_spec(self, name, path=None, target=None):
        if name == {name!r}:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Press())
from terarec.cli import main
main(["serve", "run"])
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stderr) == (130, "terarec: interrupted; nothing was left half-written\n")


def test_the_module_is_the_command_line() -> None:
    run = subprocess.run([sys.executable, "-m", "terarec", "--version"], capture_output=True, text=True, check=True)
    assert run.stdout == f"terarec {__version__}\n"


def test_commands_that_compute_nothing_with_torch_load_none(workshop: Workshop, tmp_path: Path) -> None:
    """Importing torch would take three times as long as these commands."""
    out = tmp_path / "raw"
    commands = (
        ("generate", "criteo", "--rows", 20, "--out", out),
        ("generate", "amazon", "--rows", 20, "--out", tmp_path / "reviews"),
        ("workflow", "draft", out, "--out", tmp_path / "draft.json"),
        ("prepare", "criteo", out, "--min-count", 2, "--out", tmp_path / "data"),
        ("inspect", workshop.data),
        ("inspect", workshop.data, "--column", "C1"),
        ("init-config", "dlrm", workshop.data, "--out", tmp_path / "run.json"),
    )
    program = """
import json, sys
from terarec.cli.app import run
for arguments in json.loads(sys.argv[1]):
    status = run(arguments)
    if status or "torch" in sys.modules:
        sys.exit(f"{arguments}: status {status}, torch loaded: {'torch' in sys.modules}")
"""
    ended = run_new_python(program, json.dumps([list(map(str, arguments)) for arguments in commands]))
    assert ended.returncode == 0, ended.stderr
