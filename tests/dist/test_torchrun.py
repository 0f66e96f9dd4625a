# SPDX-License-Identifier: Apache-2.0
"""``torchrun -m terarec train``: the whole way, and a rank that is killed in the middle."""

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from terarec.checkpoint import complete_checkpoints
from terarec.config import save_run
from terarec.dist import Ranks, load_plan
from terarec.dist.costs import MachineCosts
from tests.dist.test_training import check_same_weights, data, fit, plan, run_spec
from tests.waiting import wait_for

pytestmark = pytest.mark.slow
__all__ = ["data"]  # a fixture


def torchrun(*arguments: object, ranks: int, restarts: int = 0) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command += [f"--max-restarts={restarts}", "-m", "terarec", *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def children(pid: int) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it has ended meanwhile
        if int(fields[1]) == pid:
            found.append(int(path.parent.name))
    return sorted(found)


def test_rank_0_alone_prints_and_the_run_is_that_of_one_process(data: Path, tmp_path: Path) -> None:
    spec = run_spec(data)
    save_run(spec, tmp_path / "run.json")
    plan("mixed", 2).save(tmp_path / "plan.json")
    options = ("--out", tmp_path / "run", "--plan", tmp_path / "plan.json", "--json")
    process = torchrun("train", tmp_path / "run.json", *options, ranks=2)
    out, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    (printed,) = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    assert printed["out"] == str(tmp_path / "run")
    assert errors.count("table 'user' (300 rows x 4): row-wise on 2 ranks") == 1
    fit(Ranks(), spec, tmp_path / "one", None, False)
    check_same_weights(tmp_path / "run", tmp_path / "one")


def test_links_between_ranks_are_probed_and_rank_0_alone_writes_the_plan(data: Path, tmp_path: Path) -> None:
    save_run(run_spec(data), tmp_path / "run.json")
    path = tmp_path / "plan.json"
    process = torchrun("plan", tmp_path / "run.json", "--ranks", 2, "--probe", "--out", path, "--json", ranks=2)
    out, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    (found,) = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    assert found["costs_from"] == "probe of rows and links"
    assumed = dataclasses.asdict(MachineCosts())
    assert found["costs"]["local_bandwidth"] != assumed["local_bandwidth"]
    assert found["costs"]["bandwidth"] == assumed["bandwidth"]  # there is one machine
    assert load_plan(path).placements.keys() == {"user", "item", "tags"}


def test_a_killed_rank_is_restarted_and_the_run_continues(data: Path, tmp_path: Path) -> None:
    spec = run_spec(data, epochs=40, checkpoint_every=20)
    save_run(spec, tmp_path / "run.json")
    plan("other", 2).save(tmp_path / "plan.json")
    options = ("--out", tmp_path / "run", "--plan", tmp_path / "plan.json", "--resume")
    process = torchrun("train", tmp_path / "run.json", *options, ranks=2, restarts=1)
    wait_for(lambda: complete_checkpoints(tmp_path / "run" / "checkpoints") or process.poll() is not None)
    assert process.poll() is None
    os.kill(children(process.pid)[-1], signal.SIGKILL)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    assert complete_checkpoints(tmp_path / "run" / "checkpoints")[-1].name == "step-00000400"
    fit(Ranks(), spec, tmp_path / "one", None, False)
    check_same_weights(tmp_path / "run", tmp_path / "one")


def test_a_stopped_rank_ends_the_run_in_the_time_of_the_option(data: Path, tmp_path: Path) -> None:
    """Finding L9."""
    save_run(run_spec(data, epochs=4000, checkpoint_every=20), tmp_path / "run.json")
    process = torchrun("train", tmp_path / "run.json", "--out", tmp_path / "run", "--rank-timeout", 3, ranks=2)
    wait_for(lambda: complete_checkpoints(tmp_path / "run" / "checkpoints") or process.poll() is not None)
    first, last = children(process.pid)
    os.kill(last, signal.SIGSTOP)
    wait_for(lambda: first not in children(process.pid))
    os.kill(last, signal.SIGKILL)  # torchrun gives it 30 s
    _, errors = process.communicate(timeout=300)
    assert process.returncode != 0
    assert re.search(r"rank 1 \(.*\) does not answer: .*expected all ranks to join it within 3 s", errors)
