"""A small run that is trained, stopped and resumed, by the process that calls it or, as a program, in its own."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

from terarec.kernels import registry
from terarec.spec import AdaGradSpec, AdamSpec, DLRMSpec, DynamicTablesSpec, RunSpec, TrainingSpec
from terarec.train import Callback, Trainer, build
from tests.train.planted import make_planted
from tests.train.small_run import weights

OPS = ("bag_lookup", "row_update_", "fill_keyed_rows", "HashIndex")
MODELS = {
    "static": DLRMSpec(width=4, bottom=(8, 4), top=(8,)),
    "dynamic": DLRMSpec(width=4, bottom=(8, 4), top=(8,), tables=DynamicTablesSpec()),
}
STEPS, BEFORE_STOP, BATCH = 6, 4, 16


class Losses(Callback):
    """Keeps the loss of every step."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def on_step(self, trainer: Trainer) -> None:
        self.values.append(trainer.loss)


def train(directory: Path, tables: str, precision: str = "fp32") -> dict[str, Any]:
    """Train to the stop, resume to the end; return the kernels, losses, metrics, and weights with optimizer state."""
    data = directory / "data"
    make_planted(data, train=BATCH * STEPS - 5, valid=40, rows_per_group=25)  # the last batch is smaller
    losses = Losses()
    for most in (BEFORE_STOP, None):
        training = TrainingSpec(batch_size=BATCH, max_steps=most, seed=5, precision=precision, shuffle=True)
        spec = RunSpec(
            data=str(data),
            model=MODELS[tables],
            dense_optimizer=AdamSpec(lr=0.01),
            sparse_optimizer=AdaGradSpec(lr=0.05),
            training=training,
        )
        run = build(spec, directory / "run", [losses])
        report = run.fit(resume=most is None)
    assert report.evaluation is not None
    return {
        "kernels": {op: registry.active(op, "cpu").implementation for op in OPS},
        "losses": losses.values,
        "metrics": dict(report.evaluation.results.overall.values),
        "weights": weights(run.model),
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.save(
        {tables: train(Path(sys.argv[1]) / tables, tables) for tables in sys.argv[2:]}, f"{sys.argv[1]}/result.pt"
    )
