# SPDX-License-Identifier: Apache-2.0
"""Metrics by name: inputs, which values are better, and computation of each."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

from terarec.errors import ConfigError
from terarec.metrics.auc import AUC
from terarec.metrics.calibration import BINS, Calibration, check_probabilities
from terarec.metrics.columns import FloatColumns, Floats, LabelRange, Values, check_labels, check_one_score
from terarec.metrics.means import MAE, MSE, RMSE, SMAPE, Accuracy, LabelMeanMetric, LogLoss, NormalizedEntropy
from terarec.metrics.ranking import RANKING_METRICS
from terarec.metrics.samples import PartedSamples
from terarec.spec.registry import Registry

Reads = Literal["logits", "scores", "loss"]
"""Input of a metric: logits, the objective's scores (probabilities, or values), or the mean loss of the batch."""


class StreamingMetric(Protocol):
    """A metric that needs no group, taken batch by batch."""

    def update(self, predictions: Values, labels: Values, weights: Values | None = None, /) -> object:
        """Add a batch."""

    def per_label(self) -> tuple[float, ...]:
        """Return the value of every label; empty before the first update."""


@dataclass(frozen=True, kw_only=True)
class Metric:
    """One metric by its name.

    Attributes:
        name: Name with its k, such as ``ndcg@10``.
        reads: Input.
        higher_is_better: Whether a higher value is better: the direction for early stopping and plateaus.
        needs: What samples must have for it to be defined, for a warning.
        needs_group: Whether it is computed in groups of samples, such as the samples of a user.
        streaming: Maker of the streaming form; None for a metric that needs groups or reads the loss.
        by_part: Function from samples of one label to a value for each part; None for a metric that reads the loss.
        check: Function of predictions and labels that raises `ConfigError` for what the metric does not accept.
    """

    name: str
    reads: Reads
    higher_is_better: bool
    needs: str = "a sample whose label is known"
    needs_group: bool = False
    streaming: Callable[[], StreamingMetric] | None = None
    by_part: Callable[[PartedSamples], Floats] | None = None
    check: Callable[[FloatColumns, FloatColumns], None] | None = None


@dataclass(frozen=True, kw_only=True)
class _Kind:
    """A row of the registry."""

    make: Callable[[str, int | None], Metric]
    k: Literal["none", "optional", "required"] = "none"


def find_metric(name: str) -> Metric:
    """Return the metric called `name`, such as ``auc``, ``ndcg@10`` or ``mrr``.

    Raises:
        ConfigError: An unknown name (the nearest one is named), or a k that is missing, not accepted or not >= 1.
    """
    base, has_k, text = name.partition("@")
    kind = _METRICS.find(base, listed=metric_names())
    if has_k and not (kind.k != "none" and re.fullmatch("[1-9][0-9]{0,8}", text)):
        expected = f"{base!r} alone" if kind.k == "none" else f"an integer >= 1 after {base + '@'!r}"
        raise ConfigError("metric", f"got {name!r}, expected {expected}")
    if kind.k == "required" and not has_k:
        raise ConfigError("metric", f"got {name!r}, expected the length of the list, such as {base + '@10'!r}")
    return kind.make(name, int(text) if has_k else None)


def monitored_metric(name: str) -> Metric:
    """Return the metric of a monitor: ``auc``, or ``auc/LABEL`` for the value of one label.

    Raises:
        ConfigError: See `find_metric`.
    """
    return find_metric(name.partition("/")[0])


def metric_names() -> tuple[str, ...]:
    """Return the names of all metrics; ``@K`` is the length of a list, or the number of bins."""
    suffix = {"none": "", "optional": "[@K]", "required": "@K"}
    return tuple(base + suffix[kind.k] for base, kind in _METRICS.items())


def _mean(
    metric: type[LabelMeanMetric], reads: Reads, *, higher_is_better: bool = False, needs: str = Metric.needs
) -> _Kind:
    def by_part(parted: PartedSamples) -> Floats:
        samples = parted.samples
        predictions = samples.logits if reads == "logits" else samples.scores
        assert predictions is not None
        return metric.by_part(predictions, samples.labels[:, None], samples.weights, parted.part, parted.parts)

    def make(name: str, k: int | None) -> Metric:
        return Metric(
            name=name,
            reads=reads,
            higher_is_better=higher_is_better,
            needs=needs,
            streaming=metric,
            by_part=by_part,
            check=metric.check,
        )

    return _Kind(make=make)


def _ranking(base: str) -> _Kind:
    function = RANKING_METRICS[base]

    def make(name: str, k: int | None) -> Metric:
        return Metric(
            name=name,
            reads="logits",
            higher_is_better=True,
            needs="a group with a label above 0",
            needs_group=True,
            by_part=lambda samples: samples.ranking(function(samples.ranks, k)),
            check=_one_score(name, "gain"),
        )

    return _Kind(make=make, k="optional" if base in ("mrr", "map") else "required")


def _auc(name: str, k: int | None) -> Metric:
    return Metric(
        name=name,
        reads="logits",
        higher_is_better=True,
        needs="labels of both classes",
        streaming=AUC,
        by_part=PartedSamples.auc,
        check=_one_score(name, "share"),
    )


def _gauc(name: str, k: int | None) -> Metric:
    return Metric(
        name=name,
        reads="logits",
        higher_is_better=True,
        needs="a group with labels of both classes",
        needs_group=True,
        by_part=PartedSamples.gauc,
        check=_one_score(name, "share"),
    )


def _ece(name: str, k: int | None) -> Metric:
    def metric() -> Calibration:
        return Calibration(bins=k or BINS)

    def check(predictions: FloatColumns, labels: FloatColumns) -> None:
        check_one_score(name, predictions, labels)
        check_probabilities(predictions, labels)

    def by_part(parted: PartedSamples) -> Floats:
        samples = parted.samples
        assert samples.scores is not None
        return metric().by_part(samples.scores[:, 0], samples.labels, samples.weights, parted.part, parted.parts)

    return Metric(name=name, reads="scores", higher_is_better=False, streaming=metric, by_part=by_part, check=check)


def _average_loss(name: str, k: int | None) -> Metric:
    return Metric(name=name, reads="loss", higher_is_better=False, needs="a batch")


def _one_score(name: str, accepted: LabelRange) -> Callable[[FloatColumns, FloatColumns], None]:
    def check(predictions: FloatColumns, labels: FloatColumns) -> None:
        check_one_score(name, predictions, labels)
        check_labels(name, labels, accepted)

    return check


_KINDS: Mapping[str, _Kind] = {
    "auc": _Kind(make=_auc),
    "gauc": _Kind(make=_gauc),
    # Entropies read logits, since float32 probabilities round to 0 and 1; errors and accuracy read what the objective
    # predicts.
    "logloss": _mean(LogLoss, "logits"),
    "ne": _mean(NormalizedEntropy, "logits", needs="labels that are neither all 0 nor all 1"),
    "rmse": _mean(RMSE, "scores"),
    "mae": _mean(MAE, "scores"),
    "mse": _mean(MSE, "scores"),
    "smape": _mean(SMAPE, "scores"),
    "accuracy": _mean(Accuracy, "scores", higher_is_better=True),
    "ece": _Kind(make=_ece, k="optional"),
    **{base: _ranking(base) for base in RANKING_METRICS},
    "average_loss": _Kind(make=_average_loss),
}
_METRICS = Registry("metric", _KINDS)
