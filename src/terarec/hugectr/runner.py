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

from terarec.hugectr.tables.table import OLDEST

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
    """Make HugeCTR's modules importable under their own names, and mpi4py and MLPerf's logger where they are missing.

    A script's ``sys.path.append("/usr/local/hugectr/lib")`` does no harm: what is imported already comes first.
    """
    for name, target in STANDS_FOR.items():
        sys.modules[name] = importlib.import_module(target)
    if _is_missing("mpi4py"):
        package = ModuleType("mpi4py", "Stands for mpi4py, with a single process.")
        package.MPI = importlib.import_module("terarec.hugectr.mpi")  # type: ignore[attr-defined]
        sys.modules |= {"mpi4py": package, "mpi4py.MPI": package.MPI}
    if _is_missing("mlperf_logging") and _is_missing("mlperf_common"):
        sys.modules |= importlib.import_module("terarec.hugectr.mlperf").modules()


def _is_missing(package: str) -> bool:
    return package not in sys.modules and importlib.util.find_spec(package) is None


def run_script(path: str, arguments: Sequence[str], *, release: str | None = None) -> None:
    """Run the script `path` as ``python path arguments`` would.

    Args:
        path: of the script.
        arguments: what it finds in ``sys.argv`` behind its name.
        release: what its solvers take for ``compat_release``; None: the newest. 2.3 has defaults of its own, too.
    """
    provide_modules()
    if release is not None:
        package = sys.modules["hugectr"]
        package.CreateSolver = partial(package.CreateSolver, compat_release=release)  # type: ignore[attr-defined]
        if release == OLDEST:  # a call with this name has that release's defaults; its own default is this
            helper = partial(package.solver_parser_helper, eval_batches=100)
            package.solver_parser_helper = helper  # type: ignore[attr-defined]
    sys.argv = [path, *arguments]
    sys.path[0] = str(Path(path).resolve().parent)
    runpy.run_path(path, run_name="__main__")
