# SPDX-License-Identifier: Apache-2.0
"""A standalone cluster of a master and two workers on this machine, started and stopped by the test."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from terarec.errors import MissingDependencyError
from terarec.etl import prepare
from terarec.etl.spark import check_spark
from terarec.etl.workflow import Workflow
from terarec.spec import PrepareOptions
from tests.etl.spark.comparing import assert_same
from tests.etl.spark.functions import KILL_ONCE
from tests.etl.spark.shop import every_operator, write_log, write_users

ROOT = Path(__file__).parents[3]
HOST = "127.0.0.1"
PATIENCE = 900.0
"""Seconds for what takes 5 s on an idle machine. With ten other processes on two cores, 90 s were not enough."""
QUICK_START = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
"""Options of the five Java processes, of which each lives for less time than it would take to optimise its code."""


@pytest.mark.slow
def test_a_cluster_that_loses_an_executor_gives_the_same_data_set(tmp_path: Path) -> None:
    try:
        check_spark()
    except MissingDependencyError as error:
        pytest.skip(str(error))
    paths = write_log(tmp_path)
    users = write_users(tmp_path / "users.tsv")
    workflow = Workflow.of(every_operator())
    workflow.to_json(tmp_path / "shop.json")
    workflow = Workflow.from_json(tmp_path / "shop.json", allow_import=["tests.etl.spark.functions"])
    prepare(workflow, paths, tmp_path / "local", PrepareOptions(tables={"users": (str(users),)}))
    with _cluster(tmp_path, {KILL_ONCE: str(tmp_path / "killed")}) as master:
        settings = {
            "spark.executor.memory": "512m",
            "spark.cores.max": "2",
            "spark.driver.host": HOST,
            "spark.driver.bindAddress": HOST,
            "spark.driver.extraJavaOptions": QUICK_START,
            "spark.executor.extraJavaOptions": QUICK_START,
            "spark.ui.enabled": "false",
            "spark.sql.shuffle.partitions": "2",
            "spark.sql.files.maxPartitionBytes": "16384",
        }
        command = [sys.executable, "-c", "from terarec.cli import main; main()", "prepare"]
        command += [str(tmp_path / "shop.json"), *map(str, paths)]
        command += ["--out", str(tmp_path / "spark"), "--engine", "spark", "--master", master]
        command += ["--table", f"users={users}", "--allow-import", "tests.etl.spark.functions"]
        command += [part for name, value in settings.items() for part in ("--conf", f"{name}={value}")]
        done = subprocess.run(command, env=_environment(), cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
    assert (tmp_path / "killed").exists()
    assert_same(tmp_path / "spark", tmp_path / "local")


@contextmanager
def _cluster(directory: Path, variables: Mapping[str, str]) -> Iterator[str]:
    """The URL of a master that has two workers."""
    log = directory / "master.log"
    with ExitStack() as stack:
        own = ["--host", HOST, "--port", "0", "--webui-port", "0"]
        process = stack.enter_context(_process(["org.apache.spark.deploy.master.Master", *own], log, directory))
        master = _wait_for(log, process, r"Starting Spark master at (\S+)")[0]
        for number in range(2):
            arguments = ["--host", HOST, "--cores", "1", "--memory", "600m", "--webui-port", "0"]
            arguments += ["--work-dir", str(directory / f"work-{number}"), master]
            worker = ["org.apache.spark.deploy.worker.Worker", *arguments]
            stack.enter_context(_process(worker, directory / f"worker-{number}.log", directory, variables))
        _wait_for(log, process, "Registering worker", 2)
        yield master


@contextmanager
def _process(
    arguments: list[str], log: Path, directory: Path, variables: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    import pyspark

    program = Path(pyspark.__file__).parent / "bin" / "spark-class"
    with log.open("w") as output:
        process = subprocess.Popen(
            [str(program), *arguments],
            stdout=output,
            stderr=output,
            cwd=directory,
            env={**_environment(), **(variables or {})},
        )
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_for(log: Path, process: subprocess.Popen[bytes], pattern: str, times: int = 1) -> list[str]:
    """What is found in the log of a process, once it is there so many times."""
    end = time.monotonic() + PATIENCE
    while len(found := re.findall(pattern, log.read_text())) < times:
        assert process.poll() is None, log.read_text()[-2000:]
        assert time.monotonic() < end, log.read_text()[-2000:]
        time.sleep(0.2)
    return found


def _environment() -> dict[str, str]:
    paths = [str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    own = {
        "PYSPARK_PYTHON": sys.executable,
        "SPARK_DAEMON_MEMORY": "256m",
        "SPARK_DAEMON_JAVA_OPTS": QUICK_START,
        "SPARK_LOCAL_IP": HOST,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
    }
    return {**os.environ, **own}
