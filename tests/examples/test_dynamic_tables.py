# SPDX-License-Identifier: Apache-2.0
"""docs/dynamic-tables.md keeps its promises: its Python runs."""

import re
from pathlib import Path

PAGE = (Path(__file__).parents[2] / "docs" / "dynamic-tables.md").read_text()


def test_the_python_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code = "\n".join(re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL))
    exec(compile(code, "dynamic-tables.md", "exec"), {})
