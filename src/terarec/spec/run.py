"""What a training run is: the content of a train CONFIG.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from terarec.spec import checks
from terarec.spec.model import DLRMSpec, ModelSpec
from terarec.spec.optimizer import AdaGradSpec, AdamSpec, DenseOptimizerSpec, SparseOptimizerSpec
from terarec.spec.table import DEFAULT_OPTIMIZER

DEFAULT_EVAL_SPLIT = "valid"


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingSpec:
    """How long and how to train.

    Attributes:
        batch_size: samples B in a step.
        epochs: passes over the train split.
        max_steps: stop after so many steps, whatever the epochs; None for no limit.
        seed: of the first weights, the data order and dropout.
        shuffle: whether the train split is shuffled anew in every epoch.
        precision: "fp32", or "bf16" for the dense layers' matrix products.
        eval_split: the split scored after every epoch; None for no evaluation. A data set may lack the default one,
            which then has no evaluation either.
        eval_every: also after every so many steps; None for epochs only.
        monitor: the figure by which evaluations are compared: "auc", the higher the better, or "logloss", the lower.
        patience: stop after so many evaluations in a row without an improvement, counting those after epochs and every
            `eval_every` steps; None for no early stopping.
        min_delta: by how much a figure must be better to be an improvement.
        checkpoint_every: steps between checkpoints; None for one at every epoch's end.
        keep_checkpoints: how many of the newest checkpoints stay.
        keep_best: whether the step of the best evaluation is saved, too, and stays.
        threads: CPU threads of the compute; None leaves torch's setting.
        reader_threads: threads that read and decode ahead.
    """

    batch_size: int = 2048
    epochs: int = 1
    max_steps: int | None = None
    seed: int = 0
    shuffle: bool = True
    precision: Literal["fp32", "bf16"] = "fp32"
    eval_split: str | None = DEFAULT_EVAL_SPLIT
    eval_every: int | None = None
    monitor: Literal["auc", "logloss"] = "auc"
    patience: int | None = None
    min_delta: float = 0.0
    checkpoint_every: int | None = None
    keep_checkpoints: int = 2
    keep_best: bool = True
    threads: int | None = None
    reader_threads: int = 1

    def __post_init__(self) -> None:
        checks.positive_int(self, "batch_size")
        checks.positive_int(self, "epochs")
        checks.positive_int(self, "seed", minimum=0)
        checks.positive_int(self, "keep_checkpoints")
        checks.positive_int(self, "reader_threads")
        checks.one_of(self, "precision", ("fp32", "bf16"))
        checks.one_of(self, "monitor", ("auc", "logloss"))
        checks.finite_float(self, "min_delta", low=0.0)
        checks.one_of(self, "keep_best", (False, True))
        for optional in ("max_steps", "patience", "eval_every", "checkpoint_every", "threads"):
            if getattr(self, optional) is not None:
                checks.positive_int(self, optional)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSpec:
    """A model, the data it learns from, its optimizers and its schedule.

    Attributes:
        data: a prepared data set.
        model: the model.
        dense_optimizer: of the layers.
        sparse_optimizer: of the tables that name no other rule.
        row_optimizers: further rules for tables by name; ``model.tables.optimizers`` says which tables they move.
        training: how long and how to train.
        init_from: another run, or a checkpoint in one, whose weights and optimizer states the first step starts from.
            Its model, columns and ids are the same; data, learning rates and length may be others.
        reset_optimizer: whether its weights alone are loaded.
    """

    data: str
    model: ModelSpec = field(default_factory=DLRMSpec)
    dense_optimizer: DenseOptimizerSpec = field(default_factory=AdamSpec)
    sparse_optimizer: SparseOptimizerSpec = field(default_factory=AdaGradSpec)
    training: TrainingSpec = field(default_factory=TrainingSpec)
    init_from: str | None = None
    reset_optimizer: bool = False
    row_optimizers: Mapping[str, SparseOptimizerSpec] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._check_row_optimizers()
        if not isinstance(self.data, str) or not self.data:
            checks.fail(self, "data", "the path of a prepared data set")
        if self.init_from is not None and (not isinstance(self.init_from, str) or not self.init_from):
            checks.fail(self, "init_from", "the path of a RUN or of a checkpoint in one")
        checks.one_of(self, "reset_optimizer", (False, True))
        if self.reset_optimizer and self.init_from is None:
            checks.refuse(self, "reset_optimizer", "got true without init_from, expected both")

    def _check_row_optimizers(self) -> None:
        checks.instance(self, "row_optimizers", Mapping, "an optimizer for each name")
        for name, optimizer in self.row_optimizers.items():
            if not checks.is_name(name) or not isinstance(optimizer, SparseOptimizerSpec):
                checks.fail(self, "row_optimizers", "an optimizer of tables for each name")
        if DEFAULT_OPTIMIZER in self.row_optimizers:
            checks.refuse(
                self, "row_optimizers", f"got {DEFAULT_OPTIMIZER!r}, expected other names: it is sparse_optimizer"
            )
