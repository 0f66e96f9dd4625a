"""The metrics of an evaluation, gathered batch by batch."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from terarec.hugectr.enums import MetricsType
from terarec.hugectr.errors import WrongInputError
from terarec.metrics import AUC, NDCG, SMAPE, AverageLoss, HitRate
from terarec.metrics.columns import mean_over_labels


class _ColumnAUCs:
    """An AUC for each label's column, over the samples whose label there is known (above -1/2)."""

    def __init__(self) -> None:
        self._columns: list[AUC] = []

    def update(self, scores: Tensor, labels: Tensor) -> None:
        self._columns = self._columns or [AUC() for _ in range(labels.shape[1])]
        for number, auc in enumerate(self._columns):
            known = labels[:, number] > -0.5
            auc.update(scores[known, number], labels[known, number])

    def per_label(self) -> tuple[float, ...]:
        return tuple(auc.compute() for auc in self._columns)

    def compute(self) -> float:
        return mean_over_labels(self.per_label())

    def reset(self) -> None:
        self._columns = []


_KINDS: dict[MetricsType, type[_ColumnAUCs | AverageLoss | HitRate | NDCG | SMAPE]] = {
    MetricsType.AUC: _ColumnAUCs,
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
            else:
                metric.update(scores, truth)

    def finish(self) -> list[tuple[str, float]]:
        """Name and value of each metric since the last call, in the solver's order; they start anew."""
        auc = self._metrics.get(MetricsType.AUC)
        self.class_aucs = auc.per_label() if isinstance(auc, _ColumnAUCs) else ()
        found = [(kind.name, float(metric.compute())) for kind, metric in self._metrics.items()]
        for metric in self._metrics.values():
            metric.reset()
        return found


def _of_label(predictions: Tensor, label: Tensor) -> Tensor:
    return predictions[:, 1:] if (predictions.shape[1], label.shape[1]) == (2, 1) else predictions
