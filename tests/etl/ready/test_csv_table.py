# SPDX-License-Identifier: Apache-2.0
"""Any CSV becomes a data set whose workflow is fitted on the training part alone and serves raw records alike."""

import bz2
import gzip
import math
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from terarec import etl
from terarec.errors import ConfigError, FormatError
from terarec.etl.engine.report import PrepareReport
from terarec.etl.ready import CsvOptions, csv_workflow
from terarec.etl.workflow import Workflow
from terarec.formats import read_dataset
from terarec.spec import PrepareOptions, SplitByFiles, SplitByFraction
from terarec.spec.dataset import MISSING_KEY
from tests.errors import at
from tests.etl.engine.test_prepare import equal, read_split

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
BY_TEST_FILE = SplitByFiles(valid=0, test=1)


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    train, test = tmp_path / "train.csv", tmp_path / "test.csv.gz"
    train.write_text(TRAIN)
    test.write_bytes(gzip.compress(TEST.encode()))
    return train, test


def options(**changed: Any) -> CsvOptions:
    requested = {
        "label": "clicked",
        "positives": ("yes", "yes."),
        "dense": ("age",),
        "log": ("visits",),
        "categorical": ("city",),
        "ids": ("user",),
        "buckets": {"age": 4},
    }
    return CsvOptions(**(requested | changed))


def prepare(sources: list[Path], out: Path, requested: CsvOptions, **how: Any) -> PrepareReport:
    return etl.prepare(Workflow.of(csv_workflow(requested)), sources, out, options=PrepareOptions(**how))


def test_every_kind_of_column(files: tuple[Path, Path], tmp_path: Path) -> None:
    report = prepare([*files], tmp_path / "data", options(split=BY_TEST_FILE))
    assert report.splits == {"train": 4, "test": 2}
    spec = read_dataset(tmp_path / "data")
    assert spec.column_names == ("clicked", "age", "visits", "city", "user", "age_bucket")
    assert [column.rows for column in spec.categorical] == [4, 5, 4]
    assert [*Workflow.load(tmp_path / "data" / "workflow").record_columns] == ["age", "visits", "city", "user"]

    block = read_split(tmp_path / "data", "train")
    assert block.label[:, 0].tolist() == [0, 1, 0, 1]
    assert block.dense[:, 0].tolist() == pytest.approx([-10 / math.sqrt(50), 0, 10 / math.sqrt(50), 0])
    assert block.dense[:, 1].tolist() == pytest.approx([0, math.log(10), 0, math.log(4)])
    assert block.keys[0].tolist() == [2, 2, 3, 0]  # Rome twice, Oslo once, missing
    assert block.keys[1].tolist() == [2, 2, 3, 4]
    assert block.keys[2].tolist() == [1, 2, 3, 2]

    block = read_split(tmp_path / "data", "test")  # encoded as the training part was
    assert block.label[:, 0].tolist() == [1, 0]
    assert block.dense.tolist() == [[0.0, 0.0], [0.0, 0.0]]  # missing is the mean; -5 is held at the least that fits
    assert [keys.tolist() for keys in block.keys] == [[1, 3], [2, 1], [0, 2]]


def test_the_last_rows_teach_nothing(files: tuple[Path, Path], tmp_path: Path) -> None:
    report = prepare([files[0]], tmp_path / "data", options(split=SplitByFraction(valid=0.5)))
    assert report.splits == {"train": 2, "valid": 2}
    assert read_split(tmp_path / "data", "train").dense[:, 0].tolist() == [-1, 1]
    assert read_split(tmp_path / "data", "valid").keys[0].tolist() == [1, 0]


def test_rows_resume_over_files_and_the_last_before_those_for_test_are_for_validation(tmp_path: Path) -> None:
    paths = [tmp_path / f"{part}.csv" for part in range(3)]
    for part, path in enumerate(paths):
        path.write_text("y,x\n" + "".join(f"{i % 2},{i}\n" for i in range(part * 10, part * 10 + 10)))
    requested = CsvOptions(label="y", ids=("x",), split=SplitByFiles(valid=0, test=1, valid_fraction=0.25))
    report = prepare(paths, tmp_path / "data", requested)
    assert report.splits == {"train": 15, "valid": 5, "test": 10}
    train, valid, test = (read_split(tmp_path / "data", split) for split in ("train", "valid", "test"))
    assert train.keys[0].tolist() == list(range(2, 17))
    assert [*train.label[:, 0], *valid.label[:, 0], *test.label[:, 0]] == [i % 2 for i in range(30)]


