# SPDX-License-Identifier: Apache-2.0
"""Schedules from specs: the rates of torch's own schedulers or of a formula, the same after a restart through JSON."""

import json
import math

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from terarec.embedding import EmbeddingCollection
from terarec.errors import ConfigError
from terarec.optim import (
    LearningRateSchedule,
    RowOptimizer,
    build_schedulers,
    load_scheduler_states,
    scheduler_states,
)
from terarec.spec import (
    AdaGradSpec,
    ConstantSchedule,
    CosineSchedule,
    ExponentialSchedule,
    FeatureSpec,
    LinearSchedule,
    MultiStepSchedule,
    PlateauSchedule,
    SGDSpec,
    StepSchedule,
    TableSpec,
    WarmupDecaySchedule,
    from_data,
    to_data,
)
from terarec.spec.checks import FieldError
from terarec.spec.schedule import ScheduleSpec
from tests.errors import at

SPECS = [
    WarmupDecaySchedule(warmup_steps=3, decay_start=5, decay_steps=4, end_lr=0.01),
    StepSchedule(step_size=3, gamma=0.5),
    MultiStepSchedule(milestones=(2, 5), gamma=0.3),
    ExponentialSchedule(gamma=0.9),
    CosineSchedule(t_max=7, min_factor=0.1, warmup=2),
    LinearSchedule(t_max=6, min_factor=0.2, warmup=3),
    PlateauSchedule(factor=0.5, patience=1, threshold=0.0),
]
METRICS = [0.5, 0.6, 0.6, 0.59, 0.58, 0.7, 0.7, 0.7, 0.7, 0.1, 0.1, 0.1]


def optimizers() -> list[torch.optim.Optimizer]:
    tables = [TableSpec(name="a", rows=5, width=2), TableSpec(name="b", rows=5, width=2, optimizer="wide")]
    collection = EmbeddingCollection(tables, [FeatureSpec(name=t.name, table=t.name) for t in tables])
    rows = RowOptimizer(collection, {"default": SGDSpec(lr=0.4), "wide": AdaGradSpec(lr=0.05)})
    return [torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=0.3), rows]


def rates(held: list[torch.optim.Optimizer]) -> list[float]:
    return [group["lr"] for optimizer in held for group in optimizer.param_groups]


def advance(schedulers: list[lr_scheduler.LRScheduler], held: list[torch.optim.Optimizer], step: int) -> None:
    for optimizer in held:
        optimizer.step()
    for scheduler in schedulers:
        if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau):
            scheduler.step(METRICS[step])
        else:
            scheduler.step()


def expected(spec: ScheduleSpec, base: float, steps: int) -> list[float]:
    """The rates before steps 1, 2, ... by torch's scheduler of that name, or by a formula."""
    if isinstance(spec, WarmupDecaySchedule):
        schedule = LearningRateSchedule(base_lr=base, warmup_steps=3, decay_start=5, decay_steps=4, end_lr=0.01)
        return [schedule.lr(step) for step in range(1, steps + 1)]
    if isinstance(spec, CosineSchedule | LinearSchedule):
        found = []
        for done in range(steps):
            share = min(1.0, max(0, done - spec.warmup) / spec.t_max)
            left = 0.5 * (1 + math.cos(math.pi * share)) if spec.kind == "cosine" else 1 - share
            rise = min(1.0, (done + 1) / spec.warmup)
            found.append(base * rise * (spec.min_factor + (1 - spec.min_factor) * left))
        return found
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=base)
    scheduler = {
        "step": lambda: lr_scheduler.StepLR(optimizer, 3, gamma=0.5),
        "multi_step": lambda: lr_scheduler.MultiStepLR(optimizer, [2, 5], gamma=0.3),
        "exponential": lambda: lr_scheduler.ExponentialLR(optimizer, gamma=0.9),
        "plateau": lambda: lr_scheduler.ReduceLROnPlateau(optimizer, "max", factor=0.5, patience=1, threshold=0.0),
    }[spec.kind]()
    found = []
    for step in range(steps):
        found.append(optimizer.param_groups[0]["lr"])
        advance([scheduler], [optimizer], step)
    return found


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.kind)
def test_every_group_of_every_optimizer_follows(spec: ScheduleSpec) -> None:
    held = optimizers()
    schedulers = build_schedulers(spec, held)
    assert len(schedulers) == 2
    found = []
    for step in range(12):
        found.append(rates(held))
        advance(schedulers, held, step)
    for position, base in enumerate((0.3, 0.4, 0.05)):
        assert [row[position] for row in found] == pytest.approx(expected(spec, base, 12), rel=1e-12)


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.kind)
@pytest.mark.parametrize("stop", [0, 4, 9])
def test_rates_resume_bit_for_bit_after_a_restart_through_json(spec: ScheduleSpec, stop: int) -> None:
    whole = optimizers()
    schedulers = build_schedulers(spec, whole)
    for step in range(stop):
        advance(schedulers, whole, step)
    text = json.dumps(scheduler_states(schedulers), allow_nan=False)
    later = optimizers()
    after = build_schedulers(spec, later)
    for mine, theirs in zip(later, whole, strict=True):
        if isinstance(mine, RowOptimizer):
            mine.load_step_state(theirs.step_state())
        else:
            mine.load_state_dict(theirs.state_dict())
    load_scheduler_states(after, json.loads(text))
    for step in range(stop, 12):
        advance(schedulers, whole, step)
        advance(after, later, step)
        assert rates(later) == rates(whole)


