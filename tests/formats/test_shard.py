"""Files of a split are finished while the next one is written; its parts hold every row group once, with its keys."""

import json
import threading
from itertools import repeat
from pathlib import Path

import numpy as np
import pytest

from terarec.errors import ConfigError, DataNotFoundError, FormatError, StorageError
from terarec.formats import PARTS_FILE, SplitFiles, open_shard, read_dataset, read_part_keys, read_parts, write_parts
from terarec.formats.block import bags_of
from tests.errors import at
from tests.formats.samples import make_block, make_spec, write_split


class File:
    """Counts rows; finishing waits for `ready`, and may fail."""

    def __init__(self, ready: threading.Event, error: Exception | None = None) -> None:
        self.rows, self.closed, self.aborted = 0, False, False
        self._ready, self._error = ready, error

    def write_block(self, block):
        self.rows += block.num_rows

    def close(self):
        self._ready.wait(10)
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


@pytest.fixture(params=["parquet", "raw"])
def data(request, tmp_path):
    spec = make_spec(request.param, hotness=(1, 3))
    write_split(tmp_path, spec, make_block(spec, 100), cuts=range(10, 100, 10), rows_per_group=10)
    return tmp_path


def blocks_of(directory):
    spec = read_dataset(directory)
    shards = [open_shard(spec, directory / entry.file, entry.rows) for entry in spec.shards("train")]
    return [shard.read_group(index) for shard in shards for index in range(len(shard.group_rows))]


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_parts_divide_the_groups_and_hold_their_distinct_keys(data, count):
    spec, blocks = read_dataset(data), blocks_of(data)
    written = write_parts(spec, data, "train", count)
    assert read_parts(data, "train") == written
    assert len(written) == count
    assert sum(part.groups for part in written) == len(blocks)
    for part in written:
        mine, blocks = blocks[: part.groups], blocks[part.groups :]
        assert part.rows == sum(block.num_rows for block in mine)
        keys = read_part_keys(data, "train", part)
        assert list(keys) == [column.name for column in spec.categorical]
        for index, found in enumerate(keys.values()):
            expected = np.unique(np.concatenate([bags_of(block.keys[index])[0] for block in mine]))
            assert found.dtype == np.int64
            assert found.tolist() == expected.tolist()
    sizes = [part.rows for part in written]
    assert max(sizes) - min(sizes) <= 20  # two groups, between which a part cannot be cut


def test_more_parts_than_groups_are_one_part_a_group(data, caplog):
    parts = write_parts(read_dataset(data), data, "train", 1000, keysets=False)
    assert [part.groups for part in parts] == [1] * len(blocks_of(data))
    assert caplog.records
    with pytest.raises(DataNotFoundError):
        read_part_keys(data, "train", parts[0])


def test_bad_parts_are_rejected(data):
    spec = read_dataset(data)
    with pytest.raises(DataNotFoundError):
        read_parts(data, "train")
    with pytest.raises(ConfigError):
        write_parts(spec, data, "train", 0)
    part, *_ = write_parts(spec, data, "train", 2)
    path = data / "train" / part.keyset
    path.write_bytes(path.read_bytes()[:-1] + b"\x01")
    with pytest.raises(FormatError):
        read_part_keys(data, "train", part)
    description = data / "train" / PARTS_FILE
    content = json.loads(description.read_text())
    for broken in ({**content, "parts": []}, {**content, "parts": [{"groups": 0, "rows": 1}]}, {**content, "more": 1}):
        description.write_text(json.dumps(broken))
        with pytest.raises(FormatError):
            read_parts(data, "train")
