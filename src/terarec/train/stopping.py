# SPDX-License-Identifier: Apache-2.0
"""The end of a training: early stopping, signals, and the report.

A metric without a value, NaN, is neither better nor worse than any other (`EarlyStopping.update`).
"""

from __future__ import annotations

import math
import signal
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, MappingProxyType
from typing import Any

from terarec.errors import ConfigError
from terarec.memory.fast_tier import TierUse
from terarec.metrics.registry import monitored_metric
from terarec.spec import TrainingSpec
from terarec.spec.checks import did_you_mean
from terarec.spec.codec import finite_data
from terarec.train.evaluation import Evaluation


class EarlyStopping:
    """Compares evaluations by a metric and counts those in a row that bring no improvement.

    Attributes:
        monitor: Name of the metric.
        is_higher_better: Whether the best value is the highest.
        best_step: Step of the best evaluation; None before the first one.
        best_value: Its metric.
        best_metrics: All of its metrics by name; empty before the first one.

    Args:
        spec: ``patience`` and ``min_delta``.
        monitor: Name of the metric.
    """

    def __init__(self, spec: TrainingSpec, monitor: str) -> None:
        self.monitor = monitor
        self.is_higher_better = monitored_metric(monitor).higher_is_better
        self.best_step: int | None = None
        self.best_value: float | None = None
        self.best_metrics: dict[str, float] = {}
        self._spec = spec
        # Apart from `best_value`: many gains below ``min_delta`` may add up to the best value, and yet use up patience.
        self._reference: float | None = None  # what an improvement is measured from
        self._num_without_improvement = 0
        self._measure_before: str | None = None  # of loaded values, which a training without evaluations passes on

    @classmethod
    def of(cls, spec: TrainingSpec, monitors: Sequence[str]) -> EarlyStopping:
        """Return early stopping by ``spec.monitor``, or else by the first of the `monitors`."""
        monitor = spec.monitor or monitors[0]
        if monitor not in monitors:
            raise ConfigError(
                "training.monitor",
                f"got {monitor!r}{did_you_mean(monitor, monitors)}, expected one of the metrics {', '.join(monitors)}",
            )
        return cls(spec, monitor)

    @property
    def is_over(self) -> bool:
        """Whether patience is at its end."""
        patience = self._spec.patience
        return patience is not None and self._num_without_improvement >= patience

    def update(
        self, step: int, value: float, *, counts: bool, metrics: Mapping[str, float] = MappingProxyType({})
    ) -> None:
        """Take in the metric `value` after `step` steps; an undefined one, NaN, changes nothing.

        An evaluation that does not count, which uses up no patience, may be the best one.
        """
        if self._is_better(value, self.best_value, 0.0):
            self.best_step, self.best_value, self.best_metrics = step, value, dict(metrics)
        # Nothing is known of an undefined value: it is no reason to stop.
        if not counts or math.isnan(value):
            return
        if self._is_better(value, self._reference, self._spec.min_delta):
            self._reference, self._num_without_improvement = value, 0
        else:
            self._num_without_improvement += 1

    def check_defined(self) -> None:
        """Check that an evaluation had a value to compare, if comparing them was requested."""
        spec = self._spec
        uses = [
            *(["patience"] if spec.patience is not None else []),
            *(["the best checkpoint"] if spec.monitor is not None and spec.keep_best else []),
        ]
        if self.best_step is None and uses:
            raise ConfigError(
                "training.monitor",
                f"{self.monitor!r} had no value in any evaluation (it needs {monitored_metric(self.monitor).needs}), "
                f"so that {' and '.join(uses)} compared nothing; expected another monitor, such as logloss, a split "
                "to evaluate on that defines it, or no patience and no monitor; the last step is saved",
            )

    def measure(self, metric: str | None = None) -> str | None:
        """Return what a metric measures: it, the split and its groups. Values of two measures are not compared.

        Args:
            metric: Name of the metric; None for the monitor.

        Returns:
            None for a training without evaluations, which compares nothing.
        """
        metric, split = metric or self.monitor, self._spec.eval_split
        groups = f" by {self._spec.group}" if monitored_metric(metric).needs_group else ""
        return None if split is None else f"{metric} on {split}{groups}"

    def measure_of(self, state: Mapping[str, Any]) -> str | None:
        """Return the `measure` of a result of `state_dict`; that of an earlier build has the metric's name alone."""
        return self.measure(state["monitor"]) if "monitor" in state else state.get("measure")

    def state_dict(self) -> dict[str, Any]:
        """Return the state as JSON data."""
        return {
            "measure": self.measure() or self._measure_before,
            "best_step": self.best_step,
            "best_value": self.best_value,
            "best_metrics": finite_data(self.best_metrics),
            "reference": self._reference,
            "num_without_improvement": self._num_without_improvement,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from the result of `state_dict`; after one of another measure the comparison begins anew."""
        before = self.measure_of(state)
        if is_other_measure(before, self.measure()):
            return
        self._measure_before = before
        self.best_step, self.best_value = state["best_step"], state["best_value"]
        metrics = state["best_metrics"].items()
        self.best_metrics = {name: math.nan if value is None else value for name, value in metrics}
        self._reference, self._num_without_improvement = state["reference"], state["num_without_improvement"]

    def _is_better(self, value: float, than: float | None, by: float) -> bool:
        # An infinite metric is not a best one: nothing could improve on it.
        if not math.isfinite(value):
            return False
        if than is None:
            return True
        return value > than + by if self.is_higher_better else value < than - by


def is_other_measure(before: str | None, now: str | None) -> bool:
    """Return whether two results of `EarlyStopping.measure` cannot be compared; None is none that was compared."""
    return None not in (before, now) and before != now


class Interrupts:
    """While entered, the first SIGINT or SIGTERM only sets `received`; the second takes its usual, immediate effect.

    Only the main thread may handle signals; entered elsewhere it does nothing.

    Attributes:
        received: Name of the signal that came ("SIGINT", "SIGTERM"), or None.
    """

    def __init__(self) -> None:
        self.received: str | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *_: object) -> None:
        self._restore()

    def _receive(self, number: int, _frame: FrameType | None) -> None:
        # Only noted, as a handler runs between any two bytecodes, also within a step.
        self.received = signal.Signals(number).name
        # The next signal acts at once: a user who sends a second one does not want to wait for the step.
        self._restore()

    def _restore(self) -> None:
        while self._before:
            number, handler = self._before.popitem()
            signal.signal(number, handler)


@dataclass(frozen=True, kw_only=True, slots=True)
class FitReport:
    """Results of `Trainer.fit`.

    Attributes:
        steps: Steps of the complete run, those before a resume included.
        last_step: Number of the last step, which counts those of a training that this one extends.
        samples: Samples trained in this call.
        seconds: Wall-clock time of this call without evaluations; reading and checkpoints included.
        total_seconds: Wall-clock time of this call, evaluations included.
        samples_per_second: Samples / seconds.
        loss: Loss of the last step's batch; NaN if there was no step.
        device: Device of the training.
        evaluation: The last one; None without a validation split.
        highest_auc: The highest AUC of all evaluations of the run, or None.
        best_step: Step of the evaluation that was best by ``training.monitor``, or None.
        best_metrics: Metrics of that evaluation by name, with several labels also ``metric/LABEL``; empty without one.
        served_step: Step of the checkpoint that serving and evaluation load by default; None without checkpoints.
        stopped_early: Whether ``training.patience`` ended the training.
        peak_memory_bytes: Peak physical memory that this process ever held.
        tiers: Statistics of the tiers of tables in this call; None without any.
        checkpoint: The newest checkpoint, if the run writes any.
    """

    steps: int
    last_step: int
    samples: int
    seconds: float
    total_seconds: float
    samples_per_second: float
    loss: float
    device: str
    evaluation: Evaluation | None
    highest_auc: float | None
    best_step: int | None
    best_metrics: Mapping[str, float]
    stopped_early: bool
    peak_memory_bytes: int
    tiers: TierUse | None = None
    checkpoint: Path | None = None
    served_step: int | None = None

    @property
    def metrics(self) -> Mapping[str, float]:
        """Metrics of the model that is served; those of the last evaluation without checkpoints.

        Empty without an evaluation of that model.
        """
        if self.served_step is not None and self.served_step == self.best_step:
            return self.best_metrics
        if self.evaluation is not None and self.served_step in (None, self.last_step):
            return self.evaluation.results.named_values()
        return {}
