"""Operators of users: registered by a decorator, saved by name, imported where their package is allowed."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from terarec.errors import ConfigError
from terarec.etl.ops import LogOp
from terarec.etl.workflow import Workflow
from terarec.spec import LabelSpec, OperatorSpec, SourceColumn, SourceSpec, register
from tests.etl.column_values import block_of, values_of

MODULE = '''
from collections.abc import Mapping
from dataclasses import dataclass

import pyarrow.compute as pc

from terarec.etl.columns import from_arrow, to_arrow
from terarec.etl.ops import MappedColumns, NumberOperator, register


@register()
@dataclass(frozen=True, kw_only=True)
class Scale(NumberOperator):
    """x * factor."""

    factor: float = 2.0

    def params(self, name, state):
        return (self.factor,)

    def formula(self, numbers, *params):
        return numbers * params[0]


@register()
@dataclass(frozen=True, kw_only=True)
class Upper(MappedColumns):
    """Text in capital letters; records go through `transform`."""

    accepted = ("text",)

    def transform(self, block, state):
        made = {new: from_arrow(pc.utf8_upper(to_arrow(block.columns[old])), "text") for old, new in self.pairs}
        return block.with_columns(made)
'''
STEPS = [
    {"kind": "shop_ops:Scale", "columns": ["price"], "outputs": [], "factor": 3.0},
    {"kind": "shop_ops:Upper", "columns": ["brand"], "outputs": []},
    {"kind": "hash_bucket", "columns": ["brand"], "outputs": [], "buckets": 1000},
]


@pytest.fixture
def saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A workflow with two operators of a module that is not imported yet."""
    (tmp_path / "shop_ops.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(OperatorSpec, "_registered", dict(OperatorSpec.members()))
    columns = (("price", "number"), ("brand", "text"), ("bought", "integer"))
    source = SourceSpec(format="delimited", columns=tuple(SourceColumn(name=name, type=kind) for name, kind in columns))
    workflow = Workflow(
        [LogOp(columns=("price",))], source=source, labels=[LabelSpec(name="bought")], dense=["price"], name="shop"
    )
    workflow.save(tmp_path / "workflow")
    path = tmp_path / "workflow" / "workflow.json"
    content = json.loads(path.read_text())
    content["workflow"].update(steps=STEPS, categorical=["brand"])
    path.write_text(json.dumps(content))
    yield tmp_path / "workflow"
    sys.modules.pop("shop_ops", None)


def test_it_is_imported_where_its_package_is_allowed_and_does_blocks_and_records(saved: Path) -> None:
    with pytest.raises(ConfigError, match=r"operator 'shop_ops:Scale' is not run.*--allow-import shop_ops"):
        Workflow.load(saved)
    assert "shop_ops" not in sys.modules
    workflow = Workflow.load(saved, allow_import=["shop_ops"])
    assert [step.kind for step in workflow.spec.steps] == [step["kind"] for step in STEPS]
    made = workflow.apply(block_of(price=("number", [1.5, None]), brand=("text", ["acme", None])))
    assert values_of(made.columns["price"]) == [4.5, None]
    records = workflow.encode({"price": [1.5, 2.0], "brand": ["acme", "ACME"]})
    np.testing.assert_array_equal(records.dense[:, 0], np.float32([4.5, 6.0]))
    assert records.keys[0].tolist() == [made.columns["brand"].values[0]] * 2
    workflow.save(saved)
    assert Workflow.load(saved, allow_import=["shop_ops"]).spec == workflow.spec


def test_a_name_is_registered_once() -> None:
    with pytest.raises(ConfigError, match="operator 'clip'"):

        @register("clip")
        class Clip(LogOp):
            pass
