"""The training loop."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any, Protocol

from torch import nn, optim

from terarec.batch import Batch
from terarec.errors import ConfigError, RunInterruptedError, TerarecError, TrainingError
from terarec.kernels import memory
from terarec.metrics import Throughput
from terarec.nn import logistic_loss
from terarec.optim import RowOptimizer
from terarec.spec import TrainingSpec
from terarec.train.callback import Callback
from terarec.train.early_stopping import EarlyStopping
from terarec.train.evaluation import Evaluation, evaluate
from terarec.train.fit_report import FitReport
from terarec.train.interrupt import Interrupts
from terarec.train.precision import autocast, warn_if_slow

_logger = logging.getLogger(__name__)


class BatchReader(Protocol):
    """What `Trainer.fit` needs of a reader such as `terarec.data.Reader`: one epoch per ``iter``, replayable."""

    def __iter__(self) -> Iterator[Batch]:
        """The batches of an epoch, or of the rest of one after `load_state_dict`."""

    def __len__(self) -> int:
        """Batches in an epoch."""

    def state_dict(self) -> dict[str, Any]:
        """The place after the last batch given, as JSON data."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from such a place at the next ``iter``."""


class Trainer:
    """Trains a model: dense parameters through `torch.optim`, table rows through `RowOptimizer`.

    Attributes:
        step: steps done.
        epoch: epochs done.
        samples: samples done.
        loss: of the last step's batch.
        evaluation: the last one of this object, or None.
        highest_auc: highest AUC so far, or None.
        early_stopping: the best evaluation so far, and whether training stops for want of a better one.
        reader: the train reader while `fit` runs.

    Args:
        model: Batch -> logits [B, L].
        spec: how long and how to train.
        dense_optimizer: over ``model.parameters()``.
        row_optimizer: over the model's tables; None for a model without.
        callbacks: called in this order.
    """

    def __init__(
        self,
        model: nn.Module,
        spec: TrainingSpec,
        dense_optimizer: optim.Optimizer,
        row_optimizer: RowOptimizer | None,
        callbacks: Sequence[Callback] = (),
    ) -> None:
        self.model = model
        self.spec = spec
        self.dense_optimizer = dense_optimizer
        self.row_optimizer = row_optimizer
        self.callbacks = list(callbacks)
        self.step = self.epoch = self.samples = 0
        self.loss = math.nan
        self.evaluation: Evaluation | None = None
        self.highest_auc: float | None = None
        self.early_stopping = EarlyStopping(spec)
        self.reader: BatchReader | None = None
        self._evaluated_step = -1
        self._is_in_step = False
        self._evaluation_seconds = 0.0
        self._interrupts = Interrupts()

    @property
    def total_steps(self) -> int:
        """Steps that the whole run will have; 0 before `fit`."""
        if self.reader is None:
            return 0
        by_epochs = self.spec.epochs * len(self.reader)
        return by_epochs if self.spec.max_steps is None else min(by_epochs, self.spec.max_steps)

    @property
    def last_epoch(self) -> int:
        """The epoch of the last step, counted from 1; 0 before the first step."""
        return 0 if self.reader is None else -(-self.step // len(self.reader))

    @property
    def is_epoch_end(self) -> bool:
        """Whether the last step was the last one of an epoch."""
        return self.reader is not None and self.step > 0 and self.step % len(self.reader) == 0

    def fit(self, train_reader: BatchReader, valid_reader: BatchReader | None = None) -> FitReport:
        """Train until ``spec.epochs``, ``spec.max_steps`` or the end of ``spec.patience``, whichever comes first.

        Training goes on from where this trainer is. The validation split is scored after every epoch, every
        ``spec.eval_every`` steps, and at the end. The first SIGINT (Ctrl-C) or SIGTERM lets the running step finish; a
        second one acts at once.

        Args:
            train_reader: one epoch per ``iter``; after a restore, at the place that belongs to it.
            valid_reader: the validation split, unshuffled.

        Raises:
            ConfigError: `train_reader` gives no batch.
            TrainingError: the loss is NaN or infinite.
            RunInterruptedError: a signal stopped the training after a whole step.
        """
        if len(train_reader) == 0:
            raise ConfigError("fit: the train split gives no batch, expected at least one")
        warn_if_slow(self.spec.precision)
        self.reader = train_reader
        self._evaluation_seconds = 0.0
        samples_before, throughput = self.samples, Throughput()
        try:
            with Interrupts() as self._interrupts:
                self._call("on_start")
                self._run(train_reader, valid_reader)
        except RunInterruptedError:
            raise
        except Exception as error:
            if not self._is_in_step:
                try:
                    self._call_all("on_error")
                except TerarecError as second:  # such as a full disk; the first error is the one to tell
                    _logger.warning("after %s: %s", type(error).__name__, second)
            raise
        finally:
            self._is_in_step = False
            self._call_all("on_end")
        samples, seconds = self.samples - samples_before, throughput.seconds - self._evaluation_seconds
        return FitReport(
            steps=self.step,
            samples=samples,
            seconds=seconds,
            samples_per_second=samples / seconds,
            loss=self.loss,
            evaluation=self.evaluation,
            highest_auc=self.highest_auc,
            best_step=self.early_stopping.best_step,
            stopped_early=self.early_stopping.is_over,
            peak_memory_bytes=memory.peak_bytes(),
        )

    def train_step(self, batch: Batch) -> float:
        """Forward, backward, update of the dense parameters and of the touched rows.

        Returns:
            The mean loss of `batch` before the update.

        Raises:
            TrainingError: the loss is NaN or infinite; nothing was updated.
        """
        self.dense_optimizer.zero_grad()
        if self.row_optimizer is not None:
            self.row_optimizer.zero_grad()
        with autocast(self.spec.precision):
            logits = self.model(batch)
        loss = logistic_loss(logits, batch.label)
        value = loss.item()
        if not math.isfinite(value):
            raise TrainingError(
                f"step {self.step + 1} (epoch {self.epoch + 1}): the loss is {value}, expected a finite number; "
                "a lower learning rate may help"
            )
        loss.backward()  # type: ignore[no-untyped-call]
        if self.row_optimizer is not None:
            self.row_optimizer.step()
        if self.row_optimizer is None or not self.row_optimizer.is_skipped:
            self.dense_optimizer.step()
        return value

    def evaluate(self, reader: BatchReader) -> Evaluation:
        """Score all batches of `reader` with the model as it is."""
        return evaluate(self.model, reader, precision=self.spec.precision)

    def state_dict(self) -> dict[str, Any]:
        """How far the training is, as JSON data."""
        return {
            "step": self.step,
            "epoch": self.epoch,
            "samples": self.samples,
            "highest_auc": self.highest_auc,
            "evaluated_step": self._evaluated_step,
            "early_stopping": self.early_stopping.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from what `state_dict` gave."""
        self.step, self.epoch, self.samples = state["step"], state["epoch"], state["samples"]
        self.highest_auc = state["highest_auc"]
        self._evaluated_step = state.get("evaluated_step", self.step)  # older checkpoints lack it
        if "early_stopping" in state:
            self.early_stopping.load_state_dict(state["early_stopping"])

    def _run(self, train_reader: BatchReader, valid_reader: BatchReader | None) -> None:
        try:
            if valid_reader is not None and self._is_evaluation_due and self._evaluated_step != self.step:
                self._validate(valid_reader)  # a signal had stopped this evaluation
            while self.step < self.total_steps and not self.early_stopping.is_over:
                self._run_epoch(train_reader, valid_reader)
            if valid_reader is not None and (self.evaluation is None or self._evaluated_step != self.step):
                self._validate(valid_reader)
        except _StopRequestedError:
            self._call("on_interrupt")
            raise RunInterruptedError(
                f"{self._interrupts.received} after step {self.step} of {self.total_steps} (epoch {self.last_epoch})"
            ) from None
        self._call("on_finish")

    def _run_epoch(self, train_reader: BatchReader, valid_reader: BatchReader | None) -> None:
        """The batches that are left of an epoch, or fewer if ``max_steps`` comes first."""
        for batch in train_reader:
            self._is_in_step = True
            self.model.train()
            self.loss = self.train_step(batch)
            self.step += 1
            self.samples += batch.batch_size
            self.epoch += self.is_epoch_end
            self._is_in_step = False
            if valid_reader is not None and (self._is_evaluation_due or self.step >= self.total_steps):
                self._validate(valid_reader)
            self._call("on_step")
            if self.is_epoch_end:
                self._call("on_epoch_end")
            self._stop_if_asked()
            if self.step >= self.total_steps or self.early_stopping.is_over:
                return

    @property
    def _is_evaluation_due(self) -> bool:
        every = self.spec.eval_every
        return self.is_epoch_end or (every is not None and self.step > 0 and self.step % every == 0)

    def _validate(self, reader: BatchReader) -> None:
        """Score the validation split and call `on_evaluation`."""
        is_repeated = self._evaluated_step == self.step
        evaluation = evaluate(
            self.model, reader, precision=self.spec.precision, progress=lambda _samples: self._stop_if_asked()
        )
        self.evaluation, self._evaluated_step = evaluation, self.step
        self._evaluation_seconds += evaluation.seconds
        if not math.isnan(evaluation.auc):
            self.highest_auc = max(evaluation.auc, self.highest_auc or 0.0)
        # An evaluation that only max_steps made due is none of a longer run, whose patience must be the same.
        self.early_stopping.update(self.step, evaluation, counts=self._is_evaluation_due and not is_repeated)
        for callback in self.callbacks:
            callback.on_evaluation(self, evaluation)

    def _stop_if_asked(self) -> None:
        if self._interrupts.received is not None:
            raise _StopRequestedError

    def _call(self, hook: str) -> None:
        for callback in self.callbacks:
            getattr(callback, hook)(self)

    def _call_all(self, hook: str) -> None:
        """Call `hook` of every callback, whatever one of them raises."""
        with ExitStack() as stack:
            for callback in reversed(self.callbacks):
                stack.callback(getattr(callback, hook), self)


class _StopRequestedError(Exception):
    """A signal came; unwinds to `Trainer._run`."""
