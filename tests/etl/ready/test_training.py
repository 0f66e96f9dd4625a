# SPDX-License-Identifier: Apache-2.0
"""Data sets of the presets can be trained on: a small model comes near the best AUC of the planted signal."""

from pathlib import Path

import pytest

from terarec.etl import prepare
from terarec.etl.ready import adult
from terarec.etl.workflow import Workflow
from terarec.spec import AdaGradSpec, AdamSpec, DLRMSpec, RunSpec, TrainingSpec, WideDeepSpec
from terarec.train import build
from tests.etl.ready.prepared import make

ADULT = Path(__file__).parents[3] / "examples" / "data" / "adult"
MODEL = DLRMSpec(width=16, bottom=(32, 16), top=(64, 32))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "rows", "min_count", "epochs", "share"),
    [
        pytest.param("avazu", 60_000, 5, 1, 0.91, marks=pytest.mark.slow),
        ("rees46", 120_000, 2, 1, 0.93),
        ("adult", 20_000, 1, 2, 0.96),
        pytest.param("mind", 12_000, 2, 1, 0.94, marks=pytest.mark.slow),
        pytest.param("movielens", 80_000, 2, 2, 0.9, marks=pytest.mark.slow),
        pytest.param("amazon", 80_000, 2, 2, 0.9, marks=pytest.mark.slow),
    ],
)
def test_a_small_dlrm_comes_near_the_best_auc(tmp_path, name, rows, min_count, epochs, share):
    made = make(name, tmp_path, rows, min_count=min_count)
    spec = RunSpec(
        data=str(made.out),
        model=MODEL,
        dense_optimizer=AdamSpec(lr=0.002),
        sparse_optimizer=AdaGradSpec(lr=0.05),
        training=TrainingSpec(batch_size=256, epochs=epochs, threads=1),
    )
    auc = build(spec, tmp_path / "run").fit().evaluation.auc
    assert share * made.report.best_auc <= auc <= made.report.best_auc + 0.03


def test_the_published_adult_files_reach_the_documented_auc(tmp_path):
    prepare(Workflow.of(adult()), [ADULT / "adult.data.gz", ADULT / "adult.test.gz"], tmp_path / "data")
    spec = RunSpec(
        data=str(tmp_path / "data"),
        model=WideDeepSpec(),
        training=TrainingSpec(batch_size=256, epochs=3, threads=1),
    )
    assert build(spec, tmp_path / "run").fit().evaluation.auc == pytest.approx(0.929, abs=0.003)