def test_the_state_of_any_scheduler_of_torch_goes_through_json() -> None:
    def build(optimizer: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
        parts = [lr_scheduler.ConstantLR(optimizer, 0.1, total_iters=3), lr_scheduler.MultiStepLR(optimizer, [2, 4])]
        return lr_scheduler.SequentialLR(optimizer, parts, milestones=[4])

    (one, _), (other, _) = optimizers(), optimizers()
    mine, theirs = build(one), build(other)
    for step in range(6):
        advance([mine], [one], step)
    other.load_state_dict(one.state_dict())
    load_scheduler_states([theirs], json.loads(json.dumps(scheduler_states([mine]), allow_nan=False)))
    for step in range(6):
        advance([mine, theirs], [one, other], step)
        assert rates([one]) == rates([other])
    odd = lr_scheduler.StepLR(one, 1)
    odd.strange = object()
    with pytest.raises(ConfigError, check=at("StepLR")):
        scheduler_states([odd])
    with pytest.raises(ConfigError, check=at("schedulers")):
        load_scheduler_states([odd], [])


def test_the_constant_schedule_has_no_scheduler() -> None:
    assert build_schedulers(ConstantSchedule(), optimizers()) == []
    with pytest.raises(ConfigError, check=at("schedule")):
        build_schedulers(SGDSpec(), optimizers())  # type: ignore[arg-type]


@pytest.mark.parametrize("spec", [ConstantSchedule(), *SPECS], ids=lambda spec: spec.kind)
def test_specs_come_back_from_json(spec: ScheduleSpec) -> None:
    assert from_data(ScheduleSpec, json.loads(json.dumps(to_data(spec)))) == spec  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("kind", "change", "field"),
    [
        (WarmupDecaySchedule, {"warmup_steps": -1}, "warmup_steps"),
        (WarmupDecaySchedule, {"decay_power": 0.5}, "decay_power"),
        (StepSchedule, {"step_size": 0}, "step_size"),
        (StepSchedule, {"step_size": 1, "interval": "batch"}, "interval"),
        (MultiStepSchedule, {"milestones": ()}, "milestones"),
        (MultiStepSchedule, {"milestones": (5, 2)}, "milestones"),
        (MultiStepSchedule, {"milestones": (0, 2)}, "milestones"),
        (ExponentialSchedule, {"gamma": 0.0}, "gamma"),
        (CosineSchedule, {"t_max": 0}, "t_max"),
        (LinearSchedule, {"t_max": 3, "min_factor": 1.5}, "min_factor"),
        (PlateauSchedule, {"factor": 1.0}, "factor"),
        (PlateauSchedule, {"metric": ""}, "metric"),
    ],
)
def test_bad_numbers_are_named(kind, change, field: str) -> None:
    with pytest.raises(FieldError) as caught:
        kind(**change)
    assert caught.value.field == field
