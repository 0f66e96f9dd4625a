# SPDX-License-Identifier: Apache-2.0
"""Sessions that follow a run: after any checkpoint they score as the trainer's model does."""

import contextlib
import errno
import itertools
import os
import shutil
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from torch import Tensor

from terarec.checkpoint import complete_checkpoints, load
from terarec.config import load_run, save_run
from terarec.errors import ConfigError, FormatError, StorageError
from terarec.export.dense_part import DensePart
from terarec.export.files import quiet
from terarec.kernels.slots import RowBatch
from terarec.memory.cache import Cache
from terarec.memory.redis_rows import RedisRows
from terarec.serve import InferenceClient, InferenceSession, LiveUpdates, RunningServer, ServedTables, executors, serve
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
from tests.params import in_every_run
from tests.ps.redis_processes import needs_redis, running
from tests.serve.conftest import TrainedRun
from tests.serve.conftest import running as serving
from tests.serve.counted_executor import count_batches
from tests.waiting import PATIENCE, wait_for


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


@pytest.mark.slow
def test_a_training_that_began_anew_with_the_same_steps_is_taken(
    session: InferenceSession, live: Live, finished: Path, trained: TrainedRun, tmp_path: Path
) -> None:
    """Finding L3: steps alone were compared, so the former model was served for ever."""
    spec = load_run(finished / "run.json")
    training = replace(spec.training, seed=7, max_steps=2, checkpoint_every=2)
    build(replace(spec, training=training), tmp_path / "anew").fit()
    with LiveUpdates(session, live.path, every_seconds=None) as updates:
        before = session.predict(trained.records(0, 200))
        for _ in range(2):  # the second time after deltas have changed the rows of the first
            live.add(4)
            assert updates.poll()
            shutil.rmtree(live.path / "checkpoints")
            shutil.copytree(tmp_path / "anew" / "checkpoints", live.path / "checkpoints")
            assert updates.poll()
            assert not updates.poll()
            assert not np.array_equal(session.predict(trained.records(0, 200)), before)
            assert_as_the_trainer(session, live, trained, 2)
            shutil.rmtree(live.path / "checkpoints")
            live.add(2)
            assert updates.poll()
            assert np.array_equal(session.predict(trained.records(0, 200)), before)
        assert updates.statistics().snapshots == 4


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


def test_a_session_is_behind_until_it_has_the_newest_checkpoint(live: Live) -> None:
    with InferenceSession.open(live.path, tables=ServedTables(server=ParameterServerSpec())) as session:
        updates = LiveUpdates(session, live.path, every_seconds=None)
        assert updates.behind_seconds() == 0
        live.add(4)
        written = live.path / "checkpoints" / "step-00000004"
        os.utime(written, (written.stat().st_atime, written.stat().st_mtime - 500))
        assert updates.behind_seconds() >= 500
        os.utime(written, (written.stat().st_atime, written.stat().st_mtime + 5_000))  # a clock that was set back
        assert updates.behind_seconds() == 0
        assert updates.poll()
        assert updates.behind_seconds() == 0
        updates.close()


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


@pytest.mark.parametrize("file", ["checkpoints/step-00000010/dense.safetensors", "dataset/dataset.json"])
def test_a_base_that_is_rejected_leaves_the_rows_of_the_former_state(
    live: Live, trained: TrainedRun, tmp_path: Path, file: str
) -> None:
    """Its rows stayed, and the next delta was laid over them."""
    with (
        InferenceSession.open(live.path, tables=ServedTables(server=ParameterServerSpec())) as session,
        LiveUpdates(session, live.path, every_seconds=None) as updates,
    ):
        assert session.served is not None
        live.add(10)
        sound = (live.path / file).read_bytes()
        other = sound.replace(b'"C26"', b'"C27"') if file.endswith("json") else sound[:-1] + bytes([sound[-1] ^ 1])
        (live.path / file).write_bytes(other)
        with pytest.raises((ConfigError, FormatError)):
            updates.poll()
        (live.path / file).write_bytes(sound)
        assert session.served.server.versions == {"model": (2,)}
        (live.path / "checkpoints" / "step-00000010").rename(tmp_path / "base")
        live.add(4)
        assert updates.poll()
        assert_as_the_trainer(session, live, trained, 4)
        (tmp_path / "base").rename(live.path / "checkpoints" / "step-00000010")
        assert updates.poll()
        assert_as_the_trainer(session, live, trained, 10)
        assert session.served.server.versions == {"model": (10,)}


