# SPDX-License-Identifier: Apache-2.0
"""A small trained run on generated logs, and the raw records of its validation split."""

import contextlib
import logging
import shutil
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from terarec.apps.promotion import promote
from terarec.apps.synthetic.criteo import generate
from terarec.config.files import RUN_FILE, load_run
from terarec.etl import prepare
from terarec.etl.ops import Categorify
from terarec.etl.ready import criteo
from terarec.etl.workflow import Workflow
from terarec.models.artifact import load_model
from terarec.serve import InferenceSession, RunningServer, ServedModel, ServedModels, serve
from terarec.serve.repository import ModelRepository
from terarec.spec import (
    DLRMSpec,
    GraphEmbedding,
    GraphFeature,
    GraphLabel,
    GraphLayer,
    GraphModelSpec,
    GraphSpec,
    RunSpec,
    ServingSpec,
    Split,
    SplitByFiles,
    TableSpec,
    TrainingSpec,
)
from terarec.spec.serving_options import ServedModelOptions
from terarec.train.run import build
from tests.waiting import PATIENCE

DENSE = ["I1", "I2", "I3"]
CATEGORICAL = ["C1", "C2", "C3", "C4", "C7", "C26"]
"""Of the 39 columns of Criteo: with a tenth of the tables a session opens in a fifth of the time."""
ROWS, DAYS = 4_000, 2


def generate_logs(folder: Path, *, rows: int, days: int) -> list[Path]:
    """Write logs of the label and the columns above, a file a day."""
    report = generate(folder / "all", rows=rows, days=days, seed=7)
    kept = [0, *(int(name[1:]) for name in DENSE), *(13 + int(name[1:]) for name in CATEGORICAL)]
    logs = [folder / file for file in report.files]
    for log in logs:
        lines = [line.split("\t") for line in (folder / "all" / log.name).read_text().splitlines()]
        log.write_text("".join("\t".join(line[place] for place in kept) + "\n" for line in lines))
    return logs


def log_workflow(*, min_count: int, split: Split) -> Workflow:
    """Return the preset of Criteo for `generate_logs`."""
    spec = criteo(min_count=min_count, split=split)
    dense, categorical = tuple(DENSE), tuple(CATEGORICAL)
    steps = tuple(
        replace(step, columns=categorical if isinstance(step, Categorify) else dense)  # type: ignore[call-arg]
        for step in spec.steps
    )
    columns = tuple(column for column in spec.source.columns if column.name in ("label", *dense, *categorical))
    source = replace(spec.source, columns=columns)
    return Workflow.of(replace(spec, source=source, steps=steps, dense=dense, categorical=categorical))


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
            name: [int(row[index]) if row[index] else None for row in rows] for index, name in enumerate(DENSE, 1)
        }
        return numbers | {name: [row[index] for row in rows] for index, name in enumerate(CATEGORICAL, 1 + len(DENSE))}


@pytest.fixture(autouse=True)
def log_level() -> Iterator[None]:
    """Set the level of the log back, which clients of a server change, for all tests of this process."""
    log = logging.getLogger("terarec")
    before = log.level
    yield
    log.setLevel(before)


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> TrainedRun:
    return train_in(tmp_path_factory.mktemp("serve"))


def train_in(root: Path) -> TrainedRun:
    """Train the run in a directory."""
    days = generate_logs(root / "raw", rows=ROWS, days=DAYS)
    prepare(log_workflow(min_count=2, split=SplitByFiles(valid=1)), days, root / "data")
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
def models(session: InferenceSession) -> Iterator[ServedModels]:
    with ServedModels() as served:
        served.install(ServedModel(session, ServedModelOptions(max_batch=1000), name="dlrm"))
        yield served


@contextlib.contextmanager
def running(path: Path, spec: ServingSpec, **options: Any) -> Iterator[RunningServer]:
    """Serve a run in a thread of this process; `options` are those of `serve`."""
    servers: list[RunningServer] = []
    is_ready = threading.Event()

    def ready(server: RunningServer) -> None:
        servers.append(server)
        is_ready.set()

    thread = threading.Thread(target=serve, args=(path, spec, ready), kwargs=options)
    thread.start()
    try:
        assert is_ready.wait(timeout=PATIENCE)
        yield servers[0]
    finally:
        for server in servers:
            server.stop()
        thread.join(timeout=PATIENCE)
    assert not thread.is_alive()


@pytest.fixture(scope="session")
def server(trained: TrainedRun) -> Iterator[RunningServer]:
    """A server on a free port, in a thread of this process."""
    with running(trained.path, ServingSpec(name="dlrm", port=0)) as server:
        yield server


@pytest.fixture(scope="session")
def graph_run(trained: TrainedRun, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of a graph of two embeddings, with a layer that no prediction needs."""
    rows = {column.name: column.rows for column in load_model(trained.path).dataset.categorical}
    tables = {name: TableSpec(name=name, rows=rows[name] or 1, width=4) for name in ("C1", "C2", "C3")}
    graph = GraphSpec(
        labels=(GraphLabel(name="label", dim=1),),
        dense_name="numbers",
        dense_dim=len(DENSE),
        embeddings=(
            GraphEmbedding(
                name="vectors",
                output="apart",
                tables=(tables["C1"], tables["C2"]),
                features=(
                    GraphFeature(name="one", column="C1", table="C1"),
                    GraphFeature(name="two", column="C2", table="C2"),
                ),
            ),
            GraphEmbedding(
                name="single",
                output="flat",
                tables=(tables["C3"],),
                features=(GraphFeature(name="C3", table="C3", pooling="sum"),),
            ),
        ),
        layers=(
            GraphLayer(kind="mlp", bottoms=("numbers",), tops=("bottom",), options={"num_outputs": [8, 4]}),
            GraphLayer(kind="concat", bottoms=("one", "two"), tops=("pair",), options={"axis": 2}),
            GraphLayer(kind="reshape", bottoms=("pair",), tops=("flat",), options={"leading_dim": 8}),
            GraphLayer(kind="concat", bottoms=("bottom", "flat", "single"), tops=("all",), options={}),
            GraphLayer(kind="mlp", bottoms=("all",), tops=("unused",), options={"num_outputs": [4]}),
            GraphLayer(kind="mlp", bottoms=("all",), tops=("logit",), options={"num_outputs": [8, 1]}),
            GraphLayer(kind="binary_cross_entropy", bottoms=("logit", "label"), tops=("loss",), options={}),
        ),
    )
    training = TrainingSpec(batch_size=128, max_steps=2, reader_threads=1)
    folder = tmp_path_factory.mktemp("graph") / "run"
    build(RunSpec(data=str(trained.data), model=GraphModelSpec(graph=graph), training=training), folder).fit()
    return folder


@pytest.fixture(scope="session")
def other_run(trained: TrainedRun, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of the same data that scores differently."""
    spec = load_run(trained.path / RUN_FILE)
    folder = tmp_path_factory.mktemp("other") / "run"
    build(replace(spec, training=replace(spec.training, seed=11, max_steps=8)), folder).fit()
    return folder


@pytest.fixture(scope="session")
def two_versions(trained: TrainedRun, other_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository with a model "shop" of two versions, of which the second answers."""
    path = tmp_path_factory.mktemp("models")
    promote(trained.path, path, "shop")
    promote(other_run, path, "shop")
    return path


@pytest.fixture
def repository(two_versions: Path, tmp_path: Path) -> Path:
    """A copy of `two_versions`, where version 1 answers."""
    path = tmp_path / "models"
    shutil.copytree(two_versions, path)
    ModelRepository(path).model("shop").roll_back()
    return path
