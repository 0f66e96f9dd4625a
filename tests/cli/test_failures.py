import errno

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
