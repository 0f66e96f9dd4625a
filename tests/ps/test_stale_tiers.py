# SPDX-License-Identifier: Apache-2.0
"""Tiers that miss updates, or come back with rows of another time: lookups never read them, and they are renewed."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch import Tensor

from terarec.errors import StaleRowsError, StorageError, UnreachableError
from terarec.formats.hugectr.weights import SparseRows, write_sparse_folder
from terarec.kernels.slots import RowBatch
from terarec.memory import redis_fence
from terarec.memory.batch_parts import batch_of
from terarec.memory.guarded import TierUseStatistics
from terarec.memory.redis_server import RedisServer, Request
from terarec.memory.renewal import RowChunk
from terarec.ps import ParameterServer
from terarec.ps.loading import TableSource, fill_tiers, open_table_source
from terarec.ps.table import TableTiers
from terarec.spec import ParameterServerSpec, RowFileSpec, ServedModelSpec, ServedTableSpec
from terarec.spec.parameter_server import OverflowSpec
from tests.ps.redis_processes import RedisProcess, needs_redis, running
from tests.ps.tiers import Delegating, Tier, disk, distinct_rows, host, table_of
from tests.ps.tiers import redis as redis_tier
from tests.waiting import wait_for

redis = pytest.importorskip("redis")
KEYS = torch.arange(1, 201)
CHANGED, REMOVED = KEYS[:60], KEYS[150:]
_TAGS = itertools.count()


class Clock:
    """Seconds that a test sets."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


class Failing(Delegating):
    """A level that takes no changes on demand."""

    fails = False

    def write(self, batch: RowBatch, values: Tensor) -> None:
        if self.fails:
            raise StorageError("tier", "fails")
        self.level.write(batch, values)

    def erase(self, batch: RowBatch) -> None:
        if self.fails:
            raise StorageError("tier", "fails")
        self.level.erase(batch)


def failing(clock: Clock) -> Tier:
    return host(4, kind=Failing, clock=clock)


def fail(tier: Tier, fails: bool) -> None:
    tier.guarded.level.fails = fails  # type: ignore[attr-defined]


def use(table: TableTiers, place: int) -> TierUseStatistics:
    return table.statistics().tiers[place]


def update(table: TableTiers, salt: float, state: str | None = None) -> None:
    with table.changing(state):
        table.erase(REMOVED)
        table.insert(CHANGED, distinct_rows(4, CHANGED, salt))


def newest(salt: float) -> Tensor:
    rows = distinct_rows(4, KEYS)
    rows[CHANGED - 1], rows[REMOVED - 1] = distinct_rows(4, CHANGED, salt), 0.0
    return rows


@pytest.mark.parametrize("place", [0, 1])
def test_an_update_goes_on_without_a_tier_that_fails(place: int) -> None:
    """Finding L4: one dead tier stopped every update."""
    clock = Clock()
    tiers = [failing(clock), failing(clock)]
    table = table_of(tiers)
    table.insert(KEYS, distinct_rows(4, KEYS))
    fail(tiers[place], True)
    update(table, 1.0)
    assert torch.equal(table.lookup(KEYS), newest(1.0))
    assert (use(table, place).is_stale, use(table, place).is_available) == (True, False)
    update(table, 2.0)  # which it misses, too
    clock.now += 1
    assert table.renew() == 0
    assert torch.equal(table.lookup(KEYS), newest(2.0))
    fail(tiers[place], False)
    clock.now += 10
    assert table.renew() == 1
    assert (use(table, place).is_stale, use(table, place).renewed) == (False, 1)
    assert use(table, place).missed == 2 * (CHANGED.numel() + REMOVED.numel())
    values = torch.zeros(KEYS.numel(), 16, dtype=torch.uint8)
    tiers[place].guarded.level.read(batch_of(KEYS, 0), values)
    assert torch.equal(values.view(torch.float32), newest(2.0))


class Repeating(Delegating):
    """A level that names its first rows twice, as a server may while others write."""

    def items(self, table: int, chunk_rows: int) -> Iterator[tuple[Tensor, Tensor]]:
        chunks = list(self.level.items(table, 50))
        return iter([chunks[0], *chunks])


