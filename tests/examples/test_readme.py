# SPDX-License-Identifier: Apache-2.0
"""The README keeps its word: its Python runs on what its command line makes, and every command in it exists."""

import re
from contextlib import chdir
from pathlib import Path

import pytest

from terarec.apps.synthetic import generate
from terarec.cli.app import run
from terarec.etl import prepare
from terarec.etl.ready import criteo_terabyte
from terarec.etl.workflow import Workflow

README = (Path(__file__).parents[2] / "README.md").read_text()


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """A directory that holds ``data``, as after the README's commands."""
    directory = tmp_path_factory.mktemp("readme")
    generate(directory / "raw", rows=100_000, days=2, seed=1)
    prepare(Workflow.of(criteo_terabyte()), sorted((directory / "raw").glob("*.tsv")), directory / "data")
    return directory


def test_the_python_runs_and_learns(prepared, capsys):
    (block,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    with chdir(prepared):
        exec(compile(block, "README.md", "exec"), {})
    auc = float(re.search(r"auc=([0-9.]+)", capsys.readouterr().out)[1])
    assert auc > 0.6


def test_e7_torch_for_cpus_is_installed_before_the_package():
    (index,) = re.findall(r"^pip install torch --index-url (\S+/cpu)\b", README, re.MULTILINE)
    assert README.index(index) < README.index("pip install '.[all]'")


@pytest.mark.parametrize("command", sorted(set(re.findall(r"^terarec (\w+(?: criteo)?)", README, re.MULTILINE))))
def test_every_command_exists(command, capsys):
    assert run([*command.split(), "--help"]) == 0
    assert command.split()[-1] in capsys.readouterr().out


@pytest.mark.parametrize("page", sorted(set(re.findall(r"\]\((?!http|#)([^)]+)\)", README))))
def test_every_link_leads_somewhere(page):
    assert (Path(__file__).parents[2] / page.split("#")[0]).exists()
