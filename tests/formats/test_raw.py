# SPDX-License-Identifier: Apache-2.0
"""Raw shards: their bytes, and one error per way to be wrong."""

import dataclasses
import struct

import numpy as np
import pytest

from terarec.errors import FormatError
from terarec.formats.raw import RawShard, RawShardWriter
from terarec.ragged import Ragged
from tests.errors import at
from tests.formats.samples import make_block, make_spec


def test_golden_bytes_are_hugectr_raw(tmp_path):
    spec = make_spec("raw", labels=1, dense=2, hotness=(1, 2))
    path = tmp_path / "train" / "part-00000.bin"
    with RawShardWriter(path, spec) as writer:
        writer.write(
            np.array([[1.0], [0.0]]),
            np.array([[0.5, -2.0], [3.0, 4.0]]),
            [np.array([7, 8]), Ragged(np.array([1, 2, 3, 4]), np.array([0, 2, 4]))],
        )
        writer.close()
    assert path.read_bytes() == struct.pack("<3f3i", 1, 0.5, -2, 7, 1, 2) + struct.pack("<3f3i", 0, 3, 4, 8, 3, 4)


def test_a_criteo_record_takes_160_bytes(tmp_path):
    spec = make_spec("raw", dense=13, hotness=(1,) * 26)
    block = make_block(spec, 3)
    path = tmp_path / "train" / "x.bin"
    with RawShardWriter(path, spec) as writer:
        writer.write(block.label, block.dense, block.keys)
        writer.close()
    assert path.stat().st_size == 3 * 160


@pytest.mark.parametrize("size", [1, 23, 25, 47])
def test_a_size_that_is_no_whole_number_of_records(tmp_path, size):
    path = tmp_path / "x.bin"
    path.write_bytes(bytes(size))
    spec = make_spec("raw", hotness=(1, 2))
    with pytest.raises(FormatError, check=at(path, f"holds {size} bytes, expected a multiple of 24 bytes")):
        RawShard(path, spec)
    with pytest.raises(FormatError, check=at(path, f"holds {size} bytes, expected 2 rows")):
        RawShard(path, spec, 2)


def test_another_number_of_rows_than_declared(tmp_path):
    path = tmp_path / "x.bin"
    path.write_bytes(bytes(24))
    with pytest.raises(FormatError, check=at(path, "holds 24 bytes")):
        RawShard(path, make_spec("raw", hotness=(1, 2)), 2)


def test_a_file_cut_after_it_was_opened(tmp_path):
    path = tmp_path / "x.bin"
    path.write_bytes(bytes(48))
    shard = RawShard(path, make_spec("raw", hotness=(1, 2)), 2)
    path.write_bytes(bytes(30))
    with pytest.raises(FormatError, check=at(f"{path}: row group 0")):
        shard.read_group(0)


@pytest.mark.parametrize("key", [-1, 50, 2**31 - 1])
def test_a_key_outside_its_table(tmp_path, key):
    path = tmp_path / "x.bin"
    path.write_bytes(struct.pack("<3fi", 0, 0, 0, 49) + struct.pack("<3fi", 0, 0, 0, key))
    with pytest.raises(FormatError, check=at(f"{path}: row group 0, column 'C0'")):
        RawShard(path, make_spec("raw", hotness=(1,))).read_group(0)


def test_lists_must_be_full(tmp_path):
    spec = make_spec("raw", hotness=(2,))
    with (
        RawShardWriter(tmp_path / "train" / "x.bin", spec) as writer,
        pytest.raises(FormatError, check=at(f"{tmp_path}/train/x.bin, column 'C0'")),
    ):
        writer.write(np.zeros((2, 1)), np.zeros((2, 2)), [Ragged(np.array([1, 2, 3]), np.array([0, 2, 3]))])


def test_a_table_beyond_int32(tmp_path):
    spec = make_spec("raw", hotness=(1,))
    spec = dataclasses.replace(spec, categorical=(dataclasses.replace(spec.categorical[0], rows=2**31 + 1),))
    with pytest.raises(FormatError, check=at(f"{tmp_path}/train/x.bin, column 'C0'")):
        RawShardWriter(tmp_path / "train" / "x.bin", spec)
    assert list(tmp_path.iterdir()) == []
