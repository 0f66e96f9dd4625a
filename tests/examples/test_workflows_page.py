# SPDX-License-Identifier: Apache-2.0
"""docs/workflows.md keeps its word: its Python runs and prints what it says."""

import re
import types
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[2] / "docs" / "workflows.md").read_text()


def test_the_python_of_the_page_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert len(blocks) == 2
    module = types.ModuleType("shop_ops")  # operators are registered by the name of their module
    for code in blocks:
        exec(compile(code, "workflows.md", "exec"), module.__dict__)
    promised = re.findall(r"^ *print\(.*#  *(.*)$", "\n".join(blocks), re.MULTILINE)
    assert capsys.readouterr().out.splitlines() == promised
