# SPDX-License-Identifier: Apache-2.0
"""Finding P6: schedules that end with the run need no number of steps."""

import dataclasses
import re
import shutil

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR

from terarec.config import load_run
from terarec.errors import ConfigError
from terarec.formats import read_dataset, write_dataset
from terarec.optim import build_schedulers
from terarec.spec import (
    CosineSchedule,
    FTRLSpec,
    LinearSchedule,
    SGDSpec,
    StaticTablesSpec,
    WarmupDecaySchedule,
    from_data,
    to_data,
)
from terarec.train import build
from terarec.train.seeds import fit_seeds
from terarec.train.trainer import Callback
from tests.errors import at
from tests.train.small_run import changed

BASE = 0.01


class Rates(Callback):
    def __init__(self) -> None:
        self.found = []

    def on_step_start(self, trainer):
        self.found.append(trainer.optimizers.lr)


def rates_of_torch(steps: int, t_max: int) -> list[float]:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=BASE)
    scheduler = CosineAnnealingLR(optimizer, T_max=t_max)
    found = []
    for _ in range(steps):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return found


@pytest.mark.parametrize(
    ("training", "steps"),
    [
        ({}, 16),
        ({"max_steps": 11}, 11),
        ({"accumulate": 3, "drop_last": True}, 6),
        ({"repeat": True, "max_steps": 10}, 10),
    ],
)
def test_a_cosine_falls_over_the_complete_run_as_in_torch(tmp_path, spec, training, steps):
    rates = Rates()
    build(changed(spec, schedule=CosineSchedule(), **training), tmp_path / "run", [rates]).fit()
    np.testing.assert_allclose(rates.found, rates_of_torch(steps, steps), rtol=1e-9)
    assert load_run(tmp_path / "run" / "run.json").training.schedule == CosineSchedule(t_max=steps, ends_with_run=True)


@pytest.mark.parametrize(
    ("schedule", "t_max"),
    [
        (CosineSchedule(warmup=3), 8),
        (LinearSchedule(warmup=1, interval="epoch"), 1),
        (LinearSchedule(t_max=5), 5),
    ],
)
def test_the_fall_follows_the_warm_up_in_its_unit(tmp_path, spec, schedule, t_max):
    run = build(changed(spec, schedule=schedule, max_steps=11), tmp_path / "run")
    assert run.spec.training.schedule.t_max == t_max


def test_a_resumed_run_keeps_the_end_of_its_schedule(tmp_path, spec):
    spec = changed(spec, schedule=CosineSchedule())
    build(spec, tmp_path / "run").fit()
    resumed = build(changed(spec, epochs=3), tmp_path / "run", [rates := Rates()])
    assert resumed.spec.training.schedule == CosineSchedule(t_max=16, ends_with_run=True)
    resumed.fit(resume=True)
    assert rates.found == [0.0] * 8
    with pytest.raises(ConfigError):
        build(changed(spec, schedule=LinearSchedule()), tmp_path / "run").fit(resume=True)


def test_the_end_of_a_schedule_is_that_of_the_next_run(tmp_path, spec):
    """A warm start without a description took the end of the run before: its rates were 0 from there on."""
    build(changed(spec, schedule=CosineSchedule()), tmp_path / "run").fit()
    described = load_run(tmp_path / "run" / "run.json")
    longer = build(changed(described, epochs=3), tmp_path / "longer")
    assert longer.spec.training.schedule == CosineSchedule(t_max=24, ends_with_run=True)
    fixed = changed(described, schedule=CosineSchedule(t_max=5), epochs=3)
    assert build(fixed, tmp_path / "fixed").spec.training.schedule == CosineSchedule(t_max=5)


def test_finished_seeds_are_kept(tmp_path, spec):
    spec = changed(spec, schedule=CosineSchedule(), max_steps=2)
    first = fit_seeds(spec, tmp_path / "seeds", 1, "valid")
    log = tmp_path / "seeds" / "seed-5" / "metrics.jsonl"
    before = log.stat().st_mtime_ns
    assert fit_seeds(spec, tmp_path / "seeds", 1, "valid", resume=True) == first
    assert log.stat().st_mtime_ns == before
    # Results of data with other ids are none of these data.
    other = tmp_path / "data"
    shutil.copytree(spec.data, other)
    dataset = read_dataset(other)
    columns = (dataclasses.replace(dataset.categorical[0], rows=999), *dataset.categorical[1:])
    write_dataset(dataclasses.replace(dataset, categorical=columns), other)
    with pytest.raises(ConfigError, check=at("data set 'planted', column 'user'")):
        fit_seeds(dataclasses.replace(spec, data=str(other)), tmp_path / "seeds", 1, "valid", resume=True)
    # The time of a seed that continues is that of all starts.
    text = re.sub(r'"seconds": [^,}]*', '"seconds": 1000.0', log.read_text())
    log.write_text(text)
    (longer,) = fit_seeds(changed(spec, max_steps=3), tmp_path / "seeds", 1, "valid", resume=True).results
    assert longer.seconds > 2000.0  # training and evaluation


def test_a_warm_up_as_long_as_the_run_is_rejected(tmp_path, spec):
    with pytest.raises(ConfigError, check=at("training.schedule.warmup", "16")):
        build(changed(spec, schedule=CosineSchedule(warmup=16)), tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("schedule", "last"),
    [
        (LinearSchedule(t_max=10), 10),
        (CosineSchedule(t_max=1, interval="epoch"), 8),
        (WarmupDecaySchedule(decay_start=2, decay_steps=3), 4),
        (LinearSchedule(t_max=10, min_factor=0.1), 16),
    ],
)
@pytest.mark.parametrize("side", ["dense_optimizer", "sparse_optimizer"])
def test_ftrl_gets_no_rate_of_0(tmp_path, spec, schedule, last, side):
    spec = dataclasses.replace(spec, **{side: FTRLSpec(lr=0.1)})
    if last < 16:
        with pytest.raises(ConfigError, check=at("training.schedule", "falls to 0 within the 16 steps")):
            build(changed(spec, schedule=schedule), tmp_path / "run").fit()
        assert not (tmp_path / "run" / "checkpoints" / f"step-{last:08d}").exists()
    assert build(changed(spec, schedule=schedule, max_steps=last), tmp_path / "other").fit().steps == last


def test_other_rules_beside_ftrl_may_have_a_rate_of_0(tmp_path, spec):
    tables = StaticTablesSpec(optimizers={"user": "wide"})
    rules = {"wide": FTRLSpec(lr=0.1)}
    model = dataclasses.replace(spec.model, tables=tables)
    spec = dataclasses.replace(spec, model=model, sparse_optimizer=SGDSpec(lr=0.0), row_optimizers=rules)
    run = build(changed(spec, schedule=LinearSchedule(), max_steps=2), tmp_path / "run")
    assert run.fit().steps == 2


def test_an_unknown_length_is_an_error():
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=BASE)
    with pytest.raises(ConfigError, check=at("schedule.t_max")):
        build_schedulers(CosineSchedule(), [optimizer])
    assert from_data(CosineSchedule, to_data(CosineSchedule())) == CosineSchedule()
