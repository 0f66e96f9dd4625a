"""What must start quickly does not load what it does not need."""

import subprocess
import sys

import pytest

HEAVY = ("torch", "pyspark", "matplotlib", "starlette", "uvicorn", "onnx", "onnxruntime", "onnxscript")


@pytest.mark.parametrize(
    ("modules", "unwanted"),
    [
        (("terarec", "terarec.spec", "terarec.cli", "terarec.hugectr"), (*HEAVY, "numpy", "pyarrow")),
        (("terarec.formats", "terarec.etl.engine", "terarec.etl.ready", "terarec.etl.spark"), HEAVY),
        (("terarec.models", "terarec.serve", "terarec.train", "terarec.export"), (*HEAVY[1:], "torch._dynamo")),
    ],
)
def test_importing_loads_no_heavy_library(modules: tuple[str, ...], unwanted: tuple[str, ...]) -> None:
    program = "\n".join(
        f"import sys, {module}; print({module!r}, [name for name in {unwanted!r} if name in sys.modules])"
        for module in modules
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.splitlines() == [f"{module} []" for module in modules]
