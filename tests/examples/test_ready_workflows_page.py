# SPDX-License-Identifier: Apache-2.0
"""docs/ready-workflows.md keeps its promises: its commands run on small logs, and its Python prints what it says."""

import re
import shlex
import subprocess
from contextlib import chdir
from pathlib import Path

import pytest

from terarec.etl.ready import PRESETS
from tests.cli.conftest import terarec

PAGE = (Path(__file__).parents[2] / "docs" / "ready-workflows.md").read_text()
BLOCKS = [block for block in re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL) if "terarec generate" in block]
ROWS = {"mind": 500, "criteo": 2_000}


def section_of(block: str) -> str:
    """The anchor of the heading above a block."""
    return re.findall(r"^## (.+)$", PAGE[: PAGE.index(block)], re.MULTILINE)[-1].lower()


@pytest.mark.parametrize(
    "block",
    [
        pytest.param(block, id=f"{section_of(block)}-{n}", marks=pytest.mark.slow if n % 2 else ())
        for n, block in enumerate(BLOCKS)
    ],
)
def test_the_commands_run_on_fewer_rows(tmp_path, block):
    rows = ROWS.get(section_of(block), 3_000)
    with chdir(tmp_path):
        for line in block.strip().splitlines():
            if not line.startswith("terarec"):
                subprocess.run(["bash", "-c", line], check=True)
                continue
            ended = terarec(*shlex.split(re.sub(r"--rows \d+", f"--rows {rows}", line))[1:])
            assert ended.code == 0, f"{line}: {ended.err}"


@pytest.mark.parametrize("name", PRESETS)
def test_label_and_made_columns_are_reported_of(name):
    """What the files do not hold under that name."""
    spec = PRESETS[name]()
    heading = re.search(rf"^## {name.split('-')[0]}$", PAGE, re.MULTILINE | re.IGNORECASE)
    section = PAGE[heading.end() :].split("\n## ")[0]
    read = {column.name for source in (spec.source, *spec.tables.values()) for column in source.columns}
    made = {label.name for label in spec.labels} | {name for name in spec.dense if name not in read}
    assert {name for name in made if f"`{name}`" not in section} <= {"capital_gain_log", "capital_loss_log"}


def test_the_python_runs_and_prints_the_output_in_its_comments(capsys):
    for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
        exec(compile(block, "ready-workflows.md", "exec"), {})
        assert capsys.readouterr().out.strip() in re.sub(r"\n# |  # ", "\n", block).splitlines()


def test_every_link_leads_somewhere():
    for page in re.findall(r"\]\((?!http|#)([^)]+)\)", PAGE):
        assert (Path(__file__).parents[2] / "docs" / page.split("#")[0]).exists()
