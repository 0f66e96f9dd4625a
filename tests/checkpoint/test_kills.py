# SPDX-License-Identifier: Apache-2.0
"""A training whose tables lie in files is killed again and again: each time the newest checkpoint is whole."""

import contextlib
import random
import signal
import sys
import time
from pathlib import Path

import pytest
import torch

from terarec.checkpoint import latest
from terarec.checkpoint.directory import read_manifest
from tests.checkpoint.killed_training import KilledTraining
from tests.processes import Python

ROOT = Path(__file__).parents[2]


def assert_same(found: KilledTraining, expected: KilledTraining) -> None:
    for name, table in expected.embedding.tables.items():
        keys = table.keys()
        assert torch.equal(found.embedding.tables[name].keys(), keys)
        mine, others = found.embedding.tables[name].export(keys), table.export(keys)
        assert torch.equal(mine.weights, others.weights)
        for held, theirs in ((mine.state, others.state), (mine.uses, others.uses)):
            assert held.keys() == theirs.keys()
            assert all(torch.equal(values, theirs[part]) for part, values in held.items())


@pytest.mark.skipif(sys.platform != "linux", reason="forks a process that has loaded torch")
@pytest.mark.parametrize(
    ("seed", "kills"), [(3, 2), *(pytest.param(seed, 40, marks=pytest.mark.slow) for seed in range(4, 9))]
)
def test_a_kill_loses_nothing_that_a_checkpoint_holds(tmp_path: Path, seed: int, kills: int) -> None:
    moments, expected = random.Random(seed), KilledTraining(None)
    deltas = 0
    for _ in range(kills):
        with contextlib.closing(
            Python("tests.checkpoint.killed_training", tmp_path, cwd=ROOT, is_module=True)
        ) as process:
            reported = [int(process.read_line())]
            time.sleep(moments.uniform(0, 0.3))
            process.send_signal(signal.SIGKILL)
            ended = process.wait()
            assert ended.returncode == -signal.SIGKILL
            reported += [int(line) for line in ended.stdout.splitlines() if line.isdecimal()]
        newest = latest(tmp_path / "run")
        deltas += read_manifest(newest).delta is not None
        found = KilledTraining(None)
        found.load(newest)
        assert found.step >= max(reported)
        expected.train(found.step)
        assert_same(found, expected)
    assert deltas or kills < 10
