# SPDX-License-Identifier: Apache-2.0
"""docs/export.md keeps its word: its Python runs."""

import re
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[2] / "docs" / "export.md").read_text()


@pytest.mark.slow
def test_the_python_runs(tmp_path, monkeypatch):
    pytest.importorskip("onnxruntime", reason="the extra 'onnx' is not installed")
    pytest.importorskip("onnx", reason="the extra 'onnx' is not installed")
    monkeypatch.chdir(tmp_path)
    (block,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    names = {}
    exec(compile(block, "export.md", "exec"), names)
    assert names["click"].shape == (1, 1)
