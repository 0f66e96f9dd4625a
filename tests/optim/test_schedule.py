# SPDX-License-Identifier: Apache-2.0
"""The schedule against a table of it, built piece by piece, and at every edge."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from terarec.errors import ConfigError
from terarec.optim import LearningRateSchedule
from tests.errors import at

LENGTH = 40


def tabulated(base, warmup, start, steps, power, end):
    """Rates of steps 1 to LENGTH in float64, written from the last piece to the first."""
    rates = np.full(LENGTH + 1, end)
    fall = np.arange(steps, -1, -1) / steps
    stop = min(LENGTH, start + steps)
    if start:
        rates[start : stop + 1] = np.maximum(end, base * fall**power)[: max(0, stop + 1 - start)]
    rates[: (start or LENGTH) + 1] = base
    rates[: warmup + 1] = (np.arange(0, warmup + 1) / max(warmup, 1) * base)[: LENGTH + 1]
    return rates[1:]


@given(
    base=st.floats(0.0, 100.0),
    warmup=st.integers(0, 2 * LENGTH),
    start=st.integers(0, 2 * LENGTH),
    steps=st.integers(1, 2 * LENGTH),
    power=st.sampled_from([1.0, 1.5, 2.0, 3.0]),
    end=st.floats(0.0, 50.0),
)
def test_equals_the_table(base, warmup, start, steps, power, end):
    schedule = LearningRateSchedule(
        base_lr=base, warmup_steps=warmup, decay_start=start, decay_steps=steps, decay_power=power, end_lr=end
    )
    rates = [schedule.lr(step) for step in range(1, LENGTH + 1)]
    np.testing.assert_allclose(
        rates, tabulated(base, warmup, start, steps, power, end)[:LENGTH], rtol=1e-12, atol=1e-300
    )


def test_the_published_schedule_of_dlrm_at_its_edges():
    schedule = LearningRateSchedule(
        base_lr=24.0, warmup_steps=2750, decay_start=49315, decay_steps=27772, decay_power=2.0, end_lr=0.0
    )
    assert schedule.lr(1) == 24.0 / 2750
    assert schedule.lr(2749) < 24.0
    assert schedule.lr(2750) == schedule.lr(2751) == schedule.lr(49315) == 24.0
    assert schedule.lr(49316) == pytest.approx(24.0 * (27771 / 27772) ** 2, rel=1e-15)
    assert schedule.lr(49315 + 27772 // 2) == pytest.approx(6.0)
    assert schedule.lr(77086) == pytest.approx(24.0 / 27772**2)
    assert schedule.lr(77087) == schedule.lr(77088) == schedule.lr(10**9) == 0.0


def test_without_a_start_it_never_falls():
    schedule = LearningRateSchedule(base_lr=0.1, decay_steps=5, end_lr=0.01)
    assert {schedule.lr(step) for step in (1, 2, 6, 10**6)} == {0.1}


def test_the_last_rate_bounds_the_fall_and_may_exceed_the_base():
    schedule = LearningRateSchedule(base_lr=1.0, decay_start=1, decay_steps=4, decay_power=1.0, end_lr=0.3)
    assert [schedule.lr(step) for step in range(1, 8)] == [1.0, 0.75, 0.5, 0.3, 0.3, 0.3, 0.3]
    rising = LearningRateSchedule(base_lr=1.0, decay_start=1, decay_steps=2, end_lr=2.0)
    assert [rising.lr(step) for step in range(1, 4)] == [1.0, 2.0, 2.0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"base_lr": -1.0}, "LearningRateSchedule.base_lr"),
        ({"base_lr": math.nan}, "LearningRateSchedule.base_lr"),
        ({"warmup_steps": -1}, "LearningRateSchedule.warmup_steps"),
        ({"warmup_steps": 1.5}, "LearningRateSchedule.warmup_steps"),
        ({"decay_start": -1}, "LearningRateSchedule.decay_start"),
        ({"decay_steps": 0}, "LearningRateSchedule.decay_steps"),
        ({"decay_power": 0.5}, "LearningRateSchedule.decay_power"),
        ({"end_lr": -0.1}, "LearningRateSchedule.end_lr"),
    ],
)
def test_bad_numbers_are_named(change, message):
    with pytest.raises(ConfigError, check=at(message)):
        LearningRateSchedule(**{"base_lr": 1.0, **change})


def test_steps_count_from_one():
    with pytest.raises(ConfigError, check=at("LearningRateSchedule.lr")):
        LearningRateSchedule(base_lr=1.0).lr(0)
