# SPDX-License-Identifier: Apache-2.0
"""Preparations on Spark that end before they are done, and are resumed by the same call."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from terarec.errors import ConfigError, RunInterruptedError
from terarec.etl import prepare
from terarec.etl.engine.phases import Progress
from terarec.spec import PrepareOptions
from tests.errors import at
from tests.etl.engine.logs import shop_files
from tests.etl.spark.conftest import on_spark
from tests.etl.spark.fixed_width import data_files, fixed_width

pytestmark = pytest.mark.usefixtures("spark")

OPTIONS = PrepareOptions(shuffle=True, storage="norm", rows_per_shard=100)
WORKFLOW = fixed_width("user", "item", "seen")
PHASES = ["count", "group", "fit 1", "fit 2", "write"]
KILLED = """
import os, signal, sys
from pathlib import Path
from terarec.etl import prepare
from tests.etl.spark.conftest import on_spark
from tests.etl.spark.test_resume import OPTIONS, WORKFLOW

phase, out, *log = sys.argv[1:]

def kill(progress):
    if progress.phase == phase:
        os.kill(os.getpid(), signal.SIGKILL)

prepare(WORKFLOW, [Path(path) for path in log], Path(out), on_spark(OPTIONS), kill)
"""


def resumed(log: list[Path], out: Path) -> list[str]:
    """Go on with a preparation; returns the phases that were done."""
    report = prepare(WORKFLOW, log, out, on_spark(OPTIONS))
    assert [phase.name for phase in report.phases] == PHASES
    assert (report.rows, report.inputs[1].name) == (600, "time")
    prepare(WORKFLOW, log, out.with_name("local"), OPTIONS)
    assert data_files(out) == data_files(out.with_name("local"))
    return [phase.name for phase in report.phases if phase.resumed]


@pytest.mark.slow
def test_an_interrupted_run_is_resumed(tmp_path: Path) -> None:
    log = shop_files(tmp_path / "raw")

    def interrupt(progress: Progress) -> None:
        if progress.phase == "write":
            with pytest.raises(ConfigError, check=at("out", "is being written by another run")):
                prepare(WORKFLOW, log, tmp_path / "out", OPTIONS)
            raise KeyboardInterrupt

    with pytest.raises(RunInterruptedError) as interrupted:
        prepare(WORKFLOW, log, tmp_path / "out", on_spark(OPTIONS), interrupt)
    assert interrupted.value.phases == ("count", "group", "fit 1", "fit 2")
    assert not (tmp_path / "out").exists()
    with pytest.raises(ConfigError, check=at("out", "with other options, ")):
        prepare(WORKFLOW, log, tmp_path / "out", on_spark(PrepareOptions(seed=1)))
    assert resumed(log, tmp_path / "out") == PHASES[:4]
    assert not (tmp_path / "out.partial").exists()


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["fit 1", "write"])
def test_a_killed_run_is_resumed(tmp_path: Path, phase: str) -> None:
    log = shop_files(tmp_path / "raw")
    ended = subprocess.run([sys.executable, "-c", KILLED, phase, tmp_path / "out", *log], check=False)
    assert ended.returncode == -signal.SIGKILL
    assert resumed(log, tmp_path / "out") == PHASES[: PHASES.index(phase)]
