# SPDX-License-Identifier: Apache-2.0
"""Only directories that terarec has made are removed."""

import errno
import shutil
from pathlib import Path

import pytest

from terarec.errors import ConfigError
from terarec.io import locks, removal
from terarec.io.directories import atomic_dir, resumable_dir
from terarec.io.locks import file_lock
from terarec.io.removal import MARKER, mark, remove_tree, work_directory
from tests.errors import at


@pytest.fixture
def foreign(tmp_path: Path) -> Path:
    """A directory of the user."""
    directory = tmp_path / "data.partial"
    directory.mkdir()
    (directory / "thesis").write_text("ten years")
    return directory


def test_a_directory_of_others_stays(foreign: Path) -> None:
    """Finding Q1."""
    for remove in (remove_tree, work_directory, mark):
        with pytest.raises(ConfigError, check=at(foreign, "'thesis'")):
            remove(foreign)
    remove_tree(foreign, ignore_errors=True)
    assert (foreign / "thesis").read_text() == "ten years"


def test_a_link_to_a_work_directory_stays(tmp_path: Path) -> None:
    work_directory(tmp_path / "work")
    (tmp_path / "link").symlink_to(tmp_path / "work")
    for remove in (remove_tree, work_directory, mark):
        with pytest.raises(ConfigError, check=at(tmp_path / "link")):
            remove(tmp_path / "link")
    (tmp_path / "out.partial").symlink_to(tmp_path / "work")
    (tmp_path / "work" / "rows").write_text("1")
    with pytest.raises(ConfigError, check=at(tmp_path / "out.partial")), resumable_dir(tmp_path / "out", {}):
        raise AssertionError
    assert sorted(path.name for path in (tmp_path / "work").iterdir()) == sorted([MARKER, "rows"])


def test_a_lock_file_is_no_link_to_nothing(tmp_path: Path) -> None:
    """Finding Q: an empty file appeared where the link led."""
    (tmp_path / ".out.lock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, check=at(tmp_path / ".out.lock")), resumable_dir(tmp_path / "out", {}):
        raise AssertionError
    assert [path.name for path in tmp_path.iterdir()] == [".out.lock"]


def test_a_work_directory_goes_with_all_below_it(tmp_path: Path) -> None:
    work = work_directory(tmp_path / "work")
    inner = work_directory(work / "inner")
    (inner / "rows").write_text("1")
    assert not (inner / MARKER).exists()
    remove_tree(inner)
    assert [path.name for path in work.iterdir()] == [MARKER]
    assert work_directory(work) == work  # as after a kill
    remove_tree(work)
    assert not work.exists()


def test_the_marker_of_a_directory_goes_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A removal that was killed after it left a directory that no call removed any more."""
    work, rmtree = work_directory(tmp_path / "work"), shutil.rmtree
    for name in ("a", "b", "c"):
        (work / name).mkdir()
        (work / f"{name}.txt").touch()

    def checked(path: Path, **options: bool) -> None:
        assert (work / MARKER).exists()
        assert path != work or len(list(work.iterdir())) == 1
        rmtree(path, **options)

    monkeypatch.setattr(shutil, "rmtree", checked)
    remove_tree(work)
    assert not work.exists()


def test_what_stays_by_an_error_keeps_its_marker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rest of a removal that ignored errors was of nobody, so that no later one removed it."""
    work, unlink = work_directory(tmp_path / "work"), Path.unlink
    for name in ("a", "b", "c"):
        (work / name).touch()

    def busy(path: Path) -> None:
        if path.name == "b":
            raise OSError(errno.EBUSY, "busy", str(path))
        unlink(path)

    with monkeypatch.context() as context:
        context.setattr(Path, "unlink", busy)
        remove_tree(work, ignore_errors=True)
    assert sorted(path.name for path in work.iterdir()) == sorted([MARKER, "b"])
    remove_tree(work)
    assert not work.exists()


def test_a_complete_directory_is_known_by_its_names(tmp_path: Path) -> None:
    (tmp_path / "of").mkdir()
    (tmp_path / "of" / "manifest.json").write_text("{}")
    (tmp_path / "of" / "notes").write_text("mine")
    with pytest.raises(ConfigError, check=at(tmp_path / "of", "'notes'")):
        remove_tree(tmp_path / "of", names=r"manifest\.json", first="manifest.json")
    assert len(list((tmp_path / "of").iterdir())) == 2
    (tmp_path / "of" / "notes").unlink()
    remove_tree(tmp_path / "of", names=r"manifest\.json", first="manifest.json")
    assert not (tmp_path / "of").exists()


@pytest.mark.parametrize("restart", [False, True])
def test_a_directory_of_others_at_the_place_of_a_resumable_one_stays(foreign: Path, restart: bool) -> None:
    """Finding Q1: an error in the block, or a restart, removed it with all in it."""
    with (
        pytest.raises(ConfigError, check=at(foreign)),
        resumable_dir(foreign.with_suffix(""), {}, restart=restart),
    ):
        raise AssertionError
    assert [path.name for path in foreign.iterdir()] == ["thesis"]


def test_an_atomic_directory_leaves_others_beside_it(tmp_path: Path) -> None:
    names = ["out.partial", "out.partial-1", "out.partial-1-0123abcd", "out.partial-1-0123abce"]
    for name in names:
        (tmp_path / name / "files").mkdir(parents=True)
        (tmp_path / name / "files" / "thesis").write_text("ten years")
    (tmp_path / names[-1] / "owner.lock").touch()
    (tmp_path / "out.partial-1-0123abcf").symlink_to(tmp_path / "elsewhere")
    with atomic_dir(tmp_path / "out") as partial:
        (partial / "rows").write_text("1")
    assert all((tmp_path / name / "files" / "thesis").exists() for name in names)
    assert (tmp_path / "out.partial-1-0123abcf").is_symlink()
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["rows"]


def test_a_published_directory_is_no_longer_ours(tmp_path: Path) -> None:
    with resumable_dir(tmp_path / "out", {}) as journal:
        (journal.directory / "rows").write_text("1")
    with pytest.raises(ConfigError):
        remove_tree(tmp_path / "out")


def test_what_came_into_a_replaced_directory_stays(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with atomic_dir(out, replaceable="key") as partial:
        (partial / "key").write_text("1")

    def replace() -> None:
        with atomic_dir(out, replaceable="key") as partial:
            (partial / "key").write_text("2")
            (out / "thesis").write_text("ten years")

    with pytest.raises(ConfigError, match="'thesis'"):
        replace()
    assert sorted(path.name for path in out.iterdir()) == ["key", "thesis"]


def test_what_goes_with_its_directory_while_it_is_removed_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when a model is released late, by a thread, while its caller removes the directory of its files."""
    is_at, is_temporary = locks.is_at, removal.is_temporary

    def removed_after(descriptor: int, path: Path) -> bool:
        found = is_at(descriptor, path)
        shutil.rmtree(path.parent)
        return found

    def removed_before(directory: Path) -> bool:
        shutil.rmtree(directory.parent)
        return is_temporary(directory)

    place = tmp_path / "place"
    place.mkdir()
    with file_lock(place / "tags.lock") as is_held:
        monkeypatch.setattr(locks, "is_at", removed_after)
    assert is_held
    assert not place.exists()
    work = work_directory(place / "tags.rows")
    monkeypatch.setattr(removal, "is_temporary", removed_before)
    remove_tree(work)
    assert not place.exists()