def test_a_tier_gets_all_rows_of_one_that_names_some_twice() -> None:
    """It stopped after as many as there were: the last ones got default vectors."""
    tiers = [host(4), host(4, kind=Repeating)]
    table = table_of(tiers)
    table.insert(KEYS, distinct_rows(4, KEYS))
    tiers[0].guarded.miss(0, None)
    assert table.renew() == 1
    assert tiers[0].count() == KEYS.numel()


def test_an_update_that_no_tier_with_all_rows_takes_is_an_error() -> None:
    tiers = [host(4), failing(Clock())]
    table = table_of(tiers, keeps_found=[True, False])
    table.insert(KEYS, distinct_rows(4, KEYS))
    fail(tiers[1], True)
    with pytest.raises(StorageError):
        update(table, 1.0)
    assert not use(table, 1).is_stale
    fail(tiers[1], False)
    update(table, 1.0)
    assert torch.equal(table.lookup(KEYS), newest(1.0))


def test_a_cache_of_rows_that_missed_changes_forgets_their_keys() -> None:
    clock = Clock()
    fast, slow = failing(clock), host(4)
    table = table_of([fast, slow], keeps_found=[True, False])
    slow.insert(KEYS, distinct_rows(4, KEYS))
    table.lookup(KEYS)
    assert fast.count() == KEYS.numel()
    fail(fast, True)
    update(table, 1.0)
    fail(fast, False)
    clock.now += 1
    assert table.renew() == 1
    assert fast.count() == KEYS.numel() - CHANGED.numel() - REMOVED.numel()
    assert torch.equal(table.lookup(KEYS), newest(1.0))


class InFrontOfFiles:
    """A table in Redis, in front of a row file that has all rows, too."""

    def __init__(self, server: RedisProcess, path: Path, tag: str | None = None, **options: object) -> None:
        self.clock = Clock()
        spec = server.spec(num_partitions=3, timeout_seconds=5.0, **options)
        self.tag = tag or f"hps_et.m.stale{next(_TAGS)}"
        self.fast = redis_tier(RedisServer(spec), self.tag, 4, self.clock)
        self.slow = disk(RowFileSpec(path=str(path)), path / "t", 4)
        self.table = table_of([self.fast, self.slow])
        if tag is None:
            self.table.insert(KEYS, distinct_rows(4, KEYS))
        else:
            self.slow.insert(KEYS, distinct_rows(4, KEYS))
        self.client = redis.Redis(server.host, server.port)

    def assert_served(self, expected: Tensor) -> None:
        """Whatever the state of Redis, and also when all is well again."""
        for _ in range(3):
            assert torch.equal(self.table.lookup(KEYS), expected)
            self.clock.now += 10

    def assert_renewed(self, expected: Tensor) -> None:
        """Redis is brought up to date, and then has each row."""
        self.clock.now += 10
        assert self.table.renew() == 1
        hits = use(self.table, 0).counted.hits
        self.assert_served(expected)
        assert use(self.table, 0).counted.hits == hits + 3 * int((expected != 0).any(1).count_nonzero())
        assert use(self.table, 0).is_available


@pytest.fixture
def snapshotted(tmp_path: Path) -> Iterator[RedisProcess]:
    """A server that keeps what it holds by snapshots alone, as one does by default."""
    with running(tmp_path / "redis", "--appendonly", "no") as server:
        yield server


@needs_redis
def test_a_killed_server_is_told_what_it_missed(tmp_path: Path) -> None:
    with running(tmp_path / "redis", "--appendfsync", "always") as server:
        held = InFrontOfFiles(server, tmp_path / "rows")
        update(held.table, 1.0)
        server.kill()
        update(held.table, 2.0)
        assert use(held.table, 0).is_stale
        held.assert_served(newest(2.0))
        assert held.table.renew() == 0
        server.start()
        held.assert_served(newest(2.0))
        inserted = use(held.table, 0).counted.inserted
        held.assert_renewed(newest(2.0))
        assert use(held.table, 0).counted.inserted == inserted + CHANGED.numel()


