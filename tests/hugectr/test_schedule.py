# SPDX-License-Identifier: Apache-2.0
"""The scheduler counts its steps and gives the schedule's rates."""

import pytest

import terarec.hugectr as hugectr
from terarec.hugectr.errors import WrongInputError
from tests.errors import at


def test_rates_come_step_after_step():
    scheduler = hugectr.LearningRateScheduler(8.0, 4, 6, 2, 2.0, 0.0)
    assert scheduler.get_step() == 0
    assert [scheduler.get_next() for _ in range(9)] == [2.0, 4.0, 6.0, 8.0, 8.0, 8.0, 2.0, 0.0, 0.0]
    assert (scheduler.get_step(), scheduler.get_lr()) == (9, 0.0)


def test_no_decay_may_be_written_as_zeros():
    scheduler = hugectr.LearningRateScheduler(base_lr=0.5, warmup_steps=0, decay_start=0, decay_steps=0)
    assert [scheduler.get_next() for _ in range(3)] == [0.5, 0.5, 0.5]
    with pytest.raises(WrongInputError, check=at("LearningRateScheduler: decay_steps")):
        hugectr.LearningRateScheduler(0.5, decay_start=3, decay_steps=0)
    with pytest.raises(WrongInputError, check=at("LearningRateScheduler")):
        hugectr.LearningRateScheduler()
