# SPDX-License-Identifier: Apache-2.0
"""Columns that share tables: outputs and updates are those of tables of their own with the same rows."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from terarec.batch import select
from terarec.errors import ConfigError
from terarec.models import build_model
from terarec.models.contract import logits_of, training_loss
from terarec.nn.objectives import build_objective
from terarec.optim import RowOptimizer
from terarec.spec import BinarySpec, DynamicTablesSpec, SGDSpec, StaticTablesSpec
from terarec.spec.model import ModelSpec
from tests.errors import at
from tests.models.every import MODELS, dataset, random_batch

COLUMNS = dataset()
UNREAD = {"sasrec", "bert4rec", "gru4rec", "hstu", "mult_vae"}
"""Models that do not read `b`."""
KINDS = [name for name, spec in MODELS.items() if name == spec.kind and hasattr(spec, "tables") and name not in UNREAD]


def sharing(spec: ModelSpec, shared: dict[str, str], **options: Any) -> Any:
    return replace(spec, tables=replace(spec.tables, shared=shared, **options))  # type: ignore[arg-type,union-attr]


def table_of(name: str) -> str:
    return name[name.index("tables.") :] if "tables." in name else name


@pytest.mark.parametrize("kind", KINDS)
def test_a_shared_table_is_two_with_the_same_rows(kind: str) -> None:
    batch = random_batch(COLUMNS)
    shared = build_model(sharing(MODELS[kind], {"b": "a"}), COLUMNS, seed=1).eval()
    plain = build_model(MODELS[kind], COLUMNS, seed=2).eval()
    state = shared.state_dict()
    # The tables of both towers are those of the model.
    known = {table_of(name): name for name in state}
    others = {
        name: known[table_of(name).replace("tables.b", "tables.a")] for name in plain.state_dict() if "tables.b" in name
    }
    assert others
    assert not set(others) & set(state)
    plain.load_state_dict(
        {name: state[others.get(name) or known[table_of(name)]].clone() for name in plain.state_dict()}
    )
    before = {name: value.clone() for name, value in state.items()}
    for model in (shared, plain):
        output = model(batch)
        logits = logits_of(model, output)
        training_loss(model, output, batch, build_objective(BinarySpec())).backward()
        RowOptimizer(model, SGDSpec(lr=0.5)).step()
        if model is shared:
            expected = logits
    torch.testing.assert_close(logits, expected)
    found, apart = shared.state_dict(), plain.state_dict()
    for name, other in others.items():
        of_other = next(key for key in apart if key.endswith(other[other.index("tables.") :]))
        steps = apart[name] - before[other] + apart[of_other] - before[other]
        assert steps.abs().sum() > 0
        torch.testing.assert_close(found[other] - before[other], steps, atol=1e-6, rtol=1e-4)


def test_a_tower_reads_its_own_columns_alone() -> None:
    model, batch = build_model(sharing(MODELS["two_tower"], {"b": "a"}), COLUMNS).eval(), random_batch(COLUMNS)
    output = model(batch)
    for vectors, expected, names in (
        (model.user_vectors, output.user, ("b",)),  # type: ignore[union-attr]
        (model.item_vectors, output.item, ("a", "tags")),  # type: ignore[union-attr]
    ):
        part = replace(batch, sparse=select(batch.sparse, names))
        torch.testing.assert_close(vectors(part), expected)  # type: ignore[operator]


def test_a_history_shares_the_first_layer_of_the_encoder_with_the_last_of_the_decoder() -> None:
    model = build_model(sharing(MODELS["mult_vae"], {"past": "a"}), COLUMNS)
    assert [name for name in model.state_dict() if "tables" in name] == ["embedding.tables.a", "biases.tables.a.bias"]


@pytest.mark.parametrize("kind", ["sasrec", "din"])
def test_what_a_model_shares_anyway_may_be_said(kind: str) -> None:
    first, second = (
        build_model(spec, COLUMNS).state_dict() for spec in (MODELS[kind], sharing(MODELS[kind], {"past": "a"}))
    )
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_columns_of_any_keys_share_a_dynamic_table() -> None:
    columns = dataset(rows=None)
    spec = replace(MODELS["dnn"], tables=DynamicTablesSpec(shared={"b": "a", "past": "a"}))  # type: ignore[arg-type]
    model = build_model(spec, columns).train()
    batch = random_batch(columns)
    model(batch)
    keys = set(batch.sparse.keys[:18].tolist()) | set(batch.sparse.keys[int(batch.sparse.offsets[27]) :].tolist())
    assert set(model.embedding.tables["a"].export_chunks(100).__next__().keys.tolist()) == keys  # type: ignore[union-attr,operator]


OTHER_IDS = replace(COLUMNS, categorical=(*COLUMNS.categorical[:3], replace(COLUMNS.categorical[3], rows=9)))
ERRORS: dict[str, tuple[ModelSpec, Any, tuple[str, ...]]] = {
    "no such column": (sharing(MODELS["dnn"], {"bb": "a"}), COLUMNS, ("dnn", "no categorical column 'bb'")),
    "no such owner": (sharing(MODELS["dnn"], {"b": "aa"}), COLUMNS, ("dnn", "no categorical column 'aa'")),
    "other ids": (sharing(MODELS["dnn"], {"past": "a"}), OTHER_IDS, ("dnn", "'past' has 9 ids")),
    "not read": (sharing(MODELS["sasrec"], {"b": "a"}), COLUMNS, ("sasrec", "'b' is not looked up")),
    "a history": (sharing(MODELS["din"], {"past": "b"}), COLUMNS, ("din", "'past' looks up 'a'")),
}


@pytest.mark.parametrize("case", ERRORS)
def test_what_cannot_be_shared_is_rejected(case: str) -> None:
    spec, columns, place = ERRORS[case]
    with pytest.raises(ConfigError, check=at(*place)):
        build_model(spec, columns)


@pytest.mark.parametrize("shared", [{"b": "a", "a": "c"}, {"b": "b"}, {"b": ""}, ["b"]])
def test_a_table_that_is_shared_is_the_column_s_own(shared: Any) -> None:
    with pytest.raises(ConfigError, check=at("StaticTablesSpec.shared")):
        StaticTablesSpec(shared=shared)
