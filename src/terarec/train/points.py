"""The curves of a run as points: what every logger of a training writes."""

from __future__ import annotations

import torch
from torch import Tensor

from terarec.metrics import Throughput
from terarec.train.callback import Callback
from terarec.train.evaluation import Evaluation
from terarec.train.trainer import Trainer

LOG_EVERY = 10
"""Steps between training points: hundreds of points for a run of thousands of steps, at some 10 us a line."""

Point = dict[str, float | int]


class PointLogger(Callback):
    """Makes a point of the training every few steps, and calls `log_training` with it.

    A training point has ``step``, ``samples``, ``epoch``, ``loss`` (mean over the steps since the last point),
    ``samples_per_second`` (over the same steps, evaluations left out), ``seconds`` (of training since the start or
    resume), ``lr`` of the layers and ``rows_lr`` of the tables.

    Args:
        every: Steps between points.
    """

    def __init__(self, every: int = LOG_EVERY) -> None:
        self.every = every
        self._throughput = Throughput()
        self._losses: list[Tensor] = []
        self._samples_logged = 0
        self._seconds = 0.0
        self._evaluation_seconds = 0.0

    def log_training(self, point: Point) -> None:
        """Write a training point."""
        raise NotImplementedError

    def on_start(self, trainer: Trainer) -> None:
        """Start the clock."""
        self._samples_logged = trainer.samples
        self._throughput.reset()

    def on_step(self, trainer: Trainer) -> None:
        """Add the loss; log a point if one is due."""
        if trainer.last_loss is not None:
            self._losses.append(trainer.last_loss)  # on the model's device: a GPU is not waited for
        if trainer.step % self.every == 0:
            self._log(trainer)

    def on_evaluation(self, trainer: Trainer, evaluation: Evaluation) -> None:
        """Leave the evaluation out of the training's time."""
        self._evaluation_seconds += evaluation.seconds

    def on_end(self, trainer: Trainer) -> None:
        """Log what is left."""
        self._log(trainer)

    def _log(self, trainer: Trainer) -> None:
        if not self._losses:
            return
        losses = torch.stack(self._losses).tolist()
        seconds = self._throughput.seconds - self._evaluation_seconds
        self._seconds += seconds
        point: Point = {
            "step": trainer.step,
            "samples": trainer.samples,
            "epoch": trainer.epoch,
            "loss": sum(losses) / len(losses),
            "samples_per_second": (trainer.samples - self._samples_logged) / seconds,
            "seconds": self._seconds,
        }
        for name, optimizer in (("lr", trainer.optimizers.dense), ("rows_lr", trainer.optimizers.rows)):
            if optimizer is not None:
                point[name] = float(optimizer.param_groups[0]["lr"])
        self._losses.clear()
        self._samples_logged = trainer.samples
        self._evaluation_seconds = 0.0
        self._throughput.reset()
        self.log_training(point)
