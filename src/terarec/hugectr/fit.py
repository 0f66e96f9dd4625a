"""The loops of `Model.fit`: by iterations, by epochs, and over the passes of a training cache."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from terarec.hugectr.cadence import cadence_of
from terarec.hugectr.enums import MetricsType
from terarec.hugectr.errors import LossCannotConvergeError, WrongInputError
from terarec.hugectr.fit_log import FitLog

if TYPE_CHECKING:
    from terarec.hugectr.model_training import ModelTraining


class Fit:
    """One call of `Model.fit`.

    Args:
        model: a compiled model.
        display: iterations between messages; 0 for none.
        eval_interval: iterations between evaluations; 0 for none.
        snapshot: iterations between snapshots; 0 for none.
        snapshot_prefix: of the files' names.
    """

    def __init__(
        self, model: ModelTraining, *, display: int, eval_interval: int, snapshot: int, snapshot_prefix: str
    ) -> None:
        self._model, self._solver = model, model.solver
        self._display, self._eval_interval = display, eval_interval
        self._snapshot, self._prefix = snapshot, snapshot_prefix
        self._cadence = cadence_of(self._solver.compat_release)
        self._log = FitLog(self._solver)

    def by_iterations(self, max_iter: int) -> None:
        """Train for `max_iter` iterations over data that repeats, or until a callback or the AUC target ends it."""
        callbacks = self._solver.training_callbacks
        self._tell_header(f"Use non-epoch mode with number of iterations: {max_iter}")
        for callback in callbacks:
            callback.on_training_start()
        self._model.start_data_reading()
        last = max_iter - 1
        for index in range(max_iter):
            _, lr = self._train()
            self._tell_progress(index, lr, is_checked=self._solver.gen_loss_summary)
            if self._ends(index, f"{max_iter} iterations"):
                last = index
                break
            self._save(index)
        else:
            self._log.finish(f"{max_iter} iterations with batchsize:")
        for callback in callbacks:
            callback.on_training_end(last)

    def by_epochs(self, num_epochs: int) -> None:
        """Train `num_epochs` times over the data, or until the AUC target is passed; the iterations count on."""
        self._tell_header(f"Use epoch mode with number of epochs: {num_epochs}")
        self._model.get_data_reader_eval().set_source()
        index = 0
        for epoch in range(num_epochs):
            self._log.epoch(epoch)
            self._model.get_data_reader_train().set_source(self._model.reader_params.source[0])
            for lr in self._until_the_end():
                self._tell_progress(index, lr)
                if self._ends(index, f"{num_epochs} epochs, epoch {epoch},"):
                    return
                self._save(index)
                index += 1
        self._log.finish(f"{num_epochs} epochs {index} global iterations with batchsize")

    def by_passes(self, num_epochs: int) -> None:
        """Train over each source with its keyset in the training cache, `num_epochs` times; no snapshots, no target."""
        params = self._model.reader_params
        if len(params.keyset) != len(params.source):
            raise WrongInputError(f"fit: got {len(params.keyset)} keysets, expected one for each of {params.source}")
        self._tell_header(f"Use training cache mode with number of epochs: {num_epochs}")
        self._model.get_data_reader_eval().set_source()
        index = 0
        for epoch in range(num_epochs):
            self._log.epoch(epoch)
            for source, keyset in zip(params.source, params.keyset, strict=True):
                self._model.get_data_reader_train().set_source(source)
                self._model.get_embedding_training_cache().update(keyset)
                for lr in self._until_the_end():
                    self._tell_progress(index, lr)
                    if self._cadence.shows(index, self._eval_interval):
                        self._measure()
                    index += 1
        self._log.finish(f"{num_epochs} epochs {index} global iterations with batchsize")

    def _until_the_end(self) -> Iterator[float]:
        """Iterations until the data end, and their rates; with that which finds the end where the release counts it."""
        has_data = True
        while has_data:
            has_data, lr = self._train()
            if has_data or self._cadence.counts_end:
                yield lr

    def _train(self) -> tuple[bool, float]:
        """One iteration at the schedule's next rate: whether there was data, and the rate."""
        lr = self._model.get_learning_rate_scheduler().get_next()
        self._model.set_learning_rate(lr)
        return self._model.train(), lr

    def _ends(self, index: int, of_what: str) -> bool:
        """Evaluate if it is due; whether a callback or the AUC target ends the training then."""
        if not self._cadence.shows(index, self._eval_interval):
            return False
        callbacks = self._solver.training_callbacks if self._solver.repeat_dataset else []
        wishes = [callback.on_eval_start(index) for callback in callbacks]  # all are asked before one is followed
        if any(wishes):
            return True
        found = self._measure()
        wishes = [callback.on_eval_end(index, dict(found)) for callback in callbacks]
        if any(wishes):
            return True
        target = self._solver.metrics_spec.get(MetricsType.AUC, math.inf)
        is_hit: bool = found.get("AUC", -math.inf) > target
        if is_hit:
            self._log.hit(target, self._cadence.number(index), of_what)
        return is_hit

    def _measure(self) -> dict[str, float]:
        """Evaluate at most ``max_eval_batches`` batches, and tell; in epochs the data's end ends an evaluation, too."""
        began = time.perf_counter()
        for _ in range(self._solver.max_eval_batches):
            if not self._model.eval():
                break
        if not self._solver.repeat_dataset:
            self._model.get_data_reader_eval().set_source()
        found = dict(self._model.get_eval_metrics())
        self._log.metrics(found, self._model.class_aucs(), time.perf_counter() - began)
        return found

    def _save(self, index: int) -> None:
        if self._cadence.saves(index, self._snapshot):
            self._model.save_params_to_files(self._prefix, self._cadence.saved_number(index))

    def _tell_progress(self, index: int, lr: float, *, is_checked: bool = True) -> None:
        """The line of a display, if it is due.

        Raises:
            LossCannotConvergeError: the loss is NaN.
        """
        if not self._cadence.shows(index, self._display):
            return
        loss = self._model.get_current_loss() if is_checked else 0.0
        if math.isnan(loss):
            raise LossCannotConvergeError(
                f"fit: the loss of iteration {self._cadence.number(index)} is NaN: it cannot converge, expected a "
                "number; a lower learning rate may help"
            )
        self._log.progress(self._cadence.number(index), self._display, loss, lr)

    def _tell_header(self, mode: str) -> None:
        params = self._model.reader_params
        sources = (params.source[0], params.eval_source)
        self._log.header(mode, sources, self._model.trainable_lines(), (self._eval_interval, self._snapshot))
