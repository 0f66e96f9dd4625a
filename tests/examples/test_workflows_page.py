"""docs/workflows.md keeps its word: its Python runs and prints what it says."""

import re
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[2] / "docs" / "workflows.md").read_text()


def test_the_python_of_the_page_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    exec(compile(code, "workflows.md", "exec"), {})
    promised = re.findall(r"^print\(.*#  *(.*)$", code, re.MULTILINE)
    assert capsys.readouterr().out.splitlines() == promised
