"""What a training run reports."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from terarec.train.evaluation import Evaluation


@dataclass(frozen=True, kw_only=True, slots=True)
class FitReport:
    """What `Trainer.fit` did.

    Attributes:
        steps: steps of the whole run, those before a resume included.
        samples: samples trained in this call.
        seconds: wall-clock time of this call without evaluations; reading and checkpoints included.
        total_seconds: Wall-clock time of this call, evaluations included.
        samples_per_second: samples / seconds.
        loss: of the last step's batch; NaN if there was no step.
        device: Where the model trained.
        evaluation: the last one; None without a validation split.
        highest_auc: the highest AUC of all evaluations of the run, or None.
        best_step: step of the evaluation that was best by ``training.monitor``, or None.
        stopped_early: whether ``training.patience`` ended the training.
        peak_memory_bytes: most physical memory that this process ever held.
        checkpoint: the newest checkpoint, if the run writes any.
    """

    steps: int
    samples: int
    seconds: float
    total_seconds: float
    samples_per_second: float
    loss: float
    device: str
    evaluation: Evaluation | None
    highest_auc: float | None
    best_step: int | None
    stopped_early: bool
    peak_memory_bytes: int
    checkpoint: Path | None = None
