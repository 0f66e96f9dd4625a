"""The metrics of an evaluation, gathered batch by batch."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from terarec.hugectr.enums import MetricsType
from terarec.hugectr.errors import WrongInputError
from terarec.metrics import AUC, NDCG, SMAPE, AverageLoss, HitRate

_UNKNOWN = -0.5  # labels up to here are unknown in HugeCTR's AUC

_KINDS: dict[MetricsType, type[AUC | AverageLoss | HitRate | NDCG | SMAPE]] = {
    MetricsType.AUC: AUC,
    MetricsType.AverageLoss: AverageLoss,
    MetricsType.HitRate: HitRate,
    MetricsType.NDCG: NDCG,
    MetricsType.SMAPE: SMAPE,
}


class Evaluation:
    """The metrics that a solver asks for.

    Attributes:
        class_aucs: the AUC of each label's column at the last `finish`; empty without AUC.

    Args:
        metrics: as the solver's ``metrics_spec``.
        num_labels: columns of all labels.

    Raises:
        WrongInputError: a metric other than AUC for several labels.
    """

    def __init__(self, metrics: Mapping[MetricsType, float], *, num_labels: int) -> None:
        self._metrics = {kind: _KINDS[kind]() for kind in metrics}
        self.class_aucs: tuple[float, ...] = ()
        others = [kind.name for kind in metrics if kind not in (MetricsType.AUC, MetricsType.AverageLoss)]
        if num_labels > 1 and others:
            raise WrongInputError(f"metrics_spec: got {others[0]} for {num_labels} labels, expected AUC or AverageLoss")

    def update(self, loss: Tensor, predictions: Mapping[str, Tensor], labels: Mapping[str, Tensor]) -> None:
        """Take in a batch: its loss, and by label the predictions [B, n] and labels [B, n].

        A softmax over two classes counts by its second class.
        """
        scores = torch.cat([_of_label(predictions[name], labels[name]) for name in predictions], dim=1)
        truth = torch.cat([labels[name] for name in predictions], dim=1)
        for metric in self._metrics.values():
            if isinstance(metric, AverageLoss):
                metric.update(loss)
            elif isinstance(metric, AUC):
                metric.update(scores, truth.masked_fill(truth <= _UNKNOWN, math.nan))
            else:
                metric.update(scores, truth)

    def finish(self) -> list[tuple[str, float]]:
        """Name and value of each metric since the last call, in the solver's order; they start anew."""
        auc = self._metrics.get(MetricsType.AUC)
        self.class_aucs = auc.per_label() if isinstance(auc, AUC) else ()
        found = [(kind.name, float(metric.compute())) for kind, metric in self._metrics.items()]
        for metric in self._metrics.values():
            metric.reset()
        return found


def _of_label(predictions: Tensor, label: Tensor) -> Tensor:
    return predictions[:, 1:] if (predictions.shape[1], label.shape[1]) == (2, 1) else predictions