def test_updates_in_the_background(live: Live, trained: TrainedRun) -> None:
    with (
        InferenceSession.open(live.path, tables=ServedTables(server=ParameterServerSpec())) as session,
        LiveUpdates(session, live.path, every_seconds=0.01),
    ):
        for step in (4, 6, 8):
            live.add(step)
            wait_for(lambda step=step: session.step == step)
            assert_as_the_trainer(session, live, trained, step)


class Slowed(Cache):
    """Host memory that lets other threads run after each lookup and before each change."""

    def read(self, batch: RowBatch, out: Tensor) -> Tensor:
        found = super().read(batch, out)
        time.sleep(0.0005)
        return found

    def write(self, batch: RowBatch, values: Tensor) -> None:
        time.sleep(0.001)
        super().write(batch, values)

    def erase(self, batch: RowBatch) -> None:
        time.sleep(0.001)
        super().erase(batch)


@pytest.mark.parametrize("cache", in_every_run([CacheSpec(share=0.3)], [None, CacheSpec(share=0.3)]))
def test_each_answer_is_of_one_version(
    live: Live, trained: TrainedRun, monkeypatch: pytest.MonkeyPatch, cache: CacheSpec | None
) -> None:
    """Finding L6: 7 of 2,918 answers mixed the rows and layers of two versions, and all said that of the start."""
    monkeypatch.setattr("terarec.ps.levels.Cache", Slowed)
    batches = [trained.records(start, start + 20) for start in range(0, 200, 20)]
    steps = (2, 4, 6, 8, 10)
    live.add(4, 6, 8, 10)
    expected = {}
    for step in steps:
        with InferenceSession.open(live.path, step) as session:
            expected[step] = [session.predict(batch) for batch in batches]
    tables = ServedTables(server=ParameterServerSpec(), cache=cache)
    is_done, wrong, seen = threading.Event(), [], set()
    with InferenceSession.open(live.path, 2, tables=tables) as session:
        shutil.rmtree(live.path / "checkpoints")
        live.add(2)

        def score() -> None:
            while not is_done.is_set():
                for number, batch in enumerate(batches):
                    scored = session.scored(batch)
                    seen.add(scored.step)
                    if not np.array_equal(scored.scores, expected[scored.step][number]):
                        wrong.append((scored.step, number))

        threads = [threading.Thread(target=score) for _ in range(3)]
        for thread in threads:
            thread.start()
        with LiveUpdates(session, live.path, every_seconds=None) as updates:
            for step in steps[1:]:
                live.add(step)
                assert updates.poll()
                assert updates.statistics().unwritten == 0
        is_done.set()
        for thread in threads:
            thread.join(PATIENCE)
    assert not wrong
    assert {4, 6, 8} <= seen


class Dying(Cache):
    """Host memory that takes no changes on demand."""

    dies = False

    def write(self, batch: RowBatch, values: Tensor) -> None:
        if self.dies and batch.rows.numel():
            raise StorageError("tier", "fails")
        super().write(batch, values)


