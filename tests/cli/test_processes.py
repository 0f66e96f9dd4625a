# SPDX-License-Identifier: Apache-2.0
"""Processes that are killed, stopped, forked, or at work on one directory at a time."""

import contextlib
import random
import shutil
import signal
import time
from pathlib import Path

import pytest

from terarec.checkpoint import complete_checkpoints, load
from terarec.models.artifact import dense_state, load_model, tables
from tests.cli.conftest import Workshop, figures, rejected
from tests.cli.test_stopping import files, start
from tests.processes import run_python
from tests.waiting import wait_for

SHAPE = ["--model", "dlrm", "--width", "4", "--bottom", "8-4", "--top", "8", "--batch-size", "16"]


def train_arguments(workshop: Workshop, out: Path, steps: int, every: int) -> list[object]:
    limits = ["--set", f"training.max_steps={steps}", "--set", f"training.checkpoint_every={every}"]
    return ["train", *SHAPE, "--data", workshop.data, "--out", out, "--epochs", "1000", *limits]


def checkpoint_files(run: Path) -> dict[str, bytes]:
    return files(complete_checkpoints(run / "checkpoints")[-1])


def kill_trainings(workshop: Workshop, tmp_path: Path, *, steps: int, every: int, seeds: range) -> None:
    """Train once without a stop, and for each seed killed at a random moment and resumed: the same bytes."""
    begin = time.monotonic()
    uninterrupted = start(*train_arguments(workshop, tmp_path / "complete_checkpoints", steps, every))
    ended = uninterrupted.wait(300)
    assert ended.returncode == 0, ended.stderr
    seconds = time.monotonic() - begin
    expected = checkpoint_files(tmp_path / "complete_checkpoints")
    for seed in seeds:
        out = tmp_path / f"run-{seed}"
        process = start(*train_arguments(workshop, out, steps, every))
        time.sleep(random.Random(seed).uniform(0, 1.1 * seconds))
        process.close()
        figures(*train_arguments(workshop, out, steps, every), "--resume")
        assert checkpoint_files(out) == expected, f"seed {seed}"
        shutil.rmtree(out)


@pytest.mark.slow
def test_s3_trainings_killed_at_random_moments_are_resumed_to_the_same_bits(workshop: Workshop, tmp_path: Path) -> None:
    kill_trainings(workshop, tmp_path, steps=1_000, every=5, seeds=range(1, 11))


def kill_preparations(raw: list[Path], tmp_path: Path, *, seeds: range) -> None:
    """Prepare once without a stop, and for each seed killed at a random moment and called again: the same bytes."""
    arguments = ["prepare", "criteo", *raw, "--min-count", "2", "--valid-fraction", "0.25", "--out"]
    begin = time.monotonic()
    process = start(*arguments, tmp_path / "complete_checkpoints" / "data")
    ended = process.wait(300)
    assert ended.returncode == 0, ended.stderr
    seconds = time.monotonic() - begin

    def data(root: Path) -> dict[str, bytes]:
        # The report has times in it, and HugeCTR's file lists the directory.
        return {name: held for name, held in files(root / "data").items() if not name.endswith(("report.json", ".txt"))}

    for seed in seeds:
        out = tmp_path / f"out-{seed}"
        process = start(*arguments, out / "data")
        time.sleep(random.Random(seed).uniform(0, 1.1 * seconds))
        process.close()
        if not (out / "data").exists():
            figures(*arguments, out / "data")
        assert data(out) == data(tmp_path / "complete_checkpoints"), f"seed {seed}"
        assert [path.name for path in out.iterdir()] == ["data"]


def test_s3_a_preparation_killed_at_a_random_moment_is_resumed_to_the_same_bits(
    workshop: Workshop, tmp_path: Path
) -> None:
    kill_preparations(sorted(workshop.raw.glob("*.tsv")), tmp_path, seeds=range(1))


@pytest.mark.slow
def test_s3_preparations_killed_at_random_moments_are_resumed_to_the_same_bits(tmp_path: Path) -> None:
    figures("generate", "criteo", "--rows", 100_000, "--days", 2, "--out", tmp_path / "raw", "--seed", 7)
    kill_preparations(sorted((tmp_path / "raw").glob("*.tsv")), tmp_path, seeds=range(1, 11))


def test_s3_a_second_training_in_a_run_is_rejected(workshop: Workshop, tmp_path: Path) -> None:
    out = tmp_path / "run"
    first = start(*train_arguments(workshop, out, 10**9, 10**9))
    try:
        wait_for(lambda: (out / "metrics.jsonl").exists())
        rejected(*train_arguments(workshop, out, 1, 1), where=out)
        assert first.is_alive()
    finally:
        first.close()


def test_s3_a_second_preparation_of_a_directory_is_rejected(workshop: Workshop, tmp_path: Path) -> None:
    figures("generate", "criteo", "--rows", 200_000, "--days", 1, "--out", tmp_path / "raw", "--seed", 7)
    arguments = ["prepare", "criteo", tmp_path / "raw/day_0.tsv", "--valid-fraction", "0.1", "--out", tmp_path / "data"]
    partial = tmp_path / "data.partial"  # made and renamed under the lock

    for _ in range(10):
        with contextlib.closing(start(*arguments)) as first:
            wait_for(lambda: partial.exists() or (tmp_path / "data").exists())
            with contextlib.suppress(ProcessLookupError):
                first.send_signal(signal.SIGSTOP)  # it is at work for as long as this test needs
            if partial.exists():
                rejected(*arguments, where="--out")
                return
        # This process did not run for so long that the other one had ended.
        shutil.rmtree(tmp_path / "data")
    raise AssertionError("no preparation was found at work")


