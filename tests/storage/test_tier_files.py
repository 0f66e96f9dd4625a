"""Working directories of tiers: those that killed processes left go at the next start, others stay."""

import contextlib
import signal

import torch

from terarec.storage.row_format import RowFormat
from terarec.storage.tier_files import TierFiles, own_directory
from tests.processes import Python

HOLDS_FILES = """
import signal
import sys
from pathlib import Path
import torch
from terarec.storage.row_format import RowFormat
from terarec.storage.tier_files import TierFiles, own_directory

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
