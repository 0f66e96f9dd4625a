# SPDX-License-Identifier: Apache-2.0
"""Learning-rate schedules: the formula, torch schedulers from specs, and their state as JSON."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args

from torch import Tensor, optim
from torch.optim.lr_scheduler import ExponentialLR, LambdaLR, LRScheduler, MultiStepLR, ReduceLROnPlateau, StepLR

from terarec.errors import ConfigError
from terarec.spec import checks
from terarec.spec.schedule import (
    ConstantSchedule,
    CosineSchedule,
    ExponentialSchedule,
    LinearSchedule,
    MultiStepSchedule,
    PlateauSchedule,
    ScheduleSpec,
    StepSchedule,
    WarmupDecaySchedule,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class LearningRateSchedule(checks.Checked):
    """Linear warm-up, a plateau, a polynomial fall, and a last rate that stays.

    With t the number of the step, s = `decay_start`, n = `decay_steps`, p = `decay_power`:

    * t <= warmup_steps: base_lr t / warmup_steps
    * else, with s = 0, or t <= s: base_lr
    * t <= s + n: max(end_lr, base_lr ((s + n - t) / n)^p)
    * after that: end_lr

    The warm-up comes first where it and the fall overlap.

    Example:
        >>> schedule = LearningRateSchedule(base_lr=8.0, warmup_steps=4, decay_start=6, decay_steps=2)
        >>> [schedule.lr(step) for step in range(1, 10)]
        [2.0, 4.0, 6.0, 8.0, 8.0, 8.0, 2.0, 0.0, 0.0]

    Attributes:
        base_lr: The rate of the plateau.
        warmup_steps: Steps until the plateau; 0 and 1 both start on it.
        decay_start: Last step of the plateau; 0 for one that never ends.
        decay_steps: Steps of the fall.
        decay_power: Exponent of the fall, at least 1.
        end_lr: The rate after the fall, and the least during it.
    """

    base_lr: checks.NonNegative
    warmup_steps: checks.NonNegativeInt = 1
    decay_start: checks.NonNegativeInt = 0
    decay_steps: checks.PositiveInt = 1
    decay_power: Annotated[float, checks.number(1.0)] = 2.0
    end_lr: checks.NonNegative = 0.0

    def lr(self, step: int) -> float:
        """Return the learning rate of a step.

        Args:
            step: Number of the step, from 1.

        Raises:
            ConfigError: A step below 1.
        """
        if step < 1:
            raise ConfigError("LearningRateSchedule.lr", f"got step {step}, expected steps from 1")
        if step <= self.warmup_steps:
            return self.base_lr * step / self.warmup_steps
        if self.decay_start == 0 or step <= self.decay_start:
            return self.base_lr
        left = self.decay_start + self.decay_steps - step
        # Before the power, which has no real value for a negative base.
        if left < 0:
            return self.end_lr
        return max(self.end_lr, self.base_lr * math.pow(left / self.decay_steps, self.decay_power))


class WarmupDecayLR(LRScheduler):
    """The rates of `LearningRateSchedule`, with that of each group at the start as its base rate.

    Args:
        optimizer: Any optimizer.
        spec: The numbers.
    """

    def __init__(self, optimizer: optim.Optimizer, spec: WarmupDecaySchedule) -> None:
        self._spec = spec
        super().__init__(optimizer)

    def get_lr(self) -> list[float | Tensor]:
        """Return the rate of the next interval for each group."""
        return list(self.rates_after(self.last_epoch))

    def rates_after(self, done: int) -> list[float]:
        """Return the rate of each group after `done` intervals."""
        spec = self._spec
        return [
            LearningRateSchedule(
                base_lr=float(base),
                warmup_steps=spec.warmup_steps,
                decay_start=spec.decay_start,
                decay_steps=spec.decay_steps,
                decay_power=spec.decay_power,
                end_lr=spec.end_lr,
            ).lr(done + 1)
            for base in self.base_lrs
        ]

    def state_dict(self) -> dict[str, Any]:
        """Return how far the schedule is; the numbers of the spec are not part of it."""
        return {name: value for name, value in super().state_dict().items() if name != "_spec"}


def build_schedulers(
    spec: ScheduleSpec, optimizers: Sequence[optim.Optimizer], *, mode: Literal["min", "max"] = "max"
) -> list[LRScheduler]:
    """Build a scheduler for each optimizer; none for the constant schedule.

    The caller calls ``step()`` after each ``spec.interval``; for a `PlateauSchedule`, whose schedulers are
    `torch.optim.lr_scheduler.ReduceLROnPlateau`, ``step(value)`` after each evaluation.

    Args:
        spec: The schedule.
        optimizers: Any optimizers of torch, `terarec.optim.RowOptimizer` among them.
        mode: Whether lower or higher values of the metric of a `PlateauSchedule` are better.

    Raises:
        ConfigError: `spec` is not a schedule, or its fall has no length.
    """
    if not isinstance(spec, ScheduleSpec):
        names = [kind.__name__ for kind in get_args(ScheduleSpec)]
        raise ConfigError("schedule", f"got {type(spec).__name__}, expected {', '.join(names[:-1])} or {names[-1]}")
    if isinstance(spec, ConstantSchedule):
        return []
    if isinstance(spec, PlateauSchedule):
        return [_plateau(spec, optimizer, mode) for optimizer in optimizers]
    return [_BUILDERS[type(spec)](spec, optimizer) for optimizer in optimizers]


def scheduler_states(schedulers: Sequence[LRScheduler]) -> list[Any]:
    """Return the states of any schedulers of torch as JSON data.

    Raises:
        ConfigError: A state that JSON cannot hold, such as that of a schedule of functions.
    """
    return [_encoded(type(scheduler).__name__, scheduler.state_dict()) for scheduler in schedulers]


def load_scheduler_states(schedulers: Sequence[LRScheduler], states: Sequence[Any]) -> None:
    """Continue from the result of `scheduler_states`. The rates themselves are the optimizers' state.

    Raises:
        ConfigError: As many states as schedulers are expected. Nothing is changed.
    """
    if len(schedulers) != len(states):
        raise ConfigError("schedulers", f"got the state of {len(states)}, expected that of {len(schedulers)}")
    for scheduler, state in zip(schedulers, states, strict=True):
        scheduler.load_state_dict(_decoded(state))


def rates_after(scheduler: LRScheduler, done: int) -> list[float]:
    """Return the rates of a scheduler's groups after `done` intervals; none for one without such a formula.

    Args:
        scheduler: What `build_schedulers` makes, or a `LambdaLR`.
        done: Number of intervals.
    """
    if isinstance(scheduler, WarmupDecayLR):
        return scheduler.rates_after(done)
    if isinstance(scheduler, LambdaLR):
        factors = zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)
        return [float(base) * factor(done) for base, factor in factors]
    return []


class _RiseAndFall:
    """The factor of the base rate. `LambdaLR` saves the attributes of an object, and nothing of a function."""

    def __init__(self, spec: CosineSchedule | LinearSchedule) -> None:
        if spec.t_max is None:
            raise ConfigError(
                "schedule.t_max",
                f"got none where the length of the run is unknown, expected the number of {spec.interval}s of the fall "
                "(terarec.spec.schedule_of_run computes it)",
            )
        self.is_cosine = isinstance(spec, CosineSchedule)
        self.t_max, self.min_factor, self.warmup = spec.t_max, spec.min_factor, spec.warmup

    def __call__(self, done: int) -> float:
        if done < self.warmup:
            return (done + 1) / self.warmup
        share = min(1.0, (done - self.warmup) / self.t_max)
        left = (1.0 + math.cos(math.pi * share)) / 2.0 if self.is_cosine else 1.0 - share
        return self.min_factor + (1.0 - self.min_factor) * left


def _plateau(spec: PlateauSchedule, optimizer: optim.Optimizer, mode: Literal["min", "max"]) -> LRScheduler:
    return ReduceLROnPlateau(
        optimizer,
        mode=mode,
        factor=spec.factor,
        patience=spec.patience,
        threshold=spec.threshold,
        min_lr=spec.min_lr,
        # By default torch leaves a rate as it is where the reduction is below 1e-8.
        eps=0.0,
    )


_BUILDERS: Mapping[type[object], Callable[..., LRScheduler]] = {
    WarmupDecaySchedule: lambda spec, optimizer: WarmupDecayLR(optimizer, spec),
    StepSchedule: lambda spec, optimizer: StepLR(optimizer, spec.step_size, gamma=spec.gamma),
    MultiStepSchedule: lambda spec, optimizer: MultiStepLR(optimizer, list(spec.milestones), gamma=spec.gamma),
    ExponentialSchedule: lambda spec, optimizer: ExponentialLR(optimizer, gamma=spec.gamma),
    CosineSchedule: lambda spec, optimizer: LambdaLR(optimizer, _RiseAndFall(spec)),
    LinearSchedule: lambda spec, optimizer: LambdaLR(optimizer, _RiseAndFall(spec)),
}
"""Schedule -> its scheduler; that of a plateau takes the direction of a metric, too."""


# JSON has neither infinity nor keys that are numbers.
def _encoded(what: str, value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": str(value)}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        name = "counter" if isinstance(value, Counter) else "mapping"
        return {name: [[_encoded(what, key), _encoded(what, item)] for key, item in value.items()]}
    if isinstance(value, list | tuple):
        return [_encoded(what, item) for item in value]
    raise ConfigError(what, f"got {type(value).__name__} in its state_dict(), expected numbers, strings and lists")


def _decoded(value: Any) -> Any:
    if isinstance(value, list):
        return [_decoded(item) for item in value]
    if not isinstance(value, dict):
        return value
    # Every object of the encoding has one entry, whose name is its kind.
    ((name, content),) = value.items()
    if name == "float":
        return float(content)
    pairs = {_decoded(key): _decoded(item) for key, item in content}
    return Counter(pairs) if name == "counter" else pairs
