# SPDX-License-Identifier: Apache-2.0
"""`Model.fit`: training by iterations, epochs or passes, with the release's actions between iterations."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

from typing_extensions import override

from terarec.errors import RunInterruptedError
from terarec.hugectr.compilation import Compiled
from terarec.hugectr.enums import MetricsType
from terarec.hugectr.errors import LossCannotConvergeError, WrongInputError, as_hugectr_errors
from terarec.hugectr.log import FitLog
from terarec.hugectr.objects import DataReaderParams, Solver, TrainingCallback
from terarec.hugectr.schedule import LearningRateScheduler, cadence_of
from terarec.hugectr.training_cache import TrainingCache
from terarec.train import Callback, Trainer

_LOGGER = logging.getLogger(__name__)


class FittedModel(Protocol):
    """The calls of `terarec.hugectr.Model` that fitting makes."""

    solver: Solver

    @property
    def reader_params(self) -> DataReaderParams:
        """The parameters of the data."""
        ...

    def start_data_reading(self) -> None:
        """Start both readers."""
        ...

    def eval(self) -> bool:
        """Update the metrics with one batch; return False at the end of the data."""
        ...

    def save_params_to_files(self, prefix: str, iter: int = 0) -> None:  # noqa: A002 - HugeCTR's name
        """Write weights and optimizer states."""
        ...

    def get_learning_rate_scheduler(self) -> LearningRateScheduler:
        """Return the schedule."""
        ...

    def trainable_lines(self) -> list[str]:
        """Return the lines of the log about frozen parts."""
        ...


class LearningRate(Callback):
    """Setter of the learning rate of each iteration, by the model's schedule.

    Args:
        model: A compiled model.
    """

    def __init__(self, model: FittedModel) -> None:
        self._model = model

    @override
    def on_step_start(self, trainer: Trainer) -> None:
        trainer.optimizers.lr = self._model.get_learning_rate_scheduler().get_next()

    @override
    def on_epoch_end(self, trainer: Trainer) -> None:
        # HugeCTR's loop makes a step for the call that finds no more data.
        if not _repeats(trainer) and not trainer.is_stopped:
            self.on_step_start(trainer)


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
    """Counter of iterations, which displays, evaluates and saves at the same iterations as the release.

    Attributes:
        index: Number of the last iteration, from 0; -1 before the first.
        of_what: The length of the training, in the line of a target that was hit.

    Args:
        model: The model.
        compiled: The compiled model.
        log: Output of `fit`.
        every: Intervals of displays, evaluations and snapshots.
        has_target: Whether the AUC of the solver's metrics ends the training.
        checks_loss: Whether displays show the loss, and raise for NaN.
    """

    def __init__(
        self,
        model: FittedModel,
        compiled: Compiled,
        log: FitLog,
        every: Intervals,
        *,
        has_target: bool,
        checks_loss: bool,
    ) -> None:
        self.index = -1
        self.of_what = ""
        self._model, self._compiled, self._log, self._every = model, compiled, log, every
        self._checks_loss = checks_loss
        self._cadence = cadence_of(model.solver.compat_release)
        self._target = model.solver.metrics_spec.get(MetricsType.AUC, math.inf) if has_target else math.inf

    @override
    def on_step(self, trainer: Trainer) -> None:
        """Display, evaluate and save if they are due after an iteration."""
        self.index += 1
        self._log_progress(trainer)
        # HugeCTR's loop returns at its target, so the iteration that reaches it writes no snapshot.
        if self._cadence.shows(self.index, self._every.evaluation) and self._evaluate():
            trainer.stop()
        elif self._cadence.saves(self.index, self._every.snapshot):
            self._model.save_params_to_files(self._every.snapshot_prefix, self._cadence.saved_number(self.index))

    @override
    def on_epoch_end(self, trainer: Trainer) -> None:
        # The call that finds no more data counts as an iteration, in every release.
        if not _repeats(trainer) and not trainer.is_stopped:
            self.on_step(trainer)

    def _evaluate(self) -> bool:
        """Evaluate; return whether a callback or the AUC target ends the training."""
        solver = self._model.solver
        # Releases that have callbacks call them in training by iterations alone.
        callbacks = solver.training_callbacks if solver.repeat_dataset else []
        for callback in callbacks:
            callback.on_eval_start(self.index)  # its result means nothing in HugeCTR
        metrics = self._measure()
        # All callbacks are called before a request to stop is followed.
        stop_requests = [callback.on_eval_end(self.index, dict(metrics)) for callback in callbacks]
        if self._is_requested(stop_requests):
            return True
        is_hit = metrics.get("AUC", -math.inf) > self._target
        if is_hit:
            self._log.hit(self._target, self.index, self.of_what)  # this line counts from 0 in every release
        return is_hit

    def _is_requested(self, stop_requests: Sequence[bool]) -> bool:
        """Return whether a callback ends the training, on any rank: the others would wait for one that ends alone."""
        if not stop_requests:
            return False
        return not self._compiled.trainer.ranks.agree("callbacks of a script", not any(stop_requests))

    def _measure(self) -> dict[str, float]:
        """Evaluate and print at most ``max_eval_batches`` batches; in epochs, at most to the end of the data."""
        began = time.perf_counter()
        solver = self._model.solver
        for _ in range(solver.max_eval_batches):
            if not self._model.eval():
                break
        if not solver.repeat_dataset:
            self._compiled.eval_reader.set_source()
        metrics = dict(self._compiled.evaluation.finish())
        self._log.metrics(metrics, self._compiled.evaluation.class_aucs, time.perf_counter() - began)
        return metrics

    def _log_progress(self, trainer: Trainer) -> None:
        if not self._cadence.shows(self.index, self._every.display):
            return
        last = trainer.last_loss if self._checks_loss else None
        # The line has a loss in any case: scripts parse it by its fields.
        loss = 0.0 if last is None else float(last)
        if math.isnan(loss):
            raise LossCannotConvergeError(
                "fit",
                f"the loss of iteration {self._cadence.number(self.index)} is NaN: it cannot converge, expected a "
                "number; a lower learning rate may help",
            )
        self._log.progress(self._cadence.number(self.index), self._every.display, loss, trainer.optimizers.lr)


class ScriptCallbacks(Callback):
    """Caller of a script's ``TrainingCallback`` objects when training by iterations starts and when it ends.

    Args:
        callbacks: These objects.
        iterations: The count of iterations.
        log: Output of `fit`.
    """

    def __init__(self, callbacks: Sequence[TrainingCallback], iterations: Iterations, log: FitLog) -> None:
        self._callbacks = callbacks
        self._iterations, self._log = iterations, log

    @override
    def on_start(self, trainer: Trainer) -> None:
        for callback in self._callbacks:
            callback.on_training_start()

    @override
    def on_finish(self, trainer: Trainer) -> None:
        if not trainer.is_stopped:
            self._log.finish(f"{self._iterations.of_what} with batchsize:")
        for callback in self._callbacks:
            callback.on_training_end(self._iterations.index)


def _repeats(trainer: Trainer) -> bool:
    return trainer.reader is not None and trainer.reader.repeat


class Fit:
    """One call of `Model.fit`.

    Attributes:
        iterations: Count of iterations.
        is_running: Whether it trains now.

    Args:
        model: The model.
        compiled: The compiled model.
        every: Intervals of the work between iterations.
        cache: The training cache, which makes passes of epochs; None for none.
        num_epochs: Times over the data, with ``repeat_dataset=False``.
        max_iter: Iterations, with ``repeat_dataset=True``.

    Raises:
        WrongInputError: A number of epochs or iterations that is not above 0, in the mode that needs it, or another
            number of keysets than sources.
    """

    def __init__(
        self,
        model: FittedModel,
        compiled: Compiled,
        every: Intervals,
        cache: TrainingCache | None,
        *,
        num_epochs: int,
        max_iter: int,
    ) -> None:
        solver, params = model.solver, model.reader_params
        self._train_all: Callable[[], None]
        if solver.repeat_dataset:
            if max_iter <= 0:
                raise WrongInputError("fit: max_iter", f"got {max_iter}, expected more than 0 with repeat_dataset=True")
            self._train_all = partial(self._by_iterations, max_iter)
        elif cache is not None:
            if len(params.keyset) != len(params.source):
                raise WrongInputError(
                    "fit", f"got {len(params.keyset)} keysets, expected one for each of {params.source}"
                )
            # HugeCTR's loop over passes writes no snapshots.
            every = replace(every, snapshot=0)
            self._train_all = partial(self._by_passes, max(1, num_epochs), cache)
        else:
            if num_epochs <= 0:
                raise WrongInputError(
                    "fit: num_epochs", f"got {num_epochs}, expected more than 0 with repeat_dataset=False"
                )
            self._train_all = partial(self._by_epochs, num_epochs)
        self._model, self._compiled, self._every = model, compiled, every
        self._log = FitLog(solver)
        self.iterations = Iterations(
            model,
            compiled,
            self._log,
            every,
            has_target=solver.repeat_dataset or cache is None,
            checks_loss=solver.gen_loss_summary or not solver.repeat_dataset,
        )
        self.is_running = self._was_warned = False

    def run(self) -> None:
        """Train by iterations with ``repeat_dataset=True``, else by passes with a training cache, else by epochs."""
        self._train_all()

    def _by_iterations(self, count: int) -> None:
        """Train for `count` iterations over data that repeats, or until a callback or the AUC target ends it."""
        self._print_header(f"Use non-epoch mode with number of iterations: {count}")
        self.iterations.of_what = f"{count} iterations"
        self._model.start_data_reading()
        trainer = self._compiled.trainer
        # The trainer counts the steps of all calls of `fit`, HugeCTR those of one.
        trainer.spec = replace(trainer.spec, repeat=True, max_steps=trainer.step + count)
        self._train(ScriptCallbacks(self._model.solver.training_callbacks, self.iterations, self._log))

    def _by_epochs(self, count: int) -> None:
        """Train `count` times over the data, or until the AUC target is passed; the numbers of iterations continue."""
        self._print_header(f"Use epoch mode with number of epochs: {count}")
        self._compiled.eval_reader.set_source()
        for epoch in range(count):
            self._log.epoch(epoch)
            self.iterations.of_what = f"{count} epochs, epoch {epoch},"
            self._train_epoch(self._model.reader_params.source[0])
            if self._compiled.trainer.is_stopped:
                return
        self._print_end(count)

    def _by_passes(self, count: int, cache: TrainingCache) -> None:
        """Train over each source with its keyset in the training cache, `count` times; no snapshots, no target."""
        params = self._model.reader_params
        self._print_header(f"Use training cache mode with number of epochs: {count}")
        self._compiled.eval_reader.set_source()
        # Flat over all epochs, so that the pass after the last one of an epoch is known for reading ahead.
        keysets = params.keyset * count
        for epoch in range(count):
            self._log.epoch(epoch)
            for number, source in enumerate(params.source, epoch * len(params.source)):
                cache.begin_pass(keysets[number], next(iter(keysets[number + 1 :]), None))
                self._train_epoch(source)
        self._print_end(count)

    def _train_epoch(self, source: str) -> None:
        """Train once over `source`."""
        reader, trainer = self._compiled.train_reader, self._compiled.trainer
        reader.set_source(source)
        if reader.has_no_batch and not self._was_warned:
            self._was_warned = True
            _LOGGER.warning(
                "fit: %s holds fewer samples than a batch of %d, and drop_incomplete_batch=True leaves them out: there "
                "is no iteration, as in HugeCTR; expected a smaller batchsize, or drop_incomplete_batch=False",
                source,
                self._model.solver.batchsize,
            )
        trainer.begin_epoch()
        # One epoch more than the trainer has done in all calls.
        trainer.spec = replace(trainer.spec, repeat=False, max_steps=None, epochs=trainer.epoch + 1)
        self._train()
        if not trainer.is_stopped:
            reader.next_batch()  # finds the end, so that the next epoch has an order of its own

    def _train(self, *callbacks: Callback) -> None:
        """Run the trainer with the actions around an iteration.

        Raises:
            KeyboardInterrupt: Ctrl-C ended it after a complete iteration.
            RunInterruptedError: SIGTERM did.
        """
        trainer, reader = self._compiled.trainer, self._compiled.train_reader
        # In this order, a step that overfilled a workspace raises before it is displayed, evaluated or saved.
        trainer.callbacks = [LearningRate(self._model), self._compiled.capacity_check, self.iterations, *callbacks]
        self.is_running = True
        try:
            with as_hugectr_errors("train"):
                trainer.fit(reader)
        except RunInterruptedError:
            if trainer.interrupted_by == "SIGINT":
                raise KeyboardInterrupt from None
            raise
        finally:
            self.is_running = False
            is_ahead = trainer.device.type != "cpu" or trainer.ranks.size > 1 or trainer.tier_use() is not None
            if reader.repeat and is_ahead and trainer.reader is not None:
                # More batches were drawn, to copy them, send their keys or read their rows, and were not trained on.
                reader.load_state_dict(trainer.reader_state())

    def _print_header(self, mode: str) -> None:
        params = self._model.reader_params
        sources = (params.source[0], params.eval_source)
        intervals = (self._every.evaluation, self._every.snapshot)
        self._log.header(mode, sources, self._model.trainable_lines(), intervals)

    def _print_end(self, num_epochs: int) -> None:
        self._log.finish(f"{num_epochs} epochs {self.iterations.index + 1} global iterations with batchsize")
