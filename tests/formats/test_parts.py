# SPDX-License-Identifier: Apache-2.0
"""Parts of a split hold every row group once, with its distinct keys."""

import json

import numpy as np
import pytest

from terarec.errors import ConfigError, DataNotFoundError, FormatError
from terarec.formats import read_dataset
from terarec.formats.block import bags_of
from terarec.formats.parts import PARTS_FILE, read_part_keys, read_parts, write_parts
from terarec.formats.shard import open_shard
from tests.formats.samples import make_block, make_spec, write_split


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
