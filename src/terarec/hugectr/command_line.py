# SPDX-License-Identifier: Apache-2.0
"""``terarec-hugectr`` and ``python -m terarec.hugectr``: HugeCTR's own commands, and scripts written for it."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import runpy
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, redirect_stdout
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from terarec.errors import TerarecError
from terarec.hugectr.alias import MODULES
from terarec.hugectr.processes import Communicator, rank
from terarec.hugectr.release import RELEASES
from terarec.kernels.environment import add_search_path, launch, set_hugectr_release
from terarec.spec.checks import one_line
from terarec.spec.serving import EXECUTOR_MODES

if TYPE_CHECKING:
    from terarec.hugectr.inference import InferenceSession

HELP = """usage: terarec-hugectr --train CONFIG.json
       terarec-hugectr [--compat-release RELEASE] [--executor EXECUTOR] SCRIPT.py [ARGUMENTS]
       terarec-hugectr data_generator CONFIG.json DIRECTORY VOCABULARY_SIZE MAX_NNZ
                       [--files N] [--samples N] [--long-tail long|medium|short]
       terarec-hugectr data_generator --config-file CONFIG.json --voc-size-array N,N,...
                       [--nnz-array N,N,...] [--data-folder DIRECTORY] [--files N] [--samples N]
                       [--distribution powerlaw|unified] [--alpha A | --long-tail long|medium|short]
       terarec-hugectr --version | --help

