"""Runs a script for HugeCTR with not a line of it changed."""

from __future__ import annotations

import importlib
import importlib.util
import runpy
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import ModuleType

STANDS_FOR = {
    "hugectr": "terarec.hugectr",
    "hugectr.data": "terarec.hugectr.data",
    "hugectr.inference": "terarec.hugectr.inference",
    "hugectr.optimizer": "terarec.hugectr.optimizer",
    "hugectr.tools": "terarec.hugectr.tools",
    "hugectr2onnx": "terarec.hugectr.hugectr2onnx",
    "hugectr2onnx.converter": "terarec.hugectr.hugectr2onnx.converter",
    "hugectr2onnx.hugectr_loader": "terarec.hugectr.hugectr2onnx.hugectr_loader",
}
"""What scripts import, and the module that they get."""


def provide_modules() -> None:
    """Make HugeCTR's modules importable under their own names, and mpi4py where it is missing.

    A script's ``sys.path.append("/usr/local/hugectr/lib")`` does no harm: what is imported already comes first.
    """
    for name, target in STANDS_FOR.items():
        sys.modules[name] = importlib.import_module(target)
    if importlib.util.find_spec("mpi4py") is None:
        package = ModuleType("mpi4py", "Stands for mpi4py, with a single process.")
        package.MPI = importlib.import_module("terarec.hugectr.mpi")  # type: ignore[attr-defined]
        sys.modules |= {"mpi4py": package, "mpi4py.MPI": package.MPI}


def run_script(path: str, arguments: Sequence[str], *, release: str | None = None) -> None:
    """Run the script `path` as ``python path arguments`` would.

    Args:
        path: of the script.
        arguments: what it finds in ``sys.argv`` behind its name.
        release: what its solvers take for ``compat_release``; None: the newest.
    """
    provide_modules()
    if release is not None:
        package = sys.modules["hugectr"]
        package.CreateSolver = partial(package.CreateSolver, compat_release=release)  # type: ignore[attr-defined]
    sys.argv = [path, *arguments]
    sys.path[0] = str(Path(path).resolve().parent)
    runpy.run_path(path, run_name="__main__")
