# SPDX-License-Identifier: Apache-2.0
"""A directory appears whole and flushed, or not at all."""

import errno
import os
import shutil
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from terarec.errors import ConfigError, StorageError
from terarec.io.directories import atomic_dir, atomic_entries
from terarec.io.exchange import end_replacement
from terarec.io.files import write_bytes
from terarec.io.remote import final_name
from tests.errors import at
from tests.processes import run_python

KILLED = """
import os, signal, sys
from pathlib import Path
from terarec.io import directories
with getattr(directories, sys.argv[1])(Path(sys.argv[2])) as partial:
    (partial / "rows").write_text("half")
    os.kill(os.getpid(), signal.SIGKILL)
"""


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


def contents(directory: Path) -> dict[str, str]:
    """Name -> text of the files below a directory."""
    return {str(path.relative_to(directory)): path.read_text() for path in directory.rglob("*") if path.is_file()}


def write(out: Path, **texts: str) -> None:
    with atomic_dir(out, replaceable="key|value") as work:
        for name, text in texts.items():
            (work / name).write_text(text)


@pytest.mark.parametrize("name", ["out", "files", "a[b]*", "-x"])
def test_a_replacement_that_is_killed_is_ended_by_the_next_reader_or_writer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Finding Q: a kill between the two renames left no directory, and two beside it which nobody removed."""
    place = tmp_path / "place"
    copies: list[Path] = []
    out = place / name
    write(out, key="old", value="old")

    def kept(function: Callable[..., object], *arguments: object) -> None:
        function(*arguments)
        copies.append(tmp_path / f"killed{len(copies)}")  # what a kill leaves here
        with monkeypatch.context() as context:
            context.setattr(os, "mkdir", mkdir)
            shutil.copytree(place, copies[-1])

    mkdir = os.mkdir
    for function in ("replace", "mkdir", "fsync"):
        monkeypatch.setattr(os, function, partial(kept, getattr(os, function)))
    write(out, key="new")
    monkeypatch.undo()
    assert contents(out) == {"key": "new"}
    assert list(place.iterdir()) == [out]
    former, latter = {"key": "old", "value": "old"}, {"key": "new"}
    missing = [copy for copy in copies if not (copy / name).exists()]
    assert missing
    for copy in copies:
        assert copy in missing or contents(copy / name) in (former, latter)
        shutil.copytree(copy, tmp_path / "copy")
        assert end_replacement(tmp_path / "copy" / name) is (copy in missing)
        assert contents(tmp_path / "copy" / name) == (latter if copy in missing else contents(copy / name))
        shutil.rmtree(tmp_path / "copy")
        write(copy / name, key="next")
        assert [path.name for path in copy.iterdir()] == [name]
        assert contents(copy) == {f"{name}/key": "next"}


def test_what_a_kill_leaves_goes_with_the_next_call(tmp_path: Path) -> None:
    """Finding Q: the directory under construction stayed for ever."""
    for number, call in enumerate((atomic_dir, atomic_entries)):
        place = tmp_path / str(number)
        place.mkdir()
        ended = run_python(KILLED, call.__name__, place / "out")
        assert ended.returncode == -signal.SIGKILL
        assert len(contents(place)) > 1
        with call(place / "out") as work:
            (work / "rows").write_text("1")
        assert contents(place) == {"out/rows": "1"}


def test_an_owner_that_lives_keeps_what_it_writes(tmp_path: Path) -> None:
    with atomic_dir(tmp_path / "out") as first:
        (first / "rows").write_text("1")
        with atomic_dir(tmp_path / "out") as second:
            (second / "rows").write_text("2")
        assert (first / "rows").exists()
        shutil.rmtree(tmp_path / "out")
    assert contents(tmp_path) == {"out/rows": "1"}


def test_a_replacement_that_cannot_be_undone_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, replace = tmp_path / "out", os.replace
    write(out, key="old")

    def broken(source: Path, target: Path) -> None:
        if Path(target) == out:
            raise OSError(errno.EIO, "Input/output error", str(target))
        replace(source, target)

    monkeypatch.setattr(os, "replace", broken)
    with pytest.raises(StorageError, check=at(out)):
        write(out, key="new")
    with pytest.raises(StorageError, check=at(tmp_path, "a save was interrupted")):
        end_replacement(out)
    monkeypatch.undo()
    assert end_replacement(out)
    assert contents(tmp_path) == {"out/key": "new"}


@pytest.mark.parametrize("target", ["out", "nowhere/further"])
def test_a_link_that_leads_round_or_nowhere(tmp_path: Path, target: str) -> None:
    """A loop of links ended in a RuntimeError."""
    (tmp_path / "out").symlink_to(target)
    if target == "out":
        with pytest.raises(ConfigError, check=at("out")):
            write(tmp_path / "out", key="1")
    else:
        write(tmp_path / "out", key="1")
        assert contents(tmp_path / "nowhere" / "further") == {"key": "1"}
    assert (tmp_path / "out").is_symlink()
