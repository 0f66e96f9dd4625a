"""Ctrl-C while the modules of a command load."""

import subprocess
import sys

import pytest

from terarec import __version__


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
