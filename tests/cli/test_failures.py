# SPDX-License-Identifier: Apache-2.0

import errno
import subprocess
import sys

import pytest
import typer

from terarec.cli.failures import failure_of
from terarec.errors import (
    ConfigError,
    DataNotFoundError,
    FormatError,
    KeyOutOfRangeError,
    MissingDependencyError,
    RunInterruptedError,
    StorageError,
)
from tests.params import in_every_run


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (ConfigError("$.model: got 1"), 2, "error: $.model: got 1"),
        (typer.BadParameter("no such width"), 2, "error: Invalid value: no such width"),
        (FormatError("a.bin: cut\n short"), 1, "error: a.bin: cut short"),
        (DataNotFoundError("x: no such file"), 1, "error: x: no such file"),
        (StorageError("disk full"), 1, "error: disk full"),
        (KeyOutOfRangeError("feature 'C1': key 9"), 1, "error: feature 'C1': key 9"),
        (MissingDependencyError("pip install 'terarec[serve]'"), 1, "error: pip install 'terarec[serve]'"),
        (PermissionError(errno.EACCES, "Permission denied", "/x/y"), 1, "error: /x/y: Permission denied"),
        (OSError(errno.ENOSPC, "No space left on device"), 1, "error: No space left on device"),
        (OSError(errno.EFBIG, "writing bytes"), 1, "error: File too large (writing bytes)"),
        (OSError("odd"), 1, "error: odd"),
        (MemoryError("8 TiB"), 1, "error: out of memory: 8 TiB"),
        # Finding Q6: defects.
        (RuntimeError("can't allocate memory: 4 TiB\nframe"), 1, "error: out of memory: can't allocate memory: 4 TiB"),
        (RuntimeError("can't start new thread"), 1, "error: out of memory: can't start new thread"),
        (ImportError("x.so: failed to map segment"), 1, "error: out of memory: x.so: failed to map segment"),
        (RunInterruptedError("SIGINT after step 3"), 130, "interrupted: SIGINT after step 3"),
        (KeyboardInterrupt(), 130, "interrupted; nothing was left half-written"),
        (BrokenPipeError(), 0, None),
    ],
)
def test_line_and_exit_code(error: BaseException, code: int, line: str | None) -> None:
    assert failure_of(error).exit_code == code
    assert failure_of(error).line == line


def test_a_defect_is_reported_as_one() -> None:
    failure = failure_of(ZeroDivisionError("division by zero"))
    assert failure.exit_code == 3
    assert failure.line is not None
    assert failure.line.startswith("error: a defect in terarec: ZeroDivisionError: division by zero")


@pytest.mark.parametrize(
    ("error", "kind", "where"),
    [
        (ConfigError("run.json", "$.model", "got 1"), "ConfigError", "run.json: $.model"),
        (ConfigError("out", "restart=True", "got both"), "ConfigError", "out: --restart"),
        (typer.BadParameter("no such width"), "ConfigError", ""),
        (PermissionError(errno.EACCES, "Permission denied", "/x/y"), "PermissionError", "/x/y"),
        (RunInterruptedError("SIGINT after step 3"), "RunInterruptedError", ""),
        (ZeroDivisionError("division by zero"), "defect", ""),
    ],
)
def test_type_and_place(error: BaseException, kind: str, where: str) -> None:
    assert (failure_of(error).type, failure_of(error).where) == (kind, where)


def run_with(redirect: str, program: str) -> subprocess.CompletedProcess[str]:
    """Run a program in a new Python with its streams redirected by the shell."""
    command = ["sh", "-c", f'exec "$0" -c "$1" {redirect}', sys.executable, program]
    return subprocess.run(command, capture_output=True, text=True, check=False)


VERSION, INSPECT = ["--version"], ["inspect", "nowhere", "--json"]
ENDS = [(arguments, closed) for arguments in (VERSION, INSPECT) for closed in ("stdout", "stderr", "full")]


@pytest.mark.parametrize(
    ("arguments", "closed"), in_every_run([(VERSION, "full"), (INSPECT, "stdout"), (INSPECT, "stderr")], ENDS)
)
def test_streams_that_are_closed_or_full_give_no_traceback(arguments: list[str], closed: str) -> None:
    """Finding Q7."""
    program = f"import sys; from terarec.cli import main; main({arguments!r})"
    number = {"stdout": 1, "stderr": 2}.get(closed)
    redirect = f"{number}>&-" if number else ">/dev/full"
    ended = subprocess.run(
        ["sh", "-c", f'exec "$0" -c "$1" {redirect}', sys.executable, program],
        capture_output=True,
        text=True,
        check=False,
    )
    assert "Traceback" not in ended.stderr + ended.stdout
    assert "Exception ignored" not in ended.stderr
    expected = 1 if arguments[0] == "inspect" or (arguments, closed) == (["--version"], "full") else 0
    assert ended.returncode == expected


def test_no_file_gets_the_number_of_a_closed_stream() -> None:
    """Finding Q7: what is printed would go into it."""
    program = (
        "import os, sys; from terarec.cli import main, _open_streams; _open_streams(); sys.stderr.write(str(os.dup(2)))"
    )
    ended = run_with("<&- >&-", program)
    assert ended.stderr == "3"
