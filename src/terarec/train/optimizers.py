# SPDX-License-Identifier: Apache-2.0
"""The optimizers of a model: one for its layers, one for the rows of its tables, and the schedules of both."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn, optim
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from terarec.errors import ConfigError
from terarec.metrics.registry import monitored_metric
from terarec.optim import (
    RowOptimizer,
    build_dense_optimizer,
    build_schedulers,
    load_scheduler_states,
    scheduler_states,
)
from terarec.optim.dense import FTRL
from terarec.optim.schedules import rates_after
from terarec.spec import ConstantSchedule, DenseOptimizerSpec, FTRLSpec, PlateauSchedule, SparseOptimizerSpec
from terarec.spec.checks import did_you_mean
from terarec.spec.schedule import ScheduleSpec

AdvanceInterval = Literal["step", "epoch", "evaluation"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """A learning-rate scheduler of torch and when the trainer advances it.

    Attributes:
        scheduler: Any scheduler of ``torch.optim.lr_scheduler``.
        interval: When to advance: after every "step", "epoch" or "evaluation"; after evaluations with a metric if the
            scheduler takes one.
        metric: Name of that metric; None for the metric by which training compares evaluations.
    """

    scheduler: LRScheduler
    interval: AdvanceInterval = "step"
    metric: str | None = None


class Optimizers:
    """A dense optimizer, a row optimizer and the schedules of their learning rates.

    Attributes:
        dense: Any ``torch.optim.Optimizer`` over the layers' parameters; None for a model without any.
        rows: The optimizer of the tables; None for a model without any.
        schedules: The schedules.
    """

    def __init__(
        self, dense: optim.Optimizer | None, rows: RowOptimizer | None, schedules: Sequence[Schedule] = ()
    ) -> None:
        self.dense = dense
        self.rows = rows
        self.schedules = list(schedules)
        self._undefined: set[str | None] = set()

    @classmethod
    def of(
        cls,
        model: nn.Module,
        dense: DenseOptimizerSpec,
        rows: SparseOptimizerSpec | Mapping[str, SparseOptimizerSpec],
        *,
        seed: int = 0,
    ) -> Optimizers:
        """Make the optimizers of `model`, on the device where it is.

        Args:
            model: Any module.
            dense: Update rule of the layers.
            rows: Update rule of the tables, or rules by the names that tables give as their ``optimizer``.
            seed: Seed of the rounding of rows of 16 bits.

        Raises:
            ConfigError: A table names a rule that is not there.
            StorageError: Not enough memory for the optimizers' state.
        """
        # Without the empty parameters that represent tables.
        layers = [parameter for parameter in model.parameters() if parameter.numel()]
        return cls(
            build_dense_optimizer(dense, layers) if layers else None,
            RowOptimizer(model, rows, seed=seed) if has_tables(model) else None,
        )

    def __iter__(self) -> Iterator[optim.Optimizer]:
        """Iterate over the optimizers that exist: rows first, since only they can skip a step by themselves."""
        yield from (optimizer for optimizer in (self.rows, self.dense) if optimizer is not None)

    @property
    def lr(self) -> float:
        """The learning rate of the first group; setting it gives all groups of all optimizers the same."""
        for optimizer in (self.dense, self.rows):
            if optimizer is not None:
                return float(optimizer.param_groups[0]["lr"])
        raise ConfigError("optimizers", "got none, expected a model with parameters or tables")

    @lr.setter
    def lr(self, value: float) -> None:
        if self.rows is not None:
            self.rows.lr = value
        if self.dense is not None:
            for group in self.dense.param_groups:
                group["lr"] = value

    def zero_grad(self) -> None:
        """Drop all gradients."""
        for optimizer in self:
            optimizer.zero_grad()

    def advance(self, interval: AdvanceInterval, value_of: Callable[[str | None], float] | None = None) -> None:
        """Advance the schedules of `interval`; an undefined metric, NaN, leaves a plateau's as it is.

        Args:
            interval: Interval that has just ended.
            value_of: Function from a metric's name, or None for the monitored one, to its value in the evaluation.
        """
        for schedule in self.schedules:
            if schedule.interval != interval:
                continue
            if isinstance(schedule.scheduler, ReduceLROnPlateau):
                value = math.nan if value_of is None else value_of(schedule.metric)
                # torch counts NaN as a bad evaluation, and would lower the rate.
                if not math.isnan(value):
                    schedule.scheduler.step(value)
                elif value_of is not None:
                    self._undefined.add(schedule.metric)
            else:
                schedule.scheduler.step()

    def check_metrics(self, metrics: Sequence[str]) -> None:
        """Check that evaluations compute the metrics of plateau schedules.

        Args:
            metrics: Metrics of the evaluations; empty for a training without any.

        Raises:
            ConfigError: There is no evaluation, or not of such a metric.
        """
        for schedule in self.schedules:
            if not isinstance(schedule.scheduler, ReduceLROnPlateau):
                continue
            if not metrics:
                raise ConfigError(
                    "training.schedule", "got a plateau without a split to evaluate on, expected one, or another kind"
                )
            if schedule.metric is not None and schedule.metric not in metrics:
                raise ConfigError(
                    "training.schedule.metric",
                    f"got {schedule.metric!r}{did_you_mean(schedule.metric, metrics)}, "
                    f"expected one of the metrics {', '.join(metrics)}",
                )

    def check_defined(self, monitor: str) -> None:
        """Check that the metric of each plateau had a value in an evaluation.

        Args:
            monitor: Metric of schedules that name none.

        Raises:
            ConfigError: A plateau was never advanced.
        """
        for schedule in self.schedules:
            # One that was never due, as in a short training, has compared nothing without any fault.
            was_undefined = schedule.metric in self._undefined
            if was_undefined and schedule.scheduler.last_epoch == 0:
                metric = schedule.metric or monitor
                raise ConfigError(
                    "training.schedule.metric",
                    f"{metric!r} had no value in any evaluation (it needs {monitored_metric(metric).needs}), so that "
                    "the plateau compared nothing; expected another metric, or a split to evaluate on that defines "
                    "it; the last step is saved",
                )

    def schedule_state(self) -> list[Any]:
        """Return the state of each schedule as JSON data.

        Raises:
            ConfigError: The state of a scheduler of the caller's that JSON cannot hold, such as one of functions.
        """
        return scheduler_states([schedule.scheduler for schedule in self.schedules])

    def schedule_measures(self, measure: Callable[[str | None], str | None]) -> list[str | None]:
        """Return by what each schedule compares evaluations, where it does: the `measure` of its metric."""
        return [
            measure(schedule.metric) if isinstance(schedule.scheduler, ReduceLROnPlateau) else None
            for schedule in self.schedules
        ]

    def load_schedule_state(self, states: Sequence[Any], begins_anew: Sequence[bool] | None = None) -> None:
        """Continue from the result of `schedule_state`.

        Args:
            states: The states.
            begins_anew: Whether each schedule compares evaluations by another measure now: it begins anew, at the rate
                that it has reached. None for no such one.

        Raises:
            ConfigError: Another number of schedules.
        """
        schedulers = [schedule.scheduler for schedule in self.schedules]
        new_states = [scheduler.state_dict() for scheduler in schedulers]
        load_scheduler_states(schedulers, states)
        for scheduler, state, is_new in zip(schedulers, new_states, begins_anew or (), strict=False):
            if is_new:
                scheduler.load_state_dict(state)

    def check_rates(self, steps: int, epochs: int) -> None:
        """Check that no schedule gives FTRL, which divides by its learning rate, a rate of 0.

        Args:
            steps: Steps before the last one.
            epochs: Epochs before that of the last step.

        Raises:
            ConfigError: A schedule falls to 0 before the last step.
        """
        done = {"step": steps, "epoch": epochs}
        for schedule in self.schedules:
            if schedule.interval not in done:
                continue
            rates, optimizer = rates_after(schedule.scheduler, done[schedule.interval]), schedule.scheduler.optimizer
            # No rates come for a scheduler without a formula.
            if any(
                rate == 0.0 and _divides_by_rate(optimizer, group)
                for rate, group in zip(rates, optimizer.param_groups, strict=False)
            ):
                raise ConfigError(
                    "training.schedule",
                    f"got a learning rate that falls to 0 within the {steps + 1} steps, expected one that stays above "
                    "it, such as by a longer fall, min_factor or end_lr: FTRL divides by it",
                )

    def follow(self, spec: ScheduleSpec, *, monitor: str) -> None:
        """Let the rates of all optimizers follow a schedule.

        Args:
            spec: The schedule.
            monitor: Metric by which a plateau is found unless the schedule names another one.

        Raises:
            ConfigError: The schedule names an unknown metric.
        """
        if isinstance(spec, ConstantSchedule):
            return
        interval: AdvanceInterval
        metric: str | None = None
        mode: Literal["min", "max"] = "max"
        if isinstance(spec, PlateauSchedule):
            interval, metric = "evaluation", spec.metric or monitor
            try:
                mode = "max" if monitored_metric(metric).higher_is_better else "min"
            except ConfigError as error:
                raise ConfigError("training.schedule.metric", error.problem) from None
        else:
            interval = spec.interval
        # One scheduler for each optimizer, as torch's schedulers drive the groups of one.
        for scheduler in build_schedulers(spec, tuple(self), mode=mode):
            self.schedules.append(Schedule(scheduler=scheduler, interval=interval, metric=metric))


def _divides_by_rate(optimizer: optim.Optimizer, group: Mapping[str, Any]) -> bool:
    if not isinstance(optimizer, RowOptimizer):
        return isinstance(optimizer, FTRL)
    # Groups of rules by name have the name of theirs.
    rule = optimizer.spec[group["optimizer"]] if isinstance(optimizer.spec, Mapping) else optimizer.spec
    return isinstance(rule, FTRLSpec)


def has_tables(model: nn.Module) -> bool:
    """Return whether a module of `model` holds embedding tables."""
    return any(isinstance(getattr(module, "arenas", None), tuple) for module in model.modules())
