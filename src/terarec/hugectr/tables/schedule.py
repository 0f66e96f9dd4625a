"""The learning rate's schedule: the same parameters in several callables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from terarec.hugectr.tables.kinds import number, whole
from terarec.hugectr.tables.table import Parameter, Table

WARM_UP_AND_DECAY = (
    Parameter(name="warmup_steps", kind=whole(0), default=1, meaning="steps over which the rate rises to its base"),
    Parameter(name="decay_start", kind=whole(0), default=0, meaning="last step before the decay; 0: no decay"),
    Parameter(name="decay_steps", kind=whole(0), default=1, meaning="steps that the decay takes"),
    Parameter(name="decay_power", kind=number(1.0), default=2.0, meaning="exponent of the decay"),
    Parameter(name="end_lr", kind=number(0.0), default=0.0, meaning="least rate"),
)


def decay_has_steps(values: Mapping[str, Any]) -> str | None:
    """The rule that a decay that starts takes at least one step."""
    if values["decay_start"] and not values["decay_steps"]:
        return f"decay_steps: got 0 with decay_start={values['decay_start']}, expected at least 1"
    return None


LEARNING_RATE_SCHEDULER = Table(
    name="LearningRateScheduler",
    meaning="the learning rate, step after step",
    rows=(
        Parameter(name="base_lr", kind=number(0.0), meaning="base learning rate"),
        *WARM_UP_AND_DECAY,
    ),
    rules=(decay_has_steps,),
)
