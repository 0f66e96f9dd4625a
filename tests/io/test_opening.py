# SPDX-License-Identifier: Apache-2.0
"""What is not a regular file is an error at once, and never waited for or read without end."""

import errno
import hashlib
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from terarec.config import load_run
from terarec.errors import ConfigError, DataNotFoundError, FormatError
from terarec.formats import read_dataset
from terarec.formats.container import read_tensors
from terarec.formats.hugectr import read_file_list
from terarec.formats.hugectr.split_writer import read_keyset
from terarec.formats.table_file import read_table_file
from terarec.io.files import read_json
from terarec.io.locks import file_lock
from terarec.io.opening import arrow_file, link_or_copy, open_file, read_bytes, sha256_of
from terarec.io.remote import locate, read_text
from tests.errors import at

KINDS: dict[str, Callable[[Path], Any]] = {
    "pipe": os.mkfifo,
    "directory": os.mkdir,
    "device": lambda path: path.symlink_to("/dev/zero"),
    "socket": lambda path: socket.socket(socket.AF_UNIX).bind(str(path)),
}
READERS: dict[str, Callable[[Path], Any]] = {
    "open": open_file,
    "bytes": read_bytes,
    "text": read_text,
    "locate": locate,
    "json": read_json,
    "arrow": arrow_file,
    "run.json": load_run,
    "keyset": lambda path: read_keyset(path, 8),
    "file list": read_file_list,
    "container": read_tensors,
    "table": lambda path: read_table_file(path.rename(path.with_suffix(".parquet"))),
    "lock": lambda path: file_lock(path).__enter__(),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("reader", READERS)
def test_what_is_no_file_is_rejected_at_once(
    reader: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Finding Q4: pipes hung beyond SIGTERM, and a link to /dev/zero took all memory."""
    monkeypatch.chdir(tmp_path)  # the path of a socket has at most 107 bytes
    KINDS[kind](Path("place"))
    with pytest.raises((FormatError, ConfigError), match=f"(?s)is a {kind}|no such file"):
        READERS[reader](Path("place"))


def test_a_description_of_a_data_set_that_is_a_pipe_is_rejected(tmp_path: Path) -> None:
    """Finding Q4."""
    os.mkfifo(tmp_path / "dataset.json")
    with pytest.raises(FormatError):
        read_dataset(tmp_path)


def test_a_file_that_is_replaced_after_it_was_looked_at_is_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, true_stat = tmp_path / "file", os.stat
    os.mkfifo(path)
    (tmp_path / "other").write_text("1")
    monkeypatch.setattr(
        os, "stat", lambda of, **options: true_stat(tmp_path / "other" if of == path else of, **options)
    )
    with pytest.raises(FormatError, check=at(path, "pipe")):
        open_file(path)


def test_a_file_that_is_too_large_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.touch()
    os.truncate(path, 1 << 40)
    with pytest.raises(FormatError, check=at(path, "1,099,511,627,776 bytes")):
        read_json(path)


@pytest.mark.parametrize("name", ["", "a\0b", "\ud800", "missing", "file/inside"])
def test_what_leads_to_no_file_is_no_path(name: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(FormatError):
        open_file(f"{tmp_path}/{name}")


def test_arrow_reads_the_file_that_was_opened(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"content")
    for is_mapped in (False, True):
        with arrow_file(tmp_path / "file", is_mapped=is_mapped) as file:
            assert file.read() == b"content"
    with pytest.raises(DataNotFoundError):
        arrow_file(tmp_path / "other")


def test_a_link_shares_a_file_and_a_copy_does_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "file"
    source.write_bytes(b"content")
    assert link_or_copy(source, tmp_path / "link")
    (tmp_path / "by_name").symlink_to(source.name)
    (tmp_path / "below").mkdir()
    assert link_or_copy(tmp_path / "by_name", tmp_path / "below" / "file")
    assert os.path.samefile(tmp_path / "below" / "file", source)
    assert (tmp_path / "link").samefile(source)

    def refused(*_: object) -> None:
        raise OSError(errno.EXDEV, "other file system")

    monkeypatch.setattr(os, "link", refused)
    assert not link_or_copy(source, tmp_path / "copy")
    assert not (tmp_path / "copy").samefile(source)
    assert sha256_of(tmp_path / "copy") == hashlib.sha256(b"content").hexdigest()
    with pytest.raises(DataNotFoundError, check=at(tmp_path / "none")):
        link_or_copy(tmp_path / "none", tmp_path / "other")


def test_an_error_that_a_copy_would_meet_too_is_not_hidden(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"content")
    (tmp_path / "taken").write_bytes(b"mine")
    with pytest.raises(FileExistsError):
        link_or_copy(tmp_path / "file", tmp_path / "taken")
    assert (tmp_path / "taken").read_bytes() == b"mine"


def test_a_lock_file_that_its_holder_removes_meanwhile_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = tmp_path / "lock"
    lock.touch()
    status = os.stat

    def status_before_removal(path: Any, **options: Any) -> os.stat_result:
        found = status(path, **options)
        if path == lock:
            lock.unlink()
        return found

    monkeypatch.setattr(os, "stat", status_before_removal)
    open_file(lock, "ab").close()
    assert lock.is_file()
