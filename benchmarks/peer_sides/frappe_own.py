"""terarec: the model and the training of frappe.py, from the prepared data set."""

from __future__ import annotations

import frappe
import torch
from torch import nn

import terarec
from peer_sides.frappe_job import FrappeJob
from terarec.data import Reader
from terarec.optim import RowOptimizer
from terarec.spec import AdamSpec, RowOptions, TrainingSpec
from terarec.train import Trainer, evaluate


def train_ours(job: FrappeJob, seed: int, epochs: int) -> nn.Module:
    """A trained model with its best weights."""
    torch.manual_seed(seed)
    reader = Reader(job.data, "train", batch_size=job.batch_size, shuffle=True, seed=seed)
    model = frappe.DeepFM(reader.spec, seed)
    rows = RowOptimizer(model, AdamSpec(lr=job.lr, rows=RowOptions(mode="global", l2=job.l2)))
    dense = torch.optim.Adam(model.parameters(), lr=job.lr)
    trainer = Trainer(model, TrainingSpec(epochs=epochs), dense, rows)
    best = frappe.BestOnPlateau(trainer)
    trainer.callbacks.append(best)
    trainer.fit(reader, Reader(job.data, "valid", batch_size=job.batch_size))
    model.load_state_dict(best.weights)
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