Runs what was written for HugeCTR: a training file (2.3 to 3.0), a Python script of any release with not a line
changed, or the generator of random data for a training file. `python -m terarec.hugectr` does the same.
With --compat-release 3.1, for instance, it behaves as that release where releases differ; the environment variable
TERAREC_HUGECTR_RELEASE does the same for notebooks. Without them, a call behaves as in the newest release that has it.
With --executor measure, inference sessions compute in the fastest executor of this CPU, or in one that is named.
docs/hugectr-compat.md lists every name and parameter."""

USAGE_ERROR, FAILURE = 2, 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code: 0, 1 for an error, 2 for a usage error."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    accepted = {"--compat-release": RELEASES, "--executor": EXECUTOR_MODES}
    chosen: dict[str, str] = {}
    while words and words[0] in accepted:
        option, value, words = words[0], words[1] if words[1:] else "", words[2:]
        if value not in accepted[option]:
            expected = ", ".join(accepted[option])
            return _report(f"{option}: got {value!r}, expected one of {expected}", USAGE_ERROR)
        chosen[option] = value
    first = words[0] if words else "--help"
    if first in ("--help", "-h"):
        print(HELP)
        return 0
    if first == "--version":
        print(_version())
        return 0
    if first.startswith("-") and first != "--train":
        return _report(f"got an unknown option {first!r}, expected --train, --version or --help", USAGE_ERROR)
    if first == "--train" and len(words) != 2:
        return _report(f"--train: got {len(words) - 1} files, expected one training file", USAGE_ERROR)
    if first not in ("--train", "data_generator"):
        if not Path(first).is_file():
            return _report(f"{first}: does not exist, expected a script, --train or data_generator", USAGE_ERROR)
        # A script's errors are its own: they keep their traceback.
        run_script(first, words[1:], release=chosen.get("--compat-release"), executor=chosen.get("--executor"))
        return 0
    return _run_command(first, words[1:])


def _run_command(command: str, arguments: Sequence[str]) -> int:
    try:
        if command == "--train":
            from terarec.hugectr.training_json import train  # loads torch

            train(arguments[0])
        else:
            from terarec.hugectr.tools import generate

            generate(arguments)
    except TerarecError as error:
        return _report(str(error), FAILURE)
    return 0


def _version() -> str:
    from terarec import __version__
    from terarec.hugectr import __version__ as release

    return f"terarec {__version__}, with the interface of HugeCTR 2.3 to {release}"


def _report(problem: str, code: int) -> int:
    print(one_line(f"terarec-hugectr: error: {problem}"), file=sys.stderr)
    return code


REPLACEMENTS = {
    "hps_torch": "terarec.hugectr.hps_torch",
    "hps_torch.lookup_layer": "terarec.hugectr.hps_torch",
    "hugectr": "terarec.hugectr",
    "hugectr.data": "terarec.hugectr.data",
    "hugectr.inference": "terarec.hugectr.inference",
    "hugectr.optimizer": "terarec.hugectr.optimizer",
    "hugectr.tools": "terarec.hugectr.tools",
    "hugectr2onnx": "terarec.hugectr.hugectr2onnx",
    "hugectr2onnx.converter": "terarec.hugectr.hugectr2onnx",
    "hugectr2onnx.hugectr_loader": "terarec.hugectr.hugectr2onnx",
    "sparse_operation_kit": "terarec.tensorflow",
    "sparse_operation_kit.experiment": "terarec.tensorflow",
}
"""Module that a script imports -> the module that it gets; `hierarchical_parameter_server` is in `MODULES` alone, since
TensorFlow takes seconds to load."""


def run_script(path: str, arguments: Sequence[str], *, release: str | None = None, executor: str | None = None) -> None:
    """Run the script `path` as ``python path arguments`` would. Of several processes, only the first prints.

    Args:
        path: Path of the script.
        arguments: Its arguments in ``sys.argv``.
        release: Release to behave like, here and in the processes that it starts; None for the one that
            ``TERAREC_HUGECTR_RELEASE`` names, else the newest.
        executor: Value of ``executor`` of its inference sessions; None for their default.
    """
    provide_modules()
    if executor is not None:
        inference = sys.modules["hugectr.inference"]
        # Scripts call HugeCTR's names, so options of this command reach them as defaults of these names.
        inference.InferenceParams = partial(inference.InferenceParams, executor=executor)  # type: ignore[attr-defined]
        inference.InferenceSession = partial(_open_session, executor=executor)  # type: ignore[attr-defined]
    if release is not None:
        set_hugectr_release(release)
    # As `python SCRIPT` leaves them: the folder of the script comes first in the search path.
    sys.argv = [path, *arguments]
    # Children of multiprocessing get this search path and import the script again, others get the variable's.
    sys.path[:1] = [str(Path(path).resolve().parent), str(MODULES)]
    add_search_path(str(MODULES))
    with ExitStack() as stack:
        if rank():
            # Scripts print on every process; HugeCTR's log comes from the first alone.
            stack.enter_context(redirect_stdout(stack.enter_context(open(os.devnull, "w"))))
        # In this process, since only here the names of HugeCTR's modules lead to terarec.
        runpy.run_path(path, run_name="__main__")


def _open_session(*args: Any, **options: Any) -> InferenceSession:
    """Return a session of release 3.0."""
    from terarec.hugectr.inference import InferenceSession  # loads torch

    return InferenceSession(*args, **options)


def provide_modules() -> None:
    """Make HugeCTR's modules importable under their own names; and mpi4py, Horovod and others where they are missing.

    Processes of torchrun get the replacement of mpi4py in any case.

    A script's ``sys.path.append("/usr/local/hugectr/lib")`` does no harm: what is imported already comes first.
    """
    for name, target in REPLACEMENTS.items():
        # One module under both names, not a second copy: its classes stay the same for isinstance.
        sys.modules[name] = importlib.import_module(target)
    launched = launch()
    # The installed one would give each process of torchrun a world of its own, in which all have rank 0.
    if _is_missing("mpi4py") or (launched is not None and not launched.is_mpi):
        mpi = _module("mpi4py.MPI", "Replacement of mpi4py.MPI.", **_MPI_NAMES)
        sys.modules |= {"mpi4py": _module("mpi4py", "Replacement of mpi4py.", MPI=mpi), "mpi4py.MPI": mpi}
    if _is_missing("horovod"):
        ranks = importlib.import_module("terarec.tensorflow.horovod")
        sys.modules |= {
            "horovod": _module("horovod", "Replacement of horovod.", tensorflow=ranks),
            "horovod.tensorflow": ranks,
        }
    # Where one of them is installed, scripts get the packages as they are: half of each would not fit together.
    if _is_missing("mlperf_logging") and _is_missing("mlperf_common"):
        sys.modules |= _mlperf_modules()


def _is_missing(package: str) -> bool:
    return package not in sys.modules and importlib.util.find_spec(package) is None


def _module(name: str, doc: str, **members: object) -> ModuleType:
    module = ModuleType(name, doc)
    module.__dict__.update(members)
    return module


def _mlperf_modules() -> dict[str, ModuleType]:
    """Return replacements of the modules of MLPerf's logger; they print lines for its compliance checker."""
    doc = "Replacement of the logger of MLPerf's rules."
    constants = _Constants("mlperf_logging.mllog.constants")
    modules = [
        _module("mlperf_logging", doc),
        _module("mlperf_logging.mllog", doc, constants=constants),
        constants,
        _module("mlperf_common", doc),
        _module("mlperf_common.logging", doc, MLLoggerWrapper=MLLoggerWrapper),
        _module("mlperf_common.frameworks", doc),
        _module("mlperf_common.frameworks.hugectr", doc, HCTRCommunicationHandler=HCTRCommunicationHandler),
    ]
    return {module.__name__: module for module in modules}


