# SPDX-License-Identifier: Apache-2.0
"""How a side table must fit the rows that it is joined to."""

import pytest

from terarec.errors import ConfigError
from terarec.etl.columns import ColumnType
from terarec.etl.ops import HashBucket, JoinTable, Operator
from terarec.etl.workflow import plan
from terarec.spec import LabelSpec, SourceColumn, SourceSpec, WorkflowSpec
from tests.errors import at

SOURCE = SourceSpec(
    format="delimited",
    columns=(
        SourceColumn(name="item", type="integer"),
        SourceColumn(name="seen", type="integer", separator=" "),
        SourceColumn(name="brand", type="number"),
        SourceColumn(name="clicks", type="integer"),
    ),
)
ITEMS = SourceSpec(
    format="delimited",
    columns=(
        SourceColumn(name="item", type="integer"),
        SourceColumn(name="seen", type="integer"),
        SourceColumn(name="clicks", type="text"),
        SourceColumn(name="brand", type="text"),
        SourceColumn(name="tags", type="hex32", separator=" "),
    ),
)


def planned(step: Operator):
    return plan(
        WorkflowSpec(
            name="w",
            source=SOURCE,
            tables={"items": ITEMS},
            steps=(step, HashBucket(columns=("item",), buckets=5)),
            labels=(LabelSpec(name="clicks"),),
            categorical=("item",),
        )
    )


def test_columns_of_a_table_have_its_types_after_replacing_others() -> None:
    made = planned(JoinTable(table="items", on="item", columns=("brand", "tags")))
    assert made.types[1]["brand"] == ColumnType("text")
    assert made.types[1]["tags"] == ColumnType("hex32", is_list=True)
    assert made.table_steps == (0,)
    assert made.fit_phases == ()


def test_lists_of_keys_give_lists() -> None:
    made = planned(JoinTable(table="items", on="seen", columns=("brand",)))
    assert made.types[1]["brand"] == ColumnType("text", is_list=True)


@pytest.mark.parametrize(
    ("step", "place"),
    [
        (
            JoinTable(table="items", on="item", columns=("price",)),
            ("column 'price'", "does not exist in table 'items'"),
        ),
        (
            JoinTable(table="items", on="clicks", columns=("brand",)),
            ("column 'clicks'", "holds integer, and text in table"),
        ),
        (
            JoinTable(table="items", on="seen", columns=("tags",)),
            ("column 'tags' of table 'items'", "holds lists of hex32"),
        ),
        (
            JoinTable(table="items", on="brand", columns=("tags",)),
            ("column 'brand'", "holds number, and text in table 'items'"),
        ),
    ],
)
def test_tables_that_do_not_fit_are_rejected(step: Operator, place: tuple[str, str]) -> None:
    with pytest.raises(ConfigError, check=at(f"steps[0] JoinTable: {place[0]}", place[1])):
        planned(step)