@needs_redis
@pytest.mark.parametrize("is_noticed_by", ["lookup", "update"])
@pytest.mark.parametrize("state", [None, "step-2"])
def test_a_server_restarted_from_its_snapshot_is_noticed(
    snapshotted: RedisProcess, tmp_path: Path, is_noticed_by: str, state: str | None
) -> None:
    """Finding L2: it served rows of an earlier step, and statistics called it available."""
    held = InFrontOfFiles(snapshotted, tmp_path / "rows")
    held.client.save()
    update(held.table, 1.0, state)
    snapshotted.kill()
    snapshotted.start()
    if is_noticed_by == "update":
        update(held.table, 2.0, state)
    expected = newest(1.0 if is_noticed_by == "lookup" else 2.0)
    held.assert_served(expected)
    assert use(held.table, 0).is_stale
    assert use(held.table, 0).skipped > 0
    held.assert_renewed(expected)


@needs_redis
def test_a_server_restarted_in_the_middle_of_an_update_is_noticed(snapshotted: RedisProcess, tmp_path: Path) -> None:
    held = InFrontOfFiles(snapshotted, tmp_path / "rows")
    with held.table.changing():
        held.table.erase(REMOVED)
        held.client.save()
        held.table.insert(CHANGED, distinct_rows(4, CHANGED, 1.0))
        snapshotted.kill()
        snapshotted.start()
    assert use(held.table, 0).is_stale
    held.assert_served(newest(1.0))
    held.assert_renewed(newest(1.0))


@needs_redis
def test_a_server_that_lost_all_rows_is_filled(snapshotted: RedisProcess, tmp_path: Path) -> None:
    held = InFrontOfFiles(snapshotted, tmp_path / "rows")
    held.client.flushall()
    held.assert_served(distinct_rows(4, KEYS))
    assert use(held.table, 0).is_stale
    held.assert_renewed(distinct_rows(4, KEYS))


@needs_redis
def test_a_replica_that_lags_takes_over(tmp_path: Path) -> None:
    options = ("--appendonly", "no")
    with running(tmp_path / "first", *options) as server, running(tmp_path / "second", *options) as replica:
        held = InFrontOfFiles(server, tmp_path / "rows")
        other = redis.Redis(replica.host, replica.port)
        other.replicaof(server.host, server.port)
        mark = f"hps_et{{{held.tag}/p0}}s"
        wait_for(lambda: other.get(mark) is not None and other.get(mark) == held.client.get(mark))
        other.replicaof("NO", "ONE")  # the link breaks, so that the update does not arrive
        # Until its first append-only file is written, a replica that is killed has nothing.
        wait_for(lambda: not other.info("persistence")["aof_rewrite_in_progress"])
        update(held.table, 1.0)
        server.kill()
        # As behind an address that moves to the machine of the replica.
        other.save()
        replica.kill()
        replica.host, replica.port = server.host, server.port
        replica.start()
        held.assert_served(newest(1.0))
        assert use(held.table, 0).is_stale
        held.assert_renewed(newest(1.0))


@needs_redis
def test_processes_that_share_a_server(redis_server: RedisProcess, tmp_path: Path) -> None:
    """Updates without a state reach both; rows of another state are not read where a slower tier has the own ones."""
    first = InFrontOfFiles(redis_server, tmp_path / "first")
    second = InFrontOfFiles(redis_server, tmp_path / "second", first.tag)
    table = table_of([redis_tier(RedisServer(redis_server.spec(num_partitions=3)), first.tag, 4)])
    for one in (second.table, table):
        with one.changing():
            pass
    first.table.insert(CHANGED, distinct_rows(4, CHANGED, 1.0))
    expected = distinct_rows(4, KEYS)
    expected[CHANGED - 1] = distinct_rows(4, CHANGED, 1.0)
    assert torch.equal(second.table.lookup(KEYS), expected)
    assert torch.equal(table.lookup(KEYS), expected)
    update(second.table, 1.0)
    update(first.table, 2.0, "next")
    second.assert_served(newest(1.0))
    assert use(second.table, 0).is_stale
    assert torch.equal(table.lookup(KEYS), newest(2.0))  # there is nothing else
    assert second.table.renew() == 0  # nobody rolls back what the other did
    update(second.table, 2.0, "next")
    second.clock.now += 10
    assert second.table.renew("next") == 1
    second.assert_served(newest(2.0))
    first.assert_served(newest(2.0))


