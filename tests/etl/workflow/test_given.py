# SPDX-License-Identifier: Apache-2.0
"""Data sets that no workflow made: records hold what their shards hold."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from terarec.errors import ConfigError, DataNotFoundError
from terarec.etl.ops import GivenIds, Pad, Rename
from terarec.etl.workflow import Workflow, workflow_of
from terarec.etl.workflow.datasets import identity_workflow
from terarec.formats import write_dataset
from terarec.spec import CategoricalColumn, DatasetSpec, DenseColumn, LabelColumn, LabelSpec, SourceColumn, SourceSpec
from terarec.spec.dataset import MISSING_KEY
from tests.errors import at

DATASET = DatasetSpec(
    name="lists",
    storage="raw",
    labels=(LabelColumn(name="click"),),
    dense=(DenseColumn(name="price"),),
    categorical=(
        CategoricalColumn(name="user"),
        CategoricalColumn(name="tags", rows=9, hotness=3),
        CategoricalColumn(name="shop", rows=4),
        CategoricalColumn(name="seen", hotness=2),
    ),
)
RAW: dict[str, list[Any]] = {
    "price": [0.5, -1, 2.0**60],
    "user": [7, None, -(2**62)],
    "tags": [[8, 0], None, [5, 5, 1]],
    "shop": [3, 0, 1],
    "seen": [[1, None], [], [2**62]],
}


def test_values_are_taken_unchanged() -> None:
    workflow = identity_workflow(DATASET)
    encoded = workflow.encode({**RAW, "click": [0.0, 1.0, 1.0]})
    assert encoded.dense.tolist() == [[0.5], [-1.0], [2.0**60]]
    assert [column.name for column in workflow.dataset_spec().categorical] == ["tags", "shop", "user", "seen"]
    assert [column.given for column in workflow.dataset_spec().categorical] == [True, True, None, None]
    padded = replace(DATASET, categorical=tuple(replace(one, given=False) for one in DATASET.categorical))
    assert identity_workflow(padded).dataset_spec().missing_key("shop") == 0
    tags, shop, user, seen = encoded.keys
    assert [part.tolist() for part in tags] == [[8, 0, 5, 5, 1], [0, 2, 2, 5]]
    assert np.asarray(shop).tolist() == [3, 0, 1]
    assert np.asarray(user).tolist() == [7, MISSING_KEY, -(2**62)]
    assert [part.tolist() for part in seen] == [[1, MISSING_KEY, 2**62], [0, 2, 2, 3]]


def test_padding_is_no_given_id() -> None:
    """0 is that of a missing value then, as it is where the step says so."""
    names = {"item": None, "past": " ", "next": None}
    columns = tuple(SourceColumn(name=name, type="integer", separator=of_list) for name, of_list in names.items())
    there_and_back = [Rename(names={"item": "it"}), Rename(names={"it": "item"})]
    pad = Pad(columns=("past",), length=3, value=0)
    for steps, expected in (([], [True, True]), ([pad], [True, None]), (there_and_back, [True, True])):
        for is_missing in (False, True):
            ids = GivenIds(columns=("item", "past"), rows=(5, 5), max_length=4, zero_is_missing=is_missing)
            workflow = Workflow(
                [ids, *steps],
                source=SourceSpec(format="arrow", columns=columns),
                labels=[LabelSpec(name="next")],
                categorical=["item", "past"],
            )
            found = [column.given for column in workflow.dataset_spec().categorical]
            assert found == ([None, None] if is_missing else expected)


@given(
    st.lists(
        st.tuples(
            st.floats(-1e30, 1e30),
            st.none() | st.integers(-(2**63), 2**63 - 1),
            st.lists(st.integers(0, 8), max_size=3),
            st.integers(0, 3),
            st.none() | st.lists(st.none() | st.integers(-9, 9), max_size=2),
        ),
        min_size=1,
        max_size=6,
    )
)
def test_records_one_by_one_are_those_of_the_block(rows: list[tuple[Any, ...]]) -> None:
    workflow = identity_workflow(DATASET)
    columns = dict(zip(RAW, map(list, zip(*rows, strict=True)), strict=True))
    whole = workflow.encode(columns)
    singles = [workflow.encode({name: [values[row]] for name, values in columns.items()}) for row in range(len(rows))]
    np.testing.assert_array_equal(np.concatenate([single.dense for single in singles]), whole.dense)
    for place, keys in enumerate(whole.keys):
        parts = [single.keys[place] for single in singles]
        values = [part[0] if isinstance(part, tuple) else part for part in parts]
        np.testing.assert_array_equal(np.concatenate(values), keys[0] if isinstance(keys, tuple) else keys)
        if isinstance(keys, tuple):
            np.testing.assert_array_equal([len(part) for part in values], np.diff(keys[1]))


@pytest.mark.parametrize(
    ("column", "values", "place"),
    [
        ("tags", [[5], [1], [0, 9]], ("column 'tags', row 2",)),
        ("tags", [[5], [None], []], ("column 'tags', row 1", "got None")),
        ("tags", [[5], [0] * 4, []], ("column 'tags', row 1", "got [0, 0, 0, 0]")),
        ("seen", [[], [1] * 3, []], ("column 'seen', row 1",)),
        ("shop", [1, None, 2], ("column 'shop', row 1", "got None")),
        ("shop", [1, 2, -1], ("column 'shop', row 2",)),
        ("shop", [1, 0.5, 2], ("column 'shop', row 1", "got 0.5")),
        ("shop", [1, True, 2], ("column 'shop', row 1", "got True")),
        ("price", [1, 2, None], ("column 'price', row 2",)),
        ("city", ["a", "b", "c"], ("column 'city'",)),
    ],
)
def test_what_cannot_be_taken_is_reported(column: str, values: list[Any], place: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, check=at(*place)):
        identity_workflow(DATASET).encode({**RAW, column: values})


def test_a_data_set_is_requested_its_workflow(tmp_path: Path) -> None:
    write_dataset(DATASET, tmp_path / "given")
    workflow = workflow_of(tmp_path / "given")
    assert workflow.spec == identity_workflow(DATASET).spec
    write_dataset(workflow.dataset_spec(), tmp_path / "made")
    with pytest.raises(DataNotFoundError, check=at(f"{tmp_path}/made/workflow/workflow.json")):
        workflow_of(tmp_path / "made")
    workflow.save(tmp_path / "made" / "workflow")
    assert isinstance(workflow_of(tmp_path / "made"), Workflow)
    assert workflow_of(tmp_path / "made").spec == workflow.spec
