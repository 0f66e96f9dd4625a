# SPDX-License-Identifier: Apache-2.0
"""docs/graph-models.md keeps its word: its Python runs, block after block."""

import re
from pathlib import Path

PAGE = (Path(__file__).parents[2] / "docs" / "graph-models.md").read_text()


def test_the_python_runs():
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert len(blocks) > 1
    names = {}
    for block in blocks:
        exec(compile(block, "graph-models.md", "exec"), names)
