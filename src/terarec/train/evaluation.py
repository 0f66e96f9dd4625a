"""How good a model is on a split."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from torch import nn

from terarec.batch import Batch
from terarec.metrics import AUC, LogLoss, Throughput
from terarec.train.precision import Precision
from terarec.train.scoring import score


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """What `evaluate` found.

    Attributes:
        auc: area under the ROC curve, mean over labels; NaN if a label has one class only.
        logloss: mean binary cross-entropy in nats; NaN without samples.
        rows: samples scored.
        seconds: wall-clock time, reading included.
        samples_per_second: rows / seconds.
    """

    auc: float
    logloss: float
    rows: int
    seconds: float
    samples_per_second: float


def evaluate(
    model: nn.Module,
    batches: Iterable[Batch],
    *,
    precision: Precision = "fp32",
    progress: Callable[[int], None] | None = None,
) -> Evaluation:
    """Score `batches` with `model` in evaluation mode.

    Args:
        model: Batch -> logits [B, L]; or a `GraphModel`, whose losses say which tensors are logits.
        batches: for example a `terarec.data.Reader`.
        precision: of the dense layers' matrix products.
        progress: called after every batch with the samples scored so far; what it raises ends the evaluation.

    Raises:
        ConfigError: a logit that is NaN, a label outside [0, 1], or a model that gives no logits.
    """
    auc, logloss, throughput = AUC(), LogLoss(), Throughput()
    for batch, logits in score(model, batches, precision):
        auc.update(logits, batch.label)
        logloss.update(logits, batch.label)
        throughput.update(batch.batch_size)
        if progress is not None:
            progress(throughput.samples)
    auc_value, logloss_value = auc.compute(), logloss.compute()
    seconds = throughput.seconds
    return Evaluation(
        auc=auc_value,
        logloss=logloss_value,
        rows=throughput.samples,
        seconds=seconds,
        samples_per_second=throughput.samples / seconds,
    )
