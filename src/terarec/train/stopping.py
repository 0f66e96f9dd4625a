"""Early stopping: after evaluations without improvement, or by a signal."""

from __future__ import annotations

import math
import signal
import threading
from collections.abc import Mapping
from types import FrameType, TracebackType
from typing import Any

from terarec.metrics import find_metric
from terarec.spec import TrainingSpec


class EarlyStopping:
    """Compares evaluations by a metric and counts those in a row that bring no improvement.

    Attributes:
        monitor: Name of the metric.
        is_higher_better: Whether the best value is the highest.
        best_step: Step of the best evaluation; None before the first one.
        best_value: Its metric.

    Args:
        spec: ``patience`` and ``min_delta``.
        monitor: Name of the metric.
    """

    def __init__(self, spec: TrainingSpec, monitor: str) -> None:
        self.monitor = monitor
        self.is_higher_better = find_metric(monitor).higher_is_better
        self.best_step: int | None = None
        self.best_value: float | None = None
        self._spec = spec
        self._reference: float | None = None  # what an improvement is measured from
        self._num_without_improvement = 0

    @property
    def is_over(self) -> bool:
        """Whether patience is at its end."""
        patience = self._spec.patience
        return patience is not None and self._num_without_improvement >= patience

    def update(self, step: int, value: float, *, counts: bool) -> None:
        """Take in the metric `value` after `step` steps; NaN is no improvement.

        Args:
            step: Steps done.
            value: The metric of the model then.
            counts: Whether the evaluation uses up patience. It may be the best one in any case.
        """
        if self._is_better(value, self.best_value, 0.0):
            self.best_step, self.best_value = step, value
        if not counts:
            return
        if self._is_better(value, self._reference, self._spec.min_delta):
            self._reference, self._num_without_improvement = value, 0
        else:
            self._num_without_improvement += 1

    def state_dict(self) -> dict[str, Any]:
        """Return the state as JSON data."""
        return {
            "best_step": self.best_step,
            "best_value": self.best_value,
            "reference": self._reference,
            "num_without_improvement": self._num_without_improvement,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state_dict` returned."""
        self.best_step, self.best_value = state["best_step"], state["best_value"]
        self._reference, self._num_without_improvement = state["reference"], state["num_without_improvement"]

    def _is_better(self, value: float, than: float | None, by: float) -> bool:
        if not math.isfinite(value):
            return False
        if than is None:
            return True
        return value > than + by if self.is_higher_better else value < than - by


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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._restore()

    def _receive(self, number: int, _frame: FrameType | None) -> None:
        self.received = signal.Signals(number).name
        self._restore()

    def _restore(self) -> None:
        while self._before:
            number, handler = self._before.popitem()
            signal.signal(number, handler)