_MPI_NAMES: dict[str, object] = {
    "COMM_WORLD": Communicator(),
    # Names stand for MPI's operations: `Communicator.allreduce` takes these.
    "SUM": "sum",
    "MAX": "max",
    "MIN": "min",
    "Get_processor_name": lambda: "localhost",
    "Wtime": time.perf_counter,
    # torchrun or mpirun has started the processes, so there is nothing left to initialize or to finalize.
    "Init": lambda: None,
    "Finalize": lambda: None,
    "Is_initialized": lambda: True,
    "Is_thread_main": lambda: True,
}


class HCTRCommunicationHandler:
    """Rank and number of processes, for MLPerf's logger."""

    def global_rank(self) -> int:
        """Return the number of this process."""
        return Communicator().rank

    def global_size(self) -> int:
        """Return the number of processes."""
        return Communicator().size


class MLLoggerWrapper:
    """Logger of events on standard output.

    Attributes:
        comm_handler: The ranks; only the first writes.

    Args:
        comm_handler: The ranks; only the first writes.
        value: Value of events without one.
    """

    def __init__(self, comm_handler: object, value: object = None, **_: object) -> None:
        self.comm_handler = comm_handler
        self._value = value

    def start(self, key: str, value: object = None, metadata: Mapping[str, object] | None = None, **_: object) -> None:
        """Begin an interval."""
        self._write("INTERVAL_START", key, value, metadata)

    def end(self, key: str, value: object = None, metadata: Mapping[str, object] | None = None, **_: object) -> None:
        """End an interval."""
        self._write("INTERVAL_END", key, value, metadata)

    def event(self, key: str, value: object = None, metadata: Mapping[str, object] | None = None, **_: object) -> None:
        """Log a point in time."""
        self._write("POINT_IN_TIME", key, value, metadata)

    def mlperf_submission_log(self, benchmark: str, num_nodes: int | None = None, org: str | None = None) -> None:
        """Log the submission."""
        self.event("submission_benchmark", benchmark)
        self.event("submission_org", org)
        self.event("submission_platform", f"{num_nodes or 1}xSUBMISSION_PLATFORM_PLACEHOLDER")

    def log_init_stop_run_start(self) -> None:
        """Log the start of the timed part."""
        self.end("init_stop")
        self.start("run_start")

    def log_run_stop(self, status: str, epoch_num: float) -> None:
        """Log the end of the timed part."""
        self.end("run_stop", metadata={"status": status, "epoch_num": epoch_num})

    def _write(self, kind: str, key: str, value: object, metadata: Mapping[str, object] | None) -> None:
        event = {
            "namespace": "",
            "time_ms": round(1000 * time.time()),
            "event_type": kind,
            "key": key,
            "value": self._value if value is None else value,
            "metadata": dict(metadata or {}),
        }
        print(f":::MLLOG {json.dumps(event)}", flush=True)


class _Constants(ModuleType):
    """Names of events, whose values are the names in lower case."""

    def __getattr__(self, name: str) -> str:
        # `import` asks a module for names such as `__path__`, which must be missing in one that is not a package.
        if name.startswith("__"):
            raise AttributeError(name)
        return name.lower()
