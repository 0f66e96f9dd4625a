# SPDX-License-Identifier: Apache-2.0
"""Working directories of tiers: those that killed processes left go at the next start, others stay."""

import contextlib
import signal

import pytest
import torch

from terarec.errors import ConfigError
from terarec.io.owned import own_directory
from terarec.io.removal import work_directory
from terarec.memory.files import TierFiles
from terarec.memory.row_format import RowFormat
from tests.errors import at
from tests.processes import Python

HOLDS_FILES = """
import signal
import sys
from pathlib import Path
import torch
from terarec.memory.row_format import RowFormat
from terarec.io.owned import own_directory
from terarec.memory.files import TierFiles

directory = own_directory(Path(sys.argv[1]), "cache")
files = TierFiles(str(directory), ["a", "b"])
files.level(RowFormat(8, torch.float32))
print(directory, flush=True)
signal.pause()
"""


def test_directories_of_killed_processes_go_at_the_next_start(tmp_path):
    with contextlib.closing(Python(HOLDS_FILES, tmp_path)) as process:
        left = process.read_line()
        assert [str(path) for path in tmp_path.iterdir()] == [left]
        own_directory(tmp_path, "cache")
        assert list(tmp_path.rglob("row_file.json"))  # its process lives
        process.send_signal(signal.SIGKILL)
        process.wait()
    own_directory(tmp_path, "other")
    assert list(tmp_path.rglob("row_file.json"))
    own_directory(tmp_path, "cache")
    assert not list(tmp_path.iterdir())


def test_directories_that_are_in_use_or_of_others_stay(tmp_path):
    files = TierFiles(str(own_directory(tmp_path, "cache")), ["a", "b"])
    files.level(RowFormat(8, torch.float32))
    (tmp_path / "cache-7-0123abcd").mkdir()
    (tmp_path / "cache-7-0123abcd" / "notes.txt").touch()  # no lock says that it was one of these
    (tmp_path / "cache-of-mine").mkdir()
    (tmp_path / "cache-8-0123abcd").touch()
    held = sorted(tmp_path.rglob("*"))
    own_directory(tmp_path, "cache")
    assert sorted(tmp_path.rglob("*")) == held
    files.close()
    assert len(list(tmp_path.iterdir())) == 3


def test_files_of_others_in_a_directory_that_a_kill_left_stay(tmp_path):
    """Finding Q1: they were removed with it."""
    left = tmp_path / "cache-7-0123abcd"
    work_directory(left / "a.rows")
    for name in ("a.lock", "notes.txt"):
        (left / name).touch()
    before = sorted(tmp_path.rglob("*"))
    own_directory(tmp_path, "cache")
    assert sorted(tmp_path.rglob("*")) == before
    (left / "notes.txt").unlink()
    own_directory(tmp_path, "cache")
    assert list(tmp_path.iterdir()) == []


def test_a_directory_of_others_in_the_place_of_a_table_stays(tmp_path):
    """Finding Q1: ``--tiers file=DIR`` removed ``<table>.rows`` with all in it."""
    (tmp_path / "b.rows").mkdir()
    (tmp_path / "b.rows" / "thesis").write_text("ten years")
    files = TierFiles(str(tmp_path), ["a", "b"])
    for _ in range(2):  # again, as the locks of the first call are free
        with pytest.raises(ConfigError, check=at(tmp_path / "b.rows", "'thesis'")):
            files.level(RowFormat(8, torch.float32))
    files.close()
    assert [path.name for path in tmp_path.iterdir()] == ["b.rows"]
    assert (tmp_path / "b.rows" / "thesis").read_text() == "ten years"


def test_a_file_of_others_in_the_place_of_a_lock_stays(tmp_path):
    """Finding Q1: the end of the lock removed it."""
    (tmp_path / "a.lock").write_text("of another program")
    with pytest.raises(ConfigError, check=at(tmp_path / "a.lock")):
        TierFiles(str(tmp_path), ["a"]).level(RowFormat(8, torch.float32))
    assert (tmp_path / "a.lock").read_text() == "of another program"
