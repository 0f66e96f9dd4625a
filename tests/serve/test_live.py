"""Sessions that follow a run: after any checkpoint they score as the trainer's model does."""

import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from terarec.checkpoint import complete_checkpoints, load
from terarec.errors import ConfigError, FormatError
from terarec.serve import InferenceClient, InferenceSession, LiveUpdates, RunningServer, ServedTables, serve
from terarec.spec import (
    CacheSpec,
    DLRMSpec,
    DynamicTablesSpec,
    HostMemorySpec,
    ParameterServerSpec,
    RowFileSpec,
    RunSpec,
    ServedTablesSpec,
    ServingSpec,
    TrainingSpec,
    lru,
)
from terarec.train.run import build
from tests.errors import at
from tests.serve.conftest import TrainedRun


@pytest.fixture(scope="module")
def finished(trained: TrainedRun, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with evictions: a base at step 2, deltas to step 8, another base at step 10, and a delta."""
    spec = RunSpec(
        data=str(trained.data),
        model=DLRMSpec(width=4, bottom=(8, 4), top=(8,), tables=DynamicTablesSpec(max_rows=135, evict=lru(share=0.2))),
        training=TrainingSpec(
            batch_size=128, max_steps=12, reader_threads=1, checkpoint_every=10, delta_every=2, keep_checkpoints=100
        ),
    )
    path = tmp_path_factory.mktemp("live") / "run"
    build(spec, path).fit()
    return path


class Live:
    """A copy of a run that gets its checkpoints one by one."""

    def __init__(self, finished: Path, path: Path) -> None:
        self.path = path
        self._source = finished / "checkpoints"
        shutil.copytree(finished, path, ignore=shutil.ignore_patterns("checkpoints"))

    def add(self, *steps: int) -> None:
        for step in steps:
            name = f"step-{step:08d}"
            (self.path / "checkpoints").mkdir(exist_ok=True)
            shutil.copytree(self._source / name, self.path / "checkpoints" / f"{name}.partial-1")
            (self.path / "checkpoints" / f"{name}.partial-1").rename(self.path / "checkpoints" / name)

    def changes(self, step: int) -> Path:
        return sorted((self.path / "checkpoints" / f"step-{step:08d}" / "changes").iterdir())[3]


@pytest.fixture
def live(finished: Path, tmp_path: Path) -> Live:
    made = Live(finished, tmp_path / "run")
    made.add(2)
    return made


@pytest.fixture(params=["host", pytest.param("disk and cache", marks=pytest.mark.slow)])
def session(request: pytest.FixtureRequest, live: Live, tmp_path: Path) -> Iterator[InferenceSession]:
    server = ParameterServerSpec(tiers=(HostMemorySpec(),))
    tables = ServedTables(server=server)
    if request.param != "host":
        server = ParameterServerSpec(tiers=(RowFileSpec(path=str(tmp_path / "rows")),))
        tables = ServedTables(server=server, cache=CacheSpec(share=0.3))
    with InferenceSession.open(live.path, tables=tables) as opened:
        yield opened


def assert_as_the_trainer(session: InferenceSession, live: Live, trained: TrainedRun, step: int) -> None:
    records = trained.records(0, 200)
    expected = InferenceSession.open(live.path, step)
    assert session.step == step
    assert np.array_equal(session.predict(records), expected.predict(records))


def test_a_session_follows_deltas_and_a_new_base(session: InferenceSession, live: Live, trained: TrainedRun) -> None:
    with LiveUpdates(session, live.path, every_seconds=None) as updates:
        assert not updates.poll()
        assert_as_the_trainer(session, live, trained, 2)
        live.add(4)
        assert updates.poll()
        assert not updates.poll()
        assert_as_the_trainer(session, live, trained, 4)
        live.add(6, 8)
        assert updates.poll()
        assert_as_the_trainer(session, live, trained, 8)
        done = updates.statistics()
        assert (done.step, done.deltas, done.snapshots, done.rejected) == (8, 3, 0, 0)
        assert done.rows > 0
        assert done.removed > 0
        live.add(10)
        assert updates.poll()
        assert updates.statistics().snapshots == 1
        assert_as_the_trainer(session, live, trained, 10)
        live.add(12)
        assert updates.poll()
        assert_as_the_trainer(session, live, trained, 12)
        assert session.served is not None
        assert session.served.server.versions == {"model": (10,)}


def test_a_damaged_delta_is_rejected_and_applied_once_it_is_whole(live: Live, trained: TrainedRun) -> None:
    tables = ServedTables(server=ParameterServerSpec(), cache=CacheSpec(share=0.5))
    with (
        InferenceSession.open(live.path, tables=tables) as session,
        LiveUpdates(session, live.path, every_seconds=None) as updates,
    ):
        records = trained.records(0, 200)
        before = session.predict(records)
        live.add(4)
        content = live.changes(4).read_bytes()
        live.changes(4).write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        with pytest.raises(FormatError):
            updates.poll()
        assert np.array_equal(session.predict(records), before)
        assert (updates.statistics().rejected, updates.statistics().rows) == (1, 0)
        live.changes(4).write_bytes(content)
        assert updates.poll()
        assert_as_the_trainer(session, live, trained, 4)


def test_a_gap_is_rejected_until_a_base_comes(live: Live, trained: TrainedRun) -> None:
    with (
        InferenceSession.open(live.path, tables=ServedTables(server=ParameterServerSpec())) as session,
        LiveUpdates(session, live.path, every_seconds=None) as updates,
    ):
        live.add(6)  # which follows step 4
        with pytest.raises(FormatError):
            updates.poll()
        assert_as_the_trainer(session, live, trained, 2)
        live.add(10)
        assert updates.poll()
        assert_as_the_trainer(session, live, trained, 10)


def test_updates_in_the_background(live: Live, trained: TrainedRun) -> None:
    with (
        InferenceSession.open(live.path, tables=ServedTables(server=ParameterServerSpec())) as session,
        LiveUpdates(session, live.path, every_seconds=0.01),
    ):
        for step in (4, 6, 8):
            live.add(step)
            for _ in range(1000):
                if session.step == step:
                    break
                time.sleep(0.01)
            assert_as_the_trainer(session, live, trained, step)


@pytest.mark.slow
@pytest.mark.parametrize("executor", ["onnxruntime", "aotinductor", "compile"])
def test_new_weights_reach_the_executor(live: Live, trained: TrainedRun, executor: str) -> None:
    tables = ServedTables(server=ParameterServerSpec(tiers=(HostMemorySpec(),)))
    records = trained.records(0, 200)
    with (
        InferenceSession.open(live.path, tables=tables, executor=executor) as session,
        LiveUpdates(session, live.path, every_seconds=None) as updates,
    ):
        live.add(4)
        assert updates.poll()
        assert set(session.executors.values()) == {executor}
        expected = InferenceSession.open(live.path, 4).predict(records)
        assert np.abs(session.predict(records) - expected).max() <= 1e-5


def test_the_number_of_deltas_after_a_state(finished: Path) -> None:
    held = {int(path.name[5:]): load(path) for path in complete_checkpoints(finished / "checkpoints")}
    assert sorted(held) == [2, 4, 6, 8, 10, 12]
    found = {step: held[8].num_deltas_after(held[step].state) for step in (2, 4, 8, 10)}
    assert found == {2: 3, 4: 2, 8: 0, 10: None}


def test_a_session_with_its_own_tables_is_rejected(live: Live) -> None:
    with pytest.raises(ConfigError, check=at("session")):
        LiveUpdates(InferenceSession.open(live.path), live.path)


def test_a_server_follows_a_run(live: Live, trained: TrainedRun) -> None:
    found: list[RunningServer] = []
    is_ready = threading.Event()

    def ready(server: RunningServer) -> None:
        found.append(server)
        is_ready.set()

    tables = ServedTablesSpec(cache=CacheSpec(share=0.5), follow_seconds=0.02)
    thread = threading.Thread(target=serve, args=(live.path, ServingSpec(port=0, tables=tables), ready))
    thread.start()
    try:
        assert is_ready.wait(timeout=60)
        client = InferenceClient(found[0].url)
        records = trained.records(0, 50)
        for step in (2, 4):
            if step > 2:
                live.add(step)
            expected = InferenceSession.open(live.path, step).predict(records)
            for _ in range(1000):
                if np.array_equal(client.infer(records)["score"], expected):
                    break
                time.sleep(0.01)
            else:
                raise AssertionError(f"the server never came to step {step}")
    finally:
        for server in found:
            server.stop()
        thread.join(timeout=30)


@pytest.mark.slow
def test_two_replicas_follow_one_run_from_one_directory_of_files(
    live: Live, trained: TrainedRun, tmp_path: Path
) -> None:
    """One process writes the row files, another reads them; both follow the trainer, each with its dense weights."""
    writes = ParameterServerSpec(tiers=(RowFileSpec(path=str(tmp_path / "rows")),))
    reads = ParameterServerSpec(tiers=(RowFileSpec(path=str(tmp_path / "rows"), read_only=True),))
    with (
        InferenceSession.open(live.path, tables=ServedTables(server=writes)) as writer,
        InferenceSession.open(live.path, tables=ServedTables(server=reads)) as reader,
    ):
        live.add(4)
        assert LiveUpdates(writer, live.path, every_seconds=None).poll()
        assert LiveUpdates(reader, live.path, every_seconds=None).poll()
        assert_as_the_trainer(writer, live, trained, 4)
        assert_as_the_trainer(reader, live, trained, 4)
