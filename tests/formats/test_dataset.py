# SPDX-License-Identifier: Apache-2.0
"""``dataset.json`` and the files for HugeCTR: exact bytes, round trips, and one error per way to be wrong."""

import dataclasses
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from terarec.errors import DataNotFoundError, FormatError
from terarec.formats import read_dataset, write_dataset
from terarec.formats.dataset import workflow_files
from terarec.spec import (
    CategoricalColumn,
    DatasetSpec,
    DenseColumn,
    LabelColumn,
    MetadataColumn,
    ShardSpec,
)
from tests.errors import at
from tests.params import examples

SPEC = DatasetSpec(
    name="golden",
    storage="parquet",
    labels=(LabelColumn(name="click"),),
    dense=(DenseColumn(name="I1"),),
    categorical=(
        CategoricalColumn(name="C1", rows=9),
        CategoricalColumn(name="tags", rows=5, hotness=4),
    ),
    splits={
        "train": (
            ShardSpec(file="train/part-00000.parquet", rows=7),
            ShardSpec(file="train/part-00001.parquet", rows=5),
        ),
        "valid": (),
    },
    best_auc=0.75,
    weight="w",
    metadata=(MetadataColumn(name="user", type="string"),),
)

GOLDEN = """{
  "format": "terarec.dataset",
  "version": 3,
  "dataset": {
    "name": "golden",
    "storage": "parquet",
    "labels": [
      {
        "name": "click"
      }
    ],
    "dense": [
      {
        "name": "I1"
      }
    ],
    "categorical": [
      {
        "name": "C1",
        "rows": 9,
        "hotness": 1
      },
      {
        "name": "tags",
        "rows": 5,
        "hotness": 4
      }
    ],
    "splits": {
      "train": [
        {
          "file": "train/part-00000.parquet",
          "rows": 7
        },
        {
          "file": "train/part-00001.parquet",
          "rows": 5
        }
      ],
      "valid": []
    },
    "best_auc": 0.75,
    "weight": "w",
    "metadata": [
      {
        "name": "user",
        "type": "string"
      }
    ]
  }
}
"""


def test_golden_dataset_json(tmp_path):
    write_dataset(SPEC, tmp_path)
    assert (tmp_path / "dataset.json").read_text() == GOLDEN
    assert read_dataset(tmp_path) == SPEC


def test_golden_files_for_hugectr(tmp_path):
    write_dataset(SPEC, tmp_path)
    first = (tmp_path / "train" / "part-00000.parquet").resolve()
    second = (tmp_path / "train" / "part-00001.parquet").resolve()
    assert (tmp_path / "train" / "_file_list.txt").read_text() == f"2\n{first}\n{second}\n"
    assert (tmp_path / "train" / "_metadata.json").read_text() == (
        '{"file_stats": [{"file_name": "part-00000.parquet", "num_rows": 7}, '
        '{"file_name": "part-00001.parquet", "num_rows": 5}], '
        '"cats": [{"col_name": "C1", "index": 2}, {"col_name": "tags", "index": 3}], '
        '"conts": [{"col_name": "I1", "index": 1}], "labels": [{"col_name": "click", "index": 0}]}'
    )
    assert not (tmp_path / "valid").exists()


def test_raw_data_and_bare_descriptions_have_nothing_for_hugectr(tmp_path):
    write_dataset(dataclasses.replace(SPEC, storage="raw", metadata=()), tmp_path / "raw")
    write_dataset(dataclasses.replace(SPEC, splits={}), tmp_path / "bare")
    assert [path.name for path in (tmp_path / "raw").iterdir()] == ["dataset.json"]
    assert [path.name for path in (tmp_path / "bare").iterdir()] == ["dataset.json"]
    assert read_dataset(tmp_path / "bare").splits == {}


