# SPDX-License-Identifier: Apache-2.0
"""Generated files: what they hold, the law of their keys, and the planted model behind their labels."""

import json
import struct
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from terarec.apps.synthetic.records import RecordGenerator, RowSource, draw_keys, generate_records
from terarec.data.records import NormSource, ParquetSource, RawAsyncSource, RawSource, RecordReader
from terarec.errors import ConfigError
from tests.errors import at
from tests.formats.hugectr.samples import make_layout

LAYOUT = make_layout(slots=((1, True), (3, True)), sizes=(20, 30))
ONE_HOT = make_layout(slots=((1, True),) * 3, sizes=(20, 5, 300))


def generator(kind="norm", layout=LAYOUT, **changes):
    return RecordGenerator(kind=kind, layout=layout, **changes)


def whole(source):
    """All samples as one batch."""
    (batch,) = list(RecordReader(source, batch_size=10**6, repeat=False, drop_last=False, threads=2))
    return batch


def bags_of(batch):
    """Keys of each slot, and the number of them in each bag."""
    offsets = batch.sparse.offsets.reshape(-1)
    size = batch.batch_size
    slots = range(len(batch.sparse.names))
    keys = [batch.sparse.keys[offsets[s * size] : offsets[(s + 1) * size]].numpy() for s in slots]
    return keys, [np.diff(offsets[s * size : (s + 1) * size + 1].numpy()) for s in slots]


@pytest.mark.parametrize("checksum", [False, True])
def test_norm_files(tmp_path, checksum):
    made = generate_records(generator(checksum=checksum), tmp_path / "list.txt", num_files=3, rows_per_file=50)
    assert made.files == tuple(str(tmp_path / "train" / f"gen_{i}.data") for i in range(3))
    assert (made.rows, made.best_auc) == (150, None)
    batch = whole(NormSource(tmp_path / "list.txt", LAYOUT, checksum=checksum))
    assert batch.batch_size == 150
    for numbers in (batch.label, batch.dense):
        assert 0 <= numbers.min() < 0.1
        assert 0.9 < numbers.max() < 1
    (first, second), (ones, threes) = bags_of(batch)
    assert set(first.tolist()) <= set(range(20))
    assert set(second.tolist()) <= set(range(20, 50))
    assert set(ones.tolist()) == {1}
    assert set(threes.tolist()) == {3}


def test_lengths_may_be_random(tmp_path):
    generate_records(generator(is_length_random=True), tmp_path / "list.txt", rows_per_file=50)
    _, (_, lengths) = bags_of(whole(NormSource(tmp_path / "list.txt", LAYOUT, checksum=True)))
    assert set(lengths.tolist()) == {1, 2, 3}


@pytest.mark.parametrize("key_bytes", [4, 8])
def test_parquet_files(tmp_path, key_bytes):
    layout = make_layout(slots=((1, True), (3, True)), sizes=(20, 30), key_bytes=key_bytes)
    generate_records(generator("parquet", layout), tmp_path / "list.txt", split="val", num_files=2, rows_per_file=50)
    metadata = json.loads((tmp_path / "val" / "_metadata.json").read_text())
    assert [column["col_name"] for kind in ("labels", "conts", "cats") for column in metadata[kind]] == [
        "label0",
        "C1",
        "C2",
        "C3",
        "C4",
    ]
    assert [entry["file_name"] for entry in metadata["file_stats"]] == [
        str(tmp_path / "val" / f"gen_{i}.parquet") for i in range(2)
    ]
    table = pq.read_table(tmp_path / "val" / "gen_0.parquet")
    assert str(table.schema.field("C3").type) == f"int{8 * key_bytes}"
    assert max(max(row) for row in table["C4"].to_pylist()) < 30
    batch = whole(ParquetSource(tmp_path / "list.txt", layout))
    assert batch.batch_size == 100
    (first, second), (_, lengths) = bags_of(batch)
    assert first.max() < 20 <= second.min()
    assert set(lengths.tolist()) == {1, 2, 3}


@pytest.mark.parametrize(("floats", "code"), [(False, "3i3i"), (True, "3f3i")])
def test_raw_files(tmp_path, floats, code):
    made = generate_records(
        generator("raw", ONE_HOT, float_label_dense=floats), tmp_path / "x.bin", rows_per_file=20_000
    )
    assert made.files == (str(tmp_path / "x.bin"),)
    records = list(struct.iter_unpack(f"<{code}", (tmp_path / "x.bin").read_bytes()))
    assert [record[0] for record in records] == [i % 2 for i in range(20_000)]
    assert {record[1:3] for record in records} == {(0, 1)}
    for slot, size in enumerate(ONE_HOT.slot_sizes):
        assert {record[3 + slot] for record in records} <= set(range(size))
    source = RawSource(tmp_path / "x.bin", ONE_HOT, num_samples=20_000, float_label_dense=floats)
    assert whole(source).batch_size == 20_000


