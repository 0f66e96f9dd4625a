"""Any CSV becomes a data set whose encoders come from the training part alone and serve raw records alike."""

import gzip
import json
import math

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from terarec.errors import ConfigError, DataNotFoundError, FormatError
from terarec.etl import CsvLayout, CsvOptions, Encoders, prepare_csv
from terarec.formats import open_shard, read_dataset
from terarec.spec import MISSING_KEY, BucketizeEncoder

TRAIN = """clicked,age,visits,city,user
no,20, 0,Rome,7
yes,30, 9,Rome,7
no,40,?,Oslo,8
yes,30, 3,,9
"""
TEST = """clicked,age,visits,city,user
yes.,?, -5,Lima,7
no.,30,,Oslo,123456789012
"""


@pytest.fixture
def files(tmp_path):
    train, test = tmp_path / "train.csv", tmp_path / "test.csv.gz"
    train.write_text(TRAIN)
    test.write_bytes(gzip.compress(TEST.encode()))
    return train, test


def options(test=(), **changed):
    asked = {
        "label": "clicked",
        "positives": ("yes", "yes."),
        "dense": ("age",),
        "log": ("visits",),
        "categorical": ("city",),
        "integer_categorical": ("user",),
        "buckets": {"age": 4},
        "test": test,
    }
    return CsvOptions(**(asked | changed))


def block_of(directory, split):
    spec = read_dataset(directory)
    (shard,) = spec.shards(split)
    return open_shard(spec, directory / shard.file, shard.rows).read_group(0)


def test_every_kind_of_column(files, tmp_path):
    train, test = files
    report = prepare_csv([train], tmp_path / "data", options((test,)))
    assert (report.rows, report.train_rows, report.valid_rows, report.test_rows) == (6, 4, 0, 2)
    assert [(c.name, c.rows, c.distinct) for c in report.columns] == [("city", 4, 2), ("user", 5, 3)]
    spec = read_dataset(tmp_path / "data")
    assert spec.name == "data"
    assert spec.column_names == ("clicked", "age", "visits", "city", "user", "age_bucket")
    assert spec.raw_names == ("age", "visits", "city", "user")
    assert spec.categorical[2].encoder == BucketizeEncoder(boundaries=(30.0, 40.0))

    block = block_of(tmp_path / "data", "train")
    assert block.label[:, 0].tolist() == [0, 1, 0, 1]
    assert block.dense[:, 0].tolist() == pytest.approx([-10 / math.sqrt(50), 0, 10 / math.sqrt(50), 0])
    assert block.dense[:, 1].tolist() == pytest.approx([0, math.log(10), 0, math.log(4)])
    assert block.keys[0].tolist() == [2, 2, 3, 0]  # Rome twice, Oslo once, missing
    assert block.keys[1].tolist() == [2, 2, 3, 4]
    assert block.keys[2].tolist() == [1, 2, 3, 2]


def test_other_splits_are_encoded_as_the_training_part_was(files, tmp_path):
    prepare_csv([files[0]], tmp_path / "data", options((files[1],)))
    block = block_of(tmp_path / "data", "test")
    assert block.label[:, 0].tolist() == [1, 0]
    assert block.dense.tolist() == [[0.0, 0.0], [0.0, 0.0]]  # missing is the mean; -5 is held at the least that fits
    assert block.keys[0].tolist() == [1, 3]
    assert block.keys[1].tolist() == [2, 1]
    assert block.keys[2].tolist() == [0, 2]


def test_the_last_rows_teach_nothing(files, tmp_path):
    prepare_csv([files[0]], tmp_path / "data", options(valid_fraction=0.5))
    spec = read_dataset(tmp_path / "data")
    assert (spec.num_rows("train"), spec.num_rows("valid")) == (2, 2)
    assert spec.dense[0].encoder.mean == 25.0
    assert pq.read_table(tmp_path / "data/vocabularies/city.parquet")["value"].to_pylist() == ["Rome"]
    assert block_of(tmp_path / "data", "valid").keys[0].tolist() == [1, 0]


