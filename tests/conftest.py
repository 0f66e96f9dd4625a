# SPDX-License-Identifier: Apache-2.0
"""Settings that must stand before torch starts its threads and before Triton is loaded, and those of Hypothesis."""

import faulthandler
import gc
import os
import signal
import stat
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import settings

from tests.programs import count_missing

# Three test workers share two cores: a thread each (with two workers, trained models took 12 % less time with one
# thread than with two); where a test asks for more, those that wait sleep instead of spinning against the others' work.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Triton decides when it is loaded whether it compiles or interprets; "auto" never takes it for tensors on the CPU.
os.environ.setdefault("TRITON_INTERPRET", "1")

# A shell makes what it starts in its background deaf to Ctrl-C, and so what that starts: tests press it.
signal.signal(signal.SIGINT, signal.default_int_handler)

# How long an example takes tells of the machine's load alone. `make test-all` asks for the thorough profile.
settings.register_profile("quick", deadline=None, max_examples=30)
settings.register_profile("thorough", deadline=None, max_examples=200)
settings.load_profile("quick")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--run-seconds", type=float, default=0.0, help="end the whole run after this time (0: never)")


def pytest_configure(config: pytest.Config) -> None:
    """Bound the time of the run, and flush no file to the disk but in `make test-all`.

    A test that hangs ends its worker (`faulthandler_timeout`), and the first worker that ends so or crashes ends the
    run: where workers are replaced, pytest-xdist 3.8 sometimes waits for ever or fails with an internal error (4 % of
    runs on a busy machine). The bound is for what runs outside of a test, as collecting them and ending a worker do:
    the process that controls the workers prints its stack and fails.

    No test cuts the power, and a killed process loses no page of a file. The tests of cli, ops and embedding alone
    flush 9,168 times, some 5 ms each on a busy disk. Those that watch which files are flushed, and in what order, put
    their own function here.
    """
    gc.set_threshold(100_000, 50, 1000)  # collections while modules are imported took a quarter of that time
    seconds = config.getoption("--run-seconds")
    config.option.maxworkerrestart = "0"
    if hasattr(config, "workerinput"):
        _close_connection_in_forked_processes()
    if seconds and not hasattr(config, "workerinput"):
        faulthandler.dump_traceback_later(seconds, exit=True)
        config.pluginmanager.register(_FailureLines(config))
    if config.getoption("--hypothesis-profile") != "thorough":
        os.fsync = lambda descriptor: None  # type: ignore[assignment]


class _FailureLines:
    """Print a line for each test when it fails: a run that ends at its bound has no summary."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        reporter = self._config.pluginmanager.get_plugin("terminalreporter")
        if report.failed and reporter is not None:
            reporter.write_line(f"{report.nodeid} ({report.when}): {report.longreprtext.rpartition(chr(10))[2]}")


def _close_connection_in_forked_processes() -> None:
    """Let a worker's connection end with it: as long as a process that it forked holds it, the run waits."""
    pipes = [number for number in range(3, 64) if _is_pipe(number)]

    def replace() -> None:
        null = os.open(os.devnull, os.O_RDWR)
        for number in pipes:
            os.dup2(null, number)
        os.close(null)

    os.register_at_fork(after_in_child=replace)


def _is_pipe(number: int) -> bool:
    try:
        return stat.S_ISFIFO(os.fstat(number).st_mode)
    except OSError:
        return False


def pytest_collection_finish() -> None:
    """Spare collections of garbage what lives as long as the process: they took 0.5 s with all modules loaded.

    With Python's threshold of 700 objects they took 8 % of the CPU time of cli, ops and embedding.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 10, 10)


@pytest.fixture(scope="module", autouse=True)
def _no_objects_of_earlier_files_are_looked_at() -> None:
    """Spare collections what earlier files have left: modules, trees of all sources, runs for all tests.

    A collection took a second and more in a worker that had read the sources.
    """
    gc.collect()
    gc.freeze()


# What these files begin with takes 3 to 9 s in each process: a Spark session, the first traced program and its file of
# ONNX, parsed sources.
TOGETHER = {
    "spark": ("tests/etl/spark/",),
    "programs": (
        "tests/apps/test_triton.py",
        "tests/cli/test_export.py",
        "tests/embedding/test_compile.py",
        "tests/export/",
        "tests/hugectr/test_onnx.py",
        "tests/models/test_export.py",
        "tests/nn/test_registry.py",
        "tests/ops/test_compile.py",
        "tests/ops/test_opcheck.py",
        "tests/serve/test_executors.py",
        "tests/serve/test_lists.py",
        "tests/train/test_calibrating.py",
        "tests/train/test_compile.py",
        "tests/train/test_every_model.py",
    ),
    "sources": ("tests/architecture/",),
}


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give all files of a group to one worker, and any other file as ``--dist loadfile`` does.

    After a worker has crashed, the others end with the files that they have (`pytest_configure`).
    """
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class ByGroupOrFile(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            return next((name for name, starts in TOGETHER.items() if file.startswith(starts)), file)

        def remove_node(self, node: Any) -> str | None:
            # That of pytest-xdist would give the files of a crashed worker, that test included, to the others.
            files = self.assigned_work.pop(node)
            return next((test for tests in files.values() for test, is_done in tests.items() if not is_done), None)

    return ByGroupOrFile(config, log)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Count the tests that were skipped for want of a program, with the command that installs it."""
    for line in count_missing(report.longrepr[2] for report in terminalreporter.stats.get("skipped", ())):
        terminalreporter.write_line(line)


@pytest.fixture
def set_threads() -> Iterator[Callable[[int], None]]:
    """Sets torch's number of threads for the rest of a test."""
    import torch  # not before the settings above

    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture
def no_reading_thread_is_left() -> Iterator[None]:
    """Checks that all threads that read ahead in a test end with it."""
    from terarec.closer import wait_closed
    from tests.data.sources import reading_threads  # loads torch

    before = reading_threads()
    yield
    if not reading_threads() <= before:
        gc.collect()  # it takes 0.4 s where other tests ran before
        wait_closed()
    assert reading_threads() <= before
