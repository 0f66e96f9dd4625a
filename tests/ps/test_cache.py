# SPDX-License-Identifier: Apache-2.0
"""Embedding caches: what they return, keep, read in the background and refresh."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch

from terarec.errors import ConfigError, StorageError
from terarec.formats.hugectr.weights import SparseRows, write_sparse_folder
from terarec.kernels.slots import RowBatch
from terarec.memory.batch_parts import batch_of, joined
from terarec.ops import BagLayout
from terarec.ops.bag_lookup import pool_rows
from terarec.ps import ParameterServer
from terarec.ps.cache import EmbeddingCache, ModelCaches
from terarec.ps.levels import disk_level, host_level
from terarec.ps.table import TableGroup, TableTiers
from terarec.spec import (
    CacheSpec,
    HostMemorySpec,
    ParameterServerSpec,
    Pooling,
    RowFileSpec,
    ServedModelSpec,
    ServedTableSpec,
)
from tests.errors import at
from tests.ps.tiers import Delegating, distinct_rows, host, table_of
from tests.waiting import PATIENCE, wait_for

WIDTH = 8
rows_of = partial(distinct_rows, WIDTH)
KEYS = torch.cat([torch.arange(-500, 500), torch.tensor([-(2**63), 2**63 - 1])])


def tiers(default: float = 0.0) -> TableTiers:
    tier = host(WIDTH)
    tier.insert(KEYS, rows_of(KEYS))
    return table_of([tier], lambda keys: torch.full((keys.numel(), WIDTH), default))


@pytest.fixture(params=["dynamic", "int8", "static"])
def form(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def assert_rows(got: torch.Tensor, expected: torch.Tensor, form: str) -> None:
    assert torch.allclose(got, expected, atol=8 / 510 if form == "int8" else 0.0, rtol=0.0)


def test_every_lookup_equals_the_tiers(form: str) -> None:
    """Whatever the cache holds, evicts and reads."""
    generator = torch.Generator().manual_seed(1)
    cache = EmbeddingCache(tiers(default=0.25), 100, CacheSpec(form=form))  # type: ignore[arg-type]
    cache.fill(KEYS[:80], rows_of(KEYS[:80]))
    for size in (0, 1, 7, 60, 99, 100, 101, 400, 50, 3):
        requested = KEYS[torch.randint(0, KEYS.numel(), (size,), generator=generator)].clone()
        if size:
            requested[-1] = 777_777
        expected = rows_of(requested)
        expected[requested == 777_777] = 0.25
        assert_rows(cache.lookup(requested), expected, form)
        assert cache.statistics().rows <= 100
    counted = cache.statistics()
    assert counted.keys == 821
    assert 0 < counted.hits < counted.keys
    assert (counted.evicted > 0) == (form != "static")


def test_a_static_cache_keeps_its_rows() -> None:
    cache = EmbeddingCache(tiers(), 50, CacheSpec(form="static"))
    assert not cache.fill(KEYS[:60], rows_of(KEYS[:60]))
    cache.lookup(KEYS)
    assert cache.lookup(KEYS[:50]).equal(rows_of(KEYS[:50]))
    assert cache.statistics().hits == 100
    assert cache.statistics().inserted == 50


def test_rows_that_are_used_often_stay() -> None:
    cache = EmbeddingCache(tiers(), 100, CacheSpec())
    hot = KEYS[:50]
    for begin in range(100, 900, 50):
        cache.lookup(hot)
        cache.lookup(KEYS[begin : begin + 50])
    before = cache.statistics().hits
    cache.lookup(hot)
    assert cache.statistics().hits - before > 40


def test_below_the_threshold_rows_are_read_at_once_above_in_the_background() -> None:
    cache = EmbeddingCache(tiers(default=0.5), 200, CacheSpec(hit_rate_threshold=0.8))
    requested = KEYS[:100].repeat(2)
    assert cache.lookup(requested[:70]).equal(rows_of(requested[:70]))
    assert cache.statistics().read == 70
    # 70 of 100 distinct keys are there: below.
    assert cache.lookup(requested).equal(rows_of(requested))
    # 100 of 120: above; the others have the default vector until they are there.
    more = torch.cat([requested, KEYS[100:120], KEYS[100:120]])
    got = cache.lookup(more)
    assert got[:200].equal(rows_of(requested))
    assert bool((got[200:] == 0.5).all())
    assert cache.statistics().deferred == 40
    cache.wait()
    assert cache.lookup(more).equal(rows_of(more))
    assert cache.statistics().read == 120
    cache.close()


def test_rows_are_read_in_the_background_after_an_error_of_any_kind(caplog: pytest.LogCaptureFixture) -> None:
    tier = host(WIDTH, kind=Unreachable)
    tier.insert(KEYS, rows_of(KEYS))
    cache = EmbeddingCache(table_of([tier]), 200, CacheSpec(hit_rate_threshold=0.8))
    cache.lookup(KEYS[:100])
    with mock.patch.multiple(Unreachable, fails=True, error=RuntimeError("a defect")), ThreadPoolExecutor() as pool:
        cache.lookup(KEYS[:110])
        pool.submit(cache.wait).result(PATIENCE)
    assert "a defect" in caplog.text
    cache.lookup(KEYS[:110])
    cache.wait()
    assert cache.lookup(KEYS[:110]).equal(rows_of(KEYS[:110]))
    assert cache.statistics().read == 110
    cache.close()


def test_a_closed_cache_starts_no_thread() -> None:
    """A lookup that was under way as the cache was closed left one that waited for good."""
    cache = EmbeddingCache(tiers(), 200, CacheSpec(hit_rate_threshold=0.1))
    cache.lookup(KEYS[:100])
    before = set(threading.enumerate())
    cache.close()
    assert cache.lookup(KEYS[:110]).equal(rows_of(KEYS[:110]))
    cache.wait()
    assert set(threading.enumerate()) <= before


def test_threshold_one_never_defers() -> None:
    cache = EmbeddingCache(tiers(), 1000, CacheSpec())
    cache.lookup(KEYS[:999])
    assert cache.lookup(KEYS[:1000]).equal(rows_of(KEYS[:1000]))
    assert cache.statistics().deferred == 0


def test_a_refresh_reads_changed_rows_and_drops_erased_ones(form: str) -> None:
    table = tiers()
    cache = EmbeddingCache(table, 100, CacheSpec(form=form, refresh_share=0.3))  # type: ignore[arg-type]
    cache.fill(KEYS[:100], rows_of(KEYS[:100]))
    table.insert(KEYS[:40], rows_of(KEYS[:40], salt=3.0))
    table.erase(KEYS[90:100])
    assert_rows(cache.lookup(KEYS[:40]), rows_of(KEYS[:40]), form)
    assert cache.refresh() == 100
    assert_rows(cache.lookup(KEYS[:40]), rows_of(KEYS[:40], salt=3.0), form)
    assert_rows(cache.lookup(KEYS[40:90]), rows_of(KEYS[40:90]), form)
    assert not bool(cache.lookup(KEYS[90:100]).any())
    assert cache.statistics().rows == 90


def test_a_refresh_in_the_background() -> None:
    table = tiers()
    cache = EmbeddingCache(table, 100, CacheSpec(refresh_seconds=0.01))
    cache.lookup(KEYS[:10])
    table.insert(KEYS[:10], rows_of(KEYS[:10], salt=1.0))
    for _ in range(1000):
        if cache.lookup(KEYS[:10]).equal(rows_of(KEYS[:10], salt=1.0)):
            break
        threading.Event().wait(0.005)
    else:
        raise AssertionError("it was never refreshed")
    cache.close()


class Unreachable(Delegating):
    """A tier that fails on demand."""

    fails = False
    error: Exception = StorageError("down")

    def read(self, batch: RowBatch, out: torch.Tensor) -> torch.Tensor:
        if self.fails:
            raise self.error
        return self.level.read(batch, out)


def test_a_refresh_keeps_rows_while_a_tier_fails() -> None:
    tier = host(WIDTH, kind=Unreachable)
    tier.insert(KEYS, rows_of(KEYS))
    cache = EmbeddingCache(table_of([tier]), 100, CacheSpec())
    cache.lookup(KEYS[:60])
    tier.guarded.level.fails = True
    cache.refresh()
    assert cache.lookup(KEYS[:60]).equal(rows_of(KEYS[:60]))
    # Rows that it does not have get the default vector, and are read again.
    assert not bool(cache.lookup(KEYS[60:70]).any())
    assert cache.statistics().rows == 60


def test_threads_share_a_cache() -> None:
    cache = EmbeddingCache(tiers(), 64, CacheSpec(refresh_seconds=0.001))
    wrong: list[int] = []

    def look_up(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for _ in range(40):
            requested = KEYS[torch.randint(0, 300, (50,), generator=generator)]
            if not cache.lookup(requested).equal(rows_of(requested)):
                wrong.append(seed)

    threads = [threading.Thread(target=look_up, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    cache.close()
    assert not wrong


class OneUnreadable(Delegating):
    """A tier of which one table gives an error that nobody expects."""

    def read(self, batch: RowBatch, out: torch.Tensor) -> torch.Tensor:
        if bool((batch.tables == 0).any()):
            raise RuntimeError("a defect")
        return self.level.read(batch, out)


def test_a_table_that_cannot_be_refreshed_leaves_others_their_turn(caplog: pytest.LogCaptureFixture) -> None:
    names = ["a", "b"]
    level = host_level(HostMemorySpec(), names, WIDTH)
    group = TableGroup(names, WIDTH, [level])
    tables = {name: group.table(number) for number, name in enumerate(names)}
    for table in tables.values():
        table.insert(KEYS, rows_of(KEYS))
    caches = ModelCaches(tables, dict.fromkeys(names, 100), CacheSpec(refresh_seconds=0.01))
    for cache in caches.caches.values():
        cache.lookup(KEYS[:10])
    level.level = OneUnreadable(level.level)
    tables["b"].insert(KEYS[:10], rows_of(KEYS[:10], salt=1.0))
    cache = caches.caches["b"]
    wait_for(lambda: cache.lookup(KEYS[:10]).equal(rows_of(KEYS[:10], salt=1.0)))
    assert caches.caches["a"].lookup(KEYS[:10]).equal(rows_of(KEYS[:10]))
    wait_for(lambda: "a defect" in caplog.text)
    caches.close()


class Interrupted(Delegating):
    """A tier of which something else happens right after a lookup."""

    then: Callable[[], None] | None = None

    def read(self, batch: RowBatch, out: torch.Tensor) -> torch.Tensor:
        found = self.level.read(batch, out)
        then, self.then = self.then, None
        if then is not None:
            then()
        return found


def test_a_row_that_an_update_changes_while_it_is_read_is_not_kept() -> None:
    tier = host(WIDTH, kind=Interrupted)
    tier.insert(KEYS, rows_of(KEYS))
    cache = EmbeddingCache(table_of([tier]), 100, CacheSpec())

    def update(salt: float) -> None:
        tier.insert(KEYS[:5], rows_of(KEYS[:5], salt))
        cache.update(KEYS[:5], rows_of(KEYS[:5], salt))

    tier.guarded.level.then = partial(update, 2.0)
    assert cache.lookup(KEYS[:10]).equal(rows_of(KEYS[:10]))
    assert cache.lookup(KEYS[:5]).equal(rows_of(KEYS[:5], 2.0))
    tier.guarded.level.then = partial(update, 3.0)
    cache.refresh()
    assert cache.lookup(KEYS[:5]).equal(rows_of(KEYS[:5], 3.0))


@pytest.mark.parametrize("pooling", ["sum", "mean", "none"])
def test_caches_of_several_tables_are_looked_up_together(form: str, pooling: Pooling) -> None:
    """Features of two tables, one of which has two, with bags of any length, whatever the caches hold."""
    group = TableGroup(
        ["a", "b"],
        WIDTH,
        [host_level(HostMemorySpec(), ["a", "b"], WIDTH)],
        [lambda keys: torch.full((keys.numel(), WIDTH), 0.5), lambda keys: torch.zeros(keys.numel(), WIDTH)],
    )
    tables = {"a": group.table(0), "b": group.table(1)}
    tables["a"].insert(KEYS, rows_of(KEYS))
    tables["b"].insert(KEYS, rows_of(KEYS, salt=1.0))
    caches = ModelCaches(tables, {"a": 40, "b": 60}, CacheSpec(form=form))  # type: ignore[arg-type]
    assert caches.caches["a"].memory is caches.caches["b"].memory
    caches.caches["a"].fill(KEYS[:20], rows_of(KEYS[:20]))
    caches.caches["b"].fill(KEYS[:9], rows_of(KEYS[:9], salt=1.0))
    layout = BagLayout(
        table_names=("a", "b"),
        table_base=(0, 0),
        table_rows=(0, 0),
        feature_names=("x", "y", "z"),
        feature_table=(0, 1, 1),
        pooling=(pooling,) * 3,
        width=WIDTH,
    )
    generator = torch.Generator().manual_seed(5)
    for batch_size, span in ((4, 10), (1, 1), (8, 300), (5, 30), (3, 1002)):
        counts = torch.randint(0, 4, (3 * batch_size,), generator=generator)
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
        keys = KEYS[torch.randint(0, span, (int(offsets[-1]),), generator=generator)]
        of_a = int(offsets[batch_size])
        rows = torch.cat([rows_of(keys[:of_a]), rows_of(keys[of_a:], salt=1.0)])
        expected = pool_rows(rows, offsets, layout)
        assert_rows(caches.bags(keys, offsets, layout), expected, "int8" if form == "int8" else "")
    counted = [cache.statistics() for cache in caches.caches.values()]
    assert all(0 < one.hits < one.keys for one in counted)
    caches.close()


def test_the_server_makes_one_cache_for_a_table_and_a_device(tmp_path: Path) -> None:
    keys = np.arange(1000)
    write_sparse_folder(tmp_path / "0", [SparseRows(keys, rows_of(torch.arange(1000)).numpy())])
    table = ServedTableSpec(name="user", width=WIDTH, source=str(tmp_path / "0"))
    model = ServedModelSpec(name="dcn", tables=(table,), cache=CacheSpec(share=0.25))
    with ParameterServer(ParameterServerSpec(models=(model,))) as server:
        cache = server.cache("dcn", "user")
        assert cache is server.cache("dcn", "user")
        assert (cache.capacity, cache.statistics().rows) == (250, 250)
        assert cache.lookup(torch.arange(1000)).equal(rows_of(torch.arange(1000)))
        with pytest.raises(ConfigError, check=at("table")):
            server.cache("dcn", "item")


@pytest.mark.parametrize("again", [5, 90])
def test_a_repeated_key_of_a_source_has_its_last_row_in_the_cache(tmp_path: Path, again: int) -> None:
    """It had the first one, and a slot that no lookup could protect."""
    keys = np.arange(100)
    keys[again] = 0
    write_sparse_folder(tmp_path / "0", [SparseRows(keys, rows_of(torch.arange(100)).numpy())])
    table = ServedTableSpec(name="user", width=WIDTH, source=str(tmp_path / "0"))
    model = ServedModelSpec(name="dcn", tables=(table,), cache=CacheSpec(share=0.8))
    # Parts of 10 rows: both rows of the key are in one, or in two.
    with (
        mock.patch("terarec.ps.loading.CHUNK_ROWS", 10),
        ParameterServer(ParameterServerSpec(models=(model,))) as server,
    ):
        cache = server.cache("dcn", "user")
        wanted = torch.from_numpy(np.arange(80))
        assert cache.lookup(wanted).equal(server.lookup("dcn", "user", wanted))
        assert cache.lookup(torch.tensor([0])).equal(rows_of(torch.tensor([again])))
        assert cache.statistics().rows == 80


def test_wrong_keys_and_sizes_are_rejected() -> None:
    with pytest.raises(ConfigError, check=at("rows")):
        EmbeddingCache(tiers(), 0, CacheSpec())
    with pytest.raises(ConfigError, check=at("keys")):
        EmbeddingCache(tiers(), 4, CacheSpec()).lookup(torch.zeros(4))


@pytest.mark.parametrize("cache_bytes", [0, 4096])
def test_files_of_several_tables_are_read_together(tmp_path: Path, cache_bytes: int) -> None:
    """Rows in host memory and on the disk, keys that repeat, and keys that no file has."""
    held, names = (300, 40), ["0", "1"]
    spec = RowFileSpec(path=".", cache_bytes=cache_bytes)
    level = disk_level(spec, [tmp_path / name for name in names], names, WIDTH)
    group = TableGroup(names, WIDTH, [level], [lambda keys: torch.full((keys.numel(), WIDTH), 0.25)] * 2)
    tables = [group.table(0), group.table(1)]
    for number, rows in enumerate(held):
        tables[number].insert(torch.arange(rows), rows_of(torch.arange(rows), salt=float(number)))
        tables[number].flush()
    generator = torch.Generator().manual_seed(2)
    num_keys = [0, 0]
    for counts in ((3, 50), (200, 1), (0, 9), (7, 0), (400, 400), (5, 5)):
        keys = torch.randint(0, 330, (sum(counts),), generator=generator)
        found = group.find(joined([batch_of(part, i) for i, part in enumerate(torch.split(keys, counts))]))
        expected = torch.cat([rows_of(part, salt=float(i)) for i, part in enumerate(torch.split(keys, counts))])
        is_there = keys < torch.tensor(held).repeat_interleave(torch.tensor(counts))
        expected[~is_there] = 0.25
        assert torch.equal(found.mask, is_there)
        assert torch.equal(found.rows, expected)
        num_keys = [before + count for before, count in zip(num_keys, counts, strict=True)]
    statistics = [table.statistics() for table in tables]
    assert [one.keys for one in statistics] == num_keys
    assert [one.tiers[0].counted.keys for one in statistics] == num_keys
    group.stack.close()
