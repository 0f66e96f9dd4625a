# SPDX-License-Identifier: Apache-2.0
"""Files of a split are finished while the next one is written, and an error in one is reported."""

import threading
from itertools import repeat
from pathlib import Path

import pytest

from terarec.errors import StorageError
from terarec.formats.shard import SplitFiles
from tests.errors import at
from tests.formats.samples import make_block, make_spec
from tests.waiting import PATIENCE


class File:
    """Counts rows; finishing waits for `ready`, and may fail."""

    def __init__(self, ready: threading.Event, error: Exception | None = None) -> None:
        self.rows, self.closed, self.aborted = 0, False, False
        self._ready, self._error = ready, error

    def write_block(self, block):
        self.rows += block.num_rows

    def close(self):
        self._ready.wait(PATIENCE)
        if self._error:
            raise self._error
        self.closed = True

    def abort(self):
        self.aborted = True


def test_a_full_file_is_finished_while_the_next_takes_rows():
    ready, made = threading.Event(), []
    files = SplitFiles(lambda index: (Path(f"{index}"), made.append(File(ready)) or made[index]), repeat(8))
    files.write(make_block(make_spec(), 13))
    assert [(file.rows, file.closed) for file in made] == [(8, False), (5, False)]
    ready.set()
    files.close()
    assert [(file.rows, file.closed) for file in made] == [(8, True), (5, True)]
    assert files.files == [(Path("0"), 8), (Path("1"), 5)]


def test_a_file_that_cannot_be_finished_is_reported_at_the_next_end():
    ready, made = threading.Event(), []
    ready.set()
    errors = [StorageError("disk full"), None]
    files = SplitFiles(
        lambda index: (Path(f"{index}"), made.append(File(ready, errors[index])) or made[index]), repeat(8)
    )
    files.write(make_block(make_spec(), 13))
    with pytest.raises(StorageError, check=at("", "disk full")):
        files.close()
    files.abort()
    assert [file.aborted for file in made] == [True, True]
