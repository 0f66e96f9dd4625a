# SPDX-License-Identifier: Apache-2.0
"""A host that is lost: torchrun starts those that are left again, and the run goes on with fewer ranks."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from terarec.checkpoint import complete_checkpoints
from terarec.config import save_run
from terarec.dist import Ranks
from tests.addresses import own_address
from tests.dist.test_torchrun import children
from tests.dist.test_training import check_same_weights, data, fit, run_spec
from tests.waiting import wait_for

pytestmark = pytest.mark.slow
__all__ = ["data"]  # a fixture

MOST_SECONDS = 300.0


def agent(endpoint: str, run: Path, out: Path, log: Path, *, is_host: bool) -> subprocess.Popen[bytes]:
    """Start what would run on a host: one of one or two, with a rank each; `is_host` holds the rendezvous."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=1:2", "--nproc-per-node=1", "--max-restarts=3"]
    command += [
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={endpoint}",
        f"--rdzv-conf=is_host={int(is_host)},last_call_timeout=3",
    ]
    command += ["-m", "terarec", "train", str(run), "--out", str(out), "--resume"]
    with log.open("wb") as file:
        return subprocess.Popen(command, stdout=file, stderr=file)


def test_a_run_continues_with_fewer_ranks_after_a_host_is_lost(data: Path, tmp_path: Path) -> None:
    spec = run_spec(data, epochs=40, checkpoint_every=20)
    save_run(spec, tmp_path / "run.json")
    endpoint = "{}:{}".format(*own_address())
    out, checkpoints = tmp_path / "run", tmp_path / "run" / "checkpoints"
    logs = [tmp_path / "first.log", tmp_path / "second.log"]
    agents = [agent(endpoint, tmp_path / "run.json", out, log, is_host=log is logs[0]) for log in logs]
    try:
        wait_for(lambda: complete_checkpoints(checkpoints) or agents[0].poll() is not None)
        assert agents[0].poll() is None, logs[0].read_text()
        assert "on 2 ranks" in logs[0].read_text() + logs[1].read_text()
        lost = [agents[1].pid, *children(agents[1].pid)]
        for pid in lost:  # a rank has a session of its own
            os.kill(pid, signal.SIGKILL)
        assert agents[0].wait(MOST_SECONDS) == 0, logs[0].read_text()
    finally:
        for process in agents:
            if process.poll() is None:
                for pid in (process.pid, *children(process.pid)):
                    os.kill(pid, signal.SIGKILL)
            process.wait()
    assert complete_checkpoints(checkpoints)[-1].name == "step-00000400"
    fit(Ranks(), spec, tmp_path / "one", None, False)
    check_same_weights(out, tmp_path / "one")
