# SPDX-License-Identifier: Apache-2.0
"""Sequence models on two processes give what one process gives: their loss is a mean over the positions of both."""

from pathlib import Path
from typing import Any

import pytest
import torch

from terarec.apps.recipes.reproduce import prepare_sequences
from terarec.dist import Ranks
from terarec.models.artifact import load_model
from terarec.spec import AdaGradSpec, AdamSpec, GRU4RecSpec, HSTUSpec, RunSpec, SASRecSpec, TrainingSpec
from terarec.spec.sequences import SequenceSpec
from terarec.train.run import build
from tests.apps.recipes.sequences import write_planted_sequences
from tests.dist.launch import run_ranks
from tests.params import in_every_run
from tests.train.small_run import weights

# Among all items, so that no draws differ between one process and two.
OPTIONS: dict[str, Any] = {
    "item": "item",
    "history": "history",
    "width": 4,
    "loss": "softmax",
    "dropout": 0.0,
    "layers": 1,
}
SPECS: dict[str, SequenceSpec] = {
    "sasrec": SASRecSpec(inner=6, **OPTIONS),
    "gru4rec": GRU4RecSpec(state=5, **OPTIONS),
    "hstu": HSTUSpec(**OPTIONS),
}


def fit(ranks: Ranks, spec: RunSpec, out: Path) -> float:
    report = build(spec, out, ranks=ranks).fit()
    assert report.loss is not None
    return report.loss


@pytest.mark.parametrize("kind", in_every_run(["sasrec"], SPECS))
def test_two_processes_train_as_one(tmp_path: Path, kind: str) -> None:
    files = write_planted_sequences(tmp_path / "files", users=50)
    prepare_sequences(files / "Beauty.txt", tmp_path / "data")
    spec = RunSpec(
        data=str(tmp_path / "data"),
        model=SPECS[kind],  # type: ignore[arg-type]
        # A larger epsilon than usual, under which the order of sums matters less to Adam.
        dense_optimizer=AdamSpec(lr=0.01, eps=1e-3),
        sparse_optimizer=AdaGradSpec(lr=0.05, initial_accumulator=0.1),
        training=TrainingSpec(batch_size=16, epochs=2, seed=3, eval_split=None),
    )
    expected = fit(Ranks(), spec, tmp_path / "one")
    losses = run_ranks(2, fit, spec, tmp_path / "two")
    assert losses == [pytest.approx(expected, rel=1e-4)] * 2
    found, wanted = (weights(load_model(tmp_path / name).model) for name in ("two", "one"))
    for name, tensor in wanted.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=1e-5)
