"""A small trained run on generated logs, and the raw records of its validation split."""

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from terarec.data.synthetic.criteo import generate
from terarec.etl import prepare
from terarec.etl.ready import criteo
from terarec.etl.workflow import Workflow
from terarec.serve import InferenceService, InferenceSession, RunningServer, serve
from terarec.spec import DLRMSpec, RunSpec, ServingSpec, SplitByFiles, TrainingSpec
from terarec.train.run import build

DENSE = [f"I{index}" for index in range(1, 14)]
CATEGORICAL = [f"C{index}" for index in range(1, 27)]
ROWS, DAYS = 4_000, 2


@dataclass(frozen=True)
class TrainedRun:
    """A run, the data set that it was trained on, and the raw log lines of the split "valid", in order."""

    path: Path
    data: Path
    lines: tuple[str, ...]

    def records(self, start: int, stop: int) -> dict[str, list[Any]]:
        """Raw columns of some lines, as a client would send them."""
        rows = [line.split("\t") for line in self.lines[start:stop]]
        numbers = {
            name: [int(row[1 + index]) if row[1 + index] else None for row in rows] for index, name in enumerate(DENSE)
        }
        return numbers | {name: [row[14 + index] for row in rows] for index, name in enumerate(CATEGORICAL)}


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> TrainedRun:
    return train_in(tmp_path_factory.mktemp("serve"))


def train_in(root: Path) -> TrainedRun:
    """Train the run in a directory."""
    report = generate(root / "raw", rows=ROWS, days=DAYS, seed=7)
    days = [root / "raw" / file for file in report.files]
    prepare(Workflow.of(criteo(min_count=2, split=SplitByFiles(valid=1))), days, root / "data")
    spec = RunSpec(
        data=str(root / "data"),
        model=DLRMSpec(width=4, bottom=(8, 4), top=(8,)),
        training=TrainingSpec(batch_size=128, epochs=1, reader_threads=1),
    )
    build(spec, root / "run").fit()
    return TrainedRun(root / "run", root / "data", tuple(days[-1].read_text().splitlines()))


@pytest.fixture(scope="session")
def session(trained: TrainedRun) -> InferenceSession:
    return InferenceSession.open(trained.path)


@pytest.fixture(scope="session")
def service(session: InferenceSession) -> InferenceService:
    return InferenceService(session, ServingSpec(name="dlrm", max_batch=1000))


@pytest.fixture(scope="session")
def server(trained: TrainedRun) -> Iterator[RunningServer]:
    """A server on a free port, in a thread of this process."""
    found: list[RunningServer] = []
    is_ready = threading.Event()

    def ready(running: RunningServer) -> None:
        found.append(running)
        is_ready.set()

    thread = threading.Thread(target=serve, args=(trained.path, ServingSpec(name="dlrm", port=0), ready))
    thread.start()
    try:
        assert is_ready.wait(timeout=60)
        yield found[0]
    finally:
        for running in found:
            running.stop()
        thread.join(timeout=30)
    assert not thread.is_alive()
