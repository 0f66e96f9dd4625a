# SPDX-License-Identifier: Apache-2.0
"""Options of ``terarec serve`` for batches: how they are read, and what is said of wrong ones."""

import os
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from terarec.serve import run
from terarec.spec import ServingSpec, WatchingSpec
from tests.cli.conftest import rejected, terarec
from tests.params import in_every_run


def test_options_reach_the_server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found: list[ServingSpec] = []

    def serve(_: Path, spec: ServingSpec, *__: Any, **___: Any) -> None:
        found.append(spec)

    monkeypatch.setattr(run, "serve", serve)
    options = ("--max-batch-size", 256, "--preferred-batch-sizes", "16-64", "--target-p99", "2.5ms")
    levels = ("--priority-levels", 3, "--default-priority-level", 2, "--max-queue-size", 9, "--absent-is-missing")
    assert terarec("serve", tmp_path, *options, *levels, "--default-timeout-seconds", 0.5).code == 0
    assert terarec("serve", tmp_path).code == 0
    batching = found[0].batching
    assert (batching.max_batch_size, batching.preferred_batch_sizes, batching.target_p99_seconds) == (
        *(256, (16, 64)),
        pytest.approx(0.0025),
    )
    assert (batching.priority_levels, batching.default_priority_level, batching.max_queue_size) == (3, 2, 9)
    assert found[0].absent_is_missing
    assert found[1] == ServingSpec()


def test_options_of_those_who_watch_reach_the_server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found: list[tuple[ServingSpec, Any]] = []

    def serve(_: Path, spec: ServingSpec, *__: Any, drift: Any, **___: Any) -> None:
        found.append((spec, drift))

    monkeypatch.setattr(run, "serve", serve)
    log = ("--access-log", "-", "--access-log-share", 0.5)
    records = ("--record-directory", tmp_path, "--record-share", 0.25, "--record-file-seconds", 60)
    traces = ("--otlp-endpoint", "http://127.0.0.1:4318", "--trace-share", 0.1)
    assert terarec("serve", tmp_path, *log, *records, *traces, "--drift", "--drift-data", tmp_path).code == 0
    assert terarec("serve", tmp_path).code == 0
    (spec, drift), (_, without) = found
    assert spec.watching == WatchingSpec(
        access_log="-",
        access_log_share=0.5,
        record_directory=str(tmp_path),
        record_share=0.25,
        record_file_seconds=60.0,
        otlp_endpoint="http://127.0.0.1:4318",
        trace_share=0.1,
    )
    with closing(drift()) as watch:
        assert list(watch.read()) == []
    assert without is None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("executor", "policy"), in_every_run([("onnxruntime", "passive")], [("onnxruntime", "passive"), ("eager", None)])
)
def test_waiting_threads_leave_the_cores_to_an_executor(tmp_path: Path, executor: str, policy: str | None) -> None:
    """OpenMP reads its policy when torch is imported, which the command line therefore does later."""
    program = (
        "import os, sys; from terarec.cli import main\n"
        f"try: main(['serve', {str(tmp_path)!r}, '--executor', {executor!r}, '--port', '0'])\n"
        "except SystemExit: pass\n"
        "print('torch' in sys.modules, os.environ.get('OMP_WAIT_POLICY'))"
    )
    environment = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    ended = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert ended.stdout.split()[-2:] == ["True", str(policy)]


@pytest.mark.parametrize(
    ("options", "where", "problem"),
    [
        (("--target-p99", "10"), "--target-p99", "got '10', expected a time such as 10ms"),
        (("--target-p99", "100s"), "--target-p99", "100"),
        (("--target-p99", "0ms"), "--target-p99", "got '0ms', expected a time such as 10ms"),
        (("--preferred-batch-sizes", "16,64"), "--preferred-batch-sizes", "got '16,64', expected numbers"),
        (("--preferred-batch-sizes", "4096"), "--preferred-batch-sizes", "expected sizes from 1 to 1024"),
        (("--priority-levels", "2"), "--default-priority-level", "got 0"),
        (("--access-log-share", "2"), "--access-log-share", "got 2"),
        (("--otlp-endpoint", "collector"), "--otlp-endpoint", "expected a URL"),
        (("--drift-data", "data"), "--drift-data", "without --drift"),
    ],
)
def test_a_wrong_option_is_named(tmp_path: Path, options: tuple[str, ...], where: str, problem: str) -> None:
    rejected("serve", tmp_path, *options, where=where, problem=problem)
