"""Files and folders that appear together: all are written before the first of them takes its place."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from terarec.formats.flush import flush
from terarec.formats.location import is_remote
from terarec.formats.new_directory import check_replaceable, put_in_place, told_of
from terarec.formats.remote import upload
from terarec.spec import FieldError


@contextmanager
def new_files(directory: str | Path, *, replaceable: str = "") -> Iterator[Path]:
    """A directory to write into, whose entries appear in `directory` when the block ends well.

    They take the place of entries of the same names. None does before all are written and each is known to be allowed
    there; a block that fails leaves `directory` as it was. On a disk an entry appears by a rename; behind a URL, files
    are uploaded beside their places first and then moved there one by one.

    Args:
        directory: path or URL; made if it is not there.
        replaceable: pattern of the names in a folder that may be replaced.

    Raises:
        ConfigError: a folder stands where a file is to appear, or holds something of others.
        OSError: `directory` cannot be made.
        StorageError: the disk is full, or refuses to write there.
    """
    if is_remote(directory):
        with tempfile.TemporaryDirectory(prefix="terarec-") as held:
            partial = Path(held)
            with told_of(partial, Path(str(directory))):
                yield partial
            upload(partial, str(directory), replaceable=replaceable)
        return
    out = Path(directory).resolve()
    partial = out / f".partial-{os.getpid()}"
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        with told_of(partial, out):
            yield partial
            _put_all(partial, out, replaceable)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _put_all(partial: Path, out: Path, replaceable: str) -> None:
    entries = sorted(partial.iterdir())
    for entry in entries:
        target = out / entry.name
        if entry.is_dir():
            check_replaceable(target, replaceable)
        elif target.is_dir():
            raise FieldError("", "out", f"{target} is a folder, expected a file or nothing there")
    for entry in entries:
        if entry.is_dir():
            put_in_place(entry, out / entry.name)
        else:
            flush(entry)
            os.replace(entry, out / entry.name)
    flush(out)
