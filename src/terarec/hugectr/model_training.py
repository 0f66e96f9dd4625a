"""The part of `Model` that trains and evaluates."""

from __future__ import annotations

from typing import Any

from terarec.hugectr.errors import IllegalCallError, WrongInputError
from terarec.hugectr.fit import Fit
from terarec.hugectr.model_passes import ModelPasses
from terarec.hugectr.schedulers import LearningRateScheduler
from terarec.hugectr.tables.calls import FIT, SET_LEARNING_RATE
from terarec.hugectr.tables.low_level import SolverConfig
from terarec.hugectr.tables.optimizer import OptimizerWithSchedule


class ModelTraining(ModelPasses):
    """Loops, single iterations, the learning rate, and which parts move."""

    def __init__(self, solver: Any, reader_params: Any, opt_params: Any, etc_params: Any) -> None:
        super().__init__(solver, reader_params, opt_params, etc_params)
        has_rate = isinstance(self._optimizer, OptimizerWithSchedule)
        self._scheduler = _scheduler(self._optimizer if has_rate else solver)
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
        loop = Fit(
            self, display=display, eval_interval=eval_interval, snapshot=snapshot, snapshot_prefix=snapshot_prefix
        )
        self._follow(loop, num_epochs, max_iter)

    def _follow(self, loop: Fit, num_epochs: int, max_iter: int) -> None:
        """Train by iterations, passes or epochs, as the solver and the training cache ask."""
        if self.solver.repeat_dataset:
            if max_iter <= 0:
                raise WrongInputError(f"fit: max_iter: got {max_iter}, expected more than 0 with repeat_dataset=True")
            loop.by_iterations(max_iter)
        elif self._cache is not None:
            loop.by_passes(max(1, num_epochs))
        elif num_epochs <= 0:
            raise WrongInputError(f"fit: num_epochs: got {num_epochs}, expected more than 0 with repeat_dataset=False")
        else:
            loop.by_epochs(num_epochs)

    def start_data_reading(self) -> None:
        """Start both readers, before `train` is called by a script with ``repeat_dataset=True``.

        Raises:
            IllegalCallError: with ``repeat_dataset=False``, where `set_source` of a reader starts it.
        """
        engine = self._compiled("start_data_reading")
        if not self.solver.repeat_dataset:
            raise IllegalCallError("start_data_reading: got repeat_dataset=False, expected set_source of the readers")
        for reader in (engine.train_reader, engine.eval_reader):
            if not reader.is_started():
                reader.set_source()

    def train(self, is_first_batch: bool = True) -> bool:
        """One iteration; False at the end of the data, which only ``repeat_dataset=False`` has.

        Raises:
            IllegalCallError: before `compile`, or with a reader that was not started.
            OutOfBoundError: an embedding holds more keys than its workspace has room for.
        """
        return self._compiled("train").train()

    def eval(self, is_first_batch: bool = True, *, eval_batch: int = -1) -> bool:
        """Take one batch into the metrics; False at the end of the data.

        Raises:
            IllegalCallError: before `compile`, or with a reader that was not started.
        """
        return self._compiled("eval").evaluate()

    def get_current_loss(self) -> float:
        """The loss of the last iteration's batch."""
        return float(self._compiled("get_current_loss").loss)

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
        self._compiled("set_learning_rate").trainer.lr = SET_LEARNING_RATE.read((lr,), {})["lr"]

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
        self._compiled("freeze").trainer.freeze(dense=self._is_dense_frozen, embeddings=self._frozen)

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