def test_rows_go_on_over_files_and_splits(tmp_path):
    paths = []
    for part in range(3):
        paths.append(tmp_path / f"{part}.csv")
        paths[-1].write_text("y,x\n" + "".join(f"{i % 2},{i}\n" for i in range(part * 10, part * 10 + 10)))
    prepare_csv(paths, tmp_path / "data", CsvOptions(label="y", integer_categorical=("x",), valid_fraction=0.5))
    train, valid = (block_of(tmp_path / "data", split) for split in ("train", "valid"))
    assert train.keys[0].tolist() == list(range(2, 17))
    assert train.label[:, 0].tolist() == [i % 2 for i in range(15)]
    assert valid.label[:, 0].tolist() == [i % 2 for i in range(15, 30)]


def test_rare_values_share_an_id(files, tmp_path):
    prepare_csv([files[0]], tmp_path / "data", options(min_count=2))
    assert block_of(tmp_path / "data", "train").keys[0].tolist() == [2, 2, 1, 0]
    assert read_dataset(tmp_path / "data").categorical[0].rows == 3


def test_a_number_may_also_be_an_id(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("y,x\n0,5\n1,7\n1,7\n")
    prepare_csv([path], tmp_path / "data", CsvOptions(label="y", log=("x",), integer_categorical=("x",)))
    spec = read_dataset(tmp_path / "data")
    assert (spec.column_names, spec.raw_names) == (("y", "x", "x_id"), ("x",))
    assert block_of(tmp_path / "data", "train").keys[0].tolist() == [3, 2, 2]


def test_raw_records_are_encoded_as_the_files_were(files, tmp_path):
    prepare_csv([files[0]], tmp_path / "data", options())
    block = block_of(tmp_path / "data", "train")
    encoded = Encoders.load(tmp_path / "data").encode(
        {"age": [20, 30, 40, 30], "visits": [0, 9, None, 3], "city": ["Rome", "Rome", "Oslo", ""], "user": [7, 7, 8, 9]}
    )
    assert encoded.dense.tolist() == block.dense.tolist()
    assert [keys.tolist() for keys in encoded.keys] == [keys.tolist() for keys in block.keys]


def test_raw_storage_holds_the_same(files, tmp_path):
    for storage in ("parquet", "raw"):
        prepare_csv([files[0]], tmp_path / storage, options(storage=storage))
    parquet, raw = block_of(tmp_path / "parquet", "train"), block_of(tmp_path / "raw", "train")
    assert parquet.dense.tolist() == raw.dense.tolist()
    assert [keys.tolist() for keys in parquet.keys] == [keys.tolist() for keys in raw.keys]


def test_numeric_labels_are_taken_as_they_are(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("y,x\n0,1\n0.25,2\n")
    prepare_csv([path], tmp_path / "data", CsvOptions(label="y", dense=("x",)))
    assert block_of(tmp_path / "data", "train").label[:, 0].tolist() == [0.0, 0.25]


def test_progress_ends_at_its_total(files, tmp_path):
    seen = []
    prepare_csv([files[0]], tmp_path / "data", options((files[1],)), lambda done, total: seen.append((done, total)))
    assert seen == [(4, 10), (8, 10), (10, 10)]


@pytest.mark.parametrize(
    ("content", "changed", "error", "words"),
    [
        (
            "clicked,age\nyes,old\n",
            {},
            FormatError,
            r"a\.csv: row 1, column 'age': got 'old', expected a finite number",
        ),
        (
            "clicked,age\nyes,1\n,2\n",
            {},
            FormatError,
            r"row 2, column 'clicked': got a missing value, expected a label",
        ),
        ("clicked,age\nyes,1\nno\n", {}, FormatError, r"a\.csv: row 2: got 1 field, expected 2"),
        ("clicked,age\nYes,1\nNo,2\n", {}, ConfigError, r"holds 'yes'; it holds 'No', 'Yes'"),
        ("clicked,age\nyes,1\n", {"positives": ()}, FormatError, r"column 'clicked': got 'yes', expected a number"),
        ("clicked,age\n", {}, FormatError, "no row for the split 'train'"),
        ("clicked,aeg\nyes,1\n", {}, ConfigError, r"has no column 'age' \(did you mean 'aeg'\?\)"),
        ("clicked,age\nyes,1\n", {"buckets": {"age": 4}}, ConfigError, "'age' does not vary"),
        ("clicked,age\nyes,1\n", {"valid_fraction": 0.9}, FormatError, "no row for the split 'train'"),
    ],
)
def test_bad_input_is_one_line_and_leaves_nothing(tmp_path, content, changed, error, words):
    path = tmp_path / "a.csv"
    path.write_text(content)
    with pytest.raises(error, match=words) as raised:
        prepare_csv(
            [path],
            tmp_path / "data",
            CsvOptions(**({"label": "clicked", "positives": ("yes",), "dense": ("age",)} | changed)),
        )
    assert "\n" not in str(raised.value)
    assert [path.name for path in tmp_path.iterdir()] == ["a.csv"]


def test_missing_source(tmp_path):
    with pytest.raises(DataNotFoundError, match=r"b\.csv: no such file"):
        prepare_csv([tmp_path / "b.csv"], tmp_path / "data", options())


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"buckets": {"city": 4}}, "'city' is also read as a number"),
        ({"dense": (), "log": (), "categorical": (), "integer_categorical": (), "buckets": {}}, "no column to learn"),
        ({"dense": ("clicked",)}, "'clicked' occurs twice"),
        ({"buckets": {"age": 1}}, "got 1 for 'age', expected an integer >= 2"),
        ({"valid_fraction": 0.1, "valid": ("x",)}, "expected one of them"),
        ({"min_count": 0}, "min_count"),
        ({"storage": "csv"}, "storage"),
    ],
)
def test_options_that_cannot_be(changed, words):
    with pytest.raises(ConfigError, match=words):
        options(**changed)


