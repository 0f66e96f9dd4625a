# SPDX-License-Identifier: Apache-2.0
"""Schedules of the learning rates of all optimizers.

The rate of an optimizer's group at its making is its base rate. A schedule counts intervals: steps or epochs.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal, TypeGuard

from terarec.spec import checks

Interval = Literal["step", "epoch"]
"""Unit of a schedule."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ConstantSchedule:
    """Keep the base rate."""

    kind: ClassVar[str] = "constant"


@dataclass(frozen=True, kw_only=True, slots=True)
class WarmupDecaySchedule(checks.Checked):
    """Rise to the base rate linearly, stay, and fall by a power: `terarec.optim.LearningRateSchedule`, HugeCTR's.

    Attributes:
        warmup_steps: Intervals until the base rate; 0 and 1 both start on it.
        decay_start: Last interval at the base rate; 0 for no fall.
        decay_steps: Intervals of the fall.
        decay_power: Exponent of the fall, at least 1.
        end_lr: The rate after the fall, and the least during it.
        interval: Unit of the counts.
    """

    kind: ClassVar[str] = "warmup_decay"
    # HugeCTR's defaults: no warm-up and no fall.
    warmup_steps: checks.NonNegativeInt = 1
    decay_start: checks.NonNegativeInt = 0
    decay_steps: checks.PositiveInt = 1
    decay_power: Annotated[float, checks.number(1.0)] = 2.0
    end_lr: checks.NonNegative = 0.0
    interval: Interval = "step"


@dataclass(frozen=True, kw_only=True, slots=True)
class StepSchedule(checks.Checked):
    """Multiply the rate by `gamma` every `step_size` intervals, as `torch.optim.lr_scheduler.StepLR`."""

    kind: ClassVar[str] = "step"
    step_size: checks.PositiveInt
    gamma: checks.Positive = 0.1
    interval: Interval = "epoch"


@dataclass(frozen=True, kw_only=True, slots=True)
class MultiStepSchedule:
    """Multiply the rate by `gamma` after each of `milestones` intervals, as `torch.optim.lr_scheduler.MultiStepLR`."""

    kind: ClassVar[str] = "multi_step"
    milestones: tuple[int, ...]
    gamma: checks.Positive = 0.1
    interval: Interval = "epoch"

    def __post_init__(self) -> None:
        checks.check_fields(self)
        good = checks.list_of(checks.integer(1, checks.MOST)).accepts(self.milestones)
        # Distinct and rising, as `sorted(set(...))` is.
        if not good or not self.milestones or list(self.milestones) != sorted(set(self.milestones)):
            checks.fail(self, "milestones", "rising numbers of intervals such as [10, 20]")


@dataclass(frozen=True, kw_only=True, slots=True)
class ExponentialSchedule(checks.Checked):
    """Multiply the rate by `gamma` after each interval, as `torch.optim.lr_scheduler.ExponentialLR`."""

    kind: ClassVar[str] = "exponential"
    gamma: checks.Positive
    interval: Interval = "epoch"


@dataclass(frozen=True, kw_only=True, slots=True)
class _FallingSchedule(checks.Checked):
    """Base of the schedules that rise to the base rate and fall until `t_max`.

    Attributes:
        t_max: Intervals of the fall; None for all intervals of the run that follow the warm-up.
        min_factor: Last rate over base rate.
        warmup: Intervals of the rise.
        interval: Unit of the counts.
        ends_with_run: Whether a run has computed `t_max` from its length, as the next run does from its own.
    """

    t_max: checks.PositiveInt | None = None
    min_factor: checks.Share = 0.0
    warmup: checks.NonNegativeInt = 0
    interval: Interval = "step"
    ends_with_run: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class CosineSchedule(_FallingSchedule):
    """Rise to the base rate linearly in `warmup` intervals, then fall along a cosine (Loshchilov & Hutter 2017).

    After n intervals since the warm-up the rate is the base rate times
    ``min_factor + (1 - min_factor) (1 + cos(pi n / t_max)) / 2``, and from `t_max` on `min_factor`.
    """

    kind: ClassVar[str] = "cosine"


@dataclass(frozen=True, kw_only=True, slots=True)
class LinearSchedule(_FallingSchedule):
    """Rise to the base rate linearly in `warmup` intervals, then fall linearly.

    After n intervals since the warm-up the rate is the base rate times ``1 - (1 - min_factor) n / t_max``, and from
    `t_max` on `min_factor`.
    """

    kind: ClassVar[str] = "linear"


@dataclass(frozen=True, kw_only=True, slots=True)
class PlateauSchedule:
    """Multiply the rate by `factor` when a metric stops improving, as `torch.optim.lr_scheduler.ReduceLROnPlateau`.

    It counts evaluations.

    Attributes:
        factor: Factor of the rate, below 1.
        patience: Evaluations in a row without an improvement to allow.
        threshold: Share of the best value by which an improvement must exceed it.
        min_lr: Least rate.
        metric: Name of the metric, such as "auc", or "auc/click" for one label; None for the one by which training
            compares evaluations.
    """

    kind: ClassVar[str] = "plateau"
    # torch's defaults, as are those of the schedules named after its classes.
    factor: checks.Positive = 0.1
    patience: checks.NonNegativeInt = 10
    threshold: checks.NonNegative = 1e-4
    min_lr: checks.NonNegative = 0.0
    metric: checks.MetricName | None = None

    def __post_init__(self) -> None:
        checks.check_fields(self)
        if self.factor >= 1.0:
            checks.fail(self, "factor", "a number above 0 and below 1")


ScheduleSpec = (
    ConstantSchedule
    | WarmupDecaySchedule
    | StepSchedule
    | MultiStepSchedule
    | ExponentialSchedule
    | CosineSchedule
    | LinearSchedule
    | PlateauSchedule
)


def has_open_end(spec: ScheduleSpec | None) -> TypeGuard[CosineSchedule | LinearSchedule]:
    """Return whether the fall of `spec` ends with the run."""
    return isinstance(spec, CosineSchedule | LinearSchedule) and (spec.t_max is None or spec.ends_with_run)


def schedule_of_run(spec: ScheduleSpec, *, steps: int, epochs: int) -> ScheduleSpec:
    """Return `spec` with a fall that ends with a run, where it does not say when its fall ends; else as it is.

    Args:
        spec: The schedule.
        steps: Steps of the complete run.
        epochs: Epochs of the complete run, begun ones included.

    Raises:
        FieldError: The warm-up takes the complete run.
    """
    if not has_open_end(spec):
        return spec
    intervals = steps if spec.interval == "step" else epochs
    if spec.warmup >= intervals:
        checks.fail(spec, "warmup", f"fewer {spec.interval}s than the run has ({intervals}), or t_max")
    return dataclasses.replace(spec, t_max=intervals - spec.warmup, ends_with_run=True)
