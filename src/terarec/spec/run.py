# SPDX-License-Identifier: Apache-2.0
"""Training runs: the content of a train CONFIG.json."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, ClassVar, Literal

from terarec.spec import checks
from terarec.spec.calibration import CalibrationSpec
from terarec.spec.model import DLRMSpec, ModelSpec
from terarec.spec.multitask import ESMMSpec
from terarec.spec.optimizer import AdaGradSpec, AdamSpec, DenseOptimizerSpec, SparseOptimizerSpec
from terarec.spec.schedule import ScheduleSpec
from terarec.spec.tables import DEFAULT_OPTIMIZER


@dataclass(frozen=True, kw_only=True, slots=True)
class ClassWeights(checks.Checked):
    """Factors of the losses of the two classes of a label.

    Attributes:
        negative: Factor of -log(1 - p), which counts by 1 - label.
        positive: Factor of -log p, which counts by the label.
    """

    negative: checks.Positive
    positive: checks.Positive


@dataclass(frozen=True, kw_only=True, slots=True)
class BinarySpec:
    """Binary cross entropy of each label; several labels make a multi-label model.

    Attributes:
        label_weights: Factors of the labels' losses, in the order of the data set's labels; empty for ones. A label of
            weight 0 is not trained, and metrics leave it out of the mean over labels.
        calibration: Correction of the probabilities after training, which ``terarec calibrate`` writes; None for none.
        positive_weight: Factor of the losses of positive labels; "auto" lets both classes of each label have half of
            its weight, by their numbers in the train split: a run counts them, and keeps them in `class_weights`.
        class_weights: Factors of the two classes, for each label; empty for those of `positive_weight`.
    """

    kind: ClassVar[str] = "binary"
    label_weights: tuple[float, ...] = ()
    calibration: CalibrationSpec | None = None
    positive_weight: float | str = 1.0
    class_weights: tuple[ClassWeights, ...] = ()

    @property
    def weighs_losses(self) -> bool:
        """Whether classes have weights, or labels weights but 0 and 1, by which metrics leave labels out, too."""
        return bool(self.class_weights or self.positive_weight != 1.0 or set(self.label_weights) - {0.0, 1.0})

    def __post_init__(self) -> None:
        _check_weights(self, self.label_weights)
        if self.positive_weight != "auto":
            if isinstance(self.positive_weight, str):
                checks.fail(self, "positive_weight", "a number above 0, or 'auto'")
            checks.finite_float(self, "positive_weight", low=0.0, open_low=True)
        if self.calibration is not None:
            checks.instance(self, "calibration", CalibrationSpec, "a TemperatureSpec or an IsotonicSpec")


@dataclass(frozen=True, kw_only=True, slots=True)
class MultiClassSpec(checks.Checked):
    """Cross entropy of one class out of several; the label column holds its number.

    Attributes:
        classes: Number of classes C; the label is one of 0 to C - 1.
        label_smoothing: Share of each label that is spread over all classes (Szegedy et al. 2016, arXiv 1512.00567).
    """

    kind: ClassVar[str] = "multi_class"
    classes: Annotated[int, checks.whole(2, checks.MOST_WIDTH)]
    label_smoothing: checks.Share = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class RegressionSpec(checks.Checked):
    """Loss of the difference between output and label.

    Attributes:
        loss: "mse" for its square, "mae" for its absolute value, "huber" for the square below `delta` and the absolute
            value above it (Huber 1964).
        delta: Difference from which "huber" is linear.
    """

    kind: ClassVar[str] = "regression"
    loss: Literal["mse", "mae", "huber"] = "mse"
    delta: checks.Positive = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class PairwiseSpec(checks.Checked):
    """Logistic loss of score differences in all pairs of samples with different labels.

    This is RankNet's loss (Burges et al. 2005); with one positive a group it is BPR's (Rendle et al. 2009).

    Attributes:
        group: Column whose values the two samples of a pair share, such as a query or a user; None pairs all samples
            of a batch.
    """

    kind: ClassVar[str] = "pairwise"
    group: checks.Name | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class SampledSoftmaxSpec(checks.Checked):
    """Cross entropy of logits [B, 1 + N] whose first column is the positive item's and the others sampled items'.

    A model that draws its negatives from the batch, such as ``two_tower``, brings this loss itself.

    Attributes:
        temperature: Divisor of the logits.
    """

    kind: ClassVar[str] = "sampled_softmax"
    temperature: checks.Positive = 1.0


ObjectiveSpec = BinarySpec | MultiClassSpec | RegressionSpec | PairwiseSpec | SampledSoftmaxSpec


def _check_weights(owner: object, weights: tuple[float, ...]) -> None:
    checks.instance(owner, "label_weights", tuple | list, "a factor for each label, such as [1.0, 0.5]")
    for weight in weights:
        if not checks.number(0.0).accepts(weight):
            checks.reject(owner, "label_weights", f"got {weight!r}, expected finite numbers >= 0")
    if weights and not any(weights):
        checks.reject(owner, "label_weights", "got zeros alone, expected one above 0: a label to train")


DEFAULT_EVAL_SPLIT = "valid"
_MOST_SECONDS = 7 * 24 * 3600.0  # of a timeout, which the backend counts in milliseconds
DEVICE_PATTERN = r"auto|cpu|cuda(:\d+)?"


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingSpec:
    """Length, device and options of a training.

    Attributes:
        batch_size: Samples B in a batch.
        epochs: Passes over the train split.
        max_steps: Maximum number of steps, whatever the number of epochs; None for no limit.
        accumulate: Batches whose gradients are added up for one step.
        seed: Seed of the initial weights, the data order and dropout.
        shuffle: Whether the train split is shuffled anew in every epoch.
        repeat: Whether the train split is one endless stream, in which batches cross the borders of epochs and all are
            full, unless it is of Raw or RawAsync files; `max_steps` ends it.
        drop_last: Whether a last batch of fewer samples is left out of each epoch.
        passes: Whether the parts of the train split are trained one after the other, in their order: shuffling mixes
            samples of one part, and rows of tables in tiers are loaded part by part. For data sets whose parts have
            keysets.
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
        monitor: Metric by which evaluations are compared, such as "auc", or "auc/click" for one label; None for the
            first of `metrics`.
        patience: Evaluations in a row without an improvement after which training stops, counting those after epochs
            and every `eval_every` steps; None for no early stopping.
        min_delta: Least difference that is an improvement.
        checkpoint_every: Steps between checkpoints; None for one at every epoch's end.
        delta_every: Steps between checkpoints that hold only what changed since the one before; None for none.
        keep_checkpoints: Number of the newest checkpoints that stay, with those that they build on.
        keep_best: Whether the step of the best evaluation is saved, too, and stays.
        threads: CPU threads of the compute; None for the setting of torch.
        reader_threads: Threads that read and decode ahead.
        rank_timeout: Seconds after which training on several processes fails because one of them has stopped.
    """

    batch_size: checks.BatchSize = 2048
    epochs: checks.PositiveInt = 1
    max_steps: checks.PositiveInt | None = None
    accumulate: checks.PositiveInt = 1
    seed: checks.NonNegativeInt = 0
    shuffle: bool = True
    repeat: bool = False
    drop_last: bool = False
    passes: bool = False
    device: str = "auto"
    compile: bool = False
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    loss_scale: float | str = 1.0
    clip_norm: checks.Positive | None = None
    freeze: tuple[str, ...] = ()
    schedule: ScheduleSpec | None = None
    metrics: tuple[str, ...] = ()
    group: checks.Name | None = None
    slices: tuple[str, ...] = ()
    eval_split: str | None = DEFAULT_EVAL_SPLIT
    eval_every: checks.PositiveInt | None = None
    monitor: checks.MetricName | None = None
    patience: checks.PositiveInt | None = None
    min_delta: checks.NonNegative = 0.0
    checkpoint_every: checks.PositiveInt | None = None
    delta_every: checks.PositiveInt | None = None
    keep_checkpoints: checks.PositiveInt = 2
    keep_best: bool = True
    threads: checks.Threads | None = None
    reader_threads: checks.Threads = 1
    rank_timeout: Annotated[float, checks.number(0.0, _MOST_SECONDS, open_low=True)] = 300.0

    def __post_init__(self) -> None:
        checks.check_fields(self)
        if not isinstance(self.device, str) or not re.fullmatch(DEVICE_PATTERN, self.device):
            checks.fail(self, "device", "'auto', 'cpu', 'cuda' or 'cuda:N'")
        # A union of a number and a text, which the codec cannot restrict to one word.
        if self.loss_scale != "dynamic":
            if isinstance(self.loss_scale, str):
                checks.fail(self, "loss_scale", "a number above 0, or 'dynamic'")
            checks.finite_float(self, "loss_scale", low=0.0, open_low=True)
        for name in ("freeze", "metrics", "slices"):
            checks.distinct(self, name, getattr(self, name))
        if self.repeat and self.passes:
            checks.reject(self, "passes", "got passes with repeat, expected one of them: a stream has no parts")
        if self.repeat and self.max_steps is None:
            checks.reject(self, "max_steps", "got none with repeat, expected the number of steps that ends the stream")


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSpec:
    """Model, its training data, its optimizers and its schedule.

    Attributes:
        data: Path of a prepared data set.
        model: The model.
        objective: Loss and type of the scores; None for the natural one of the model: binary cross entropy
            unless it brings its own loss.
        dense_optimizer: Optimizer of the layers.
        sparse_optimizer: Optimizer of the tables that name no other rule.
        row_optimizers: Further optimizers of tables by name; ``model.tables.optimizers`` says which tables they update.
        training: Length, device and options of the training.
        init_from: Another run, or a checkpoint in one, whose weights and optimizer states the first step starts from.
            Its model, columns and ids are the same; data, learning rates and length may be others.
        reset_optimizer: Whether to load only the weights of `init_from`, without its optimizer states.
        extend_chain: Whether the checkpoints continue the chain of `init_from`, of its newest one if that is a RUN:
            where fewer than half of the rows changed, they begin with a delta. All ids stay; others may be added.
    """

    data: str
    model: ModelSpec = field(default_factory=DLRMSpec)
    objective: ObjectiveSpec | None = None
    dense_optimizer: DenseOptimizerSpec = field(default_factory=AdamSpec)
    sparse_optimizer: SparseOptimizerSpec = field(default_factory=AdaGradSpec)
    training: TrainingSpec = field(default_factory=TrainingSpec)
    init_from: str | None = None
    reset_optimizer: bool = False
    extend_chain: bool = False
    row_optimizers: Mapping[str, SparseOptimizerSpec] = field(default_factory=dict)

    def __post_init__(self) -> None:
        checks.check_fields(self)
        self._check_row_optimizers()
        if isinstance(self.model, ESMMSpec) and not isinstance(self.objective, BinarySpec | None):
            # Its outputs are the logits of products of probabilities.
            checks.reject(self, "objective", f"got {self.objective.kind!r} for esmm, expected 'binary'")
        if not isinstance(self.data, str) or not self.data:
            checks.fail(self, "data", "the path of a prepared data set")
        if self.init_from is not None and (not isinstance(self.init_from, str) or not self.init_from):
            checks.fail(self, "init_from", "the path of a RUN or of a checkpoint in one")
        if self.reset_optimizer and self.init_from is None:
            checks.reject(self, "reset_optimizer", "got true without init_from, expected both")
        if self.extend_chain and self.init_from is None:
            checks.reject(self, "extend_chain", "got true without init_from, expected both")
        if self.extend_chain and self.reset_optimizer:
            checks.reject(self, "extend_chain", "got true with reset_optimizer, expected one: a chain keeps all states")

    def check_own_loss(self) -> None:
        """Raise `ConfigError` for weights of labels or classes, which a loss of the model's own does not read.

        Only where a training begins: runs of an earlier version may have them, which changed nothing.
        """
        if isinstance(self.objective, BinarySpec) and self.objective.weighs_losses:
            kind = self.model.kind
            checks.reject(
                self, "objective", f"got weights of labels or classes for {kind}, which has its own loss, expected none"
            )

    def _check_row_optimizers(self) -> None:
        checks.instance(self, "row_optimizers", Mapping, "an optimizer for each name")
        for name, optimizer in self.row_optimizers.items():
            if not checks.is_name(name) or not isinstance(optimizer, SparseOptimizerSpec):
                checks.fail(self, "row_optimizers", "an optimizer of tables for each name")
        # The name by which tables that name no rule find `sparse_optimizer`.
        if DEFAULT_OPTIMIZER in self.row_optimizers:
            checks.reject(
                self, "row_optimizers", f"got {DEFAULT_OPTIMIZER!r}, expected other names: it is sparse_optimizer"
            )


def without_calibration(run: RunSpec) -> RunSpec:
    """Return `run` without the calibration of its scores."""
    return _with_calibration(run, None)


def calibrated_for(run: RunSpec, step: int, described: RunSpec | None = None) -> RunSpec:
    """Return `run` with the calibration of its scores that is for the weights of a step; without one if none is.

    Args:
        run: The run.
        step: Training steps of the weights.
        described: Later description of the run, whose calibration counts; None for `run` itself.
    """
    calibration = calibration_of(run if described is None else described)
    return _with_calibration(run, calibration if calibration is not None and calibration.step == step else None)


def calibration_of(run: RunSpec) -> CalibrationSpec | None:
    """Return the calibration of the scores of `run`; None for none."""
    return run.objective.calibration if isinstance(run.objective, BinarySpec) else None


def _with_calibration(run: RunSpec, calibration: CalibrationSpec | None) -> RunSpec:
    objective = run.objective or BinarySpec()
    if calibration == calibration_of(run) or not isinstance(objective, BinarySpec):
        return run
    return replace(run, objective=replace(objective, calibration=calibration))
