# SPDX-License-Identifier: Apache-2.0
"""A directory appears whole and flushed, or not at all."""

import errno
import os
from pathlib import Path

import pytest

from terarec.errors import ConfigError, StorageError
from terarec.io.directories import atomic_dir
from terarec.io.files import write_bytes
from terarec.io.remote import final_name
from tests.errors import at


@pytest.fixture
def flushed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Paths that were forced to the disk, in their order."""
    paths: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: paths.append(os.readlink(f"/proc/self/fd/{descriptor}")))
    return paths


def test_all_files_are_on_the_disk_before_the_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    flushed: list[tuple[str, bool]] = []
    sync = os.fsync

    def watch(descriptor: int) -> None:
        flushed.append((os.readlink(f"/proc/self/fd/{descriptor}"), out.exists()))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", watch)
    with atomic_dir(out) as partial:
        (partial / "train").mkdir()
        (partial / "train" / "part").write_text("x")
        (partial / "dataset.json").write_text("y")
    inside = ("train", "train/part", "dataset.json")
    assert set(flushed) == {
        *((str(partial / name), False) for name in inside),
        (str(partial), False),
        (str(tmp_path), True),
    }
    assert (out / "train" / "part").read_text() == "x"


def test_files_that_do_not_flush_are_flushed_with_the_directory_alone(tmp_path: Path, flushed: list[str]) -> None:
    with atomic_dir(tmp_path / "out") as partial:
        write_bytes(partial / "train" / "part", b"x", flushes=False)
        write_bytes(partial / "dataset.json", b"y", flushes=False)
        assert flushed == []
    inside = {str(partial / name) for name in ("train", "train/part", "dataset.json")}
    assert sorted(flushed) == sorted([*inside, str(partial), str(tmp_path)])
    write_bytes(tmp_path / "out" / "later", b"z")
    assert final_name(flushed[-2]) == f"{tmp_path}/out/later" != flushed[-2]
    assert flushed[-1] == f"{tmp_path}/out"


def test_other_files_inside_are_on_the_disk_at_once(tmp_path: Path, flushed: list[str]) -> None:
    with atomic_dir(tmp_path / "out") as partial:
        write_bytes(partial / "record", b"part")
        assert flushed == [str(partial / "record.partial"), str(partial)]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_a_disk_that_is_full_leaves_nothing(tmp_path: Path, number: int) -> None:
    def write() -> None:
        with atomic_dir(tmp_path / "out") as partial:
            (partial / "part").write_text("x")
            raise OSError(number, os.strerror(number))

    with pytest.raises(StorageError, check=at(f"{tmp_path}/out")):
        write()
    assert list(tmp_path.iterdir()) == []


def test_existing_content_stays(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, check=at("out")), atomic_dir(tmp_path):
        pass
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


def test_a_file_that_does_not_fit_is_named_by_its_place(tmp_path: Path) -> None:
    def write() -> None:
        with atomic_dir(tmp_path / "out") as partial:
            raise StorageError(partial / "part", "File too large")

    with pytest.raises(StorageError, check=at(tmp_path / "out" / "part", "File too large")):
        write()


def test_what_may_be_replaced_is_whole_until_then(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with atomic_dir(out) as partial:
        (partial / "key").write_text("old")

    def write(name: str, *, fails: bool) -> None:
        with atomic_dir(out, replaceable="key|value") as partial:
            (partial / name).write_text("new")
            assert (out / "key").read_text() == "old"
            if fails:
                raise StorageError("no more")

    with pytest.raises(StorageError, check=at("", "no more")):
        write("value", fails=True)
    assert [path.name for path in out.iterdir()] == ["key"]
    write("value", fails=False)
    assert [path.name for path in out.iterdir()] == ["value"]
    assert list(tmp_path.iterdir()) == [out]
    rejected = pytest.raises(ConfigError, check=at("out", "holds 'value'"))
    with rejected, atomic_dir(out, replaceable="key"):
        pass


def test_an_error_of_a_file_that_is_read_names_it(tmp_path: Path) -> None:
    """Finding Q13: it said "cannot write there" of the directory to write."""
    source = tmp_path / "source"

    def copy() -> None:
        with atomic_dir(tmp_path / "out"):
            raise PermissionError(errno.EACCES, "Permission denied", str(source))

    with pytest.raises(StorageError, check=at(source, "Permission denied")):
        copy()
