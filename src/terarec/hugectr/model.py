"""`Model`: what a script builds, trains, evaluates and saves."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from terarec.batch import to_device
from terarec.errors import RunInterruptedError
from terarec.hugectr.callbacks import Intervals, Iterations, LearningRate, ScriptCallbacks
from terarec.hugectr.errors import IllegalCallError, WrongInputError, as_hugectr_errors
from terarec.hugectr.fit_log import FitLog
from terarec.hugectr.model_files import ModelFiles
from terarec.hugectr.readers import DataReader
from terarec.hugectr.run import Training, describe_records, save_run
from terarec.hugectr.schedulers import LearningRateScheduler
from terarec.hugectr.tables.calls import FIT, MODEL, SET_LEARNING_RATE
from terarec.hugectr.tables.low_level import SolverConfig
from terarec.hugectr.tables.optimizer import OptimizerWithSchedule, OptParamsPy
from terarec.hugectr.tables.table import taking
from terarec.spec import RecordsSpec
from terarec.train import Callback


class Model(ModelFiles):
    """A model, its data and its training.

    Attributes:
        solver: what `CreateSolver` made.
        reader_params: the `DataReaderParams`; of release 3.0 the `Input`, which says the same.

    Args:
        solver: what `CreateSolver` made.
        reader_params: where the data is. Release 3.0 has none: there the optimizer is the second argument.
        opt_params: what `CreateOptimizer` made.
        etc_params: what `CreateETC` or `CreateMOS` made, for training pass by pass.

    Raises:
        WrongInputError: anything else.
    """

    @taking(MODEL)
    def __init__(self, solver: Any, reader_params: Any, opt_params: Any, etc_params: Any) -> None:
        if isinstance(reader_params, OptParamsPy):
            reader_params, opt_params = None, reader_params
        super().__init__(solver, reader_params, opt_params, etc_params)
        has_rate = isinstance(self._optimizer, OptimizerWithSchedule)
        self._scheduler = _scheduler(self._optimizer if has_rate else solver)
        self._iterations: Iterations | None = None
        self._is_fitting = False
        self._is_dense_frozen = False
        self._frozen: set[str] = set()

    def fit(
        self,
        num_epochs: int = 0,
        max_iter: int = 2000,
        display: int = 200,
        eval_interval: int = 1000,
        snapshot: int = 10000,
        snapshot_prefix: str = "",
        data_source_params: Any = None,
        **unknown: Any,
    ) -> None:
        """Train, evaluate and save.

        With ``repeat_dataset=True`` each evaluation goes on in its data where the last one stopped, so two of them see
        the same samples only if ``max_eval_batches`` covers these; in epochs each starts at their begin.

        Args:
            num_epochs: times over the data, with ``repeat_dataset=False``.
            max_iter: iterations, with ``repeat_dataset=True``.
            display: iterations between messages.
            eval_interval: iterations between evaluations.
            snapshot: iterations between snapshots.
            snapshot_prefix: of the snapshots' names.
            data_source_params: release 3.4's file system of the snapshots and of other files of the model from now on.
            unknown: refused, with the name that was perhaps meant.

        Raises:
            IllegalCallError: before `compile`.
            WrongInputError: a number of epochs or iterations that is not above 0, in the mode that needs it, anything
                but an integer, or an unknown name.
            LossCannotConvergeError: the loss is NaN.
        """
        self._compiled("fit")
        given = (num_epochs, max_iter, display, eval_interval, snapshot, snapshot_prefix, data_source_params)
        FIT.read(given, unknown)
        if data_source_params is not None:
            self.solver = self.solver.with_values(data_source_params=data_source_params)
        solver = self.solver
        if isinstance(solver, SolverConfig) and solver.max_iter + solver.num_epochs:
            num_epochs, max_iter, display = solver.num_epochs, solver.max_iter, solver.display
            eval_interval, snapshot = solver.eval_interval, solver.snapshot
        every = Intervals(display=display, evaluation=eval_interval, snapshot=snapshot, snapshot_prefix=snapshot_prefix)
        if solver.repeat_dataset:
            self._fit_by_iterations(max_iter, every)
        elif self._cache is not None:
            self._fit_by_passes(max(1, num_epochs), replace(every, snapshot=0))
        else:
            self._fit_by_epochs(num_epochs, every)

    def _fit_by_iterations(self, max_iter: int, every: Intervals) -> None:
        """Train for `max_iter` iterations over data that repeats, or until a callback or the AUC target ends it."""
        if max_iter <= 0:
            raise WrongInputError(f"fit: max_iter: got {max_iter}, expected more than 0 with repeat_dataset=True")
        log = self._log_of_fit(f"Use non-epoch mode with number of iterations: {max_iter}", every)
        iterations = Iterations(self, log, every, checks_loss=self.solver.gen_loss_summary)
        iterations.of_what = f"{max_iter} iterations"
        self.start_data_reading()
        trainer = self._compiled("fit").trainer
        trainer.spec = replace(trainer.spec, repeat=True, max_steps=trainer.step + max_iter)
        self._train_on(iterations, ScriptCallbacks(self, iterations, log))

    def _fit_by_epochs(self, num_epochs: int, every: Intervals) -> None:
        """Train `num_epochs` times over the data, or until the AUC target is passed; the iterations count on."""
        if num_epochs <= 0:
            raise WrongInputError(f"fit: num_epochs: got {num_epochs}, expected more than 0 with repeat_dataset=False")
        log = self._log_of_fit(f"Use epoch mode with number of epochs: {num_epochs}", every)
        iterations = Iterations(self, log, every)
        self.get_data_reader_eval().set_source()
        for epoch in range(num_epochs):
            log.epoch(epoch)
            iterations.of_what = f"{num_epochs} epochs, epoch {epoch},"
            self._train_epoch(self.reader_params.source[0], iterations)
            if self._compiled("fit").trainer.is_stopped:
                return
        log.finish(f"{num_epochs} epochs {iterations.index + 1} global iterations with batchsize")

    def _fit_by_passes(self, num_epochs: int, every: Intervals) -> None:
        """Train over each source with its keyset in the training cache, `num_epochs` times; no snapshots, no target."""
        params = self.reader_params
        if len(params.keyset) != len(params.source):
            raise WrongInputError(f"fit: got {len(params.keyset)} keysets, expected one for each of {params.source}")
        log = self._log_of_fit(f"Use training cache mode with number of epochs: {num_epochs}", every)
        iterations = Iterations(self, log, every, has_target=False)
        self.get_data_reader_eval().set_source()
        for epoch in range(num_epochs):
            log.epoch(epoch)
            for source, keyset in zip(params.source, params.keyset, strict=True):
                self.get_embedding_training_cache().update(keyset)
                self._train_epoch(source, iterations)
        log.finish(f"{num_epochs} epochs {iterations.index + 1} global iterations with batchsize")

    def _train_epoch(self, source: str, iterations: Iterations) -> None:
        """Train once over `source`."""
        self.get_data_reader_train().set_source(source)
        trainer = self._compiled("fit").trainer
        trainer.begin_epoch()
        trainer.spec = replace(trainer.spec, repeat=False, max_steps=None, epochs=trainer.epoch + 1)
        self._train_on(iterations)
        if not trainer.is_stopped:
            self.get_data_reader_train().next_batch()  # finds the end, so that the next epoch has an order of its own

    def _train_on(self, iterations: Iterations, *callbacks: Callback) -> None:
        """Run the trainer with what happens around an iteration.

        Raises:
            KeyboardInterrupt: Ctrl-C ended it after a whole iteration.
            RunInterruptedError: SIGTERM did.
        """
        made = self._compiled("fit")
        trainer, reader = made.trainer, made.train_reader
        self._iterations = iterations
        rate = LearningRate(self)
        trainer.callbacks = [rate, made.capacity_check, iterations, *callbacks]
        self._is_fitting = True
        try:
            with as_hugectr_errors("train"):
                trainer.fit(reader)
        except RunInterruptedError:
            if trainer.interrupted_by == "SIGINT":
                raise KeyboardInterrupt from None
            raise
        finally:
            self._is_fitting = False
            if trainer.device.type != "cpu" and reader.repeat:
                reader.load_state_dict(trainer.reader_state())  # a batch ahead was copied and not trained on

    def _log_of_fit(self, mode: str, every: Intervals) -> FitLog:
        """The log of a `fit` whose header is printed."""
        log = FitLog(self.solver)
        params = self.reader_params
        sources = (params.source[0], params.eval_source)
        log.header(mode, sources, self.trainable_lines(), (every.evaluation, every.snapshot))
        return log

    def save_run(self, path: str | Path) -> None:
        """Write a RUN of terarec, whose training goes on where this model's is, to the bit.

        ``terarec train --resume --out RUN``, ``evaluate``, ``predict``, ``export``, ``serve`` and ``inspect`` take it.
        ``RUN/records.json`` describes the data, which stays where it is. Evaluations are those of terarec. By epochs,
        the rate does not advance at the end of the data as it does in HugeCTR's loop. Workspaces bound nothing there.

        Args:
            path: A new or empty directory.

        Raises:
            IllegalCallError: Before `compile`, or of a model with a training cache, whose data is in passes.
            WrongInputError: A directory that holds something else.
            FileCannotOpenError: Data that is not there.
            BrokenFileError: Data that does not hold what it should.
            StorageError: The disk is full.
        """
        with as_hugectr_errors("save_run"):
            save_run(Path(path), *self.run_parts())

    def run_parts(self) -> tuple[RecordsSpec, Training]:
        """Describe the data and the training for a RUN; see `save_run`.

        Raises:
            IllegalCallError: As `save_run`.
            FileCannotOpenError: Data that is not there.
            BrokenFileError: Data that does not hold what it should.
        """
        made = self._compiled("save_run")
        if self._cache is not None:
            raise IllegalCallError("save_run: the model has a training cache, expected one that trains on one source")
        trainer, reader = made.trainer, made.train_reader
        is_ahead = self._is_fitting and made.model.device.type != "cpu"
        started = trainer.reader_state() if is_ahead else reader.state_dict() if reader.is_started() else None
        records = describe_records(
            made.plan.spec,
            made.layout,
            self.reader_params,
            {"train": reader, "valid": made.eval_reader},
            made.async_layout,
        )
        training = Training(
            trainer=trainer,
            dense=made.dense,
            rules=made.plan.rules,
            schedule=self._scheduler.schedule,
            next_step=self._scheduler.get_step() + 1,
            shuffle=made.is_shuffled,
            repeat=self.solver.repeat_dataset,
            reader_threads=min(self.reader_params.num_workers, os.cpu_count() or 1),
            reader_state=started,
        )
        return records, training

    def start_data_reading(self) -> None:
        """Start both readers, before `train` is called by a script with ``repeat_dataset=True``.

        Raises:
            IllegalCallError: with ``repeat_dataset=False``, where `set_source` of a reader starts it.
        """
        made = self._compiled("start_data_reading")
        if not self.solver.repeat_dataset:
            raise IllegalCallError("start_data_reading: got repeat_dataset=False, expected set_source of the readers")
        for reader in (made.train_reader, made.eval_reader):
            if not reader.is_started():
                reader.set_source()

    def train(self, is_first_batch: bool = True) -> bool:
        """One iteration; False at the end of the data, which only ``repeat_dataset=False`` has.

        Raises:
            IllegalCallError: before `compile`, or with a reader that was not started.
            OutOfBoundError: an embedding holds more keys than its workspace has room for, or a key outside its table.
            BrokenFileError: a file is damaged.
        """
        made = self._compiled("train")
        batch = _started(made.train_reader, "train").next_batch()
        if batch is None:
            return False
        with as_hugectr_errors("train"):
            made.trainer.train_step(to_device(batch, made.model.device))
        made.capacity_check.on_step(made.trainer)
        return True

    def eval(self, is_first_batch: bool = True, *, eval_batch: int = -1) -> bool:
        """Take one batch into the metrics; False at the end of the data.

        Raises:
            IllegalCallError: before `compile`, or with a reader that was not started.
            LossCannotConvergeError: Predictions are NaN.
        """
        made = self._compiled("eval")
        batch = _started(made.eval_reader, "eval").next_batch()
        if batch is None:
            return False
        with as_hugectr_errors("eval"):
            made.evaluation.score(made.model, batch, made.trainer.spec.precision)
        return True

    def get_current_loss(self) -> float:
        """The loss of the last iteration's batch."""
        loss = self._compiled("get_current_loss").trainer.last_loss
        return 0.0 if loss is None else float(loss)

    def get_eval_metrics(self) -> list[tuple[str, float]]:
        """Name and value of each metric over the evaluation batches since the last call."""
        return self._compiled("get_eval_metrics").evaluation.finish()

    def class_aucs(self) -> tuple[float, ...]:
        """The AUC of each label's column at the last `get_eval_metrics`."""
        return self._compiled("class_aucs").evaluation.class_aucs

    def get_learning_rate_scheduler(self) -> LearningRateScheduler:
        """The schedule that `fit` follows."""
        return self._scheduler

    def set_learning_rate(self, lr: float) -> None:
        """The rate of the next iterations; frozen parts do not move at any.

        Raises:
            IllegalCallError: before `compile`.
            WrongInputError: anything but a finite number of at least 0.
        """
        self._compiled("set_learning_rate").trainer.optimizers.lr = SET_LEARNING_RATE.read((lr,), {})["lr"]

    def reset_learning_rate_scheduler(self, *args: Any, **kwargs: Any) -> None:
        """Start another schedule at its first step; the arguments and errors are `LearningRateScheduler`'s."""
        self._scheduler = LearningRateScheduler(*args, **kwargs)

    def freeze_dense(self) -> None:
        """Leave the dense layers' weights and optimizer states alone."""
        self._is_dense_frozen = True
        self._freeze()

    def unfreeze_dense(self) -> None:
        """Train the dense layers again."""
        self._is_dense_frozen = False
        self._freeze()

    def freeze_embedding(self, embedding_name: str | None = None) -> None:
        """Leave the rows of one embedding, or of all, alone.

        Raises:
            WrongInputError: no embedding of that name.
        """
        self._frozen |= set(self._embedding_names(embedding_name))
        self._freeze()

    def unfreeze_embedding(self, embedding_name: str | None = None) -> None:
        """Train the rows of one embedding, or of all, again.

        Raises:
            WrongInputError: no embedding of that name.
        """
        self._frozen -= set(self._embedding_names(embedding_name))
        self._freeze()

    @property
    def last_iteration(self) -> int:
        """Number of the last iteration of the last `fit`, from 0; -1 before the first."""
        return -1 if self._iterations is None else self._iterations.index

    def trainable_lines(self) -> list[str]:
        """What `fit` tells of frozen parts."""
        return [
            f"Dense network trainable: {not self._is_dense_frozen}",
            *(
                f"Sparse embedding {name} trainable: {name not in self._frozen}"
                for name in self._compiled("fit").model.embeddings
            ),
        ]

    def _freeze(self) -> None:
        made = self._compiled("freeze")
        for weight in made.model.layers.parameters():
            weight.requires_grad_(not self._is_dense_frozen)
            if self._is_dense_frozen:
                weight.grad = None  # optimizers leave alone what has none
        if made.trainer.optimizers.rows is not None:
            # Not `terarec.optim.freeze`, which lets frozen dynamic tables take up no keys: HugeCTR's do.
            frozen = [table for name in self._frozen for table in made.model.collection(name).tables]
            made.trainer.optimizers.rows.frozen = frozen

    def _embedding_names(self, name: str | None) -> list[str]:
        known = [embedding.name for embedding in self._compiled("freeze_embedding").plan.spec.embeddings]
        if name is not None and name not in known:
            raise WrongInputError(f"freeze_embedding: got {name!r}, expected one of {', '.join(known)}")
        return known if name is None else [name]


def _scheduler(source: Any) -> LearningRateScheduler:
    """The schedule of a solver, or in release 3.0 of an optimizer."""
    base = source.learning_rate if isinstance(source, OptimizerWithSchedule) else source.lr
    return LearningRateScheduler(
        base, source.warmup_steps, source.decay_start, source.decay_steps, source.decay_power, source.end_lr
    )


def _started(reader: DataReader, call: str) -> DataReader:
    if not reader.is_started():
        raise IllegalCallError(f"{call}: the data reader was not started, expected start_data_reading() before")
    return reader
