# SPDX-License-Identifier: Apache-2.0
"""Sequence models of dynamic tables, and of tables in tiers, equal those of static tables in memory, to the bit."""

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from terarec.apps.recipes.reproduce import prepare_sequences
from terarec.models.sequences import SequenceModel
from terarec.spec import (
    AdaGradSpec,
    AdamSpec,
    DynamicTablesSpec,
    HSTUSpec,
    NegativesSpec,
    RunSpec,
    SASRecSpec,
    StaticTablesSpec,
    Tiers,
    TrainingSpec,
)
from terarec.spec.sequences import SequenceSpec
from terarec.spec.tables import TablesSpec
from terarec.train.run import build
from terarec.train.sequence_ranking import evaluate_sequences
from tests.params import in_every_run
from tests.train.small_run import assert_same, weights

ITEMS, WIDTH = 2000, 16
COLUMNS: dict[str, Any] = {"item": "item", "history": "history", "width": WIDTH, "max_length": 6, "layers": 1}
MODELS: dict[str, SequenceSpec] = {
    "sasrec": SASRecSpec(**COLUMNS, inner=16, dropout=0.1),
    "hstu": HSTUSpec(**COLUMNS, negatives=NegativesSpec(count=16)),
}
INITIAL: dict[str, Any] = {"initializer": "normal", "init_scale": 0.02}
TENTH = f"{ITEMS * 2 * WIDTH * 4 // 10 // 1024}KiB"
"""Memory of a tenth of the rows with their states."""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """80 users, each of whose next items is one of few."""
    folder = tmp_path_factory.mktemp("sequences")
    rng = np.random.default_rng(1)
    lines = []
    for user in range(80):
        start, length = rng.integers(1, ITEMS), rng.integers(4, 9)
        lines.append(" ".join(map(str, [user + 1, *((start + 7 * np.arange(length)) % ITEMS + 1)])))
    (folder / "items.txt").write_text("\n".join(lines) + "\n")
    prepare_sequences(folder / "items.txt", folder / "data")
    return folder / "data"


def trained(data: Path, out: Path, kind: str, tables: TablesSpec) -> tuple[dict[str, Any], dict[str, float], Any]:
    """Return the weights, the metrics of the test split and the report of a run."""
    spec = RunSpec(
        data=str(data),
        model=cast(Any, replace(MODELS[kind], tables=tables)),
        dense_optimizer=AdamSpec(lr=0.01),
        sparse_optimizer=AdaGradSpec(lr=0.05),
        training=TrainingSpec(batch_size=8, epochs=2, seed=3, eval_split=None, reader_threads=1),
    )
    run = build(spec, out)
    report = run.fit()
    metrics = evaluate_sequences(cast(SequenceModel, run.model), run.reader("test")).values
    return weights(run.model), dict(metrics), report


@pytest.mark.parametrize("kind", in_every_run(["sasrec"], MODELS))
def test_rows_in_tiers_are_those_in_memory(data: Path, tmp_path: Path, kind: str) -> None:
    expected, metrics, _ = trained(data, tmp_path / "plain", kind, StaticTablesSpec(**INITIAL))
    tiers = Tiers(host=TENTH, file=str(tmp_path / "rows"))
    found, of_tiers, report = trained(data, tmp_path / "tiers", kind, StaticTablesSpec(**INITIAL, tiers=tiers))
    assert report.tiers.rows_read > 0
    assert_same(found, expected)
    assert of_tiers == metrics


@pytest.mark.parametrize("kind", in_every_run(["sasrec"], MODELS))
def test_rows_by_key_are_those_by_id(data: Path, tmp_path: Path, kind: str) -> None:
    expected, _, _ = trained(data, tmp_path / "static", kind, StaticTablesSpec(**INITIAL))
    found, _, _ = trained(data, tmp_path / "dynamic", kind, DynamicTablesSpec(**INITIAL))
    keys = found["item/keys"]
    # Those that training had: of others there is no row, where a static table has the initial one.
    assert 80 < len(keys) < ITEMS
    for name, value in found.items():
        if name.startswith("item/"):
            assert value.equal(expected[name][keys]), name
        else:
            assert value.equal(expected[name]), name
