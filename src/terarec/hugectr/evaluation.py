# SPDX-License-Identifier: Apache-2.0
"""Evaluation batch by batch: the metrics, and the tensors of the last batch."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping

import torch
from torch import Tensor

from terarec.batch import Batch, to_device
from terarec.dist import Ranks
from terarec.hugectr.enums import MetricsType
from terarec.hugectr.errors import IllegalCallError, LossCannotConvergeError, WrongInputError
from terarec.io.opening import open_file
from terarec.metrics import AUC, NDCG, SMAPE, AverageLoss, HitRate
from terarec.models import GraphModel
from terarec.nn.precision import Precision, autocast

_UNKNOWN = -0.5  # labels up to here are unknown in HugeCTR's AUC

_KINDS: dict[MetricsType, type[AUC | AverageLoss | HitRate | NDCG | SMAPE]] = {
    MetricsType.AUC: AUC,
    MetricsType.AverageLoss: AverageLoss,
    MetricsType.HitRate: HitRate,
    MetricsType.NDCG: NDCG,
    MetricsType.SMAPE: SMAPE,
}


_NEEDS: dict[MetricsType, str] = {
    MetricsType.AUC: "labels of both classes",
    MetricsType.HitRate: "a probability above 0.8",
    MetricsType.NDCG: "a label above 0",
}

_logger = logging.getLogger(__name__)


class SolverMetrics:
    """The metrics of a solver; one without a value (NaN) is named once, as a warning, and reaches no target.

    Attributes:
        class_aucs: The AUC of each label's column at the last `finish`; empty without AUC.
        tensors: The tensors of the last batch by name, with probabilities in place of the logits that losses read,
            as HugeCTR's losses leave them; empty before the first batch.
        predictions: Label -> its probabilities [B, n] in the last batch, in the order of the labels' columns; empty
            before the first batch.
        batch: This rank's samples of the last batch, or None.

    Args:
        metrics: The solver's ``metrics_spec``.
        num_labels: Columns of all labels.
        ranks: Processes that evaluate together, each its span of a batch; None for this alone.
    """

    def __init__(self, metrics: Mapping[MetricsType, float], *, num_labels: int, ranks: Ranks | None = None) -> None:
        self._ranks = ranks or Ranks()
        # HugeCTR's map of metrics is in the order of the enumeration, whatever that of the script's dict.
        self._metrics = {kind: make() for kind, make in _KINDS.items() if kind in metrics}
        self.class_aucs: tuple[float, ...] = ()
        self.tensors: dict[str, Tensor] = {}
        self.predictions: dict[str, Tensor] = {}
        self.batch: Batch | None = None
        self._labels = torch.empty(0)
        self._undefined: set[str] = set()
        others = [kind.name for kind in metrics if kind not in (MetricsType.AUC, MetricsType.AverageLoss)]
        if num_labels > 1 and others:
            raise WrongInputError(
                "metrics_spec", f"got {others[0]} for {num_labels} labels, expected AUC or AverageLoss"
            )

    @torch.no_grad()
    def score(self, model: GraphModel, batch: Batch, precision: Precision, *, total: int) -> None:
        """Update the metrics with the predictions of `model` for `batch`; dynamic tables do not change."""
        self.tensors = {}  # frees the last batch's tensors before this one's are made
        model.eval()
        # All ranks get the tensors of the whole batch: metrics such as AUC are not means over parts of a batch.
        ranks = self._ranks
        with autocast(precision, model.device):
            tensors = model(to_device(batch, model.device))
            loss = model.total_loss(tensors)
        if ranks.size > 1:
            share = torch.nan_to_num(loss.detach()) * batch.batch_size / total  # the mean of no samples is not a number
            loss = ranks.all_reduce_("loss of an evaluation", share.reshape(1))[0]
            # Not the shares of this many samples: in files with checksums a short last batch is split like a full one.
            sizes = torch.zeros(ranks.size, dtype=torch.int64)
            sizes[ranks.rank] = batch.batch_size
            rows: list[int] = ranks.all_reduce_("samples of an evaluation", sizes).tolist()
            tensors = {name: ranks.joined(f"tensor {name!r}", tensor, total, rows) for name, tensor in tensors.items()}
        predictions = model.predictions(tensors)
        _check_numbers(predictions)
        self.update(loss, predictions, tensors)
        self.tensors = {**tensors, **model.probabilities(tensors)}
        self.predictions, self.batch = predictions, batch
        self._labels = torch.cat([tensors[name] for name in predictions], dim=1)

    def update(self, loss: Tensor, predictions: Mapping[str, Tensor], labels: Mapping[str, Tensor]) -> None:
        """Add a batch: its loss, and by label the predictions [B, n] and labels [B, n]."""
        for metric in self._metrics.values():
            if isinstance(metric, AverageLoss):
                metric.update(loss)
            elif isinstance(metric, AUC):
                update_auc(metric, predictions, labels)
            else:
                # Of one label: see the constructor.
                for name, scores in predictions.items():
                    metric.update(_of_label(scores, labels[name]), labels[name])

    def finish(self) -> list[tuple[str, float]]:
        """Return the name and value of each metric since the last call, in the order of `MetricsType`; reset them."""
        auc = self._metrics.get(MetricsType.AUC)
        self.class_aucs = auc.per_label() if isinstance(auc, AUC) else ()
        metrics = [(kind.name, float(metric.compute())) for kind, metric in self._metrics.items()]
        for metric in self._metrics.values():
            metric.reset()
        for kind, (name, value) in zip(self._metrics, metrics, strict=True):
            if math.isnan(value) and name not in self._undefined and self._ranks.is_first:
                self._undefined.add(name)
                _logger.warning(
                    "%s is undefined (nan) in an evaluation: it needs %s; no target is reached by it",
                    name,
                    _NEEDS.get(kind, "samples"),
                )
        return metrics

    def append_predictions(self, prediction_file: str, label_file: str) -> None:
        """Append the last batch to two files; see `Model.export_predictions`."""
        if self.batch is None:
            raise IllegalCallError("export_predictions", "nothing was evaluated yet, expected a call of eval before")
        if not self._ranks.is_first:
            return
        predictions = torch.cat(list(self.predictions.values()), dim=1)
        for path, values in ((prediction_file, predictions), (label_file, self._labels)):
            with open_file(path, "ab") as file:
                # Six digits and a space behind each, as a C++ stream of floats writes them.
                file.write("".join(f"{value:.6g} " for value in values.flatten().tolist()).encode())


def update_auc(metric: AUC, predictions: Mapping[str, Tensor], labels: Mapping[str, Tensor]) -> None:
    """Add to `metric` a batch: by label the predictions [B, n] and labels [B, n].

    A softmax over two classes counts by its second class, and unknown labels do not count.
    """
    scores = torch.cat([_of_label(predictions[name], labels[name]) for name in predictions], dim=1)
    truth = torch.cat([labels[name] for name in predictions], dim=1)
    # AUC leaves out labels that are NaN, each in its own column.
    metric.update(scores, truth.masked_fill(truth <= _UNKNOWN, math.nan))


def _of_label(predictions: Tensor, label: Tensor) -> Tensor:
    return predictions[:, 1:] if (predictions.shape[1], label.shape[1]) == (2, 1) else predictions


def _check_numbers(predictions: Mapping[str, Tensor]) -> None:
    for label, scores in predictions.items():
        missing = int(scores.isnan().any(1).sum())
        if missing:
            raise LossCannotConvergeError(
                "eval",
                f"the predictions of {label!r} are NaN for {missing} of {len(scores)} samples, expected numbers: "
                "the training diverged, or the data holds NaN; a lower learning rate may help",
            )
