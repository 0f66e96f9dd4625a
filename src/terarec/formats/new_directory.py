"""Directories that appear whole or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from terarec.errors import StorageError
from terarec.formats.atomic import DISK_FULL
from terarec.formats.flush import flush, flush_tree
from terarec.spec import FieldError


@contextmanager
def new_directory(out: Path) -> Iterator[Path]:
    """A directory beside `out` to write into, renamed to `out` when the block ends well and removed otherwise.

    All that it holds is on the disk before it is renamed, and its new name is when the block ends.

    A kill leaves the directory beside (``<out>.partial-<process>``), and no `out`.

    Args:
        out: must not exist, or be an empty directory.

    Raises:
        ConfigError: `out` is a file, or holds something.
        StorageError: the disk is full, or refuses to write there.
    """
    out = out.resolve()
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise FieldError("", "out", f"{out} exists and is not empty, expected a new or an empty directory")
    partial = out.with_name(f"{out.name}.partial-{os.getpid()}")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        yield partial
        flush_tree(partial)
        os.replace(partial, out)
        flush(out.parent)
    except StorageError as error:
        # A file's own error names it where it was written; the user knows `out` alone.
        raise StorageError(str(error).replace(str(partial), str(out))) from error
    except OSError as error:
        if isinstance(error, ValueError):  # a FormatError such as a missing source says all itself
            raise
        reason = f"{error.strerror or error}"
        what = f"{reason}; nothing was left behind" if error.errno in DISK_FULL else f"cannot write there: {reason}"
        raise StorageError(f"{out}: {what}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
