# SPDX-License-Identifier: Apache-2.0
"""Interruptions of a command: Ctrl-C, a full disk; and a server that gets one request."""

import json
import os
import resource
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from terarec.checkpoint import complete_checkpoints
from terarec.errors import DataNotFoundError, NoSpaceError
from terarec.serve.client import InferenceClient
from tests.cli.conftest import Workshop, figures, rejected, terarec
from tests.processes import Python
from tests.waiting import wait_for

SHAPE = ["--width", "4", "--bottom", "8-4", "--top", "8", "--batch-size", "16"]


def start(*arguments: object) -> Python:
    return Python("from terarec.cli import main; main()", *arguments)


def test_ctrl_c_leaves_a_checkpoint_to_resume_from(workshop: Workshop, tmp_path: Path) -> None:
    out = tmp_path / "run"
    train = ["train", "--model", "dlrm", "--data", workshop.data, "--out", out, *SHAPE, "--epochs", "1000"]
    process = start(*train, "--json")
    wait_for(lambda: bool(complete_checkpoints(out / "checkpoints")))
    process.send_signal(signal.SIGINT)
    ended = process.wait()
    assert ended.returncode == 130
    last = ended.stderr.strip().splitlines()[-1]
    newest = complete_checkpoints(out / "checkpoints")[-1]
    assert last.startswith("terarec: interrupted: SIGINT after step ")
    assert str(newest) in last
    assert "Traceback" not in ended.stderr
    assert json.loads(ended.stdout.splitlines()[-1])["error"] == last.removeprefix("terarec: ")
    step = int(newest.name.removeprefix("step-"))
    resumed = figures(*train, "--resume", "--set", f"training.max_steps={step + 1}")
    assert (resumed["steps"], resumed["samples"]) == (step + 1, 16)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_leaves_nothing_half_written(tmp_path: Path, number: signal.Signals) -> None:
    def press() -> None:
        wait_for(lambda: any(tmp_path.rglob("day_0.tsv")))
        os.kill(os.getpid(), number)

    threading.Thread(target=press).start()
    ended = terarec("generate", "criteo", "--rows", 10**7, "--out", tmp_path / "raw", "--json")
    assert ended.code == 130
    assert ended.err == "terarec: interrupted; nothing was left half-written\n"
    assert ended.figures["type"] == "KeyboardInterrupt"
    assert list(tmp_path.iterdir()) == []


@contextmanager
def small_disk(path: Path, size: int) -> Iterator[str]:
    """`path` is a real file system of `size` bytes meanwhile; only root may mount one."""
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "none", path], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("a file system cannot be mounted here")
    try:
        yield "No space left on device"
    finally:
        subprocess.run(["umount", path], check=True)


@contextmanager
def small_files(path: Path, size: int) -> Iterator[str]:
    """No file of this process may grow above `size` bytes meanwhile."""
    del path
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield "File too large"
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


LIMITS = {
    (small_disk, "generate"): 200_000,
    (small_disk, "prepare"): 200_000,
    (small_disk, "train"): 600_000,
    (small_disk, "predict"): 4096,
    (small_files, "generate"): 20_000,
    (small_files, "prepare"): 20_000,
    (small_files, "train"): 60_000,
    (small_files, "predict"): 1000,
}
"""Bytes: room to begin, and less than the command needs."""


@pytest.mark.parametrize(("kind", "command"), LIMITS, ids=lambda value: getattr(value, "__name__", value))
def test_a_full_disk_leaves_nothing_half_written(
    workshop: Workshop, tmp_path: Path, kind: Callable[[Path, int], AbstractContextManager[str]], command: str
) -> None:
    days = sorted(workshop.raw.glob("*.tsv"))
    wide = ["--model", "dlrm", "--width", "64", "--bottom", "64", "--top", "64"]
    arguments: list[object] = {
        "generate": ["generate", "criteo", "--rows", "20000"],
        "prepare": ["prepare", "criteo", *days],
        "train": ["train", *wide, "--data", workshop.data],
        "predict": ["predict", workshop.run, "--data", workshop.data, "--split", "train"],
    }[command]
    out = tmp_path / ("out.parquet" if command == "predict" else "out")
    with kind(tmp_path, LIMITS[kind, command]) as problem:
        reported = rejected(*arguments, "--out", out, error=NoSpaceError, problem=problem)
        assert reported["where"].startswith(str(out))
        assert ".partial" not in reported["error"]
        # Steps were trained, so their logs stay (B3), those of TensorBoard where it is installed.
        left = {"run.json", "dataset", "metrics.jsonl", "checkpoints"} if command == "train" else set()
        assert {path.name for path in out.glob("*")} - {"tensorboard"} == left
        assert not [path for path in tmp_path.rglob("*") if "step-" in path.name or ".partial" in path.name]


