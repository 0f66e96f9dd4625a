"""Work of `Model.fit` around each iteration, as callbacks of `terarec.train.Trainer`."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from terarec.hugectr.enums import MetricsType
from terarec.hugectr.errors import LossCannotConvergeError, OutOfBoundError
from terarec.hugectr.log import FitLog
from terarec.hugectr.schedule import cadence_of
from terarec.models import GraphModel
from terarec.train import Callback, Trainer

if TYPE_CHECKING:
    from terarec.hugectr.model import Model


class LearningRate(Callback):
    """Gives each iteration the rate of the model's schedule.

    Args:
        model: A compiled model.
    """

    def __init__(self, model: Model) -> None:
        self._model = model

    def on_step_start(self, trainer: Trainer) -> None:
        """Set the next rate."""
        trainer.optimizers.lr = self._model.get_learning_rate_scheduler().get_next()

    def on_epoch_end(self, trainer: Trainer) -> None:
        """Advance by a step for the call of HugeCTR's loop that finds no more data."""
        if not _repeats(trainer) and not trainer.is_stopped:
            self.on_step_start(trainer)


class CapacityCheck(Callback):
    """Raises for more keys in an embedding than its workspace has room for.

    Args:
        model: The graph.
        capacities: Name of an embedding -> most keys.
    """

    def __init__(self, model: GraphModel, capacities: Mapping[str, int]) -> None:
        self._checks = [(name, list(model.collection(name).tables.values()), most) for name, most in capacities.items()]

    def on_step(self, trainer: Trainer) -> None:
        """Count the keys.

        Raises:
            OutOfBoundError: There are too many.
        """
        for name, tables, most in self._checks:
            count = sum(map(len, tables))
            if count > most:
                raise OutOfBoundError(
                    f"SparseEmbedding {name!r}",
                    f"holds {count:,} keys, expected at most {most:,}, for which its workspace or sizes give "
                    "room; give it more (HUGECTR_DISABLE_OVERFLOW_CHECK=1 turns this check off)",
                )


@dataclass(frozen=True, kw_only=True, slots=True)
class Intervals:
    """Intervals of the work between iterations.

    Attributes:
        display: Iterations between messages; 0 for none.
        evaluation: Iterations between evaluations; 0 for none.
        snapshot: Iterations between snapshots; 0 for none.
        snapshot_prefix: Start of the snapshots' names.
    """

    display: int
    evaluation: int
    snapshot: int
    snapshot_prefix: str


class Iterations(Callback):
    """Counts iterations, and displays, evaluates and saves when the release does.

    Attributes:
        index: Number of the last iteration, from 0; -1 before the first.
        of_what: The length of the training, in the line of a target that was hit.

    Args:
        model: A compiled model.
        log: What is printed.
        every: How often.
        has_target: Whether the AUC of the solver's metrics ends the training.
        checks_loss: Whether displays show the loss, and raise for NaN.
    """

    def __init__(
        self,
        model: Model,
        log: FitLog,
        every: Intervals,
        *,
        has_target: bool = True,
        checks_loss: bool = True,
    ) -> None:
        self.index = -1
        self.of_what = ""
        self._model, self._log, self._every = model, log, every
        self._checks_loss = checks_loss
        self._cadence = cadence_of(model.solver.compat_release)
        self._target = model.solver.metrics_spec.get(MetricsType.AUC, math.inf) if has_target else math.inf

    def on_step(self, trainer: Trainer) -> None:
        """Do what is due after an iteration.

        Raises:
            LossCannotConvergeError: The loss that a display shows is NaN.
        """
        self.index += 1
        self._log_progress(trainer)
        if self._cadence.shows(self.index, self._every.evaluation) and self._evaluate():
            trainer.stop()
        elif self._cadence.saves(self.index, self._every.snapshot):
            self._model.save_params_to_files(self._every.snapshot_prefix, self._cadence.saved_number(self.index))

    def on_epoch_end(self, trainer: Trainer) -> None:
        """Count the call that finds no more data, where the release does."""
        if self._cadence.counts_end and not _repeats(trainer) and not trainer.is_stopped:
            self.on_step(trainer)

    def _evaluate(self) -> bool:
        """Evaluate; return whether a callback or the AUC target ends the training."""
        solver = self._model.solver
        callbacks = solver.training_callbacks if solver.repeat_dataset else []
        # All callbacks are called before a request to stop is followed.
        stop_requests = [callback.on_eval_start(self.index) for callback in callbacks]
        if any(stop_requests):
            return True
        found = self._measure()
        stop_requests = [callback.on_eval_end(self.index, dict(found)) for callback in callbacks]
        if any(stop_requests):
            return True
        is_hit = found.get("AUC", -math.inf) > self._target
        if is_hit:
            self._log.hit(self._target, self._cadence.number(self.index), self.of_what)
        return is_hit

    def _measure(self) -> dict[str, float]:
        """Evaluate and print at most ``max_eval_batches`` batches; in epochs, the end of the data ends it, too."""
        began = time.perf_counter()
        solver = self._model.solver
        for _ in range(solver.max_eval_batches):
            if not self._model.eval():
                break
        if not solver.repeat_dataset:
            self._model.get_data_reader_eval().set_source()
        found = dict(self._model.get_eval_metrics())
        self._log.metrics(found, self._model.class_aucs(), time.perf_counter() - began)
        return found

    def _log_progress(self, trainer: Trainer) -> None:
        if not self._cadence.shows(self.index, self._every.display):
            return
        loss = self._model.get_current_loss() if self._checks_loss else 0.0
        if math.isnan(loss):
            raise LossCannotConvergeError(
                "fit",
                f"the loss of iteration {self._cadence.number(self.index)} is NaN: it cannot converge, expected a "
                "number; a lower learning rate may help",
            )
        self._log.progress(self._cadence.number(self.index), self._every.display, loss, trainer.optimizers.lr)


class ScriptCallbacks(Callback):
    """Calls a script's ``TrainingCallback`` objects when training by iterations starts and when it ends.

    Args:
        model: A compiled model.
        iterations: The count of iterations.
        log: What is printed.
    """

    def __init__(self, model: Model, iterations: Iterations, log: FitLog) -> None:
        self._callbacks = model.solver.training_callbacks
        self._iterations, self._log = iterations, log

    def on_start(self, trainer: Trainer) -> None:
        """Call ``on_training_start``."""
        for callback in self._callbacks:
            callback.on_training_start()

    def on_finish(self, trainer: Trainer) -> None:
        """Print the end, unless something ended it early, and call ``on_training_end``."""
        if not trainer.is_stopped:
            self._log.finish(f"{self._iterations.of_what} with batchsize:")
        for callback in self._callbacks:
            callback.on_training_end(self._iterations.index)


def _repeats(trainer: Trainer) -> bool:
    return trainer.reader is not None and trainer.reader.repeat
