# SPDX-License-Identifier: Apache-2.0
"""terarec: the run of a recipe, from the prepared data set."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import torch
from torch import nn

import terarec
from peer_sides.frappe_job import FrappeJob
from terarec.apps.recipes import load_recipe
from terarec.data import Reader
from terarec.models.artifact import load_model
from terarec.train import build, evaluate

DATA, MODEL = "frappe_x1", "deepfm"


def train_ours(job: FrappeJob, seed: int, epochs: int) -> nn.Module:
    """Return a trained model with the weights of its best evaluation; checkpoints are in the job's folder."""
    run = load_recipe(DATA, MODEL).run
    training = dataclasses.replace(
        run.training, epochs=epochs, patience=None, seed=seed, device="cpu", threads=job.threads
    )
    out = Path(job.folder) / f"run-{seed}"
    build(dataclasses.replace(run, data=job.data, training=training), out).fit()
    model = load_model(out, "best").model
    shutil.rmtree(out)
    return model


class Terarec:
    """Implements `Side`. Batches are read from the files in every epoch."""

    version = f"terarec {terarec.__version__}, torch {torch.__version__}"

    def __init__(self, job: FrappeJob) -> None:
        self.job = job

    def train(self, *, seed: int, epochs: int) -> None:
        self.model = train_ours(self.job, seed, epochs)

    def test(self) -> tuple[float, float]:
        result = evaluate(self.model, Reader(self.job.data, "test", batch_size=self.job.batch_size))
        return result.auc, result.logloss