def test_a_disk_that_fills_up_leaves_the_earlier_checkpoints(workshop: Workshop, tmp_path: Path) -> None:
    shape = ["--width", "64", "--bottom", "64", "--top", "64", "--data", workshop.data]
    out = tmp_path / "run"
    figures("train", *shape, "--out", out, "--set", "training.max_steps=1", "--batch-size", 128)
    newest = out / "checkpoints/step-00000012"
    with small_files(tmp_path, 60_000):
        typed = ["train", "--out", out, "--resume", "--set", "training.max_steps=none"]
        rejected(*typed, error=NoSpaceError, where=newest, problem="continue from step-00000001 with --resume")
    assert [path.name for path in complete_checkpoints(out / "checkpoints")] == ["step-00000001"]


def test_resuming_where_there_is_nothing_says_that_it_starts(workshop: Workshop, tmp_path: Path) -> None:
    train = ["train", "--data", workshop.data, "--out", tmp_path / "run", *SHAPE, "--set", "training.max_steps=1"]
    assert "no checkpoint to resume from, starting from the first step" in terarec(*train, "--resume").out
    again = terarec("train", "--out", tmp_path / "run", "--resume", "--set", "training.max_steps=2")
    assert again.code == 0, again.err
    assert "no checkpoint" not in again.out


def files(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def test_a_place_that_cannot_be_written_is_rejected_first(workshop: Workshop, tmp_path: Path) -> None:
    before = files(workshop.data)
    typed = ["train", "--data", workshop.data, "--out", workshop.data]
    rejected(*typed, where="--out", problem=f"{workshop.data} is not a run directory")
    assert files(workshop.data) == before
    path = tmp_path / "file"
    path.write_text("mine")
    rejected("train", "--data", workshop.data, "--out", path, where="--out", problem=f"{path} is a file")
    typed = ["predict", workshop.run, "--data", workshop.data, "--out", tmp_path]
    rejected(*typed, where="--out", problem=f"{tmp_path} is a directory")
    assert files(tmp_path) == {"file": b"mine"}


@pytest.mark.parametrize("command", [["evaluate"], ["predict", "--out", "scores.parquet"]])
def test_a_directory_without_a_run_is_reported(workshop: Workshop, tmp_path: Path, command: list[str]) -> None:
    end = ["--data", workshop.data]
    rejected(*command, tmp_path / "nope", *end, error=DataNotFoundError, where=tmp_path / "nope")
    rejected(*command, workshop.data, *end, error=DataNotFoundError, where=workshop.data, problem="run.json")
    newest = complete_checkpoints(workshop.run / "checkpoints")[-1]
    for inside in (newest, newest.parent):
        rejected(*command, inside, *end, error=DataNotFoundError, where=inside, problem=f"{workshop.run}")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_directory_that_may_not_be_written(workshop: Workshop, tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    ended = terarec("generate", "criteo", "--rows", 10, "--out", tmp_path / "raw")
    tmp_path.chmod(0o700)
    assert ended.code == 1
    assert "Permission denied" in ended.err


def test_a_server_answers_a_request_and_stops(workshop: Workshop) -> None:
    process = start("serve", workshop.run, "--port", 0, "--name", "clicks", "--json")
    try:
        reported = json.loads(process.read_line())
        assert reported["name"] == "clicks"
        assert reported["url"] == f"http://127.0.0.1:{reported['port']}"
        fields = (workshop.raw / "day_1.tsv").read_text().split("\n", 1)[0].split("\t")
        numbers = {f"I{i}": [float(fields[i]) if fields[i] else None] for i in range(1, 14)}
        record = numbers | {f"C{i}": [fields[13 + i]] for i in range(1, 27)}
        scores = InferenceClient(reported["url"], model="clicks").infer(record)
        assert 0 < float(scores["score"].reshape(-1)[0]) < 1
    finally:
        process.send_signal(signal.SIGINT)
        ended = process.wait()
    assert (ended.returncode, ended.stdout) == (0, ""), ended.stderr
