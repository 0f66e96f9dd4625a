# SPDX-License-Identifier: Apache-2.0
"""Operators of users: registered by a decorator, saved by name, imported where their package is allowed."""

import json
import math
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from terarec.errors import ConfigError
from terarec.etl.columns import ColumnType
from terarec.etl.ops import LogOp, MappedColumns, State
from terarec.etl.ops.base import ColumnTypes
from terarec.etl.workflow import Workflow
from terarec.spec import LabelSpec, SourceColumn, SourceSpec, registry
from terarec.spec.registry import OperatorSpec, Registry, register
from tests.errors import at
from tests.etl.column_values import block_of, values_of
from tests.etl.ops.fitting import fit
from tests.etl.ops.fitting import saved as kept

MODULE = '''
from collections.abc import Mapping
from dataclasses import dataclass

import pyarrow.compute as pc

from terarec.etl.columns import array_of, like, numbers_of
from terarec.etl.ops import MappedColumns, NumberOperator, register
from terarec.etl.ops.states import FittedNumbers, SummedStatistic
from terarec.etl.ops.states import Moments


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
    """Text in capital letters; records go through Arrow."""

    accepted = ("text",)

    def transform_batch(self, batch, state):
        return {new: pc.utf8_upper(batch.column(old)) for old, new in self.pairs}


@register()
@dataclass(frozen=True, kw_only=True)
class LessMean(MappedColumns):
    """x - the mean of the training values, from NumPy views of the arrays."""

    accepted = ("number",)
    stage = "fitted"

    def transform(self, rows, state):
        made = {}
        for old, new in self.pairs:
            array = rows.columns[old]
            made[new] = like(array, array_of(numbers_of(array) - state.columns[old]["mean"]))
        return rows.with_columns(made)

    def statistic(self, types, memory):
        return SummedStatistic(self.kind, self.columns, Moments, lambda found: {"mean": found.mean})

    def load_state(self, directory, name):
        return FittedNumbers.load(directory, name, self, ("mean",))
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
    monkeypatch.setattr(registry, "_OPERATORS", Registry("operator", OperatorSpec.members()))
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
    with pytest.raises(ConfigError, check=at(f"{saved}/workflow.json: steps[0]: operator 'shop_ops:Scale'")):
        Workflow.load(saved)
    assert "shop_ops" not in sys.modules
    workflow = Workflow.load(saved, allow_import=["shop_ops"])
    assert [step.kind for step in workflow.spec.steps] == [step["kind"] for step in STEPS]
    made = workflow.apply(block_of(price=("number", [1.5, None]), brand=("text", ["acme", None])))
    assert values_of(made.columns["price"]) == [4.5, None]
    records = workflow.encode({"price": [1.5, 2.0], "brand": ["acme", "ACME"]})
    np.testing.assert_array_equal(records.dense[:, 0], np.float32([4.5, 6.0]))
    assert records.keys[0].tolist() == [values_of(made.columns["brand"])[0]] * 2
    workflow.save(saved)
    assert Workflow.load(saved, allow_import=["shop_ops"]).spec == workflow.spec


def test_it_takes_arrays_and_is_fitted_on_them(saved: Path) -> None:
    path = saved / "workflow.json"
    content = json.loads(path.read_text())
    content["workflow"]["steps"][0] = {"kind": "shop_ops:LessMean", "columns": ["price"], "outputs": []}
    path.write_text(json.dumps(content))
    workflow = Workflow.load(saved, allow_import=["shop_ops"])
    block = block_of(price=("number", [1.0, None, 4.0]), brand=("text", ["acme", None, "b"]))
    step = workflow.plan.operators[0]
    state = workflow.states[0] = kept(step, fit(step, [block.slice(0, 2), block.slice(2, 3)]))
    assert values_of(step.transform(block, state).columns["price"]) == [-1.5, None, 1.5]
    assert workflow.encode({"price": [1.0, 2.5], "brand": ["acme", "b"]}).dense.tolist() == [[-1.5], [0.0]]


def test_a_name_is_registered_once() -> None:
    with pytest.raises(ConfigError, check=at("operator 'clip'")):

        @register("clip")
        class Clip(LogOp):
            pass


@dataclass(frozen=True, kw_only=True)
class Returns(MappedColumns):
    """Returns the same whatever comes."""

    array: pa.Array

    def transform_batch(self, batch: pa.RecordBatch, state: State | None) -> Mapping[str, pa.Array]:
        return {"x": self.array}


@pytest.mark.parametrize(
    ("array", "got"),
    [
        (pa.array([1.0]), "1 values"),
        (pa.array(["a", "b"]), "string"),
        (pa.array([1.0, math.inf]), "an infinite number"),
        (pa.array([[1.0], []]), "list"),
    ],
)
def test_arrays_that_are_not_outputs_are_an_error(array: pa.Array, got: str) -> None:
    block = block_of(x=("number", [1.0, None]))
    with pytest.raises(ConfigError, check=at(": 'x'")):
        Returns(columns=("x",), array=array).transform(block, None)
    assert values_of(Returns(columns=("x",), array=pa.array([3, None])).transform(block, None).columns["x"]) == [
        3,
        None,
    ]


@dataclass(frozen=True, kw_only=True)
class Numbered(MappedColumns):
    """Ids of numbers."""

    accepted = ("number",)

    def output_types(self, types: ColumnTypes) -> ColumnTypes:
        return {new: ColumnType("id") for _, new in self.pairs}

    def transform_batch(self, batch: pa.RecordBatch, state: State | None) -> Mapping[str, pa.Array]:
        return {new: pc.cast(batch.column(old), pa.int64()) for old, new in self.pairs}


class HalfNumbered(Numbered):
    """The same, with the number of some of them."""

    def cardinalities(self, rows: Mapping[str, int], state: State | None) -> Mapping[str, int]:
        return {"a": 3}


def test_ids_without_their_number_are_an_error() -> None:
    """Finding Q: it was a KeyError at the end of a preparation."""
    source = SourceSpec(
        format="delimited", columns=tuple(SourceColumn(name=name, type="number") for name in ("a", "b", "y"))
    )

    def made(*columns: str, by: type[Numbered]) -> Workflow:
        labels = [LabelSpec(name="y")]
        return Workflow([by(columns=columns)], source=source, labels=labels, categorical=list(columns))

    with pytest.raises(ConfigError, check=at("steps[0] Numbered: column 'a'", "a number of ids")):
        made("a", by=Numbered)
    assert made("a", by=HalfNumbered).dataset_spec().categorical[0].rows == 3
    with pytest.raises(ConfigError, check=at("steps[0] HalfNumbered: column 'b'", "a number of ids")):
        made("a", "b", by=HalfNumbered).dataset_spec()
