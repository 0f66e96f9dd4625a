# SPDX-License-Identifier: Apache-2.0
"""The learning rate of each step, and when a release displays, evaluates and saves."""

from __future__ import annotations

from dataclasses import dataclass

from terarec.hugectr.objects import OptimizerWithSchedule, OptParamsPy, Solver
from terarec.hugectr.release import release_number
from terarec.hugectr.schema.table import bind_arguments
from terarec.optim.schedules import LearningRateSchedule


@dataclass(frozen=True, kw_only=True, slots=True)
class Cadence:
    """Numbering of iterations in a release.

    Attributes:
        from_one: Displays and evaluations are due when the iterations done are a multiple of the interval; before that
            release, when those done before the running one are, unless there are none.
        saves_from_one: Rule of `from_one` for snapshots, of which none follows the first iteration alone.
    """

    from_one: bool
    saves_from_one: bool

    def shows(self, index: int, interval: int) -> bool:
        """Return whether a display or an evaluation is due after the iteration `index`, from 0."""
        return _is_due(index, interval, self.from_one)

    def number(self, index: int) -> int:
        """Return the number of the iteration `index` in log lines."""
        return index + self.from_one

    def saves(self, index: int, interval: int) -> bool:
        """Return whether a snapshot is due after the iteration `index`, from 0."""
        return index != 0 and _is_due(index, interval, self.saves_from_one)

    def saved_number(self, index: int) -> int:
        """Return the number of the iteration `index` in names of snapshots."""
        return index + self.saves_from_one


def cadence_of(release: str) -> Cadence:
    """Return the cadence of `release`."""
    number = release_number(release)
    # As the loops of the releases count; log lines, evaluations and names of snapshots depend on it.
    return Cadence(from_one=number >= (23, 4), saves_from_one=number >= (23, 9))


def _is_due(index: int, interval: int, from_one: bool) -> bool:
    if interval <= 0:
        return False
    return (index + 1) % interval == 0 if from_one else index != 0 and index % interval == 0


class LearningRateScheduler:
    """The learning rate of the next step, and of the one after it.

    Args:
        base_lr: Base learning rate.
        warmup_steps: Steps over which the rate rises to its base.
        decay_start: Last step before the decay; 0 for no decay.
        decay_steps: Steps of the decay.
        decay_power: Exponent of the decay.
        end_lr: Least rate.

    Raises:
        WrongInputError: A value that its schema does not accept.
    """

    @bind_arguments("LearningRateScheduler")
    def __init__(
        self,
        base_lr: float,
        warmup_steps: int = 1,
        decay_start: int = 0,
        decay_steps: int = 1,
        decay_power: float = 2.0,
        end_lr: float = 0.0,
    ) -> None:
        self._schedule = LearningRateSchedule(
            base_lr=base_lr,
            warmup_steps=warmup_steps,
            decay_start=decay_start,
            decay_steps=max(1, decay_steps),  # without a decay it means nothing, and scripts write 0
            decay_power=decay_power,
            end_lr=end_lr,
        )
        self._step = 0

    @classmethod
    def of(cls, source: Solver | OptimizerWithSchedule) -> LearningRateScheduler:
        """Return the schedule of a solver, or of release 3.0's optimizer."""
        base = source.learning_rate if isinstance(source, OptimizerWithSchedule) else source.lr
        return cls(base, source.warmup_steps, source.decay_start, source.decay_steps, source.decay_power, source.end_lr)

    def get_next(self) -> float:
        """Advance to the next step, first to step 1, and return its learning rate."""
        self._step += 1
        return self.get_lr()

    def get_lr(self) -> float:
        """Return the learning rate of the current step, or of the first one before it."""
        # Scripts print the rate before the first `get_next`.
        return self._schedule.lr(max(1, self._step))

    @property
    def schedule(self) -> LearningRateSchedule:
        """The rates of all steps."""
        return self._schedule

    def get_step(self) -> int:
        """Return the number of the current step; 0 before the first."""
        return self._step


def base_rate(solver: Solver, optimizer: OptParamsPy) -> float:
    """Return the learning rate that training begins with: that of release 3.0's optimizer, else of the solver."""
    return optimizer.learning_rate if isinstance(optimizer, OptimizerWithSchedule) else solver.lr