def test_s3_readers_of_a_run_in_training_see_whole_checkpoints(workshop: Workshop, tmp_path: Path) -> None:
    """Checkpoints come and go at every step, and each model that is opened meanwhile is that of its step."""
    out, seen = tmp_path / "run", []
    process = start(*train_arguments(workshop, out, 10**9, 1), "--set", "training.keep_checkpoints=1")
    try:
        wait_for(lambda: bool(complete_checkpoints(out / "checkpoints")))
        for _ in range(25):
            loaded = load_model(out)
            state = dense_state(loaded.model)
            assert all(bool(tensor.isfinite().all()) for tensor in state.values())
            assert tables(loaded.model)
            seen.append(loaded.step)
    finally:
        process.send_signal(signal.SIGINT)
        ended = process.wait()
    assert ended.returncode == 130, ended.stderr
    assert seen == sorted(seen)
    assert load(complete_checkpoints(out / "checkpoints")[-1]).step >= seen[-1]


@pytest.mark.slow
def test_s3_ctrl_c_during_large_steps_ends_soon_with_a_checkpoint(workshop: Workshop, tmp_path: Path) -> None:
    """Steps of the whole data set at once, of wide tables: the signal comes within a call of the core."""
    wide = ["--model", "dlrm", "--width", "256", "--bottom", "256", "--top", "256", "--batch-size", "100000"]
    arguments = ["train", *wide, "--data", workshop.data, "--out", tmp_path / "run", "--epochs", "100000"]
    process = start(*arguments, "--set", "training.checkpoint_every=1000000")
    wait_for(lambda: (tmp_path / "run/metrics.jsonl").exists())
    time.sleep(1)
    process.send_signal(signal.SIGINT)
    ended = process.wait()
    assert ended.returncode == 130, ended.stderr
    assert complete_checkpoints(tmp_path / "run/checkpoints")


@pytest.mark.slow
def test_s3_ctrl_c_during_a_large_parse_ends_soon(tmp_path: Path) -> None:
    figures("generate", "criteo", "--rows", 300_000, "--days", 1, "--out", tmp_path / "raw", "--seed", 7)
    process = start(
        "prepare", "criteo", tmp_path / "raw/day_0.tsv", "--valid-fraction", "0.1", "--out", tmp_path / "data"
    )
    wait_for(lambda: (tmp_path / "data.partial").exists())
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    ended = process.wait()
    assert ended.returncode == 130, ended.stderr
    assert "Traceback" not in ended.stderr
    assert not (tmp_path / "data").exists()


FORK = """
import os, sys, threading, warnings
warnings.simplefilter("ignore")
import torch
from terarec.batch import Batch, Jagged
from terarec.embedding import EmbeddingCollection
from terarec.optim import RowOptimizer
from terarec.spec import FeatureSpec, SGDSpec, TableSpec

torch.set_num_threads(4)
tables = [TableSpec(name="t", rows=20_000, width=32)]
collection = EmbeddingCollection(tables, [FeatureSpec(name="f", table="t")], seed=1)
rows = RowOptimizer(collection, SGDSpec(lr=0.1))
keys = torch.arange(20_000).repeat(5)
bags = Jagged(names=("f",), keys=keys, offsets=torch.arange(len(keys) + 1))

def step():
    pooled = collection(bags).pooled
    pooled.sum().backward()
    rows.step()

step()
is_over = threading.Event()

def look_up():
    while not is_over.is_set():
        with torch.no_grad():
            collection(bags)

threads = [threading.Thread(target=look_up) for _ in range(2)]
for thread in threads:
    thread.start()
children = []
for _ in range(5):
    child = os.fork()
    if child == 0:
        try:
            step()
            os._exit(0)
        except BaseException as error:
            print(type(error).__name__, error, file=sys.stderr, flush=True)
            os._exit(1)
    children.append(child)
codes = [os.waitpid(child, 0)[1] for child in children]
is_over.set()
for thread in threads:
    thread.join()
step()
print(codes)
"""


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="forks")
def test_s3_a_fork_during_lookups_in_threads_does_not_hang() -> None:
    ended = run_python(FORK, timeout=120)  # one that hangs is ended and fails the test
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == "[0, 0, 0, 0, 0]\n", ended.stderr


WORKERS = """
import warnings
warnings.simplefilter("ignore")
import torch
from torch.utils.data import DataLoader, Dataset
from terarec.batch import Jagged
from terarec.embedding import EmbeddingCollection
from terarec.spec import FeatureSpec, TableSpec

torch.set_num_threads(4)
tables = [TableSpec(name="t", rows=20_000, width=32)]
collection = EmbeddingCollection(tables, [FeatureSpec(name="f", table="t")], seed=1)

def look_up(shift):
    keys = (torch.arange(100_000) + shift) % 20_000
    with torch.no_grad():
        return collection(Jagged(names=("f",), keys=keys, offsets=torch.arange(len(keys) + 1))).pooled.sum(0)

class Sums(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        return look_up(index)

expected = torch.stack([look_up(index) for index in range(8)])
found = torch.cat(list(DataLoader(Sums(), batch_size=2, num_workers=2, multiprocessing_context="fork")))
assert torch.equal(found, expected)
print("equal")
"""


def test_s3_workers_of_a_data_loader_look_up_after_a_fork() -> None:
    ended = run_python(WORKERS, timeout=120)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == "equal\n"
