# SPDX-License-Identifier: Apache-2.0
"""Objectives: losses and scores of models that return logits.

A sample's weight multiplies its loss; the mean is over the samples of the batch and not over the sum of their weights,
as in ``torch.nn.functional.binary_cross_entropy_with_logits(weight=...)``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, Protocol

import torch
from torch import Tensor
from torch.nn.functional import (
    binary_cross_entropy_with_logits,
    cross_entropy,
    huber_loss,
    l1_loss,
    logsigmoid,
    mse_loss,
)

from terarec.batch import Batch, column_codes, column_digests, is_missing
from terarec.errors import ConfigError
from terarec.nn.batch_ranks import BatchRanks, rows_of_all, sum_over
from terarec.spec import DatasetSpec
from terarec.spec.calibration import CalibrationSpec, IsotonicSpec, TemperatureSpec
from terarec.spec.dataset import MISSING_KEY
from terarec.spec.run import (
    BinarySpec,
    ClassWeights,
    MultiClassSpec,
    ObjectiveSpec,
    PairwiseSpec,
    RegressionSpec,
    SampledSoftmaxSpec,
)

_LEAST = 1e-6
"""Least distance of an isotonic probability from 0 and 1 where its logit is read."""


class ScoreCalibration(Protocol):
    """Corrects the probabilities of a model with L labels."""

    def logits(self, logits: Tensor) -> Tensor:
        """Return the logits of the calibrated probabilities of logits float32[B, L]."""

    def scores(self, logits: Tensor) -> Tensor:
        """Return the calibrated probabilities float32[B, L] of logits float32[B, L]."""


def build_calibration(spec: CalibrationSpec) -> ScoreCalibration:
    """Return the calibration that `spec` describes."""
    return _Isotonic(spec) if isinstance(spec, IsotonicSpec) else _Temperature(spec)


class _Temperature:
    def __init__(self, spec: TemperatureSpec) -> None:
        self._factors = 1.0 / torch.tensor(spec.temperatures)

    def logits(self, logits: Tensor) -> Tensor:
        return logits * self._factors.to(logits.device)

    def scores(self, logits: Tensor) -> Tensor:
        return self.logits(logits).sigmoid()


class _Isotonic:
    """Straight lines between points: the first value, and the steps up to each probability added up."""

    def __init__(self, spec: IsotonicSpec) -> None:
        most = max(map(len, spec.scores))
        # Lists as long as the longest one: its last point again adds nothing.
        scores, values = (
            torch.tensor([[*numbers, *numbers[-1:] * (most - len(numbers))] for numbers in lists], dtype=torch.float64)
            for lists in (spec.scores, spec.values)
        )
        widths = scores.diff()
        slopes = torch.where(widths > 0.0, values.diff() / widths, 0.0)
        self._lines = [part.float() for part in (values[:, 0], values[:, -1], scores[:, :-1], widths, slopes)]

    def logits(self, logits: Tensor) -> Tensor:
        return torch.logit(self.scores(logits), eps=_LEAST)

    def scores(self, logits: Tensor) -> Tensor:
        first, last, starts, widths, slopes = (part.to(logits.device) for part in self._lines)
        passed = (logits.sigmoid().unsqueeze(2) - starts).clamp_min(0.0).minimum(widths)
        # Rounding takes the sum above the last value.
        return (first + (passed * slopes).sum(2)).minimum(last)


class Objective(Protocol):
    """A loss over logits with the scores that belong to it.

    Attributes:
        default_metrics: Metrics that evaluation computes unless others are named; training monitors the first.

    One whose scores are the probabilities of the labels may have ``gives_probabilities = True``; evaluations then have
    calibration curves. One that corrects these after training has ``calibrated_logits(logits)``, which metrics read.
    """

    default_metrics: ClassVar[tuple[str, ...]]

    def num_outputs(self, num_labels: int) -> int:
        """Return the number of logits C of a sample."""

    def loss(self, logits: Tensor, batch: Batch) -> Tensor:
        """Return the mean loss of a batch, a scalar float32, for logits [B, C]."""

    def scores(self, logits: Tensor) -> Tensor:
        """Return the scores for logits [B, C]: probabilities or values, float32[B, C]."""


class BinaryObjective:
    """Binary cross entropy in nats, the mean over samples and labels.

    Attributes:
        label_weights: Factors of the labels' losses; empty for ones.

    Args:
        spec: Weights of the labels and of their classes, and calibration of the scores.
    """

    default_metrics: ClassVar[tuple[str, ...]] = ("auc", "logloss")
    gives_probabilities: ClassVar[bool] = True
    takes_probabilities: ClassVar[bool] = True
    """Whether the loss is one of labels from 0 to 1."""

    def __init__(self, spec: BinarySpec | None = None) -> None:
        spec = spec or BinarySpec()
        self.label_weights = spec.label_weights
        self._positive_weight, self._classes = spec.positive_weight, spec.class_weights
        self._num_calibrated = None if spec.calibration is None else spec.calibration.num_labels
        self._calibration = None if spec.calibration is None else build_calibration(spec.calibration)

    def num_outputs(self, num_labels: int) -> int:
        """Return one logit a label."""
        if self._num_calibrated not in (None, num_labels):
            problem = f"is of {self._num_calibrated} labels, expected one for each of {num_labels}"
            raise ConfigError("objective.calibration", problem)
        if self.label_weights and len(self.label_weights) != num_labels:
            raise ConfigError(
                "objective.label_weights",
                f"got {len(self.label_weights)}, expected one for each of {num_labels} labels",
            )
        if self._classes and len(self._classes) != num_labels:
            raise ConfigError(
                "objective.class_weights", f"got {len(self._classes)}, expected one for each of {num_labels} labels"
            )
        return num_labels

    def loss(self, logits: Tensor, batch: Batch) -> Tensor:
        """Return the mean of -a y log p - b (1 - y) log(1 - p), p = 1 / (1 + exp(-x)), for labels y in [0, 1].

        a and b are the weights of the classes, ones by default.
        """
        _check_shape(logits, batch.label)
        weight = None if batch.weight is None else batch.weight.unsqueeze(1)
        ratio = None
        if self._classes or self._positive_weight != 1.0:
            classes = self._classes or (_by_number(self._positive_weight),)
            # torch has a factor of the positive class alone; that of the negative one is then a factor of both.
            ratio = torch.tensor([one.positive / one.negative for one in classes], device=logits.device)
            weight = _product(weight, torch.tensor([one.negative for one in classes], device=logits.device))
        if self.label_weights:
            weight = _product(weight, torch.tensor(self.label_weights, device=logits.device))
        # From logits in float32: the logarithm of a probability that is rounded to 0 or 1 is lost.
        return binary_cross_entropy_with_logits(logits.float(), batch.label, weight=weight, pos_weight=ratio)

    def scores(self, logits: Tensor) -> Tensor:
        """Return the probability of each label, calibrated."""
        return logits.float().sigmoid() if self._calibration is None else self._calibration.scores(logits.float())

    def calibrated_logits(self, logits: Tensor) -> Tensor:
        """Return the logits of `scores`."""
        return logits if self._calibration is None else self._calibration.logits(logits.float())


class MultiClassObjective:
    """Cross entropy in nats.

    Args:
        spec: Number of classes and label smoothing.
    """

    default_metrics: ClassVar[tuple[str, ...]] = ("accuracy", "logloss")

    def __init__(self, spec: MultiClassSpec) -> None:
        self._spec = spec

    def num_outputs(self, num_labels: int) -> int:
        """Return one logit a class.

        Raises:
            ConfigError: Several label columns.
        """
        if num_labels != 1:
            raise ConfigError("objective", f"got 'multi_class' for {num_labels} labels, expected one, the class")
        return self._spec.classes

    def loss(self, logits: Tensor, batch: Batch) -> Tensor:
        """Return the mean of -log softmax(x)[class]."""
        classes = batch.label[:, 0].long()
        # Checked here, since on a GPU torch's loss would end the process's device context by a failed assertion.
        if bool(((classes < 0) | (classes >= self._spec.classes) | (classes != batch.label[:, 0])).any()):
            raise ConfigError("label", f"got a value that is no class, expected integers 0 to {self._spec.classes - 1}")
        losses = cross_entropy(logits.float(), classes, label_smoothing=self._spec.label_smoothing, reduction="none")
        return _weighted_mean(losses, batch)

    def scores(self, logits: Tensor) -> Tensor:
        """Return the probability of each class."""
        return logits.float().softmax(1)


class RegressionObjective:
    """Squared, absolute or Huber loss.

    Args:
        spec: Kind of the loss.
    """

    default_metrics: ClassVar[tuple[str, ...]] = ("rmse", "mae")

    def __init__(self, spec: RegressionSpec) -> None:
        self._spec = spec

    def num_outputs(self, num_labels: int) -> int:
        """Return one output a label."""
        return num_labels

    def loss(self, logits: Tensor, batch: Batch) -> Tensor:
        """Return the mean loss over samples and labels."""
        values = logits.float()
        _check_shape(values, batch.label)
        if self._spec.loss == "mse":
            losses = mse_loss(values, batch.label, reduction="none")
        elif self._spec.loss == "mae":
            losses = l1_loss(values, batch.label, reduction="none")
        else:
            losses = huber_loss(values, batch.label, reduction="none", delta=self._spec.delta)
        return _weighted_mean(losses.mean(1), batch)

    def scores(self, logits: Tensor) -> Tensor:
        """Return the outputs unchanged."""
        return logits.float()


class PairwiseObjective:
    """The mean of log(1 + exp(-(x_i - x_j))) over the pairs with y_i > y_j, each with the weight of i.

    A batch without such a pair has the loss 0. Samples without a group are in no pair.

    Args:
        spec: Column of the groups.
        missing_key: Key of a missing value in it, where it has keys.
    """

    default_metrics: ClassVar[tuple[str, ...]] = ("auc",)
    batch_ranks: BatchRanks | None = None
    """The processes that have a part of each batch, of which pairs are made; None for this one alone."""
    num_counted: Tensor | None = None
    """Number of the pairs of the last loss on all ranks; None before the first, and for several labels."""
    adds_up: ClassVar[bool] = True
    """Whether the loss of a rank is its part of that of the whole batch, and no mean over its own samples."""

    def __init__(self, spec: PairwiseSpec, missing_key: int = MISSING_KEY) -> None:
        self._group, self._missing_key = spec.group, missing_key

    def num_outputs(self, num_labels: int) -> int:
        """Return one score a label."""
        return num_labels

    def loss(self, logits: Tensor, batch: Batch) -> Tensor:
        """Return the mean over pairs, and over labels."""
        _check_shape(logits, batch.label)
        ranks, own = self.batch_ranks, logits.float()
        others, labels = own, batch.label
        if ranks is not None:
            others, _ = rows_of_all(ranks, "scores of pairs", own)
            labels, _ = rows_of_all(ranks, "labels of pairs", labels)
        same = None
        if self._group is not None:
            # Codes number the values of one process; digests are equal on all of them.
            codes = (column_codes if ranks is None else column_digests)(batch, self._group).to(logits.device)
            of_all = codes if ranks is None else rows_of_all(ranks, "groups of pairs", codes)[0]
            is_known = ~is_missing(batch, self._group, self._missing_key).to(logits.device)
            same = (codes.unsqueeze(1) == of_all) & is_known.unsqueeze(1)
        sums, counts = [], []
        for column in range(own.shape[1]):
            is_pair = batch.label[:, column].unsqueeze(1) > labels[:, column]
            if same is not None:
                is_pair = is_pair & same
            # Only the pairs that count: of binary labels these are a small part of the B x B matrix.
            first, second = is_pair.nonzero(as_tuple=True)
            losses = -logsigmoid(own[first, column] - others[second, column])
            # Empty, and so 0 with a gradient of 0, where a batch has no pair.
            sums.append((losses if batch.weight is None else losses * batch.weight[first]).sum())
            counts.append(losses.numel())
        # A loss of a rank is its part of the mean over the pairs of all, so it is divided by their number.
        total = torch.tensor(counts, device=logits.device)
        if ranks is not None:
            total = sum_over(ranks, "pairs", total)
        self.num_counted = total[0] if len(counts) == 1 else None  # each label has a mean of its own
        return (torch.stack(sums) / total.clamp_min(1)).mean()

    def scores(self, logits: Tensor) -> Tensor:
        """Return the logistic function of the scores, which keeps their order."""
        return logits.float().sigmoid()


class SampledSoftmaxObjective:
    """Cross entropy of the positive item, in the first column, among sampled ones.

    Args:
        spec: Temperature.
    """

    default_metrics: ClassVar[tuple[str, ...]] = ("auc",)

    def __init__(self, spec: SampledSoftmaxSpec) -> None:
        self._temperature = spec.temperature

    def num_outputs(self, num_labels: int) -> int:
        """Return one logit: that of the given item; sampled items are added in training only."""
        return 1

    def loss(self, logits: Tensor, batch: Batch) -> Tensor:
        """Return the mean of -log softmax(x / temperature)[0]."""
        if logits.dim() != 2 or logits.shape[1] < 2:
            raise ConfigError("sampled_softmax", f"got logits {list(logits.shape)}, expected [B, 1 + N] with N >= 1")
        losses = -(logits.float() / self._temperature).log_softmax(1)[:, 0]
        return _weighted_mean(losses, batch)

    def scores(self, logits: Tensor) -> Tensor:
        """Return the logistic function of the first column."""
        # The columns of sampled items, which follow in training, are not scores of the sample.
        return logits[:, :1].float().sigmoid()


def build_objective(spec: ObjectiveSpec | None, dataset: DatasetSpec | None = None) -> Objective:
    """Return the objective that `spec` describes; binary cross entropy for None.

    Args:
        spec: The objective.
        dataset: Columns, which say what keys of groups are missing values; None where no loss is computed.
    """
    if isinstance(spec, PairwiseSpec) and spec.group is not None and dataset is not None:
        return PairwiseObjective(spec, dataset.missing_key(spec.group))
    return BinaryObjective() if spec is None else _OBJECTIVES[type(spec)](spec)


def untrained_labels(objective: Objective, labels: Sequence[str]) -> tuple[str, ...]:
    """Return those of `labels` (numbers where they have no names) whose loss has the weight 0."""
    # By attribute: any object with the methods is an objective.
    weights: Sequence[float] = getattr(objective, "label_weights", ())
    names = labels or tuple(map(str, range(len(weights))))
    return tuple(name for name, weight in zip(names, weights, strict=False) if weight == 0)


_OBJECTIVES: Mapping[type, Callable[..., Objective]] = {
    BinarySpec: BinaryObjective,
    MultiClassSpec: MultiClassObjective,
    RegressionSpec: RegressionObjective,
    PairwiseSpec: PairwiseObjective,
    SampledSoftmaxSpec: SampledSoftmaxObjective,
}


def _weighted_mean(losses: Tensor, batch: Batch) -> Tensor:
    return losses.mean() if batch.weight is None else (losses * batch.weight).mean()


def _by_number(positive_weight: float | str) -> ClassWeights:
    if isinstance(positive_weight, str):
        raise ConfigError(
            "objective.positive_weight",
            f"got {positive_weight!r} without class_weights, which a run counts, expected a number",
        )
    return ClassWeights(negative=1.0, positive=positive_weight)


def _product(weight: Tensor | None, factors: Tensor) -> Tensor:
    return factors if weight is None else weight * factors


def _check_shape(logits: Tensor, label: Tensor) -> None:
    if logits.shape != label.shape:
        raise ConfigError("model", f"got logits {list(logits.shape)}, expected {list(label.shape)} as the labels have")
