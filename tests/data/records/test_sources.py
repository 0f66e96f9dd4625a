# SPDX-License-Identifier: Apache-2.0
"""Sources of fixed-width records, and the layouts that describe them."""

import fsspec
import numpy as np
import pytest

from terarec.data.records import RawAsyncSource, RawSource, RecordReader
from terarec.errors import ConfigError, DataNotFoundError, FormatError
from terarec.formats.hugectr.raw import FixedRecordWriter, raw_async_types, raw_types
from terarec.spec import RecordLayout, SparseInput
from tests.data.sources import row_numbers
from tests.errors import at
from tests.formats.hugectr.samples import make_layout, make_rows

ONE_HOT = make_layout(slots=((1, True),) * 3, sizes=(1000, 1000, 1000))


def read_all(source, batch_size):
    return list(RecordReader(source, batch_size=batch_size, repeat=False, drop_last=False, threads=2))


def raw_file(path, rows, *, floats=True):
    with FixedRecordWriter(path, ONE_HOT, raw_types(ONE_HOT, float_label_dense=floats)) as writer:
        writer.write(*rows)
        writer.close()
    return path


def test_raw_samples_over_several_groups(tmp_path):
    rows = make_rows(ONE_HOT, 40_000)
    source = RawSource(raw_file(tmp_path / "x.bin", rows), ONE_HOT, num_samples=39_999, float_label_dense=True)
    batches = read_all(source, 7000)
    assert row_numbers(batches) == list(range(39_999))
    third = np.concatenate([batch.sparse.keys[2 * batch.batch_size :].numpy() for batch in batches])
    np.testing.assert_array_equal(third, rows[2][2][0][:39_999] + 2000)
    assert batches[0].sparse.names == ("in0.0", "in1.0", "in2.0")
    assert batches[0].sparse.offsets.tolist() == list(range(21_001))


def test_integer_raw_samples_are_decoded(tmp_path):
    rows = make_rows(ONE_HOT, 10)
    path = raw_file(tmp_path / "x.bin", rows, floats=False)
    (batch,) = read_all(RawSource(path, ONE_HOT, num_samples=10, float_label_dense=False), 10)
    np.testing.assert_array_equal(batch.label, rows[0])
    np.testing.assert_allclose(batch.dense, np.log1p(rows[1]), rtol=1e-6)


def test_multi_hot_samples(tmp_path):
    layout = make_layout(slots=((2, True), (1, True)), key_bytes=8)
    types = raw_async_types(layout, is_dense_float=True, multi_hot=True)
    label, dense, keys = make_rows(layout, 9)
    with FixedRecordWriter(tmp_path / "x.bin", layout, types) as writer:
        writer.write(label, dense, keys)
        writer.close()
    first, last = read_all(RawAsyncSource(tmp_path / "x.bin", layout, num_samples=9), 5)
    assert first.sparse.keys.tolist() == [*keys[0][0][:10].tolist(), *keys[1][0][:5].tolist()]
    assert last.sparse.offsets.tolist() == [0, 2, 4, 6, 8, 9, 10, 11, 12]


def test_raw_samples_behind_a_url(tmp_path):
    rows = make_rows(ONE_HOT, 100)
    path = raw_file(tmp_path / "x.bin", rows)
    files = fsspec.filesystem("memory")
    files.pipe("/terarec/x.bin", path.read_bytes())
    try:
        source = RawSource("memory://terarec/x.bin", ONE_HOT, num_samples=100, float_label_dense=True)
        assert row_numbers(read_all(source, 30)) == list(range(100))
    finally:
        files.rm("/terarec", recursive=True)


def test_wrong_sources(tmp_path):
    with pytest.raises(ConfigError, check=at("num_samples")):
        RawSource(tmp_path / "x.bin", ONE_HOT, num_samples=0, float_label_dense=True)
    with pytest.raises(DataNotFoundError, check=at(f"{tmp_path}/x.bin")):
        RawSource(tmp_path / "x.bin", ONE_HOT, num_samples=1, float_label_dense=True)
    raw_file(tmp_path / "x.bin", make_rows(ONE_HOT, 10))
    with pytest.raises(FormatError, check=at(f"{tmp_path}/x.bin")):
        RawSource(tmp_path / "x.bin", ONE_HOT, num_samples=11, float_label_dense=True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"label_dim": 0}, "RecordLayout.label_dim"),
        ({"dense_dim": -1}, "RecordLayout.dense_dim"),
        ({"key_bytes": 2}, "RecordLayout.key_bytes"),
        (
            {"slot_sizes": (5, 5)},
            "RecordLayout.slot_sizes",
        ),
        ({"slot_sizes": (5, 5, -1)}, "RecordLayout.slot_sizes"),
        ({"inputs": ONE_HOT.inputs * 2}, "RecordLayout.inputs"),
    ],
)
def test_wrong_layouts(changes, message):
    fields = {"label_dim": 1, "dense_dim": 0, "inputs": ONE_HOT.inputs, **changes}
    with pytest.raises(ConfigError, check=at(message)):
        RecordLayout(**fields)


def test_what_a_layout_says():
    layout = RecordLayout(
        label_dim=1,
        dense_dim=0,
        inputs=(
            SparseInput(name="wide", nnz_per_slot=(2,), is_fixed_length=False),
            SparseInput(name="deep", nnz_per_slot=(1, 3), is_fixed_length=True),
        ),
        slot_sizes=(5, 6, 7),
    )
    assert layout.slot_names == ("wide.0", "deep.0", "deep.1")
    assert layout.most_keys == (2, 1, 3)
    assert layout.key_offsets == (0, 5, 11)
    with pytest.raises(ConfigError, check=at("SparseInput.nnz_per_slot")):
        SparseInput(name="x", nnz_per_slot=(0,), is_fixed_length=True)
