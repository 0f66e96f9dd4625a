# SPDX-License-Identifier: Apache-2.0
"""Files and folders that appear together, on a disk and behind a URL."""

import errno
import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import fsspec
import pytest

from terarec.errors import ConfigError, DataNotFoundError, StorageError
from terarec.io.directories import atomic_entries
from terarec.io.exchange import end_entries
from terarec.io.remote import local_copy
from tests.errors import at

ROWS = "key|slot"


@pytest.fixture
def url(tmp_path):
    """A new place behind a URL; what it held is gone afterwards."""
    place = f"memory://file-set/{tmp_path.name}"
    yield place
    files, root = fsspec.core.url_to_fs(place)
    if files.exists(root):
        files.rm(root, recursive=True)


@pytest.fixture(params=["disk", "url"])
def place(request, tmp_path):
    return str(tmp_path / "set") if request.param == "disk" else request.getfixturevalue("url")


def held(place):
    """Name -> content of every file below `place`."""
    files, root = fsspec.core.url_to_fs(str(place))
    if not files.exists(root):
        return {}
    return {name.removeprefix(root).strip("/"): files.cat_file(name) for name in files.find(root)}


def put(place, **contents):
    with atomic_entries(place, replaceable=ROWS) as folder:
        for name, content in contents.items():
            (folder / name).parent.mkdir(exist_ok=True)
            if isinstance(content, dict):
                (folder / name).mkdir()
                for inner, text in content.items():
                    (folder / name / inner).write_text(text)
            else:
                (folder / name).write_text(content)


def test_entries_take_the_places_of_their_names_and_leave_others_alone(place):
    put(place, a="1", other="x", rows={"key": "k", "slot": "s"})
    put(place, a="2", rows={"key": "l"})
    assert held(place) == {"a": b"2", "other": b"x", "rows/key": b"l"}


def test_nothing_appears_when_the_block_fails(place):
    put(place, a="1")
    with pytest.raises(StorageError, check=at(place.replace("://", ":/"), "cannot write there")):
        put(place, a="2", **{"rows/key/deep": "3"})  # whose folder nobody makes
    assert held(place) == {"a": b"1"}


@pytest.mark.parametrize("wrong", [{"b": "2", "rows": {"key": "l"}}, {"b": "2", "z": "file"}])
def test_an_entry_that_may_not_be_there_leaves_all_as_it_was(place, wrong):
    put(place, b="1")
    files, root = fsspec.core.url_to_fs(place)
    files.makedirs(f"{root}/rows", exist_ok=True)
    files.makedirs(f"{root}/z", exist_ok=True)
    files.pipe_file(f"{root}/rows/notes", b"mine")
    files.pipe_file(f"{root}/z/notes", b"mine")
    before = held(place)
    with pytest.raises(ConfigError, check=at("out")):
        put(place, **wrong)
    assert held(place) == before


def test_the_local_copy_of_a_path_is_itself_and_of_a_url_whole(tmp_path, url):
    with local_copy(tmp_path / "a") as path:
        assert path == tmp_path / "a"
    put(url, a="1", b="2", rows={"key": "k"})
    with local_copy(f"{url}/a", adjacent=("x", ".none")) as path:
        assert (path.name, path.read_text()) == ("a", "1")
    with local_copy(f"{url}/rows/") as folder:
        assert [(one.name, one.read_text()) for one in folder.iterdir()] == [("key", "k")]
    assert not folder.exists()


@pytest.mark.parametrize("error", [DataNotFoundError, StorageError])
def test_errors_about_a_copy_name_the_url(url, error):
    def use():
        with local_copy(f"{url}/none") as path:
            assert not path.exists()
            raise error(path, "no such thing")

    with pytest.raises(error, check=at(f"{url}/none", "no such thing")):
        use()


def test_a_kill_leaves_no_file_of_the_former_call_beside_one_of_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Finding Q36: a kill between two renames left a new ``x.onnx.data`` beside the former ``x.onnx``."""
    place, states = tmp_path / "place", list[Path]()
    put(place, **{"x": "1", "x.data": "1", "other": "o", "rows": {"key": "1"}})

    def kept(function: Callable[..., object], *arguments: object) -> None:
        function(*arguments)
        states.append(tmp_path / f"killed{len(states)}")  # what a kill leaves here
        with monkeypatch.context() as context:
            context.setattr(os, "mkdir", mkdir)
            shutil.copytree(place, states[-1])

    mkdir = os.mkdir
    for function in ("replace", "mkdir"):
        monkeypatch.setattr(os, function, partial(kept, getattr(os, function)))
    put(place, **{"x": "2", "x.data": "2", "rows": {"key": "2"}})
    monkeypatch.undo()
    former, latter = ({"x": n, "x.data": n, "rows/key": n, "other": b"o"} for n in (b"1", b"2"))
    assert held(place) == latter
    assert not list(place.glob(".partial*"))
    assert any(not (state / "x").exists() for state in states)
    for state in states:
        files = {name: text for name, text in held(state).items() if not name.startswith(".partial")}
        assert len(set(files.values()) - {b"o"}) < 2
        assert "x" not in files or files["x"] == files["x.data"]
        shutil.copytree(state, tmp_path / "copy")
        if end_entries(tmp_path / "copy"):
            assert held(tmp_path / "copy") == latter
        shutil.rmtree(tmp_path / "copy")
        put(state, y="3", z="3")
        assert held(state) in ({**version, "y": b"3", "z": b"3"} for version in (former, latter))


def test_an_error_of_the_disk_between_two_renames_leaves_all_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, replace = tmp_path / "place", os.replace
    put(place, a="1", b="1")

    def fail(source: Path, target: Path) -> None:
        if Path(target) == place / "b":
            monkeypatch.undo()
            raise OSError(errno.EIO, "Input/output error", str(target))
        replace(source, target)

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(StorageError, check=at(place, "cannot write there")):
        put(place, a="2", b="2")
    assert held(place) == {"a": b"1", "b": b"1"}