@pytest.mark.parametrize("num_tiers", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_dead_tier_does_not_stop_updates(
    live: Live, trained: TrainedRun, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, num_tiers: int
) -> None:
    """Finding L4: tables were left at two steps, and scores were .27 off."""
    monkeypatch.setattr("terarec.ps.levels.Cache", Dying)
    server = ParameterServerSpec(
        tiers=(HostMemorySpec(), RowFileSpec(path=str(tmp_path / "rows"), cache_bytes=0))[:num_tiers]
    )
    with (
        InferenceSession.open(live.path, tables=ServedTables(server=server)) as session,
        LiveUpdates(session, live.path, every_seconds=None) as updates,
    ):
        assert session.served is not None
        tier = session.served.server.table("model", "C3").group.stack.levels[0].level
        assert isinstance(tier, Dying)
        tier.dies = True
        for step in (4, 6):
            live.add(step)
            if num_tiers == 1:  # nothing else has the rows, which stay in memory until it is back
                with pytest.raises(StorageError):
                    updates.poll()
                assert updates.statistics().unwritten > 0
            else:
                assert updates.poll()
                assert session.served.server.statistics()["model"]["C3"].tiers[0].is_stale
            assert_as_the_trainer(session, live, trained, step)
        tier.dies = False

        def is_written() -> bool:
            updates.poll()
            tiers = session.served.server.statistics()["model"]["C3"].tiers  # type: ignore[union-attr]
            return not updates.statistics().unwritten and not any(use.is_stale for use in tiers)

        wait_for(is_written)
        assert updates.statistics().last_error == ""
        assert_as_the_trainer(session, live, trained, 6)
        live.add(8)
        assert updates.poll()
        assert_as_the_trainer(session, live, trained, 8)


@pytest.mark.slow
@needs_redis
@pytest.mark.parametrize("has_file", in_every_run([True], [False, True]))
def test_redis_restarted_from_its_snapshot_is_brought_up_to_date(
    live: Live, trained: TrainedRun, tmp_path: Path, has_file: bool
) -> None:
    """Finding L2: it served rows of an earlier step for good, and scores were .04 off."""
    with running(tmp_path / "redis", "--appendonly", "no") as redis:
        client = pytest.importorskip("redis").Redis(redis.host, redis.port)
        tiers = (redis.spec(num_partitions=2), RowFileSpec(path=str(tmp_path / "rows")))[: 1 + has_file]
        with (
            InferenceSession.open(live.path, tables=ServedTables(server=ParameterServerSpec(tiers=tiers))) as session,
            LiveUpdates(session, live.path, every_seconds=None) as updates,
        ):
            assert session.served is not None
            server = session.served.server
            client.save()
            live.add(4)
            assert updates.poll()
            redis.kill()
            redis.start()
            if has_file:
                assert_as_the_trainer(session, live, trained, 4)
            else:
                session.predict(trained.records(0, 200))  # which notices
            uses = [table.tiers[0] for table in server.statistics()["model"].values()]
            assert all(use.is_stale for use in uses)

            def is_renewed() -> bool:
                updates.poll()
                return all(table.tiers[0].renewed == 1 for table in server.statistics()["model"].values())

            wait_for(is_renewed)
            assert_as_the_trainer(session, live, trained, 4)
            client.save()
            redis.kill()
            redis.start()  # with all rows, so that nothing is stale
            live.add(6)
            assert updates.poll()
            assert_as_the_trainer(session, live, trained, 6)
            assert not any(table.tiers[0].is_stale for table in server.statistics()["model"].values())


@needs_redis
def test_sessions_that_share_a_redis_with_all_rows(live: Live, trained: TrainedRun, tmp_path: Path) -> None:
    """The second one took the change of the first for rows of others, and served default vectors for good."""
    with running(tmp_path / "redis") as redis:

        def opened() -> InferenceSession:
            return InferenceSession.open(
                live.path, tables=ServedTables(server=ParameterServerSpec(tiers=(redis.spec(),)))
            )

        with (
            opened() as first,
            opened() as second,
            LiveUpdates(first, live.path, every_seconds=None) as one,
            LiveUpdates(second, live.path, every_seconds=None) as other,
        ):
            for step in (4, 6):
                live.add(step)
                assert one.poll()
                assert other.poll()
                assert other.statistics().unwritten == 0
                for session in (first, second):
                    assert_as_the_trainer(session, live, trained, step)
            live.add(8)
            assert second.served is not None
            (tier,) = second.served.server.table("model", "C3").group.stack.levels
            assert tier.fences[0].reset(None) is False  # as a process that loads the same rows again
            with pytest.raises(StorageError):
                one.poll()
            assert_as_the_trainer(first, live, trained, 8)
            tier.fences[0].end()
            one.poll()
            assert other.poll()
            assert (one.statistics().unwritten, other.statistics().unwritten) == (0, 0)
            for session in (first, second):
                assert_as_the_trainer(session, live, trained, 8)
            live.add(10)
            assert one.poll()  # and removes the former version
            assert_as_the_trainer(second, live, trained, 8)
            assert other.poll()
            for session in (first, second):
                assert_as_the_trainer(session, live, trained, 10)
        client = pytest.importorskip("redis").Redis(redis.host, redis.port)
        assert not client.keys("*model@2*")


@needs_redis
@pytest.mark.parametrize("tiers", [[], pytest.param([HostMemorySpec()], marks=pytest.mark.slow)])
def test_a_session_that_missed_what_another_one_wrote_goes_on(
    live: Live, trained: TrainedRun, tmp_path: Path, tiers: list[HostMemorySpec]
) -> None:
    """Each poll raised until the next base, and the rows of all later deltas stayed in memory."""
    with running(tmp_path / "redis") as redis:
        tables = ServedTables(server=ParameterServerSpec(tiers=(*tiers, redis.spec())))
        with (
            InferenceSession.open(live.path, tables=tables) as first,
            InferenceSession.open(live.path, tables=tables) as second,
            LiveUpdates(second, live.path, every_seconds=None) as other,
        ):
            with LiveUpdates(first, live.path, every_seconds=None) as one:
                live.add(4)
                assert one.poll()
            second.predict(trained.records(0, 200))  # where other tiers have the rows, this one goes stale
            live.add(6)
            assert other.poll()
            assert other.statistics().unwritten == 0
            assert_as_the_trainer(second, live, trained, 6)
            assert second.served is not None
            uses = [table.tiers[-1] for table in second.served.server.statistics()["model"].values()]
            assert not any(use.is_stale for use in uses)
            if not tiers:
                assert sum(use.renewed for use in uses) == 0
                with LiveUpdates(first, live.path, every_seconds=None) as one:
                    assert one.poll()
                    assert one.statistics().unwritten == 0
                assert_as_the_trainer(first, live, trained, 6)


@needs_redis
def test_a_delta_that_failed_midway_goes_on_with_the_next_one(live: Live, trained: TrainedRun, tmp_path: Path) -> None:
    """It was taken for rows of others: Redis was emptied and filled anew, with default vectors meanwhile."""
    write, calls = RedisRows.write, itertools.count()

    def fail_once(rows: RedisRows, batch: RowBatch, values: Tensor) -> None:
        if next(calls) == 1:
            raise StorageError("redis", "fails")
        write(rows, batch, values)

    with (
        running(tmp_path / "redis") as redis,
        InferenceSession.open(
            live.path, tables=ServedTables(server=ParameterServerSpec(tiers=(redis.spec(),)))
        ) as session,
        LiveUpdates(session, live.path, every_seconds=None) as updates,
    ):
        live.add(4)
        with mock.patch.object(RedisRows, "write", fail_once), pytest.raises(StorageError):
            updates.poll()
        assert_as_the_trainer(session, live, trained, 4)
        live.add(6)
        assert updates.poll()
        assert updates.statistics().unwritten == 0
        assert_as_the_trainer(session, live, trained, 6)
        assert session.served is not None
        tiers = session.served.server.statistics()["model"].values()
        assert sum(table.tiers[0].renewed for table in tiers) == 0


@needs_redis
def test_redis_restarted_while_a_delta_waits_is_filled(live: Live, trained: TrainedRun, tmp_path: Path) -> None:
    """The pause after the error, and an attempt without rows, kept the repair from its turn."""
    with (
        running(tmp_path / "redis", "--appendonly", "no") as redis,
        InferenceSession.open(
            live.path, tables=ServedTables(server=ParameterServerSpec(tiers=(redis.spec(timeout_seconds=5.0),)))
        ) as session,
        LiveUpdates(session, live.path, every_seconds=None) as updates,
    ):
        redis.kill()
        live.add(4)
        with pytest.raises(StorageError):
            updates.poll()
        session.predict(trained.records(0, 20))  # from here on the tier rests
        redis.start()

        def is_written() -> bool:
            with contextlib.suppress(StorageError):
                updates.poll()
            return not updates.statistics().unwritten

        wait_for(is_written)
        assert_as_the_trainer(session, live, trained, 4)


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


def test_an_executor_that_could_not_be_built_is_built_by_the_next_poll(
    live: Live, trained: TrainedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The session went on in eager torch for good."""
    sizes = count_batches(monkeypatch)

    def full(part: DensePart, folder: Path) -> executors.Program:
        raise OSError(errno.ENOSPC, "No space left on device")

    with (
        InferenceSession.open(
            live.path, tables=ServedTables(server=ParameterServerSpec()), executor="onnxruntime"
        ) as session,
        LiveUpdates(session, live.path, every_seconds=None) as updates,
    ):
        for step in (4, 10):  # by a delta, and by a base
            live.add(step)
            with monkeypatch.context() as on_a_full_disk:
                on_a_full_disk.setattr(executors, "EXECUTORS", {**executors.EXECUTORS, "onnxruntime": full})
                with pytest.raises(ConfigError, check=at("executor 'onnxruntime'", "No space left")):
                    updates.poll()
            assert_as_the_trainer(session, live, trained, step)
            assert (session.executors, updates.statistics().unwritten) == ({}, 0)
            assert not updates.poll()
            assert set(session.executors.values()) == {"onnxruntime"}
            sizes.clear()
            assert_as_the_trainer(session, live, trained, step)
            assert sizes == [200]


def test_updates_end_while_others_export(live: Live, trained: TrainedRun) -> None:
    """A server that was stopped waited for the compiler of a model that was being loaded."""
    tables = ServedTables(server=ParameterServerSpec())
    begun, may_end = threading.Event(), threading.Event()

    def export() -> None:
        with quiet():
            begun.set()
            assert may_end.wait(PATIENCE)

    with (
        ThreadPoolExecutor() as pool,
        InferenceSession.open(live.path, tables=tables, executor="onnxruntime") as session,
    ):
        exporting = pool.submit(export)
        assert begun.wait(PATIENCE)
        live.add(4)
        try:
            with LiveUpdates(session, live.path, every_seconds=0.01):
                wait_for(lambda: session.step == 4)
            assert session.executors == {}
        finally:
            may_end.set()
        exporting.result(PATIENCE)
        assert_as_the_trainer(session, live, trained, 4)


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
        assert is_ready.wait(timeout=PATIENCE)
        client = InferenceClient(found[0].url)
        records = trained.records(0, 50)
        for step in (2, 4):
            if step > 2:
                live.add(step)
            expected = InferenceSession.open(live.path, step).predict(records)
            wait_for(lambda expected=expected: np.array_equal(client.infer(records)["score"], expected))
    finally:
        for server in found:
            server.stop()
        thread.join(timeout=PATIENCE)


def test_a_server_that_follows_begins_with_the_last_checkpoint(live: Live, trained: TrainedRun) -> None:
    """It began with the best one of a run with patience, and left it at the first look."""
    live.add(4)
    spec = load_run(live.path / "run.json")
    save_run(replace(spec, training=replace(spec.training, patience=3)), live.path / "run.json")
    (live.path / "checkpoints/best.json").write_text('{"format": "terarec.best", "version": 1, "step": 2}')
    assert InferenceSession.open(live.path).step == 2
    tables = ServedTablesSpec(follow_seconds=1e6)
    with serving(live.path, ServingSpec(port=0, tables=tables)) as server:
        records = trained.records(0, 50)
        expected = InferenceSession.open(live.path, 4).predict(records)
        assert np.array_equal(InferenceClient(server.url).infer(records)["score"], expected)


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
