# SPDX-License-Identifier: Apache-2.0
"""Data sets there and back through every format of HugeCTR."""

import dataclasses
import re
from pathlib import Path

import numpy as np
import pytest

from terarec.data import Reader, read_spec
from terarec.data.reader import DatasetSource
from terarec.data.records import open_split, write_as_dataset, write_as_records
from terarec.errors import ConfigError, DataNotFoundError, FormatError
from terarec.formats import read_dataset, write_dataset
from terarec.formats.block import slice_rows
from terarec.formats.hugectr.records import describe_dataset, read_records, write_records
from terarec.formats.hugectr.split_writer import read_keyset
from terarec.formats.shard import create_shard, shard_path
from terarec.spec import RecordLayout, RecordOptions, RecordsSpec, SparseInput
from terarec.spec.dataset import MISSING_KEY, RecordSplit
from tests.data.records.samples import break_checksum, norm_files
from tests.data.sources import assert_same_batches
from tests.errors import at
from tests.formats.samples import make_block, make_spec

ROWS = {"train": 100, "valid": 30}


def make_dataset(directory: Path, storage="parquet", hotness=(1, 3), **changes) -> Path:
    spec = dataclasses.replace(make_spec(storage, hotness=hotness), **changes)
    splits = {}
    for number, (split, rows) in enumerate(ROWS.items()):
        block = make_block(spec, rows, seed=number)
        shards = []
        for index, part in enumerate((slice_rows(block, 0, rows // 2), slice_rows(block, rows // 2, rows))):
            with create_shard(spec, shard_path(directory, spec, split, index)) as writer:
                writer.write(part.label, part.dense, part.keys)
                shards.append(writer.close())
        splits[split] = tuple(shards)
    write_dataset(dataclasses.replace(spec, splits=splits), directory)
    return directory


def batches(dataset: Path, split: str):
    return list(Reader(dataset, split, batch_size=7))


CASES = [
    ("norm", "parquet", (1, 3), {}),
    ("norm", "parquet", (1, 3), {"checksum": False, "key_bytes": 8}),
    ("norm", "parquet", (1, 1), {}),
    ("parquet", "parquet", (1, 3), {}),
    ("parquet", "parquet", (1, 3), {"key_bytes": 8}),
    ("raw", "raw", (1, 1), {}),
    ("raw_async", "raw", (1, 3), {}),
    ("raw_async", "raw", (2, 1), {"key_bytes": 8}),
]


@pytest.mark.parametrize(("kind", "storage", "hotness", "options"), CASES)
def test_there_and_back_gives_the_same_rows(tmp_path, kind, storage, hotness, options):
    dataset = make_dataset(tmp_path / "data", storage, hotness)
    reported = []
    records = write_as_records(
        dataset,
        tmp_path / "out",
        RecordOptions(kind=kind, keysets=True, **options),
        lambda *rows: reported.append(rows),
    )
    assert reported[-1] == (130, 130)
    assert read_records(tmp_path / "out" / "records.json") == records
    assert records.layout.key_bytes == options.get("key_bytes", 4)
    assert records.layout.slot_sizes == (50, 51)
    imported = write_as_dataset(tmp_path / "out" / "records.json", tmp_path / "again", storage=storage)
    assert imported.num_skipped == 0
    found, expected = read_dataset(tmp_path / "again"), read_dataset(dataset)
    assert found == imported.dataset
    assert (found.labels, found.dense, found.categorical) == (expected.labels, expected.dense, expected.categorical)
    for split in ROWS:
        assert_same_batches(batches(tmp_path / "again", split), batches(dataset, split))


def test_id_0_is_missing_where_it_was(tmp_path):
    """Models took it for a value of what a workflow had made."""
    (tmp_path / "data/w").mkdir(parents=True)
    spec = make_spec()
    given = tuple(dataclasses.replace(one, given=one.name == "C1" or None) for one in spec.categorical)
    write_as_records(
        make_dataset(tmp_path / "data", workflow="w", categorical=given), tmp_path / "out", RecordOptions(kind="norm")
    )
    imported = write_as_dataset(tmp_path / "out/records.json", tmp_path / "again").dataset
    for described in (read_spec(tmp_path / "out"), imported, read_dataset(tmp_path / "again")):
        assert [described.missing_key(name) for name in ("C0", "C1")] == [0, MISSING_KEY]
    records = read_records(tmp_path / "out/records.json")
    read = describe_dataset(dataclasses.replace(records, keys="as_read"), "read", "raw", {})
    assert read.missing_key("C0") == MISSING_KEY
    with pytest.raises(ConfigError, check=at("RecordsSpec.given")):
        dataclasses.replace(records, given=(False,))


@pytest.mark.parametrize(("kind", "storage", "offset"), [("norm", "parquet", 50), ("raw_async", "raw", 0)])
def test_keysets_hold_the_keys_that_tables_see(tmp_path, kind, storage, offset):
    dataset = make_dataset(tmp_path / "data", storage)
    write_as_records(dataset, tmp_path / "out", RecordOptions(kind=kind, keysets=True))
    for split in ROWS:
        keys = read_keyset(tmp_path / "out" / split / "_hugectr.keyset", 4)
        blocks = [DatasetSource(dataset, split).read(group) for group in range(2)]
        first = np.concatenate([block.keys[0] for block in blocks])
        second = np.concatenate([block.keys[1][0] for block in blocks])
        np.testing.assert_array_equal(keys, np.union1d(first, second + offset))


def test_whole_numbers_only_in_raw_async_labels(tmp_path):
    spec = make_spec("raw", hotness=(1,))
    with create_shard(spec, shard_path(tmp_path / "data", spec, "train", 0)) as writer:
        writer.write(np.array([[0.5]]), np.zeros((1, 2)), [np.array([1])])
        shard = writer.close()
    write_dataset(dataclasses.replace(spec, splits={"train": (shard,)}), tmp_path / "data")
    with pytest.raises(FormatError, check=at(f"{tmp_path}/out/train/data.bin", "label 0.5")):
        write_as_records(tmp_path / "data", tmp_path / "out", RecordOptions(kind="raw_async"))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("kind", "hotness", "options", "where"),
    [
        ("raw", (1, 3), {}, "column 'C1'"),
        ("raw", (1, 1), {"key_bytes": 8}, "Raw"),
        ("norm", (1, 3), {"key_bytes": 5}, "RecordOptions.key_bytes"),
        ("csv", (1, 3), {}, "RecordOptions.kind"),
    ],
)
def test_what_a_format_cannot_hold(tmp_path, kind, hotness, options, where):
    dataset = make_dataset(tmp_path / "data", hotness=hotness)
    with pytest.raises(ConfigError, check=at(where)):
        write_as_records(dataset, tmp_path / "out", RecordOptions(kind=kind, **options))
    assert not (tmp_path / "out").exists()


def test_a_column_of_any_keys_has_no_size(tmp_path):
    spec = make_spec(hotness=(1,))
    column = dataclasses.replace(spec.categorical[0], rows=None)
    dataset = tmp_path / "data"
    dataset.mkdir()
    write_dataset(dataclasses.replace(spec, categorical=(column,)), dataset)
    with pytest.raises(ConfigError, check=at("column 'C0'")):
        write_as_records(dataset, tmp_path / "out", RecordOptions(kind="norm"))


def described(directory: Path, sizes=(), rows=12, **changes) -> Path:
    """Norm files of another program: 12 samples of keys up to 999 in two slots, one input."""
    norm_files(directory, (5, 7))
    layout = RecordLayout(
        label_dim=1,
        dense_dim=2,
        inputs=(SparseInput(name="data", nnz_per_slot=(1, 3), is_fixed_length=False),),
        slot_sizes=sizes,
    )
    spec = RecordsSpec(
        kind="norm",
        layout=layout,
        splits={"train": RecordSplit(path="list.txt", rows=rows)},
        label_names=("y",),
        dense_names=("I1", "I2"),
        **changes,
    )
    write_records(spec, directory / "records.json")
    return directory / "records.json"


def test_files_of_another_program_without_sizes_of_slots(tmp_path):
    path = described(tmp_path)
    break_checksum(tmp_path / "gen_1.data", 3)
    imported = write_as_dataset(path, tmp_path / "data")
    assert imported.num_skipped == 1
    assert imported.dataset.column_names == ("y", "I1", "I2", "data.0", "data.1")
    assert [(column.rows, column.hotness) for column in imported.dataset.categorical] == [(None, 1), (None, 3)]
    (batch,) = Reader(tmp_path / "data", batch_size=100)
    assert batch.label[:, 0].tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 9, 10, 11]


def test_a_key_outside_its_slot(tmp_path):
    path = described(tmp_path, sizes=(20, 3000))
    with pytest.raises(FormatError, check=at(f"{tmp_path}/list.txt, column 'data.0'")):
        write_as_dataset(path, tmp_path / "data")
    assert not (tmp_path / "data").exists()


def test_another_number_of_rows_than_reported(tmp_path):
    path = described(tmp_path, rows=13)
    with pytest.raises(FormatError, check=at(f"{tmp_path}/list.txt")):
        write_as_dataset(path, tmp_path / "data")


def test_the_description_in_the_documents_is_one(tmp_path):
    page = (Path(__file__).parents[3] / "docs" / "hugectr-formats.md").read_text()
    (text,) = (block for block in re.findall(r"```json\n(.*?)```", page, re.DOTALL) if "terarec.records" in block)
    (tmp_path / "records.json").write_text(text)
    assert read_records(tmp_path / "records.json").key_names == ("C1", "tags")


def test_wrong_descriptions(tmp_path):
    with pytest.raises(DataNotFoundError, check=at(f"{tmp_path}/records.json")):
        read_records(tmp_path / "records.json")
    path = described(tmp_path)
    text = path.read_text()
    path.write_text(text.replace('"rows": 12', '"rows": "x"'))
    with pytest.raises(FormatError, check=at(f"{path}: $.records.splits.train.rows")):
        read_records(path)
    path.write_text(text.replace('"I2"', '"I2", "I3"'))
    with pytest.raises(FormatError, check=at(f"{path}: $.records.dense_names")):
        read_records(path)
    path.write_text(text.replace('"records": {', '"more": 1, "records": {'))
    with pytest.raises(FormatError, check=at(f"{path}: $.more")):
        read_records(path)
    path.write_text(text)
    with pytest.raises(ConfigError, check=at("split")):
        open_split(read_records(path), "test", tmp_path)
