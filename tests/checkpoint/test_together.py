# SPDX-License-Identifier: Apache-2.0
"""A checkpoint of several writers: what one of them cannot do, all of them learn."""

import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from terarec.checkpoint import complete_checkpoints
from terarec.checkpoint.directory import MANIFEST, FileEntry
from terarec.checkpoint.save_load import save_together
from terarec.checkpoint.table_files import TableShare
from terarec.errors import StorageError
from tests.checkpoint.small_state import make_state
from tests.waiting import PATIENCE

SIZE = 3


class Thread:
    """A writer that is a thread of this process."""

    def __init__(self, rank: int, meeting: threading.Barrier, reports: dict[int, Any]) -> None:
        self.rank, self.size = rank, SIZE
        self._meeting, self._reports = meeting, reports

    def gather(self, what: str, data: Any) -> list[Any]:
        self._reports[self.rank] = data
        self._meeting.wait()
        found = [self._reports[rank] for rank in range(self.size)]
        self._meeting.wait()
        return found


def write_together(directory: Path, failing: int | None, failure: str) -> list[Exception | None]:
    meeting, reports = threading.Barrier(SIZE, timeout=PATIENCE), {}

    def write(rank: int) -> Exception | None:
        def write_files(checkpoint: Path, shares: Mapping[str, TableShare]) -> list[FileEntry]:
            if rank == failing and failure == "files":
                raise OSError(28, "No space left on device")
            if rank == failing:
                (checkpoint / MANIFEST / "in the way").mkdir(parents=True)
            return []

        try:
            save_together(directory, replace(make_state(1), tables={}), Thread(rank, meeting, reports), write_files)
        except Exception as error:
            return error
        return None

    with ThreadPoolExecutor(SIZE) as pool:
        return list(pool.map(write, range(SIZE)))


def test_the_first_writer_ends_the_checkpoint(tmp_path: Path) -> None:
    assert write_together(tmp_path, None, "") == [None] * SIZE
    assert len(complete_checkpoints(tmp_path)) == 1


@pytest.mark.parametrize(("failing", "failure", "named"), [(1, "files", 1), (0, "files", 0), (2, "manifest", 0)])
def test_all_writers_learn_at_once_what_one_cannot_write(tmp_path: Path, failing, failure, named) -> None:
    errors = write_together(tmp_path, failing, failure)
    assert isinstance(errors[named], OSError | StorageError)
    for rank in {*range(SIZE)} - {named}:
        assert isinstance(errors[rank], StorageError)  # of a meeting that somebody misses it would be another
        assert f"rank {named}" in str(errors[rank])
    assert not complete_checkpoints(tmp_path)
    assert not list(tmp_path.glob("*"))