def test_raw_async_files(tmp_path):
    generate_records(generator("raw_async"), tmp_path / "x.bin", rows_per_file=100)
    batch = whole(RawAsyncSource(tmp_path / "x.bin", LAYOUT, num_samples=100, is_dense_float=False))
    assert batch.sparse.keys.numel() == 400
    np.testing.assert_allclose(batch.dense[0], np.log1p([0, 1]), rtol=1e-6)


def test_equal_generators_write_equal_files_and_splits_differ(tmp_path):
    contents = []
    for name, seed, split in (("a", 1, "train"), ("b", 1, "train"), ("c", 2, "train"), ("d", 1, "val")):
        path = tmp_path / name / "list.txt"
        made = generate_records(generator(seed=seed), path, split=split, rows_per_file=30)
        contents.append(Path(made.files[0]).read_bytes())
    assert contents[0] == contents[1]
    assert len(set(contents)) == 3


@pytest.mark.parametrize("alpha", [0.9, 1.0, 1.1, 1.3, 3.0])
def test_keys_follow_the_power_law(alpha):
    size = 1000
    keys = draw_keys(np.random.default_rng(0), 200_000, size, alpha)
    assert keys.min() == 0
    assert keys.max() <= size - 1

    def cumulative(y):  # of a density y^-alpha from 1 to size
        return np.log(y) / np.log(size) if alpha == 1 else (y ** (1 - alpha) - 1) / (size ** (1 - alpha) - 1)

    bounds = np.array([1.5, 2.5, 10.5, 100.5])
    found = [(keys + 1 < bound).mean() for bound in bounds]
    np.testing.assert_allclose(found, cumulative(bounds), atol=0.005)


def test_keys_may_be_uniform():
    keys = draw_keys(np.random.default_rng(0), 100_000, 10, None)
    np.testing.assert_allclose(np.bincount(keys, minlength=10) / 100_000, 0.1, atol=0.005)


@pytest.mark.parametrize(("kind", "floats"), [("norm", False), ("parquet", False), ("raw", False), ("raw", True)])
def test_the_best_auc_is_that_of_the_planted_model(tmp_path, kind, floats):
    layout = make_layout(labels=2, slots=((1, True),) * 3, sizes=(20, 5, 300))
    planted = generator(kind, layout, is_planted=True, float_label_dense=floats)
    made = generate_records(planted, tmp_path / "out", rows_per_file=20_000)
    assert 0.8 < made.best_auc < 0.95
    rows = RowSource(planted)
    drawn = [rows.draw("train", first, min(16_384, 20_000 - first)) for first in (0, 16_384)]
    label, score = (np.concatenate([getattr(part, name) for part in drawn]) for name in ("label", "probabilities"))
    assert set(np.unique(label)) == {0, 1}
    aucs = []
    for column in range(2):
        ranks = score[:, column].argsort().argsort() + 1.0
        positive = label[:, column] == 1
        pairs = positive.sum() * (~positive).sum()
        aucs.append((ranks[positive].sum() - positive.sum() * (positive.sum() + 1) / 2) / pairs)
        assert 0.4 < positive.mean() < 0.6
    assert made.best_auc == pytest.approx(np.mean(aucs), abs=1e-3)


def test_the_planted_model_is_a_sum_over_numbers_and_keys():
    rows = RowSource(generator(layout=make_layout(slots=((1, True), (3, True)), sizes=(20, 300)), is_planted=True))
    drawn = rows.draw("train", 0, 500)
    model = rows._model
    values, offsets = drawn.keys[1]
    for row in range(0, 500, 50):
        logit = model.bias[0] + drawn.dense[row] @ model.weights[0] + model.effects[0][0, drawn.keys[0][row]]
        for key in values[offsets[row] : offsets[row + 1]]:
            logit += model.effects[1][0, key] if key < 32 else 0.0
        assert drawn.probabilities[row, 0] == pytest.approx(1 / (1 + np.exp(-logit)), rel=1e-5)


def test_wrong_generators(tmp_path):
    with pytest.raises(ConfigError, check=at("RecordGenerator.kind")):
        generator("csv")
    with pytest.raises(ConfigError, check=at("RecordGenerator.layout")):
        generator(layout=make_layout())
    with pytest.raises(ConfigError, check=at("RecordGenerator.alpha")):
        generator(alpha=-1)
    with pytest.raises(ConfigError, check=at("num_files")):
        generate_records(generator("raw"), tmp_path / "x", num_files=2, rows_per_file=1)
    with pytest.raises(ConfigError, check=at("rows_per_file")):
        generate_records(generator(), tmp_path / "x", rows_per_file=0)
    assert list(tmp_path.iterdir()) == []
