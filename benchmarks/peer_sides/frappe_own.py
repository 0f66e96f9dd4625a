"""terarec: the recipe's model and settings, from the prepared data set."""

from __future__ import annotations

import copy
import dataclasses

import torch
from torch import Tensor, nn

import terarec
from peer_sides.frappe_job import FrappeJob
from terarec.data import Reader
from terarec.models import build_model
from terarec.optim import RowOptimizer, build_dense_optimizer
from terarec.recipes import load_recipe
from terarec.train import Callback, Evaluation, Trainer, evaluate

DATA, MODEL = "frappe_x1", "deepfm"


class BestOnPlateau(Callback):
    """A tenth of the learning rates after an evaluation without improvement, and a copy of the best weights."""

    def __init__(self, trainer: Trainer) -> None:
        assert trainer.row_optimizer is not None
        self.schedules = [
            torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, mode="max", factor=0.1, patience=0)
            for optimizer in (trainer.row_optimizer, trainer.dense_optimizer)
        ]
        self.best = 0.0
        self.weights: dict[str, Tensor] = {}

    def on_evaluation(self, trainer: Trainer, evaluation: Evaluation) -> None:
        """Follow the validation AUC."""
        for schedule in self.schedules:
            schedule.step(evaluation.auc)
        if evaluation.auc > self.best:
            self.best, self.weights = evaluation.auc, copy.deepcopy(trainer.model.state_dict())


def train_ours(job: FrappeJob, seed: int, epochs: int) -> nn.Module:
    """A trained model with its best weights."""
    torch.manual_seed(seed)
    run = load_recipe(DATA, MODEL).run
    training = dataclasses.replace(run.training, epochs=epochs, patience=None)
    reader = Reader(job.data, "train", batch_size=training.batch_size, shuffle=True, seed=seed)
    model = build_model(run.model, reader.spec, seed=seed)
    rows = RowOptimizer(model, run.sparse_optimizer)
    trainer = Trainer(model, training, build_dense_optimizer(run.dense_optimizer, model.parameters()), rows)
    best = BestOnPlateau(trainer)
    trainer.callbacks.append(best)
    trainer.fit(reader, Reader(job.data, "valid", batch_size=training.batch_size))
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
