"""How the learning rate moves from step to step."""

from __future__ import annotations

import math
from dataclasses import dataclass

from terarec.errors import ConfigError
from terarec.spec import checks


@dataclass(frozen=True, kw_only=True, slots=True)
class LearningRateSchedule:
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
        base_lr: the rate of the plateau.
        warmup_steps: steps until the plateau; 0 and 1 both start on it.
        decay_start: last step of the plateau; 0 for one that never ends.
        decay_steps: steps of the fall.
        decay_power: exponent of the fall, at least 1.
        end_lr: the rate after the fall, and the least during it.
    """

    base_lr: float
    warmup_steps: int = 1
    decay_start: int = 0
    decay_steps: int = 1
    decay_power: float = 2.0
    end_lr: float = 0.0

    def __post_init__(self) -> None:
        checks.finite_float(self, "base_lr", low=0.0)
        checks.positive_int(self, "warmup_steps", minimum=0)
        checks.positive_int(self, "decay_start", minimum=0)
        checks.positive_int(self, "decay_steps")
        checks.finite_float(self, "decay_power", low=1.0)
        checks.finite_float(self, "end_lr", low=0.0)

    def lr(self, step: int) -> float:
        """The learning rate of a step.

        Args:
            step: number of the step, from 1.

        Raises:
            ConfigError: a step below 1.
        """
        if step < 1:
            raise ConfigError(f"LearningRateSchedule.lr: got step {step}, expected steps from 1")
        if step <= self.warmup_steps:
            return self.base_lr * step / self.warmup_steps
        if self.decay_start == 0 or step <= self.decay_start:
            return self.base_lr
        left = self.decay_start + self.decay_steps - step
        if left < 0:
            return self.end_lr
        return max(self.end_lr, self.base_lr * math.pow(left / self.decay_steps, self.decay_power))
