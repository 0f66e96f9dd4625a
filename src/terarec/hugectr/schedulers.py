"""LearningRateScheduler: a schedule that knows its step."""

from __future__ import annotations

from typing import Any

from terarec.hugectr.tables.schedule import LEARNING_RATE_SCHEDULER
from terarec.optim.schedules import LearningRateSchedule


class LearningRateScheduler:
    """The learning rate of the next step, and of the one after it.

    Args:
        args: as HugeCTR takes them (``base_lr, warmup_steps=1, decay_start=0, decay_steps=1, decay_power=2.0,
            end_lr=0.0``), by place or by name.
        kwargs: the same.

    Raises:
        WrongInputError: as the table of its parameters says.
    """

    __signature__ = LEARNING_RATE_SCHEDULER.signature()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        values = LEARNING_RATE_SCHEDULER.read(args, kwargs)
        # Without a decay its number of steps means nothing, and scripts write 0.
        self._schedule = LearningRateSchedule(**{**values, "decay_steps": max(1, values["decay_steps"])})
        self._step = 0

    def get_next(self) -> float:
        """Go to the next step, the first time to step 1, and return its learning rate."""
        self._step += 1
        return self.get_lr()

    def get_lr(self) -> float:
        """The learning rate of the step that is on; of the first one before any."""
        return self._schedule.lr(max(1, self._step))

    @property
    def schedule(self) -> LearningRateSchedule:
        """The rates of all steps."""
        return self._schedule

    def get_step(self) -> int:
        """Number of the step that is on; 0 before the first."""
        return self._step
