"""What must start quickly does not load what it does not need."""

import subprocess
import sys

import pytest

HEAVY = ("torch", "pyspark", "matplotlib", "starlette", "uvicorn", "onnx", "onnxruntime")


@pytest.mark.parametrize(
    ("module", "unwanted"),
    [
        ("terarec", (*HEAVY, "numpy", "pyarrow")),
        ("terarec.spec", (*HEAVY, "numpy", "pyarrow")),
        ("terarec.cli", (*HEAVY, "numpy", "pyarrow")),
        ("terarec.formats", HEAVY),
        ("terarec.hugectr", (*HEAVY, "numpy", "pyarrow")),
        ("terarec.etl.engine", HEAVY),
        ("terarec.etl.ready", HEAVY),
        ("terarec.etl.table", HEAVY),
        ("terarec.etl.spark", HEAVY),
        ("terarec.models", HEAVY[1:]),
        ("terarec.train", HEAVY[1:]),
        ("terarec.export", HEAVY[1:]),
    ],
)
def test_importing_loads_no_heavy_library(module: str, unwanted: tuple[str, ...]) -> None:
    program = f"import sys, {module}; print([name for name in {unwanted!r} if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
