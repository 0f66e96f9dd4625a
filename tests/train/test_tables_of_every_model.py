# SPDX-License-Identifier: Apache-2.0
"""Every model learns over dynamic tables and tables in tiers what it learns over static ones in memory."""

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from terarec.spec import (
    AdaGradSpec,
    AdamSpec,
    DynamicTablesSpec,
    NegativesSpec,
    RunSpec,
    StaticTablesSpec,
    Tiers,
    TrainingSpec,
)
from terarec.spec.tables import TablesSpec
from terarec.train import build
from tests.models import every
from tests.params import in_every_run
from tests.train.small_run import assert_same, weights
from tests.train.test_every_model import write_samples

COLUMNS = every.dataset(rows=1000)
KINDS = [name for name, spec in every.MODELS.items() if name == spec.kind and hasattr(spec, "tables")]
INITIAL: dict[str, Any] = {"initializer": "normal", "init_scale": 0.02}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_samples(tmp_path_factory.mktemp("every"), COLUMNS)


def run_of(data: Path, kind: str, tables: TablesSpec, **changes: Any) -> RunSpec:
    spec: Any = every.MODELS[kind]
    names = {field.name for field in fields(spec)}
    changes = {name: value for name, value in {**changes, "dropout": 0.0}.items() if name in names}
    return RunSpec(
        data=str(data),
        model=replace(spec, tables=tables, **changes),
        # A larger epsilon than usual, under which the order of sums matters less to Adam.
        dense_optimizer=AdamSpec(lr=0.01, eps=1e-3),
        sparse_optimizer=AdaGradSpec(lr=0.05, initial_accumulator=0.1),
        training=TrainingSpec(batch_size=16, max_steps=20, seed=3, eval_split=None, reader_threads=1),
    )


def drawn(data: Path, kind: str, tables: TablesSpec) -> RunSpec:
    """The loss is of drawn items where there is a choice: one among all items reads the whole table."""
    loss = {"loss": "sampled_softmax"} if getattr(every.MODELS[kind], "loss", None) == "softmax" else {}
    return run_of(data, kind, tables, negatives=NegativesSpec(count=5), **loss)


@pytest.mark.parametrize("kind", in_every_run(["mmoe", "ncf"], KINDS))
def test_rows_in_tiers_are_those_in_memory(data: Path, tmp_path: Path, kind: str) -> None:
    expected = build(drawn(data, kind, StaticTablesSpec(**INITIAL)), tmp_path / "memory")
    expected.fit()
    tiers = Tiers(host="40KiB", file=str(tmp_path / "rows"))
    found = build(drawn(data, kind, StaticTablesSpec(**INITIAL, tiers=tiers)), tmp_path / "tiers")
    report = found.fit()
    assert report.tiers is not None
    assert report.tiers.rows_read > 0
    assert_same(weights(found.model), weights(expected.model))


@pytest.mark.parametrize("kind", in_every_run(["dien", "mult_vae"], KINDS))
def test_rows_by_key_are_those_by_id(data: Path, tmp_path: Path, kind: str) -> None:
    static = build(drawn(data, kind, StaticTablesSpec(**INITIAL)), tmp_path / "static")
    dynamic = build(drawn(data, kind, DynamicTablesSpec(**INITIAL)), tmp_path / "dynamic")
    losses = [run.fit().loss for run in (static, dynamic)]
    assert losses[0] == losses[1]
    found, expected = weights(dynamic.model), weights(static.model)
    assert any(name.endswith("/keys") and 0 < len(keys) < 1000 for name, keys in found.items())
    for name, value in found.items():
        table, slash, _ = name.rpartition("/")
        # Of a key that training did not have there is no row, where a static table has the initial one.
        assert value.equal(expected[name][found[f"{table}/keys"]] if slash else expected[name]), name