@given(data=st.data())
@settings(max_examples=examples(30))
def test_any_description_comes_back(tmp_path_factory, data):
    name = st.text(min_size=1, max_size=9).filter(lambda text: not set(text) & set("/\\") and text not in (".", ".."))
    name = name.filter(lambda text: text.isprintable())
    names = data.draw(st.lists(name, min_size=3, max_size=9, unique=True))
    spec = DatasetSpec(
        name=data.draw(name),
        storage=data.draw(st.sampled_from(["parquet", "raw"])),
        labels=(LabelColumn(name=names[0]),),
        dense=(DenseColumn(name=names[1]),),
        categorical=tuple(
            CategoricalColumn(
                name=n,
                rows=data.draw(st.none() | st.integers(1, 2**40)),
                hotness=data.draw(st.integers(1, 99)),
            )
            for n in names[2:]
        ),
        splits={"train": (ShardSpec(file="train/a", rows=data.draw(st.integers(0, 2**40))),)},
    )
    directory = tmp_path_factory.mktemp("dataset")
    write_dataset(spec, directory)
    assert read_dataset(directory) == spec


def test_no_directory_and_no_description(tmp_path):
    with pytest.raises(DataNotFoundError, check=at(f"{tmp_path}/absent")):
        read_dataset(tmp_path / "absent")
    with pytest.raises(DataNotFoundError, check=at(tmp_path)):
        read_dataset(tmp_path)


BROKEN = {
    "not JSON": (lambda _: "{", ("", "not JSON")),
    "nested deeply": (lambda _: "[" * 10**5, ("", "not JSON")),
    "not text": (lambda _: b"\xff\xfe\x00", ("", "not JSON")),
    "a list": (lambda _: "[]", (": $.format", "got None")),
    "another format": (lambda d: {**d, "format": "terarec.checkpoint"}, (": $.format", "got 'terarec.checkpoint'")),
    "newer": (lambda d: {**d, "version": 4}, ("", "version 4 is newer than this terarec reads")),
    "older": (
        lambda d: {**d, "version": 2},
        ("", "version 2 was made by an earlier development state, expected version 3"),
    ),
    "version": (lambda d: {**d, "version": "1"}, (": $.version", "got '1'")),
    "version 0": (lambda d: {**d, "version": 0}, (": $.version", "got 0")),
    "no content": (lambda d: {"format": d["format"], "version": 3}, (": $.dataset", "got null")),
    "another field": (lambda d: {**d, "more": 1}, (": $.more", "unknown field")),
    "unknown field": (
        lambda d: {**d, "dataset": {**d["dataset"], "label": []}},
        (": $.dataset.label", "'labels'"),
    ),
    "mistyped": (
        lambda d: {**d, "dataset": {**d["dataset"], "labels": 3}},
        (": $.dataset.labels", "got 3"),
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_descriptions(tmp_path, case):
    change, place = BROKEN[case]
    content = change(json.loads(GOLDEN))
    content = json.dumps(content) if isinstance(content, dict) else content
    path = tmp_path / "dataset.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(FormatError, check=at(f"{path}{place[0]}", place[1])) as caught:
        read_dataset(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("file", ["part.parquet", "valid/part.parquet", "train/deep/part.parquet"])
def test_shards_lie_in_the_directory_of_their_split(tmp_path, file):
    spec = dataclasses.replace(SPEC, splits={"train": (ShardSpec(file=file, rows=1),)})
    with pytest.raises(FormatError, check=at(tmp_path)):
        write_dataset(spec, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_data_set_knows_the_files_of_its_workflow(tmp_path):
    assert workflow_files(SPEC, tmp_path) == ()
    spec = dataclasses.replace(SPEC, workflow="workflow", splits={})
    write_dataset(spec, tmp_path)
    assert read_dataset(tmp_path) == spec
    with pytest.raises(DataNotFoundError, check=at(f"{tmp_path}/workflow")):
        workflow_files(spec, tmp_path)
    (tmp_path / "workflow" / "states").mkdir(parents=True)
    (tmp_path / "workflow" / "workflow.json").write_text("{}")
    (tmp_path / "workflow" / "states" / "00-log_op.json").write_text("{}")
    assert workflow_files(spec, tmp_path) == ("workflow/states/00-log_op.json", "workflow/workflow.json")