@needs_redis
def test_changes_by_turns_where_nothing_else_has_the_rows(redis_server: RedisProcess) -> None:
    """One that came while another process made its own left the table without rows for good."""
    tag, server = f"hps_et.m.stale{next(_TAGS)}", RedisServer(redis_server.spec())
    first, second = (table_of([redis_tier(server, tag, 4)]) for _ in range(2))
    for table in (first, second):
        table.insert(KEYS, distinct_rows(4, KEYS))
    with first.changing():
        with pytest.raises(StaleRowsError):
            second.insert(REMOVED, distinct_rows(4, REMOVED))
        assert torch.equal(second.lookup(KEYS), distinct_rows(4, KEYS))
        first.insert(CHANGED, distinct_rows(4, CHANGED, 1.0))
    second.erase(REMOVED)
    for table in (first, second):
        assert torch.equal(table.lookup(KEYS), newest(1.0))
        assert not use(table, 0).is_stale


@needs_redis
def test_a_change_whose_writer_died_is_undone(redis_server: RedisProcess, tmp_path: Path) -> None:
    """Its mark stood for ever: other processes passed the server over until a writer came."""
    first = InFrontOfFiles(redis_server, tmp_path / "first")
    second = InFrontOfFiles(redis_server, tmp_path / "second", first.tag)
    with second.table.changing():
        pass
    died = first.fast.guarded
    died.fences[0].begin("next")
    died.write(batch_of(CHANGED, 0), distinct_rows(4, CHANGED, 1.0).view(torch.uint8))
    second.assert_served(distinct_rows(4, KEYS))
    assert second.table.renew() == 0  # it may be alive
    second.client.delete(f"hps_et{{{first.tag}/p0}}w")
    second.assert_renewed(distinct_rows(4, KEYS))
    with pytest.raises(StaleRowsError):
        died.fences[0].end()


@needs_redis
def test_nothing_stays_of_a_table_that_is_removed(redis_server: RedisProcess, tmp_path: Path) -> None:
    """The marks of each version of a model stayed."""
    held = InFrontOfFiles(redis_server, tmp_path / "rows")
    assert held.client.keys(f"hps_et{{{held.tag}/*")
    held.table.clear()
    assert not held.client.keys(f"hps_et{{{held.tag}/*")


@needs_redis
def test_a_new_process_removes_rows_that_its_source_does_not_have(redis_server: RedisProcess, tmp_path: Path) -> None:
    """Those of another width, and their times, stayed."""
    held = InFrontOfFiles(redis_server, tmp_path / "rows")
    update(held.table, 1.0, "next")
    bounded = redis_server.spec(num_partitions=3, overflow=OverflowSpec(max_rows=1000, evict="lru"))
    redis_tier(RedisServer(bounded), held.tag, 6).insert(REMOVED, distinct_rows(6, REMOVED))
    held.client.hset(f"hps_et{{{held.tag}/p1}}v", "odd", "")
    tier = redis_tier(RedisServer(redis_server.spec(num_partitions=3)), held.tag, 4)
    table = table_of([tier])
    part = RowChunk(CHANGED, distinct_rows(4, CHANGED))
    fill_tiers(
        table, TableSource(path=tmp_path, num_rows=CHANGED.numel(), read=lambda: iter([part])), lambda rows: None
    )
    assert torch.equal(table.find(KEYS).mask, torch.isin(KEYS, CHANGED))
    assert (tier.count(), use(table, 0).counted.damaged) == (CHANGED.numel(), 0)
    assert not held.client.keys(f"hps_et{{{held.tag}/*t")


