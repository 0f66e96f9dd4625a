# SPDX-License-Identifier: Apache-2.0
"""docs/preparing.md keeps its promises: its Python runs and prints what its comments say."""

import re
from contextlib import chdir
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[2] / "docs" / "preparing.md").read_text()


def test_the_python_runs_and_prints_the_output_in_its_comments(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (block,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    expected = re.findall(r"print\(.*\)  # (.+)", block)
    with chdir(tmp_path):
        exec(compile(block, "preparing.md", "exec"), {})
    assert capsys.readouterr().out.splitlines() == expected
    made = set(re.findall(r"^  (\S+)/ ", PAGE, re.MULTILINE))
    assert {name.rstrip("/") for name in made} <= {path.name for path in (tmp_path / "data").iterdir()}
    assert (tmp_path / "data" / "report.json").exists()
