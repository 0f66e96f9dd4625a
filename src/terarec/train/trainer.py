# SPDX-License-Identifier: Apache-2.0
"""The training loop and its callbacks."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from functools import partial
from itertools import islice
from typing import Any, cast

import torch
from torch import Tensor, nn

from terarec.batch import Batch
from terarec.data.reader import BatchReader, InMemorySource, Reader
from terarec.dist.ranks import Ranks
from terarec.errors import ConfigError, RunInterruptedError, TerarecError
from terarec.formats.frames import Frame, is_frame
from terarec.kernels import memory
from terarec.memory.fast_tier import TierUse
from terarec.metrics.means import Throughput
from terarec.metrics.samples import NamesOfIds
from terarec.models.contract import check_labels, device_of
from terarec.nn.objectives import BinaryObjective, Objective
from terarec.nn.precision import warn_if_slow
from terarec.optim import freeze
from terarec.spec import DatasetSpec, TrainingSpec
from terarec.train.devices import ReadBatch, batches_on, share_of_reader, tier_use
from terarec.train.evaluation import Evaluation, Evaluator
from terarec.train.optimizers import Optimizers
from terarec.train.ranks_step import RanksStep, share_batches
from terarec.train.step import StepInput, TrainingStep
from terarec.train.stopping import EarlyStopping, FitReport, Interrupts, is_other_measure


class Callback:
    """Called by `Trainer.fit`; every hook does nothing unless overridden.

    What a hook raises ends the training, as it was after the last step: a `Run` still saves that step.

    The trainer's ``step``, ``epoch``, ``samples`` and ``loss`` say how far it is.

    Attributes:
        is_for_first_rank: Whether a `Run` on several ranks calls it on the first one alone, as one that prints or logs;
            it must not change the training then. Others are called on all ranks, and what `stop` or an exception ends
            on one rank it ends on all.
    """

    is_for_first_rank = False

    def on_start(self, trainer: Trainer) -> None:
        """Called when `fit` begins, from the first step or from a restored state."""

    def on_step_start(self, trainer: Trainer) -> None:
        """Called after a batch was read and before its step, for which learning rates may still be set."""

    def on_step(self, trainer: Trainer) -> None:
        """Called after a step, and after its evaluation if one was due."""

    def on_evaluation(self, trainer: Trainer, evaluation: Evaluation) -> None:
        """Called after the validation split was scored, and before `on_step` of that step."""

    def on_epoch_end(self, trainer: Trainer) -> None:
        """Called after the last batch of an epoch, which ``trainer.epoch`` counts already."""

    def on_interrupt(self, trainer: Trainer) -> None:
        """Called when a signal stops the training after a complete step; `on_end` follows."""

    def on_finish(self, trainer: Trainer) -> None:
        """Called after the last step; `on_end` follows."""

    def on_error(self, trainer: Trainer) -> None:
        """Called when a hook, the reader or an evaluation raises between two steps; `on_end` follows."""

    def on_end(self, trainer: Trainer) -> None:
        """Called when `fit` ends, with or without an error: release resources."""


_logger = logging.getLogger(__name__)


def steps_of_epoch(spec: TrainingSpec, reader: BatchReader) -> int:
    """Return the steps of an epoch over `reader`."""
    return -(-len(reader) // spec.accumulate)


def steps_of_run(spec: TrainingSpec, steps_per_epoch: int) -> int:
    """Return the steps of a complete training, unless patience ends it earlier."""
    by_epochs, most = spec.epochs * steps_per_epoch, spec.max_steps
    if spec.repeat:
        return most or 0
    return by_epochs if most is None else min(by_epochs, most)


class Trainer:
    """Trains a model: its layers by a `torch.optim` optimizer, the rows of its tables by a `RowOptimizer`.

    It trains where the model is: batches are copied there, on a GPU ahead of the compute.

    Attributes:
        step: Steps done, those of `first_step` included.
        first_step: Steps of the training whose chain of checkpoints this one extends; 0 for one that extends none.
        epoch: Epochs done.
        samples: Samples done.
        evaluation: The last one of this object, or None.
        saving_seconds: Time that `callbacks` took to save checkpoints.
        highest_auc: Highest AUC so far, or None.
        early_stopping: The best evaluation so far, and whether training stops since none improved on it.
        evaluator: Computes the metrics of a split.
        reader: The train reader while `fit` runs.
        ranks: The processes that train together.
        dataset: The columns of tables in memory that `evaluate` takes.

    Args:
        model: Batch -> logits [B, C]; `terarec.models.contract` lists what else a model may have.
        spec: Settings of the training.
        optimizers: Optimizers over the model's parameters and tables, made where the model is.
        objective: The loss and the scores of models that return logits; binary cross entropy by default.
        labels: Names of the labels in evaluations; numbers by default.
        callbacks: Callbacks, called in this order.
        check_loss: Whether a loss that is NaN or infinite raises; otherwise training continues.
        dataset: The columns of tables in memory that `evaluate` takes; None for readers alone.
        ranks: The processes that train together, each of which has such a trainer and reads the same batches: a rank
            trains on its share of each. None for this process alone.
        names: Names of the ids in the slice columns of evaluations; None to report the ids.

    Raises:
        ConfigError: A metric or a pattern of frozen names that nothing has, or with several ranks a loss or layer that
            compares samples with each other.

    Example:
        >>> model = build_model(DeepFMSpec(), reader.spec)
        >>> optimizers = Optimizers.of(model, AdamSpec(lr=1e-3), AdaGradSpec(lr=1e-2))
        >>> Trainer(model, TrainingSpec(epochs=2), optimizers).fit(reader, valid_reader)
    """

    def __init__(
        self,
        model: nn.Module,
        spec: TrainingSpec,
        optimizers: Optimizers,
        *,
        objective: Objective | None = None,
        labels: Sequence[str] = (),
        callbacks: Sequence[Callback] = (),
        check_loss: bool = True,
        dataset: DatasetSpec | None = None,
        ranks: Ranks | None = None,
        names: NamesOfIds | None = None,
    ) -> None:
        self.model = model
        self.dataset = dataset
        self.ranks = ranks or Ranks()
        self.spec = spec
        self.optimizers = optimizers
        self.objective: Objective = objective or BinaryObjective()
        self.callbacks = list(callbacks)
        self._labels = tuple(labels)
        self.device = device_of(model)
        # Before the model is compiled and its parameters are listed: it may replace layers.
        share_batches(model, self.objective, self.ranks)
        make_step = TrainingStep if self.ranks.size == 1 else partial(RanksStep, ranks=self.ranks)
        self._stepping: TrainingStep = make_step(
            model, spec, optimizers, self.objective, device=self.device, check_loss=check_loss
        )
        self.evaluator = Evaluator.of(spec, self.objective, labels, ranks=self.ranks, names=names)
        self.step = self.first_step = self.epoch = self.samples = 0
        self.evaluation: Evaluation | None = None
        self.highest_auc: float | None = None
        self._auc_measure: str | None = None  # of a loaded one, which a training without evaluations passes on
        self.early_stopping = EarlyStopping.of(spec, self.evaluator.monitors)
        self.reader: BatchReader | None = None
        self._reader_state: dict[str, Any] | None = None
        self._steps_per_epoch = 0
        self._steps_in_epoch: int | None = 0
        # Not 0: a training of no steps is evaluated, too.
        self._evaluated_step = -1
        self._is_in_step = self._is_stopped = False
        self._highest_loss: Tensor | None = None
        self.saving_seconds = 0.0
        self._evaluation_seconds = 0.0
        self._tiers_before: TierUse | None = None
        self._interrupts = Interrupts()
        if spec.freeze:
            freeze(model, spec.freeze, rows=optimizers.rows)

    @property
    def loss(self) -> float:
        """The loss of the last step's batch; NaN before the first step."""
        return math.nan if self.last_loss is None else float(self.last_loss)

    @property
    def last_loss(self) -> Tensor | None:
        """The loss of the last step as a scalar on the model's device, which reads without waiting for a GPU."""
        return self._stepping.loss

    @property
    def output(self) -> object:
        """Output of the model for the last step's last batch."""
        return self._stepping.output

    @property
    def steps_per_epoch(self) -> int:
        """Steps in an epoch; 0 before `fit`."""
        return self._steps_per_epoch

    @property
    def total_steps(self) -> int:
        """The last step of the complete run; 0 before `fit`."""
        return self.first_step + steps_of_run(self.spec, self.steps_per_epoch)

    @property
    def is_stopped(self) -> bool:
        """Whether `stop` ends the running `fit`, or has ended the last one."""
        return self._is_stopped

    @property
    def interrupted_by(self) -> str | None:
        """The signal that ends the running `fit`, or has ended the last one, such as "SIGINT"; None without any."""
        return self._interrupts.received

    @property
    def last_epoch(self) -> int:
        """The epoch of the last step, counted from 1; 0 before the first step."""
        return self.epoch + (not self.is_epoch_end) if self._own_steps else 0

    @property
    def is_epoch_end(self) -> bool:
        """Whether the last step was the last one of an epoch."""
        return self._own_steps > 0 and self._steps_in_epoch == self.steps_per_epoch

    @property
    def _own_steps(self) -> int:
        return self.step - self.first_step

    def extend(self, step: int) -> None:
        """Count from `step` on, as the training does that this one extends. Before the first step."""
        self.step = self.first_step = step

    def fit(self, train_reader: BatchReader, valid_reader: BatchReader | None = None) -> FitReport:
        """Train until ``spec.epochs``, ``spec.max_steps`` or the end of ``spec.patience``, whichever comes first.

        Training continues from where this trainer is. The validation split is scored after every epoch, every
        ``spec.eval_every`` steps, and at the end. The first SIGINT (Ctrl-C) or SIGTERM lets the running step finish; a
        second one acts at once.

        Args:
            train_reader: One epoch per ``iter``, or an endless stream; after a restore, at its place then.
            valid_reader: The validation split, unshuffled.

        Raises:
            ConfigError: `train_reader` gives no batch, a schedule waits for a metric that no evaluation computes, or it
                reaches a rate of 0 by which an optimizer divides.
                At the end: the metric of early stopping, of the best checkpoint or of a plateau never had a value.
            TrainingError: The loss is NaN or infinite.
            RunInterruptedError: A signal stopped the training after a complete step.
        """
        if len(train_reader) == 0:
            raise ConfigError(
                "fit",
                "the train split gives no batch, expected rows, with drop_last at least as many as in a batch",
            )
        self.optimizers.check_metrics(self.evaluator.monitors if valid_reader is not None else ())
        warn_if_slow(self.spec.precision, self.device)
        self.reader, self._reader_state = train_reader, _state_of(train_reader)
        self._steps_per_epoch = steps_of_epoch(self.spec, train_reader)
        last_step = max(0, steps_of_run(self.spec, self.steps_per_epoch) - 1)
        self.optimizers.check_rates(last_step, last_step // self.steps_per_epoch)
        if self._steps_in_epoch is None:  # restored from a checkpoint that did not hold it
            self._steps_in_epoch = (self._own_steps - 1) % self.steps_per_epoch + 1 if self._own_steps else 0
        self._is_stopped = self._stepping.is_interrupted = False
        self._evaluation_seconds = 0.0
        self._tiers_before = tier_use(self.model)
        samples_before, throughput = self.samples, Throughput()
        try:
            with self.ranks.telling(), Interrupts() as self._interrupts:
                self._call("on_start")
                self._run(train_reader, valid_reader)
        # `on_interrupt` has saved the step already.
        except RunInterruptedError:
            raise
        except Exception as error:
            # A step that failed midway has updated a part of the rows and layers: that is not a state to save.
            if not self._is_in_step:
                try:
                    self._call_all("on_error")
                except TerarecError as second:  # such as a full disk; the first error is the one to report
                    _logger.warning("after %s: %s", type(error).__name__, second)
            raise
        finally:
            self._is_in_step = False
            self._call_all("on_end")
        if valid_reader is not None:
            # At the end, when the last step is saved: a later evaluation might have had a value.
            self.early_stopping.check_defined()
            self.optimizers.check_defined(self.early_stopping.monitor)
        samples, total_seconds = self.samples - samples_before, throughput.seconds
        seconds = total_seconds - self._evaluation_seconds
        return FitReport(
            steps=self._own_steps,
            last_step=self.step,
            samples=samples,
            seconds=seconds,
            total_seconds=total_seconds,
            samples_per_second=samples / seconds,
            loss=self.loss,
            device=str(self.device),
            evaluation=self.evaluation,
            highest_auc=self.highest_auc,
            best_step=self.early_stopping.best_step,
            best_metrics=self.early_stopping.best_metrics,
            stopped_early=self.early_stopping.is_over,
            peak_memory_bytes=memory.peak_bytes(),
            tiers=self.tier_use(),
        )

    def train_step(
        self, *batches: Batch, following: Batch | None = None, totals: Sequence[int] | None = None
    ) -> Tensor:
        """Run one step: forward, backward, and the update of the layers and of the touched rows.

        Args:
            batches: One batch, or several whose gradients are added up as if they were one.
            following: The first batch of the next step, whose keys ranks exchange during this one; None if unknown.
            totals: Samples of each batch on all ranks, where `batches` and `following` have those of this rank alone;
                None for batches with the samples of all.

        Returns:
            The mean loss before the update, a scalar without gradient.

        Raises:
            BudgetError: The tiers of tables are too small for the batches.
            TrainingError: The loss is NaN or infinite. On the CPU nothing was updated. On a GPU the loss of the step
                before is checked, so that the processor need not wait for this one's. With a dynamic loss scale the
                step is skipped instead.
        """
        sizes = [batch.batch_size for batch in batches] if totals is None else totals
        self._stepping.run(
            StepInput(
                number=self.step + 1,
                epoch=self.epoch + 1,
                batches=batches,
                sizes=sizes,
                is_own=totals is not None,
                following=following,
                is_interrupted=self._interrupts.received is not None,
            )
        )
        self.step += 1
        self.samples += sum(sizes)
        assert self._stepping.loss is not None, "a step has a loss"
        return self._stepping.loss

    def seed_rank(self) -> None:
        """Seed the random numbers of each rank but the first differently, such as for dropout."""
        if not self.ranks.is_first:
            # 2^64 divided by the golden ratio, as in SplitMix64, spreads the seeds of neighbouring ranks.
            torch.manual_seed((torch.initial_seed() + 0x9E3779B97F4A7C15 * self.ranks.rank + self.step) % 2**63)

    def stop(self) -> None:
        """End a running `fit` after the present step, as if it were the last one. For callbacks; all ranks call it.

        A `Run` lets the call of one rank hold for all.
        """
        self._is_stopped = True

    def begin_epoch(self) -> None:
        """Count the next batch as the first one of an epoch: for a reader that starts over before its end."""
        self._steps_in_epoch = 0

    def evaluate(self, data: BatchReader | Frame) -> Evaluation:
        """Score all samples of `data` with the present weights.

        Args:
            data: A reader; or a table of pandas, Polars or Arrow with the columns of `dataset` as shards have them.

        Raises:
            ConfigError: A table, and the trainer has no `dataset`.
            FormatError: A table that lacks a column, or has one of another type.
        """
        if not is_frame(data, "data"):
            return self.evaluator.evaluate(self._stepping.module, cast(BatchReader, data))
        if self.dataset is None:
            got = type(data).__name__
            raise ConfigError(
                "data", f"got a {got}, whose columns have no roles; expected a reader, or Trainer(dataset=)"
            )
        with closing(Reader(InMemorySource.of_table(self.dataset, data), batch_size=self.spec.batch_size)) as reader:
            return self.evaluator.evaluate(self._stepping.module, reader)

    def tier_use(self) -> TierUse | None:
        """Return the counters of the tables' tiers since the last `fit` began; None without tiers."""
        now, before = tier_use(self.model), self._tiers_before
        return now if now is None or before is None else now.minus(before)

    def reader_state(self) -> dict[str, Any]:
        """Return the state of the train reader after the last step's batch, as JSON data."""
        assert self.reader is not None, "only a running fit has a reader to save"
        return self.reader.state_dict() if self._reader_state is None else self._reader_state

    def state_dict(self) -> dict[str, Any]:
        """Return the progress of the training as JSON data."""
        return {
            "step": self.step,
            "first_step": self.first_step,
            "epoch": self.epoch,
            "samples": self.samples,
            "steps_in_epoch": self._steps_in_epoch,
            "highest_auc": self.highest_auc,
            "auc_measure": self.early_stopping.measure("auc") or self._auc_measure,
            "evaluated_step": self._evaluated_step,
            "early_stopping": self.early_stopping.state_dict(),
            "schedules": self.optimizers.schedule_state(),
            "schedule_measures": self.optimizers.schedule_measures(self.early_stopping.measure),
            "loss_scaler": self._stepping.scaler.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from the result of `state_dict`; what compares evaluations by another measure now begins anew.

        Raises:
            ConfigError: Another number of schedules.
        """
        measure, before = self.early_stopping.measure, self.early_stopping.measure_of(state["early_stopping"])
        if is_other_measure(before, measure()) and self.ranks.is_first:
            _logger.warning(
                "evaluations were compared by %s and now are by %s: early stopping and the best step begin anew",
                before,
                measure(),
            )
        # An earlier build has the names of metrics alone.
        measures_before = state.get("schedule_measures") or [
            metric and measure(metric) for metric in state.get("schedule_metrics", ())
        ]
        measures = zip(measures_before, self.optimizers.schedule_measures(measure), strict=False)
        self.optimizers.load_schedule_state(state["schedules"], [is_other_measure(*each) for each in measures])
        self.step, self.first_step = state["step"], state["first_step"]
        self.epoch, self.samples = state["epoch"], state["samples"]
        self._steps_in_epoch = state["steps_in_epoch"]
        if not is_other_measure(state.get("auc_measure"), measure("auc")):
            self.highest_auc, self._auc_measure = state["highest_auc"], state.get("auc_measure")
        self._evaluated_step = state["evaluated_step"]
        self.early_stopping.load_state_dict(state["early_stopping"])
        self._stepping.scaler.load_state_dict(state["loss_scaler"])

    def _run(self, train_reader: BatchReader, valid_reader: BatchReader | None) -> None:
        try:
            if valid_reader is not None and self._is_evaluation_due and self._evaluated_step != self.step:
                self._validate(valid_reader)  # a signal had stopped this evaluation
            while not self._is_over():
                self._run_epoch(train_reader, valid_reader)
            # Also for a finished run that is resumed: its evaluation is in the log, but not in this object.
            if valid_reader is not None and (self.evaluation is None or self._evaluated_step != self.step):
                self._validate(valid_reader)
        except _StopRequestedError:
            self._call("on_interrupt")
            which = self._interrupts.received or "a signal to another rank"
            raise RunInterruptedError(
                f"{which} after step {self.step} of {self.total_steps} (epoch {self.last_epoch})",
                signal=self._interrupts.received or "",
                step=self.step,
            ) from None
        self._call("on_finish")

    def _is_over(self) -> bool:
        spec = self.spec
        is_last = spec.max_steps is not None and self._own_steps >= spec.max_steps
        # One stream over all epochs ends by its number of steps, since its batches cross the epochs' borders.
        is_past = not spec.repeat and self.epoch >= spec.epochs
        return is_last or is_past or self._is_stopped or self.early_stopping.is_over

    def _run_epoch(self, train_reader: BatchReader, valid_reader: BatchReader | None) -> None:
        """Train on the batches that are left of an epoch, or on fewer if ``max_steps`` comes first."""
        # Ranks exchange the keys of the next step during this one, so they draw its batches first. Others draw them
        # after the callbacks: no batch is read after the last step, and an error of the reader finds this one
        # complete.
        is_ahead = self._stepping.exchanges_keys
        is_shared = share_of_reader(train_reader) is not None
        # Closed here: threads that still read rows ahead would change tables that the caller uses next.
        check = partial(check_labels, self.model, self.objective, self._labels)
        with closing(batches_on(train_reader, self.device, self.model, is_ahead=is_ahead, check=check)) as batches:
            if not self._train_on(train_reader, batches, valid_reader, is_ahead=is_ahead, is_shared=is_shared):
                return
        if not self.is_epoch_end:  # the reader left damaged records out, so it gave fewer batches than its length
            self._reader_state = _state_of(train_reader)  # an epoch without a batch has no step after which to note it
            self._steps_in_epoch = self.steps_per_epoch
            self._count_epoch()
            if valid_reader is not None and self._own_steps:
                self._validate(valid_reader)
            self._call("on_epoch_end")

    def _train_on(
        self,
        train_reader: BatchReader,
        batches: Iterator[tuple[Batch, ReadBatch]],
        valid_reader: BatchReader | None,
        *,
        is_ahead: bool,
        is_shared: bool,
    ) -> bool:
        """Train on `batches` of `train_reader`; return whether they ended before the run did."""
        following = list(islice(batches, self.spec.accumulate))
        while group := following:
            following = list(islice(batches, self.spec.accumulate)) if is_ahead else []
            # Until the step begins all is as after the one before, which an error of the callbacks saves.
            self._call("on_step_start")
            if self.is_epoch_end:
                self._steps_in_epoch = 0
            self._is_in_step = True
            loss = self.train_step(
                *(batch for batch, _ in group),
                following=following[0][0] if following else None,
                totals=[read.rows for _, read in group] if is_shared else None,
            )
            # On its device, so that no step waits for it.
            self._highest_loss = loss.abs() if self._highest_loss is None else loss.abs().maximum(self._highest_loss)
            # That of the batches trained on, not of those that are read ahead, or that the next step reads.
            self._reader_state = group[-1][1].state or _state_of(train_reader)
            self._steps_in_epoch = (self._steps_in_epoch or 0) + 1
            # Counted within the step: a checkpoint saved after an error must not lack the epoch that the step ended.
            if self.is_epoch_end:
                self._count_epoch()
            self._is_in_step = False
            if valid_reader is not None and (self._is_evaluation_due or self.step >= self.total_steps):
                self._validate(valid_reader)
            self._call("on_step")
            if self.is_epoch_end:
                self._call("on_epoch_end")
            self._stop_if_requested()
            if self._is_over():
                return False
            if not is_ahead:
                following = list(islice(batches, self.spec.accumulate))
        return True

    def _count_epoch(self) -> None:
        self.epoch += 1
        if self.ranks.is_first and self._highest_loss is not None and not bool(self._highest_loss):
            _logger.warning(
                "nothing was learned in epoch %d: no sample has a loss, expected such as labels above 0 and histories",
                self.epoch,
            )
        self._highest_loss = None
        self.optimizers.advance("epoch")

    @property
    def _is_evaluation_due(self) -> bool:
        every = self.spec.eval_every
        return self.is_epoch_end or (every is not None and self._own_steps > 0 and self.step % every == 0)

    def _validate(self, reader: BatchReader) -> None:
        """Score the validation split and call `on_evaluation`."""
        is_repeated = self._evaluated_step == self.step
        evaluation = self.evaluator.evaluate(
            self._stepping.module, reader, progress=lambda _samples: self._stop_if_requested()
        )
        self.evaluation, self._evaluated_step = evaluation, self.step
        self._evaluation_seconds += evaluation.seconds
        if not math.isnan(evaluation.auc):
            self.highest_auc = max(evaluation.auc, self.highest_auc or 0.0)
        # An evaluation that only max_steps made due is none of a longer run, whose patience must be the same.
        counts = self._is_evaluation_due and not is_repeated
        value = evaluation.value(self.early_stopping.monitor)
        self.early_stopping.update(self.step, value, counts=counts, metrics=evaluation.results.named_values())
        if counts:
            monitor = self.early_stopping.monitor
            self.optimizers.advance("evaluation", lambda metric: evaluation.value(metric or monitor))
        for callback in self.callbacks:
            callback.on_evaluation(self, evaluation)

    def _stop_if_requested(self) -> None:
        if self.ranks.size > 1:  # they stop after the same step
            if self._stepping.is_interrupted:
                raise _StopRequestedError
        elif self._interrupts.received is not None:
            raise _StopRequestedError

    def _call(self, hook: str) -> None:
        for callback in self.callbacks:
            getattr(callback, hook)(self)

    def _call_all(self, hook: str) -> None:
        """Call `hook` of every callback, whatever one of them raises."""
        with ExitStack() as stack:
            # An `ExitStack` runs what it holds in reverse order, and continues after an exception.
            for callback in reversed(self.callbacks):
                stack.callback(getattr(callback, hook), self)


def _state_of(reader: BatchReader) -> dict[str, Any] | None:
    """Return the present state of a reader; None of a list of batches, which has none."""
    state_dict: Callable[[], dict[str, Any]] | None = getattr(reader, "state_dict", None)
    return None if state_dict is None else state_dict()


class _StopRequestedError(Exception):
    """A signal came; unwinds to `Trainer._run`."""
