# SPDX-License-Identifier: Apache-2.0
"""tools.DataGenerator writes what DataReaderParams of the same parameters read."""

import numpy as np
import pytest

from terarec.data.records import NormSource, ParquetSource, RawSource, RecordReader
from terarec.hugectr import Check_t, DataReaderType_t, Distribution_t, PowerLaw_t
from terarec.hugectr.tools import DataGenerator, DataGeneratorParams
from terarec.spec import RecordLayout, SparseInput


def params(directory, kind, **changes):
    options = {
        "format": kind,
        "label_dim": 1,
        "dense_dim": 13,
        "num_slot": 3,
        "i64_input_key": False,
        "source": f"{directory}/file_list.txt",
        "eval_source": f"{directory}/file_list_test.txt",
        "slot_size_array": [100, 4, 50],
        "num_files": 2,
        "eval_num_files": 1,
        "num_samples_per_file": 40,
        "num_samples": 70,
        "eval_num_samples": 30,
        **changes,
    }
    return DataGeneratorParams(**options)


def layout(key_bytes=4):
    inputs = (SparseInput(name="data", nnz_per_slot=(1, 1, 1), is_fixed_length=True),)
    return RecordLayout(label_dim=1, dense_dim=13, inputs=inputs, key_bytes=key_bytes, slot_sizes=(100, 4, 50))


def whole(source):
    reader = RecordReader(source, batch_size=100_000, repeat=False, drop_last=False, threads=1)
    batch = next(iter(reader))
    reader.close()
    return batch


@pytest.mark.parametrize("check", [Check_t.Sum, Check_t.Non])
def test_norm(tmp_path, check):
    DataGenerator(params(tmp_path, DataReaderType_t.Norm, check_type=check)).generate()
    for name, rows in (("file_list.txt", 80), ("file_list_test.txt", 40)):
        batch = whole(NormSource(tmp_path / name, layout(), checksum=check is Check_t.Sum))
        assert batch.batch_size == rows
        for slot, (low, high) in enumerate([(0, 100), (100, 104), (104, 154)]):
            keys = batch.sparse.keys[slot * rows : (slot + 1) * rows]
            assert low <= keys.min()
            assert keys.max() < high
    assert sorted(path.name for path in (tmp_path / "train").iterdir()) == ["gen_0.data", "gen_1.data"]
    assert [path.name for path in (tmp_path / "val").iterdir()] == ["gen_0.data"]


@pytest.mark.parametrize(("random_nnz", "lengths"), [(False, {3}), (True, {1, 2, 3})])
def test_norm_with_several_keys_a_slot(tmp_path, random_nnz, lengths):
    made = params(tmp_path, DataReaderType_t.Norm, nnz_array=[3, 1, 3], random_nnz=random_nnz)
    DataGenerator(made).generate()
    inputs = (SparseInput(name="data", nnz_per_slot=(3, 1, 3), is_fixed_length=False),)
    of_file = RecordLayout(label_dim=1, dense_dim=13, inputs=inputs, key_bytes=4)
    batch = whole(NormSource(tmp_path / "file_list.txt", of_file, checksum=True))
    found = batch.sparse.offsets.diff().view(3, 80)
    assert set(found[0].tolist()) | set(found[2].tolist()) == lengths
    assert set(found[1].tolist()) == {1}


def test_data_that_is_there_stays(tmp_path):
    (tmp_path / "file_list.txt").write_text("mine")
    DataGenerator(params(tmp_path, DataReaderType_t.Norm)).generate()
    assert (tmp_path / "file_list.txt").read_text() == "mine"
    assert (tmp_path / "file_list_test.txt").exists()
    assert not (tmp_path / "train").exists()


def test_parquet(tmp_path):
    DataGenerator(params(tmp_path, DataReaderType_t.Parquet, i64_input_key=True)).generate()
    batch = whole(ParquetSource(tmp_path / "file_list.txt", layout(8)))
    assert batch.batch_size == 80
    assert batch.sparse.keys[160:].min() >= 104


@pytest.mark.parametrize("floats", [False, True])
def test_raw(tmp_path, floats):
    DataGenerator(params(tmp_path, DataReaderType_t.Raw, float_label_dense=floats)).generate()
    for name, rows in (("file_list.txt", 70), ("file_list_test.txt", 30)):
        source = RawSource(tmp_path / name, layout(), num_samples=rows, float_label_dense=floats)
        assert whole(source).label[:, 0].tolist() == [i % 2 for i in range(rows)]


def test_the_law_of_the_keys(tmp_path):
    shares = {}
    laws = [
        {"dist_type": Distribution_t.Uniform},
        *({"power_law_type": law} for law in (PowerLaw_t.Long, PowerLaw_t.Medium, PowerLaw_t.Short)),
        {"power_law_type": PowerLaw_t.Specific, "alpha": 4.0},
    ]
    for number, law in enumerate(laws):
        directory = tmp_path / str(number)
        DataGenerator(params(directory, DataReaderType_t.Raw, num_samples=5000, **law)).generate()
        source = RawSource(directory / "file_list.txt", layout(), num_samples=5000, float_label_dense=False)
        keys = whole(source).sparse.keys[:5000].numpy()
        shares[number] = float(np.mean(keys == 0))
    assert shares[0] == pytest.approx(0.01, abs=0.005)
    assert sorted(shares, key=shares.get) == [0, 1, 2, 3, 4]
