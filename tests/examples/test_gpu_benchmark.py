# SPDX-License-Identifier: Apache-2.0
"""The benchmark for GPUs runs where there is none, at a tiny size on Triton's interpreter."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.device_cases import MODULES, SLOW, TESTED_ELSEWHERE, cases_of
from tests.on_device import CPU
from tests.params import in_every_run
from tests.simulated_device.device import missing_to_build

pytest.importorskip("triton", reason="Triton is installed on Linux alone")

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "gpu.py"


@pytest.mark.slow
def test_every_part_runs_interpreted():
    result = subprocess.run([sys.executable, SCRIPT, "--interpret"], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-2000:]
    assert result.stdout.count("right ") == len(MODULES)


@pytest.mark.slow
def test_ranks_are_measured_by_strong_and_weak_scaling():
    arguments = ["--interpret", "--parts", "ranks"]
    result = subprocess.run([sys.executable, SCRIPT, *arguments], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-2000:]
    for scaling, batch in (("strong", 3), ("weak", 6)):
        assert f"{scaling} scaling, batch 3, 1 rank: time of step" in result.stdout
        assert f"{scaling} scaling, batch {batch}, 2 ranks: time of step" in result.stdout
        assert f"{scaling} scaling, batch {batch}, 2 ranks: bytes that a rank sends: exchange of keys" in result.stdout


@pytest.mark.slow
def test_ranks_run_on_the_simulated_device_and_a_second_start_goes_on(tmp_path):
    if reason := missing_to_build():
        pytest.skip(reason)
    arguments = [sys.executable, SCRIPT, "--simulated", "--progress", tmp_path / "progress.json"]
    first = subprocess.run([*arguments, "--seconds", "0"], capture_output=True, text=True, check=False)
    assert first.returncode == 0, first.stdout[-2000:] + first.stderr[-2000:]
    assert "are over" in first.stdout
    arguments += ["--seconds", "3600"]
    second = subprocess.run(arguments, capture_output=True, text=True, check=False)
    assert second.returncode == 0, second.stdout[-2000:] + second.stderr[-2000:]
    assert "2 ranks: probe of links: latency" in second.stdout
    third = subprocess.run(arguments, capture_output=True, text=True, check=False)
    assert third.stdout.count("measured before: ") == 5


@pytest.mark.slow
def test_checks_are_chosen_by_a_word():
    arguments = ["--interpret", "--parts", "checks", "--match", "cosine"]
    result = subprocess.run([sys.executable, SCRIPT, *arguments], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-2000:]
    assert result.stdout.splitlines()[-1] == "1 checks, 0 wrong"
    assert "right models: model two_tower-cosine (" in result.stdout


KINDS = [kind for kind in MODULES if kind not in TESTED_ELSEWHERE]
LONG = {"checkpoints", "sessions", "embeddings", "hugectr", "models"}


@pytest.mark.parametrize(
    ("kind", "slow"),
    in_every_run(
        # What the others check is checked on the CPU by tests of their own.
        [(kind, False) for kind in KINDS if kind not in LONG],
        [*((kind, False) for kind in KINDS), (None, True)],
    ),
)
def test_checks_hold_on_the_cpu(kind, slow):
    cases = {name: holds for each in ([kind] if kind else KINDS) for name, holds in cases_of(each).items()}
    for name, holds in cases.items():
        if (name in SLOW) != slow:
            continue
        try:
            holds(CPU)
        except BaseException as error:
            error.add_note(f"in the check {name!r}")
            raise
