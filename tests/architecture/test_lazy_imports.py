"""Packages that must start quickly load no heavy library."""

import importlib

import pytest

import terarec
from tests.processes import run_new_python

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
    result = run_new_python(program)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == [f"{module} []" for module in modules]


def test_every_name_at_the_top_is_there_and_is_what_its_package_exports() -> None:
    for home, names in terarec._HOMES.items():
        package = importlib.import_module(f"terarec.{home}")
        assert all(getattr(terarec, name) is getattr(package, name) for name in names)
    assert {name for names in terarec._HOMES.values() for name in names} == {*terarec.__all__} - {"__version__"}
    with pytest.raises(AttributeError, match="no attribute 'trainer'"):
        _ = terarec.trainer
