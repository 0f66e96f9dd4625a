"""What a training run is: the content of a train CONFIG.json."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from terarec.spec import checks
from terarec.spec.model import DLRMSpec, ModelSpec
from terarec.spec.objective import ObjectiveSpec
from terarec.spec.optimizer import AdaGradSpec, AdamSpec, DenseOptimizerSpec, SparseOptimizerSpec
from terarec.spec.schedule import ScheduleSpec
from terarec.spec.table import DEFAULT_OPTIMIZER

DEFAULT_EVAL_SPLIT = "valid"
DEVICE_PATTERN = r"auto|cpu|cuda(:\d+)?"


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingSpec:
    """How long, where and how to train.

    Attributes:
        batch_size: Samples B in a batch.
        epochs: Passes over the train split.
        max_steps: Stop after so many steps, whatever the epochs; None for no limit.
        accumulate: Batches whose gradients are added up for one step.
        seed: Seed of the first weights, the data order and dropout.
        shuffle: Whether the train split is shuffled anew in every epoch.
        repeat: Whether the train split is one endless stream, in which batches cross the borders of epochs and all are
            full; `max_steps` ends it.
        drop_last: Whether a last batch of fewer samples is left out of each epoch.
        device: "cpu", "cuda", "cuda:N", or "auto" for a GPU where there is one and the CPU elsewhere.
        compile: Whether ``torch.compile`` compiles the layers.
        precision: "fp32", or "bf16" or "fp16" for the dense layers' matrix products.
        loss_scale: Factor of the loss before the backward pass, by which gradients are divided again; "dynamic" for
            one that follows their range. For "fp16".
        clip_norm: Bound of the L2 norm of all gradients together, those of rows included; None for none.
        freeze: Patterns of names of parameters and tables that are not trained, such as "bottom.*".
        schedule: Learning rates over the steps; None for constant ones.
        metrics: Metrics of evaluations by name, such as "auc" or "ndcg@10"; empty for those of the objective.
        group: Column by which "gauc" and ranking metrics group samples, such as a user; None for no such metric.
        slices: Columns for whose values metrics are computed, too.
        eval_split: The split scored after every epoch; None for no evaluation. A data set may lack the default one,
            which then has no evaluation either.
        eval_every: Steps between further evaluations; None for epochs' ends only.
        monitor: Metric by which evaluations are compared; None for the first of `metrics`.
        patience: Evaluations in a row without an improvement after which training stops, counting those after epochs
            and every `eval_every` steps; None for no early stopping.
        min_delta: Least difference that is an improvement.
        checkpoint_every: Steps between checkpoints; None for one at every epoch's end.
        keep_checkpoints: Number of the newest checkpoints that stay.
        keep_best: Whether the step of the best evaluation is saved, too, and stays.
        threads: CPU threads of the compute; None leaves torch's setting.
        reader_threads: Threads that read and decode ahead.
    """

    batch_size: int = 2048
    epochs: int = 1
    max_steps: int | None = None
    accumulate: int = 1
    seed: int = 0
    shuffle: bool = True
    repeat: bool = False
    drop_last: bool = False
    device: str = "auto"
    compile: bool = False
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    loss_scale: float | str = 1.0
    clip_norm: float | None = None
    freeze: tuple[str, ...] = ()
    schedule: ScheduleSpec | None = None
    metrics: tuple[str, ...] = ()
    group: str | None = None
    slices: tuple[str, ...] = ()
    eval_split: str | None = DEFAULT_EVAL_SPLIT
    eval_every: int | None = None
    monitor: str | None = None
    patience: int | None = None
    min_delta: float = 0.0
    checkpoint_every: int | None = None
    keep_checkpoints: int = 2
    keep_best: bool = True
    threads: int | None = None
    reader_threads: int = 1

    def __post_init__(self) -> None:
        for name in ("batch_size", "epochs", "accumulate", "keep_checkpoints", "reader_threads"):
            checks.positive_int(self, name)
        checks.positive_int(self, "seed", minimum=0)
        checks.one_of(self, "precision", ("fp32", "bf16", "fp16"))
        if not isinstance(self.device, str) or not re.fullmatch(DEVICE_PATTERN, self.device):
            checks.fail(self, "device", "'auto', 'cpu', 'cuda' or 'cuda:N'")
        if self.loss_scale != "dynamic":
            if isinstance(self.loss_scale, str):
                checks.fail(self, "loss_scale", "a number above 0, or 'dynamic'")
            checks.finite_float(self, "loss_scale", low=0.0, open_low=True)
        if self.clip_norm is not None:
            checks.finite_float(self, "clip_norm", low=0.0, open_low=True)
        checks.finite_float(self, "min_delta", low=0.0)
        for name in ("keep_best", "shuffle", "repeat", "drop_last", "compile"):
            checks.one_of(self, name, (False, True))
        for name in ("freeze", "metrics", "slices"):
            checks.distinct(self, name, getattr(self, name))
        for name in ("monitor", "group"):
            if getattr(self, name) is not None:
                checks.name(self, name)
        for optional in ("max_steps", "patience", "eval_every", "checkpoint_every", "threads"):
            if getattr(self, optional) is not None:
                checks.positive_int(self, optional)
        if self.repeat and self.max_steps is None:
            checks.refuse(self, "max_steps", "got none with repeat, expected the number of steps that ends the stream")


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSpec:
    """A model, the data it learns from, its optimizers and its schedule.

    Attributes:
        data: Path of a prepared data set.
        model: The model.
        objective: What is minimised and what scores are; None for what is natural for the model: binary cross entropy
            unless it brings its own loss.
        dense_optimizer: Optimizer of the layers.
        sparse_optimizer: Optimizer of the tables that name no other rule.
        row_optimizers: Further optimizers of tables by name; ``model.tables.optimizers`` says which tables they update.
        training: How long, where and how to train.
        init_from: Another run, or a checkpoint in one, whose weights and optimizer states the first step starts from.
            Its model, columns and ids are the same; data, learning rates and length may be others.
        reset_optimizer: Whether only its weights are loaded.
    """

    data: str
    model: ModelSpec = field(default_factory=DLRMSpec)
    objective: ObjectiveSpec | None = None
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