def test_layout_without_header(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("1;x\n0;y\n")
    layout = CsvLayout(delimiter=";", names=("y", "c"))
    prepare_csv([path], tmp_path / "data", CsvOptions(label="y", categorical=("c",), layout=layout, name="mine"))
    assert read_dataset(tmp_path / "data").name == "mine"
    metadata = json.loads((tmp_path / "data/train/_metadata.json").read_text())
    assert metadata["cats"] == [{"col_name": "c", "index": 1}]


@pytest.mark.parametrize("label", ["3", "-0.5", "1.0001", "nan", "inf", "yes"])
@pytest.mark.parametrize("split", ["train", "test"])
def test_a_label_is_a_number_from_0_to_1_or_needs_positives(tmp_path, label, split):
    good, bad = tmp_path / "good.csv", tmp_path / "bad.csv"
    good.write_text("y,x\n0,1\n0.5,2\n1,3\n")
    bad.write_text(f"y,x\n0,1\n{label},2\n")
    train, test = (bad, ()) if split == "train" else (good, (bad,))
    asked = CsvOptions(label="y", dense=("x",), test=test)
    expected = rf"bad\.csv: row 2, column 'y': got '{label}', expected a number from 0 to 1, or --positive VALUE"
    with pytest.raises(FormatError, match=expected):
        prepare_csv([train], tmp_path / "data", asked)
    assert not (tmp_path / "data").exists()
    assert prepare_csv([good], tmp_path / "data", CsvOptions(label="y", dense=("x",))).rows == 3


def test_integers_may_stay_the_keys_that_they_are(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text(f"y,user,c\n1,{2**63 - 1},a\n0,-5,b\n1,,a\n0,{-(2**63) + 1},b\n")
    asked = CsvOptions(label="y", categorical=("c",), keys=("user",))
    prepare_csv([path], tmp_path / "data", asked)
    spec = read_dataset(tmp_path / "data")
    assert [(column.name, column.rows) for column in spec.categorical] == [("c", 4), ("user", None)]
    table = pq.read_table(tmp_path / "data/train/part-00000.parquet")
    keys = [2**63 - 1, -5, MISSING_KEY, -(2**63) + 1]
    assert table["user"].to_pylist() == keys
    encoders = Encoders.load(tmp_path / "data")
    raw = [2**63 - 1, -5, None, -(2**63) + 1]
    for values in (raw, pa.array(raw * 100)):
        encoded = encoders.encode({"user": values, "c": ["a"] * len(values)})
        assert encoded.keys[1].tolist() == keys * (len(values) // 4)
    for wrong in ([0.5], ["7"], [2**63], [True], np.array([1.5]), np.array([2**63], dtype=np.uint64)):
        with pytest.raises(ConfigError, match=r"column 'user'.*expected a 64-bit integer"):
            encoders.encode({"user": wrong, "c": ["a"]})