@needs_redis
@pytest.mark.parametrize("is_renewed", [False, True])
def test_rows_of_a_server_that_has_all_are_there_while_they_are_replaced(
    redis_server: RedisProcess, tmp_path: Path, is_renewed: bool
) -> None:
    """They were removed first: lookups that had nothing else gave default vectors until the last one was there."""
    tag, server = f"hps_et.m.stale{next(_TAGS)}", RedisServer(redis_server.spec(num_partitions=3))
    first, second = (table_of([redis_tier(server, tag, 4)]) for _ in range(2))
    with first.changing("a"):
        first.insert(KEYS, distinct_rows(4, KEYS))

    def read() -> Iterator[RowChunk]:
        expected = distinct_rows(4, KEYS)
        assert torch.equal(first.lookup(KEYS), expected)
        yield RowChunk(CHANGED, distinct_rows(4, CHANGED, 1.0))
        expected[CHANGED - 1] = distinct_rows(4, CHANGED, 1.0)
        assert torch.equal(first.lookup(KEYS), expected)

    source = TableSource(path=tmp_path, num_rows=CHANGED.numel(), read=read)
    if is_renewed:
        redis.Redis(redis_server.host, redis_server.port).delete(f"hps_et{{{tag}/p0}}s")
        assert not first.find(KEYS).mask.any()
        assert first.renew("b", source) == 1
    else:
        fill_tiers(second, source, lambda rows: None)
    found = first.find(KEYS)
    assert torch.equal(found.mask, torch.isin(KEYS, CHANGED))
    assert torch.equal(found.rows[CHANGED - 1], distinct_rows(4, CHANGED, 1.0))


