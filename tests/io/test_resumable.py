# SPDX-License-Identifier: Apache-2.0
"""Directories whose unfinished work outlives a kill."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from terarec.errors import ClusterError, ConfigError, FormatError, RunInterruptedError, StorageError
from terarec.etl.source.files import find_files
from terarec.io import directories
from terarec.io.directories import atomic_dir, resumable_dir
from terarec.io.files import write_bytes
from terarec.io.removal import is_temporary, remove_tree
from tests.errors import at

WORK = {"sources": "a"}

KILLED = """
import os, signal, sys
from pathlib import Path
from terarec.io.directories import resumable_dir
with resumable_dir(Path(sys.argv[1]), {"sources": "a"}) as journal:
    (journal.directory / "counts").write_text("whole")
    journal.commit("count", {"rows": 7})
    os.kill(os.getpid(), signal.SIGKILL)
"""


def stop(out: Path, reason: BaseException) -> None:
    """Stop for a `reason` after one phase."""
    with resumable_dir(out, WORK) as journal:
        journal.commit("count", {"rows": 7})
        raise reason


def test_it_appears_whole_and_without_its_marks(tmp_path: Path) -> None:
    out = tmp_path / "data"
    with resumable_dir(out, WORK) as journal:
        (journal.directory / "rows").write_text("1")
        journal.commit("write", {})
        assert not out.exists()
    assert [path.name for path in out.iterdir()] == ["rows"]
    assert list(tmp_path.iterdir()) == [out]


def test_an_error_leaves_nothing_behind(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="broken"):
        stop(tmp_path / "data", RuntimeError("broken"))
    assert list(tmp_path.iterdir()) == []


def test_an_error_leaves_none_of_the_directories_above_that_it_made(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    for place in (tmp_path / "there" / "a" / "b" / "data", tmp_path / "c" / "data"):
        with pytest.raises(RuntimeError, match="broken"):
            stop(place, RuntimeError("broken"))
    with pytest.raises(RuntimeError, match="broken"), atomic_dir(tmp_path / "c" / "data"):
        raise RuntimeError("broken")
    assert [path.name for path in tmp_path.rglob("*")] == ["there"]
    with pytest.raises(RunInterruptedError):
        stop(tmp_path / "c" / "data", KeyboardInterrupt())
    assert (tmp_path / "c" / "data.partial" / "journal.json").exists()


def test_a_killed_run_is_resumed(tmp_path: Path) -> None:
    out = tmp_path / "data"
    killed = subprocess.run([sys.executable, "-c", KILLED, str(out)], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert not out.exists()
    with resumable_dir(out, WORK) as journal:
        assert journal.result("count") == {"rows": 7}
        assert journal.result("write") is None
        assert (journal.directory / "counts").read_text() == "whole"
    assert (out / "counts").exists()
    assert list(tmp_path.iterdir()) == [out]


def test_files_of_a_phase_are_on_the_disk_before_the_journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flushed: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: flushed.append(os.readlink(f"/proc/self/fd/{descriptor}")))
    with resumable_dir(tmp_path / "data", WORK) as journal:
        flushed.clear()
        for name in ("counts", "state"):
            write_bytes(journal.directory / name, b"1")
        journal.commit("count", {})
        names = [Path(path).name for path in flushed]
    files = ("counts.partial", "state.partial", "journal.json.partial")
    assert names == [name for file in files for name in (file, "data.partial")]


def test_other_work_is_rejected_until_restarted(tmp_path: Path) -> None:
    out = tmp_path / "data"
    subprocess.run([sys.executable, "-c", KILLED, str(out)], check=False)
    with (
        pytest.raises(ConfigError, check=at("out", "with other sources, ")),
        resumable_dir(out, {"sources": "b"}),
    ):
        pass
    assert (tmp_path / "data.partial" / "counts").exists()
    with resumable_dir(out, {"sources": "b"}, restart=True) as journal:
        assert journal.phases == ()
        assert not (journal.directory / "counts").exists()


def test_two_runs_at_once_are_rejected(tmp_path: Path) -> None:
    out = tmp_path / "data"
    with resumable_dir(out, WORK) as journal:
        (journal.directory / "rows").write_text("1")
        with (
            pytest.raises(ConfigError, check=at("out", "data is being written by another run")),
            resumable_dir(out, WORK),
        ):
            pass
    assert (out / "rows").exists()


def test_the_lock_is_held_until_the_directory_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "data"
    problems: list[str] = []
    flush_tree, replace = directories.flush_tree, os.replace

    def enter() -> None:
        with pytest.raises(ConfigError) as caught, resumable_dir(out, WORK, restart=True):
            pass
        problems.append(caught.value.problem)

    def flush_late(path: Path) -> None:
        enter()
        flush_tree(path)

    def rename_late(source: Path, target: Path) -> None:
        if target == out:
            enter()
        replace(source, target)

    monkeypatch.setattr(directories, "flush_tree", flush_late)
    monkeypatch.setattr(os, "replace", rename_late)
    with resumable_dir(out, WORK) as journal:
        (journal.directory / "rows").write_text("1")
        journal.commit("write", {})
    assert len(problems) == 2
    assert all("is being written by another run" in problem for problem in problems)
    assert [path.name for path in out.iterdir()] == ["rows"]


def test_control_c_keeps_committed_phases(tmp_path: Path) -> None:
    out = tmp_path / "data"
    with pytest.raises(RunInterruptedError, check=lambda error: error.phases == ("count",)):
        stop(out, KeyboardInterrupt())
    with resumable_dir(out, WORK) as journal:
        assert journal.phases == ("count",)


@pytest.mark.parametrize(
    ("function", "kept", "raised"),
    [("flush_tree", ("count",), RunInterruptedError), ("_rename", (), KeyboardInterrupt)],
)
def test_control_c_while_the_directory_is_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str, kept: tuple[str, ...], raised: type[BaseException]
) -> None:
    """The journal was gone before the files were flushed, and the message said that the phases are kept."""

    def press(*_: object) -> None:
        raise KeyboardInterrupt

    def publish() -> None:
        with resumable_dir(tmp_path / "data", WORK) as journal:
            journal.commit("count", {"rows": 7})

    with monkeypatch.context() as patched:
        patched.setattr(directories, function, press)
        with pytest.raises(raised):
            publish()
    assert (tmp_path / "data.partial").exists() is bool(kept)
    with resumable_dir(tmp_path / "data", WORK) as journal:
        assert journal.phases == kept


@pytest.mark.parametrize("has_journal", [False, True])
def test_files_of_a_first_phase_are_no_others(tmp_path: Path, has_journal: bool) -> None:
    """They stay for the same work alone: files of another workflow came into the data set."""
    partial, killed = tmp_path / "data.partial", KILLED.replace('    journal.commit("count", {"rows": 7})\n', "")
    subprocess.run([sys.executable, "-c", killed, str(tmp_path / "data")], check=False)
    if not has_journal:
        (partial / "journal.json").unlink()
    else:
        with pytest.raises(ConfigError, check=at("out")), resumable_dir(tmp_path / "data", {"sources": "b"}):
            pass
    with resumable_dir(tmp_path / "data", WORK):
        assert (partial / "counts").exists() is has_journal


def test_committed_phases_survive_a_failed_cluster(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(ClusterError, check=lambda error: error.phases == ("count",)):
        stop(out, ClusterError("gone"))
    assert not out.exists()


def test_a_damaged_journal_is_rejected_until_restarted(tmp_path: Path) -> None:
    out = tmp_path / "data"
    with pytest.raises(RunInterruptedError):
        stop(out, KeyboardInterrupt())
    journal = tmp_path / "data.partial" / "journal.json"
    journal.write_bytes(journal.read_bytes()[:40])
    with pytest.raises(FormatError, check=at(journal)):
        stop(out, RuntimeError("never reached"))
    with resumable_dir(out, WORK, restart=True) as fresh:
        assert fresh.phases == ()


def test_what_is_not_committed_is_not_reported_as_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def press(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    def count_and_split() -> None:
        with resumable_dir(tmp_path / "data", WORK) as journal:
            journal.commit("count", {"rows": 7})
            monkeypatch.setattr("terarec.io.directories.write_versioned_json", press)
            journal.commit("split", {})

    with pytest.raises(RunInterruptedError, check=lambda error: error.phases == ("count",)):
        count_and_split()


def test_control_c_before_the_first_phase_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), resumable_dir(tmp_path / "data", WORK):
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_holds_something_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("precious")
    with pytest.raises(ConfigError, check=at("out", "exists and is not empty")), resumable_dir(tmp_path, WORK):
        pass
    assert (tmp_path / "mine").read_text() == "precious"
    assert not tmp_path.with_name(tmp_path.name + ".partial").exists()


def test_an_error_of_the_disk_names_the_directory_that_was_requested(tmp_path: Path) -> None:
    with (
        pytest.raises(StorageError, check=at(tmp_path / "data", "No space left on device; nothing was left behind")),
        resumable_dir(tmp_path / "data", WORK),
        Path("/dev/full").open("wb", buffering=0) as full,
    ):
        full.write(b"1")
    assert list(tmp_path.iterdir()) == []


def test_a_kill_after_the_rename_leaves_a_complete_directory(tmp_path: Path) -> None:
    """Finding Q36: its marker counted, so that it was no source, and the next call might have removed it."""
    out = tmp_path / "data"
    script = "\n".join(
        (
            "import os, signal, sys",
            "from pathlib import Path",
            "from terarec.io import directories",
            "directories.published = lambda out: os.kill(os.getpid(), signal.SIGKILL)",
            "with directories.resumable_dir(Path(sys.argv[1]), {}) as journal:",
            "    (journal.directory / 'part.csv').write_text('1')",
        )
    )
    ended = subprocess.run([sys.executable, "-c", script, str(out)], check=False)
    assert ended.returncode == -signal.SIGKILL
    assert not is_temporary(out)
    assert [Path(file.path) for file in find_files([out])] == [out / "part.csv"]
    with pytest.raises(ConfigError, check=at(out)):
        remove_tree(out)
    with pytest.raises(ConfigError, check=at("out")), resumable_dir(out, WORK):
        pass
    assert (out / "part.csv").exists()
