# SPDX-License-Identifier: Apache-2.0
"""Packages that must start quickly load no heavy library."""

import importlib
from types import ModuleType

import pytest

import terarec.data
import terarec.etl
from tests.processes import run_new_python

HEAVY = (
    "torch",
    "pyspark",
    "matplotlib",
    "httptools",
    "uvloop",
    "grpc",
    "prometheus_client",
    "onnx",
    "onnxruntime",
    "onnxscript",
    "opentelemetry",
)
ETL = ("terarec.etl.engine", "terarec.etl.ready", "terarec.etl.spark")


@pytest.mark.parametrize(
    ("modules", "unwanted"),
    [
        (("terarec", "terarec.spec", "terarec.cli", "terarec.hugectr"), (*HEAVY, "numpy", "pyarrow")),
        (("terarec.data", "terarec.formats", "terarec.apps.synthetic", *ETL), HEAVY),
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


@pytest.mark.parametrize("package", [terarec, terarec.data, terarec.etl], ids=lambda package: package.__name__)
def test_every_name_is_there_and_is_what_its_module_has(package: ModuleType) -> None:
    for home, names in package._HOMES.items():
        module = importlib.import_module(f"{package.__name__}.{home}")
        assert all(getattr(package, name) is getattr(module, name) for name in names)
    assert {name for names in package._HOMES.values() for name in names} == {*package.__all__} - {"__version__"}
    assert set(package.__all__) <= set(dir(package))
    with pytest.raises(AttributeError, match="no attribute 'trainer'"):
        _ = package.trainer