def test_a_number_may_also_be_an_id_and_an_interval(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("y,x\n0,5\n1,7\n1,5\n")
    prepare([path], tmp_path / "data", CsvOptions(label="y", log=("x",), ids=("x",), buckets={"x": 2}))
    assert read_dataset(tmp_path / "data").column_names == ("y", "x", "x_id", "x_bucket")
    block = read_split(tmp_path / "data", "train")
    assert block.dense[:, 0].tolist() == pytest.approx([0, math.log(3), 0])
    assert [keys.tolist() for keys in block.keys] == [[2, 3, 2], [1, 2, 1]]


def test_raw_records_are_encoded_as_the_files_were(files: tuple[Path, Path], tmp_path: Path) -> None:
    prepare([files[0]], tmp_path / "data", options(min_count=2))
    block = read_split(tmp_path / "data", "train")
    assert block.keys[0].tolist() == [2, 2, 1, 0]
    encoded = Workflow.load(tmp_path / "data" / "workflow").encode(
        {"age": [20, 30, 40, 30], "visits": [0, 9, None, 3], "city": ["Rome", "Rome", "Oslo", ""], "user": [7, 7, 8, 9]}
    )
    assert encoded.dense.tolist() == block.dense.tolist()
    assert [keys.tolist() for keys in encoded.keys] == [keys.tolist() for keys in block.keys]


def test_numeric_labels_are_taken_unchanged(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("y,x\n0,1\n0.25,2\n")
    prepare([path], tmp_path / "data", CsvOptions(label="y", dense=("x",)))
    assert read_split(tmp_path / "data", "train").label[:, 0].tolist() == [0.0, 0.25]


@pytest.mark.parametrize("label", ["3", "-0.5", "1.0001", "inf", "yes"])
@pytest.mark.parametrize("split", ["train", "test"])
def test_a_label_is_a_number_from_0_to_1_or_needs_positives(tmp_path: Path, label: str, split: str) -> None:
    good, bad = tmp_path / "good.csv", tmp_path / "bad.csv"
    good.write_text("y,x\n0,1\n0.5,2\n1,3\n")
    bad.write_text(f"y,x\n0,1\n{label},2\n")
    sources = [bad] if split == "train" else [good, bad]
    requested = CsvOptions(label="y", dense=("x",), split=None if split == "train" else BY_TEST_FILE)
    with pytest.raises(FormatError, check=at(f"{bad}: line 3, column 'y'")):
        prepare(sources, tmp_path / "data", requested)
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize(
    ("content", "changed", "error", "place"),
    [
        ("clicked,age\nyes,old\n", {}, FormatError, (": line 2, column 'age'", "got 'old'")),
        (
            "clicked,age\nyes,1\n\n,2\n",
            {},
            FormatError,
            (": line 4, column 'clicked'", "got a missing value"),
        ),
        ("clicked,age\nyes,1\nno\n", {}, FormatError, (": line 3", "found 1 field")),
        ("clicked,age\nYes,1\nNo,2\n", {}, ConfigError, ("label 'clicked'", "holds 'yes'; it holds 'Yes', 'No'")),
        ("clicked,age\n", {}, FormatError, ("", "the file is empty")),
        (
            "clicked,aeg\nyes,1\n",
            {},
            ConfigError,
            ("", "has no column 'age' (did you mean 'aeg'?)"),
        ),
        ("clicked,age,age\nyes,1\n", {}, FormatError, ("", "names column 'age' 2 times")),
        ("clicked;age\nyes;1\n", {}, ConfigError, ("", "its header is the single column 'clicked;age'")),
        ("clicked,age\nyes,\udcff\n", {}, FormatError, (": line 2, column 'age'", "")),
        ("clicked,age\nyes,1\n", {"split": SplitByFraction(valid=0.9)}, ConfigError, ("split", "leaves 0 of 1 rows")),
    ],
)
def test_bad_input_is_one_line_and_leaves_nothing(
    tmp_path: Path, content: str, changed: dict[str, Any], error: type[Exception], place: tuple[str, str]
) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(content.encode(errors="surrogateescape"))
    requested = CsvOptions(**({"label": "clicked", "positives": ("yes",), "dense": ("age",)} | changed))
    where = place[0] if place[0][:1].isalpha() else f"{path}{place[0]}"
    with pytest.raises(error, check=at(where, place[1])) as raised:
        prepare([path], tmp_path / "data", requested)
    assert "\n" not in str(raised.value)
    assert [path.name for path in tmp_path.iterdir()] == ["a.csv"]


def test_new_rows_need_no_positive_one(files: tuple[Path, Path], tmp_path: Path) -> None:
    prepare([files[0]], tmp_path / "data", options())
    later = tmp_path / "later.csv"
    later.write_text("clicked,age,visits,city,user\nno,20,0,Rome,7\n")
    fitted = Workflow.load(tmp_path / "data" / "workflow")
    assert etl.prepare(fitted, [later], tmp_path / "later").rows == 1


@pytest.mark.parametrize(
    ("changed", "place"),
    [
        ({"buckets": {"city": 4}}, ("CsvOptions.categorical",)),
        ({"dense": (), "log": (), "categorical": (), "ids": (), "buckets": {}}, ("CsvOptions",)),
        ({"dense": ("clicked",)}, ("WorkflowSpec", "'clicked' occurs twice")),
        ({"keys": ("user",)}, ("WorkflowSpec", "'user' occurs twice")),
        ({"buckets": {"age": 1}}, ("CsvOptions.buckets",)),
        ({"min_count": 0}, ("CsvOptions.min_count",)),
        ({"names": ("clicked", "age", "visits", "user")}, ("CsvOptions.names",)),
        *(({"delimiter": text}, ("SourceSpec.delimiter",)) for text in ("", '"', "\n", "\u00e9")),
    ],
)
def test_options_that_cannot_be(changed: dict[str, Any], place: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, check=at(*place)):
        Workflow.of(csv_workflow(options(**changed)))


def test_other_layouts_hold_the_same(files: tuple[Path, Path], tmp_path: Path) -> None:
    rows = TRAIN.splitlines()[1:]
    plain = tmp_path / "plain.txt.bz2"
    plain.write_bytes(bz2.compress("\n".join(line.replace(",", ";") for line in rows).encode()))
    quoted = tmp_path / "quoted.csv"
    quoted.write_text(
        "\r\n".join(
            [' city , "clicked",age,visits,"user",more']
            + [
                f' "{city}" ,{clicked}, {age} ,{visits.replace("?", "NA")},"{user}",","'
                for clicked, age, visits, city, user in (line.split(",") for line in rows)
            ]
        )
    )
    names = ("clicked", "age", "visits", "city", "user")
    prepare([files[0]], tmp_path / "a", options())
    prepare([plain], tmp_path / "b", options(delimiter=";", names=names, name="mine"))
    prepare([quoted], tmp_path / "c", options(missing=("NA",)), storage="raw")
    assert read_dataset(tmp_path / "b").name == "mine"
    for other in "bc":
        equal(read_split(tmp_path / "a", "train"), read_split(tmp_path / other, "train"))


def test_integers_may_stay_the_keys_that_they_are(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text(f"y,user,c\n1,{2**63 - 1},a\n0,-5,b\n1,,a\n0,{-(2**63) + 1},b\n")
    prepare([path], tmp_path / "data", CsvOptions(label="y", categorical=("c",), keys=("user",)))
    spec = read_dataset(tmp_path / "data")
    assert [(column.name, column.rows) for column in spec.categorical] == [("c", 4), ("user", None)]
    table = pq.read_table(tmp_path / "data/train/part-00000.parquet")
    keys = [2**63 - 1, -5, MISSING_KEY, -(2**63) + 1]
    assert table["user"].to_pylist() == keys
    workflow = Workflow.load(tmp_path / "data" / "workflow")
    raw = [2**63 - 1, -5, None, -(2**63) + 1]
    for values in (raw, pa.array(raw * 100)):
        encoded = workflow.encode({"user": values, "c": ["a"] * len(values)})
        assert encoded.keys[1].tolist() == keys * (len(values) // 4)
    for wrong in ([0.5], ["7"], [2**63], [True], np.array([1.5]), np.array([2**63], dtype=np.uint64)):
        with pytest.raises(ConfigError, check=at("column 'user', row 0")):
            workflow.encode({"user": wrong, "c": ["a"]})
