# SPDX-License-Identifier: Apache-2.0
"""A small run that is trained, stopped and resumed, by the process that calls it or, as a program, in its own."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from terarec.kernels import registry
from terarec.spec import (
    AdaGradSpec,
    AdamSpec,
    DLRMSpec,
    DynamicTablesSpec,
    RunSpec,
    StaticTablesSpec,
    Tiers,
    TrainingSpec,
)
from terarec.spec.model import ModelSpec
from terarec.train import Callback, Trainer, build
from tests.train.planted import make_planted
from tests.train.small_run import weights

CPU = torch.device("cpu")
OPS = ("bag_lookup", "row_update_", "fill_keyed_rows", "HashIndex")
DLRM = DLRMSpec(width=4, bottom=(8, 4), top=(8,))
TIERS = Tiers(device="8KiB", host="4KiB", file=".")
MODELS = {
    "static": DLRM,
    "dynamic": dataclasses.replace(DLRM, tables=DynamicTablesSpec()),
    "static in tiers": dataclasses.replace(DLRM, tables=StaticTablesSpec(tiers=TIERS)),
    "dynamic in tiers": dataclasses.replace(DLRM, tables=DynamicTablesSpec(tiers=TIERS)),
}
STEPS, BEFORE_STOP, BATCH = 4, 2, 8


class Losses(Callback):
    """Keeps the loss of every step."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def on_step(self, trainer: Trainer) -> None:
        self.values.append(trainer.loss)


def train(
    directory: Path,
    model: ModelSpec,
    *,
    device: torch.device = CPU,
    stops: Sequence[int | None] = (BEFORE_STOP, None),
) -> dict[str, Any]:
    """Train to each of `stops`, each time resumed, None being the end.

    Returns:
        The kernels that run, and the run's losses, metrics and weights with optimizer state.
    """
    data = directory / "data"
    if model.tables.tiers is not None:
        tiers = dataclasses.replace(model.tables.tiers, file=str(directory / "rows"))
        model = dataclasses.replace(model, tables=dataclasses.replace(model.tables, tiers=tiers))
    make_planted(data, train=BATCH * STEPS - 5, valid=20, rows_per_group=25)  # the last batch is smaller
    losses = Losses()
    for most in stops:
        training = TrainingSpec(batch_size=BATCH, max_steps=most, seed=5, device=str(device))
        spec = RunSpec(
            data=str(data),
            model=model,
            dense_optimizer=AdamSpec(lr=0.01),
            sparse_optimizer=AdaGradSpec(lr=0.05),
            training=training,
        )
        run = build(spec, directory / "run", [losses])
        report = run.fit(resume=True)
    assert report.evaluation is not None
    return {
        "kernels": {op: registry.active(op, device.type).implementation for op in OPS},
        "losses": losses.values,
        "metrics": dict(report.evaluation.results.overall.values),
        "weights": {name: held.cpu() for name, held in weights(run.model).items()},
    }


def assert_follows(found: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Raise unless two results of `train` are equal but for rounding, with sums in different orders."""
    assert len(found["losses"]) == len(expected["losses"]) == STEPS
    for name in ("losses", "metrics"):
        torch.testing.assert_close(found[name], expected[name], rtol=1e-5, atol=0.0)
    assert found["weights"].keys() == expected["weights"].keys()
    for name, tensor in expected["weights"].items():  # the first steps of AdaGrad and Adam divide by small numbers
        message = partial("{}: {}".format, name)
        torch.testing.assert_close(found["weights"][name], tensor, rtol=1e-4, atol=1e-6, msg=message)


def follows_the_cpu(model: ModelSpec, device: torch.device) -> None:
    """Raise unless a run on `device` is that of the CPU."""
    with TemporaryDirectory() as first, TemporaryDirectory() as second:
        assert_follows(train(Path(first), model, device=device), train(Path(second), model))


def resumes(model: ModelSpec, device: torch.device) -> None:
    """Raise unless a run on `device` that is stopped and resumed is one without a stop."""
    with TemporaryDirectory() as first, TemporaryDirectory() as second:
        stopped = train(Path(first), model, device=device)
        assert_follows(stopped, train(Path(second), model, device=device, stops=(None,)))


CASES: dict[str, Callable[[torch.device], None]] = {
    **{f"a run over {tables} tables": partial(follows_the_cpu, model) for tables, model in MODELS.items()},
    "a resumed run with dropout": partial(resumes, dataclasses.replace(DLRM, dropout=0.3)),
}
"""What ``benchmarks/gpu.py`` checks where a GPU is."""

if __name__ == "__main__":
    torch.set_num_threads(1)
    results = {tables: train(Path(sys.argv[1]) / tables, model) for tables, model in MODELS.items()}
    torch.save(results, f"{sys.argv[1]}/result.pt")
