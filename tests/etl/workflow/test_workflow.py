# SPDX-License-Identifier: Apache-2.0
"""A workflow of steps that learn nothing: from rows to a data set's columns, and to the disk and back."""

import json
from pathlib import Path

import numpy as np
import pytest

from terarec.errors import ConfigError, DataNotFoundError, FormatError
from terarec.etl.columns import Rows
from terarec.etl.ops import Bucketize, FillMissing, HashBucket, ListSlice, LogOp, Normalize
from terarec.etl.workflow import Workflow
from terarec.spec import CategoricalColumn, DenseColumn, LabelSpec, SourceColumn, SourceSpec
from terarec.spec.dataset import MISSING_KEY
from tests.errors import at
from tests.etl.column_values import block_of

SOURCE = SourceSpec(
    format="delimited",
    columns=(
        SourceColumn(name="user", type="integer"),
        SourceColumn(name="price", type="number"),
        SourceColumn(name="brand", type="text"),
        SourceColumn(name="tags", type="text", separator=" "),
        SourceColumn(name="stars", type="integer"),
    ),
)


def workflow() -> Workflow:
    return Workflow(
        [
            Bucketize(columns=("price",), boundaries=(1.0, 5.0), outputs=("band",)),
            FillMissing(columns=("price",), value=0.0, indicator=True),
            LogOp(columns=("price",)),
            ListSlice(columns=("tags",), start=-2),
            HashBucket(columns=("tags",), buckets=1000),
        ],
        source=SOURCE,
        labels=[
            LabelSpec(name="liked", column="stars", at_least=4.0),
            LabelSpec(name="shop", column="brand", positives=("b",)),
        ],
        dense=["price", "price_missing"],
        categorical=["band", "tags"],
        keys=["user"],
        name="shop",
    )


def rows() -> Rows:
    return block_of(
        user=("integer", [7, None, 2**62]),
        price=("number", [0.5, None, 5.0]),
        brand=("text", ["a", "b", "c"]),
        tags=("text", [["x", "a", "\u00fc"], [], [None]]),
        stars=("integer", [3, 4, 5]),
    )


def test_a_workflow_describes_itself() -> None:
    """Finding P6: it was an object at an address."""
    assert repr(workflow()) == "Workflow('shop', 5 steps, fitted)"
    unfitted = Workflow(
        [Normalize(columns=("price",))], source=SOURCE, labels=[LabelSpec(name="stars")], dense=["price"]
    )
    assert repr(unfitted) == "Workflow('workflow', 1 steps, not fitted)"


def test_rows_become_a_data_sets_columns() -> None:
    made = workflow().encode_rows(workflow().apply(rows()))
    np.testing.assert_array_equal(made.label, np.array([[0, 0], [1, 1], [1, 0]], dtype=np.float32))
    np.testing.assert_array_equal(made.dense, np.array([[np.log(1.5), 0], [0, 1], [np.log(6), 0]], dtype=np.float32))
    band, tags, user = made.keys
    assert np.asarray(band).tolist() == [1, 0, 3]
    assert [part.tolist() for part in tags] == [[717, 149, 0], [0, 2, 2, 3]]
    assert np.asarray(user).tolist() == [7, MISSING_KEY, 2**62]


def test_the_data_set_is_described() -> None:
    spec = workflow().dataset_spec()
    assert spec.dense == (DenseColumn(name="price"), DenseColumn(name="price_missing"))
    assert spec.categorical == (
        CategoricalColumn(name="band", rows=4),
        CategoricalColumn(name="tags", rows=1001, hotness=2),
        CategoricalColumn(name="user"),
    )
    assert [label.name for label in spec.labels] == ["liked", "shop"]


def test_apply_stops_where_requested() -> None:
    made = workflow().apply(rows(), upto=1)
    assert "band" in made.columns
    assert "price_missing" not in made.columns


def test_json_and_directory_round_trips(tmp_path: Path) -> None:
    made = workflow()
    made.to_json(tmp_path / "w.json")
    assert Workflow.from_json(tmp_path / "w.json").spec == made.spec
    made.save(tmp_path / "saved")
    loaded = Workflow.load(tmp_path / "saved")
    assert loaded.spec == made.spec
    assert loaded.is_fitted
    content = json.loads((tmp_path / "saved" / "workflow.json").read_text())
    assert (content["format"], content["version"]) == ("terarec.workflow", 4)


def test_sample_columns_can_be_exchanged() -> None:
    made = workflow()
    name = made.spec.source.columns[0].name
    changed = made.with_sample_columns(weight=None, metadata=[name])
    assert (changed.spec.metadata, changed.is_fitted) == ((name,), True)
    assert changed.dataset_spec().column_names == made.dataset_spec().column_names
    with pytest.raises(ConfigError, check=at("WorkflowSpec.metadata")):
        made.with_sample_columns(weight=None, metadata=["nothing"])
    with pytest.raises(ConfigError, check=at("weight")):
        made.with_sample_columns(weight="nothing", metadata=())


def test_what_no_workflow_is_read_from(tmp_path: Path) -> None:
    with pytest.raises(DataNotFoundError, check=at(f"{tmp_path}/workflow.json")):
        Workflow.load(tmp_path)
    path = tmp_path / "workflow.json"
    workflow().to_json(path)
    data = json.loads(path.read_text())
    for version in (3, 5):
        path.write_text(json.dumps({**data, "version": version}))
        with pytest.raises(FormatError, check=at(path, f"version {version}")):
            Workflow.load(tmp_path)
    path.write_text(json.dumps({**data, "states": {}}))
    with pytest.raises(FormatError, check=at(f"{path}: $.states")):
        Workflow.load(tmp_path)
    data["workflow"]["steps"][1]["valeu"] = 1
    path.write_text(json.dumps(data))
    with pytest.raises(ConfigError, check=at(f"{path}: $.workflow.steps[1].valeu")):
        Workflow.load(tmp_path)


def test_values_that_a_data_set_does_not_hold() -> None:
    plain = Workflow([], source=SOURCE, labels=[LabelSpec(name="stars")], dense=["price"])
    with pytest.raises(FormatError, check=at("column 'price', row 1", "got nan")):
        plain.encode_rows(plain.apply(rows()))
    big = block_of(price=("number", [1.0, 1e39]), stars=("integer", [1, 2]))
    with pytest.raises(FormatError, check=at("column 'price', row 1", "got 1e+39")):
        plain.encode_rows(big)
    unlabelled = block_of(price=("number", [1.0]), stars=("integer", [None]))
    with pytest.raises(FormatError, check=at("column 'stars', row 0")):
        plain.encode_rows(unlabelled)
