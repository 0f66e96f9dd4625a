# SPDX-License-Identifier: Apache-2.0
"""Every model on two processes gives what one process gives, where the draws of its training are the same."""

from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch

from terarec.dist import Ranks
from terarec.models.artifact import load_model
from terarec.spec import DynamicTablesSpec, GraphModelSpec, RunSpec, StaticTablesSpec, lfu
from terarec.train import build
from tests.dist.launch import run_ranks
from tests.dist.test_moves import held_rows
from tests.models.every import GRAPH, MODELS, dataset
from tests.params import in_every_run
from tests.train.small_run import weights
from tests.train.test_every_model import write_samples
from tests.train.test_tables_of_every_model import INITIAL, KINDS, run_of

DRAWING = {"bert4rec", "mf_bpr", "ncf", "mult_vae"}
"""Models whose training draws masks, items or latent vectors: each rank draws its own."""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_samples(tmp_path_factory.mktemp("every"), dataset(rows=40))


def fit(ranks: Ranks, spec: RunSpec, out: Path) -> float:
    report = build(spec, out, ranks=ranks).fit()
    assert report.loss is not None
    return report.loss


@pytest.mark.parametrize("kind", in_every_run(["sasrec"], KINDS))
def test_two_ranks_train_as_one(data: Path, tmp_path: Path, kind: str) -> None:
    names = {field.name for field in fields(MODELS[kind])}
    among_all = {"loss": "softmax"} if "loss" in names and kind not in ("mf_bpr", "ncf") else {}
    spec = run_of(data, kind, StaticTablesSpec(**INITIAL), auxiliary=0.0, **among_all)
    losses = run_ranks(2, fit, spec, tmp_path / "two")
    assert losses[0] == losses[1]
    found = weights(load_model(tmp_path / "two").model)
    assert all(value.isfinite().all() for value in found.values())
    expected_loss = fit(Ranks(), spec, tmp_path / "one")
    if kind in DRAWING:
        assert losses[0] == pytest.approx(expected_loss, rel=0.2)
        return
    assert losses[0] == pytest.approx(expected_loss, rel=1e-4)
    for name, value in weights(load_model(tmp_path / "one").model).items():
        # Rounding: a step moves a weight by up to 0.01, also where its gradient is what rounding left of a sum.
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-3)


def test_features_of_other_names_than_their_columns_train_on_ranks(data: Path, tmp_path: Path) -> None:
    embedding = GRAPH.embeddings[0]
    features = tuple(replace(feature, name=f"of_{feature.name}", column=feature.name) for feature in embedding.features)
    tables = tuple(replace(table, rows=40) for table in embedding.tables)
    graph = replace(GRAPH, embeddings=(replace(embedding, tables=tables, features=features),))
    spec = run_of(data, "dnn", StaticTablesSpec(**INITIAL))
    spec = replace(spec, model=GraphModelSpec(graph=graph), training=replace(spec.training, max_steps=3))
    losses = run_ranks(2, fit, spec, tmp_path / "two")
    assert losses == [pytest.approx(fit(Ranks(), spec, tmp_path / "one"), rel=1e-5)] * 2


def test_keys_that_a_model_leaves_out_get_no_rows_on_ranks(data: Path, tmp_path: Path) -> None:
    spec = run_of(data, "din", DynamicTablesSpec(max_rows=100, evict=lfu()))
    spec = replace(spec, training=replace(spec.training, max_steps=2))
    losses = run_ranks(2, fit, spec, tmp_path / "two")
    assert losses == [pytest.approx(fit(Ranks(), spec, tmp_path / "one"), rel=1e-5)] * 2
    found, expected = (held_rows(tmp_path / out / "checkpoints") for out in ("two", "one"))
    counted = [name for name in expected if name.endswith(("/keys", "/count", "/last_step"))]
    assert {name: found[name].tolist() for name in counted} == {name: expected[name].tolist() for name in counted}