@needs_redis
def test_rows_of_tables_that_wait_to_be_replaced_are_there(
    redis_server: RedisProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One table was filled after the other, and lookups of those that waited gave default vectors."""
    write_sparse_folder(tmp_path / "0", [SparseRows(KEYS.numpy(), distinct_rows(4, KEYS).numpy())])
    names, model = "abcde", f"m{next(_TAGS)}"
    tables = tuple(ServedTableSpec(name=name, width=4, source=str(tmp_path / "0")) for name in names)
    spec = redis_server.spec(timeout_seconds=30.0)
    served = ServedModelSpec(name=model, tables=tables)
    with ParameterServer(ParameterServerSpec(tiers=(spec,), models=(served,))) as server:
        client = redis.Redis(redis_server.host, redis_server.port)
        for name in names:
            client.delete(f"hps_et{{hps_et.{model}.{name}/p0}}s")

        def are_there() -> bool:
            return all(torch.equal(server.lookup(model, name, KEYS), distinct_rows(4, KEYS)) for name in names)

        def opened(table: ServedTableSpec) -> TableSource:
            source = open_table_source(table)
            assert source is not None

            def read() -> Iterator[RowChunk]:
                wait_for(are_there)
                uses = [use.tiers[0] for use in server.statistics()[model].values()]
                assert all(use.is_replaced == use.is_stale for use in uses)
                yield from source.read()

            return replace(source, read=read)

        assert not any(server.lookup(model, name, KEYS).any() for name in names)
        monkeypatch.setattr("terarec.ps.server.open_table_source", opened)
        monkeypatch.setattr("terarec.ps.server._REPLACED_AT_ONCE", 1)
        assert server.renew(model, "b", tmp_path / "0") == 5
        assert are_there()
        assert not any(use.tiers[0].is_replaced for use in server.statistics()[model].values())


@needs_redis
def test_a_long_renewal_keeps_its_lease(
    redis_server: RedisProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others took the writer for dead while it went through keys of which none had to change."""
    held, clock, run = InFrontOfFiles(redis_server, tmp_path / "rows"), Clock(), RedisServer.run
    lease, is_leased = f"hps_et{{{held.tag}/p0}}w", list[bool]()
    monkeypatch.setattr(redis_fence, "time", SimpleNamespace(monotonic=clock))

    def pause() -> None:
        is_leased.append(bool(held.client.delete(lease)))
        clock.now += redis_fence.LEASE_SECONDS + 1

    def read() -> Iterator[RowChunk]:
        for keys in torch.split(KEYS, 50):
            yield RowChunk(keys, newest(1.0)[keys - 1])
            pause()

    def run_slowly(server: RedisServer, requests: Sequence[Request]) -> list[object]:
        replies = run(server, requests)
        if any(b"HSCAN" in request.command for request in requests):
            pause()
        return replies

    with mock.patch.object(RedisServer, "run", side_effect=UnreachableError("redis", "is away")):
        update(held.table, 1.0)
    held.clock.now += 10
    source = TableSource(path=tmp_path, num_rows=KEYS.numel(), read=read)
    assert held.table.renew("b", source) == 1
    table = table_of([redis_tier(RedisServer(redis_server.spec(num_partitions=3)), held.tag, 4)])
    monkeypatch.setattr(RedisServer, "run", run_slowly)
    fill_tiers(table, source, lambda rows: None)
    assert is_leased == [True] * (4 + 4 + 3)


@needs_redis
def test_a_renewal_that_fails_anywhere_begins_anew(redis_server: RedisProcess, tmp_path: Path) -> None:
    """The next one wrote the keys that the tier had missed before it came back with earlier rows, and those alone."""
    run, lost = RedisServer.run, KEYS[100:140]
    held = InFrontOfFiles(redis_server, tmp_path / "rows")
    for failing in itertools.count():
        snapshot = {name: held.client.dump(name) for name in held.client.keys(f"hps_et{{{held.tag}/*")}
        expected = newest(failing + 1)
        expected[lost - 1] = distinct_rows(4, lost, failing + 1)
        held.table.insert(lost, expected[lost - 1])
        with mock.patch.object(RedisServer, "run", side_effect=UnreachableError("redis", "is away")):
            update(held.table, failing + 1)
        for name, value in snapshot.items():
            held.client.restore(name, 0, value, replace=True)
        held.clock.now += 10
        calls = itertools.count()

        def fail_once(server: RedisServer, requests: Sequence[Request]) -> list[object]:
            if next(calls) == failing:  # noqa: B023
                raise StorageError("redis", "takes no writes")
            return run(server, requests)

        with mock.patch.object(RedisServer, "run", fail_once):
            if held.table.renew():
                break
        held.assert_renewed(expected)
    assert failing > 10


@needs_redis
def test_a_table_that_another_program_wrote_has_no_fence(redis_server: RedisProcess) -> None:
    """HugeCTR's rows are served as they are; only changes by terarec have marks."""
    tier = redis_tier(RedisServer(redis_server.spec(num_partitions=3)), "hps_et.foreign.t", 4)
    values = distinct_rows(4, KEYS).view(torch.uint8)
    tier.guarded.level.write(batch_of(KEYS, 0), values)
    assert torch.equal(table_of([tier]).lookup(KEYS), distinct_rows(4, KEYS))
    names = redis.Redis(redis_server.host, redis_server.port).keys("hps_et{hps_et.foreign.*")
    assert all(name.endswith(b"v") for name in names)


@needs_redis
def test_a_full_server_is_stale_and_the_file_serves(tmp_path: Path) -> None:
    with running(tmp_path / "redis", "--maxmemory", "3mb", "--maxmemory-policy", "noeviction") as server:
        held = InFrontOfFiles(server, tmp_path / "rows")
        many = torch.arange(1000, 101_000)
        held.table.insert(many, distinct_rows(4, many))
        assert use(held.table, 0).is_stale
        assert torch.equal(held.table.lookup(many), distinct_rows(4, many))


@needs_redis
def test_a_bounded_server_forgets_what_it_missed(tmp_path: Path) -> None:
    with running(tmp_path / "redis", "--appendfsync", "always") as server:
        held = InFrontOfFiles(server, tmp_path / "rows", overflow=OverflowSpec(max_rows=60))
        server.kill()
        update(held.table, 1.0)
        server.start()
        held.clock.now += 10
        assert held.table.renew() == 1
        held.assert_served(newest(1.0))


@needs_redis
def test_a_stale_lookup_is_an_error_of_its_own(snapshotted: RedisProcess, tmp_path: Path) -> None:
    held = InFrontOfFiles(snapshotted, tmp_path / "rows")
    held.client.flushall()
    with pytest.raises(StaleRowsError) as caught:
        held.fast.guarded.level.read(batch_of(KEYS, 0), torch.empty(KEYS.numel(), 16, dtype=torch.uint8))
    assert not caught.value.is_later
