# SPDX-License-Identifier: Apache-2.0
"""Levels below the fast tier."""

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
import torch

from terarec.errors import NoSpaceError, StorageError
from terarec.kernels.slots import RowBatch
from terarec.memory.cache import Cache
from terarec.memory.cached_part import BudgetError
from terarec.memory.level import FileLevel
from terarec.memory.table_stores import TableStore, TableStores
from terarec.memory.write_behind import WrittenBehind
from tests.errors import at
from tests.memory.memory_row_store import MemoryRowStore
from tests.waiting import PATIENCE, wait_for

ROW_BYTES = 16


def batch(*keys: int, table: int = 0) -> RowBatch:
    held = torch.tensor(keys, dtype=torch.int64)
    return RowBatch(held + 1000 * table, held, torch.full_like(held, table))


def joined(*parts: RowBatch) -> RowBatch:
    return RowBatch(*(torch.cat(held) for held in zip(*parts, strict=True)))


def rows(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.uint8)[:, None].repeat(1, ROW_BYTES)


def stores() -> TableStores:
    return TableStores([TableStore(MemoryRowStore(ROW_BYTES)) for _ in range(2)])


LEVELS = {
    "stores": stores,
    "cache": lambda: Cache(ROW_BYTES, [4], stores(), slot_bytes=10, name="host"),
    "cache-of-reads": lambda: Cache(ROW_BYTES, [4], stores(), slot_bytes=10, name="host", keeps_read=True),
    "behind": lambda: WrittenBehind(stores()),
}


@pytest.mark.parametrize("level", LEVELS.values(), ids=LEVELS)
def test_rows_of_several_tables_come_back(level) -> None:
    held: FileLevel = level()
    mixed = joined(batch(3, table=1), batch(5, 4), batch(7, table=1), batch(9, 8, 7))
    held.write(mixed, rows(1, 2, 3, 4, 5, 6, 7))
    held.write(batch(4), rows(9))
    wanted = joined(batch(7), batch(6), batch(7, 3, table=1), batch(4, 4))
    out = rows(0, 0, 0, 0, 0, 0)
    assert held.read(wanted, out).tolist() == [True, False, True, True, True, True]
    assert out[:, 0].tolist() == [7, 0, 4, 1, 9, 9]
    held.erase(joined(batch(7), batch(100), batch(3, table=1)))
    assert (held.count(0), held.count(1)) == (4, 1)
    found = {
        key: int(row[0]) for keys, values in held.items(0, 2) for key, row in zip(keys.tolist(), values, strict=True)
    }
    assert found == {5: 2, 4: 9, 9: 5, 8: 6}
    held.commit({})
    assert held.memory_bytes > 0
    held.close()


def test_a_cache_without_a_level_below_is_a_limit() -> None:
    cache = Cache(ROW_BYTES, [4], None, slot_bytes=10, name="host")
    cache.write(batch(1, 2, 3, 4), rows(1, 2, 3, 4))
    cache.write(batch(2, 3), rows(5, 6))
    with pytest.raises(BudgetError) as caught:
        cache.write(batch(5), rows(5))
    assert (caught.value.needed, caught.value.capacity, caught.value.needed_bytes) == (5, 4, 5 * 26)
    assert cache.count(0) == 4
    assert sum(len(keys) for keys, _ in cache.items(0, 3)) == 4


class Counted(TableStores):
    """Stores that count the rows that are read."""

    num_read = 0

    def read(self, held: RowBatch, out: torch.Tensor) -> torch.Tensor:
        self.num_read += held.rows.numel()
        return super().read(held, out)


def test_rows_that_were_read_stay_where_they_are_to_be_kept() -> None:
    level = Counted([TableStore(MemoryRowStore(ROW_BYTES))])
    level.write(batch(*range(8)), rows(*range(8)))
    cache = Cache(ROW_BYTES, [4], level, slot_bytes=10, name="host", keeps_read=True)
    for wanted, num_read in ((batch(1, 2, 1, 9), 4), (batch(2, 1, 2), 4), (batch(3, 4, 1), 6), (batch(1, 2, 5, 3), 7)):
        out = rows(*[77] * wanted.rows.numel())
        found = cache.read(wanted, out)
        assert found.tolist() == (wanted.rows < 8).tolist()
        assert out[found, 0].tolist() == wanted.rows[found].tolist()
        assert level.num_read == num_read
    assert len(cache) == 4
    assert not cache.parts[0].slots.is_dirty.any()


class Full(TableStores):
    """Stores that take no rows on demand."""

    is_full = False

    def write(self, held: RowBatch, values: torch.Tensor) -> None:
        if self.is_full:
            raise NoSpaceError("disk", "full")
        super().write(held, values)


def test_reads_need_no_room_below() -> None:
    """Rows that were read took the slots of changed ones, which were written first: on a full disk reads failed."""
    level = Full([TableStore(MemoryRowStore(ROW_BYTES))])
    level.write(batch(*range(8)), rows(*range(8)))
    cache = Cache(ROW_BYTES, [4], level, slot_bytes=10, name="host", keeps_read=True)
    cache.write(batch(0, 1, 2), rows(10, 11, 12))
    level.is_full = True
    for wanted in (batch(5, 6), batch(7, 0), batch(4, 3)):
        out = rows(0, 0)
        assert cache.read(wanted, out).all()
        assert out[:, 0].tolist() == [key + 10 * (key < 3) for key in wanted.keys.tolist()]
    level.is_full = False
    cache.commit({})
    out = rows(0, 0, 0)
    assert level.read(batch(0, 1, 2), out).all()
    assert out[:, 0].tolist() == [10, 11, 12]


def test_changed_rows_are_searched_once_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each read looked at all slots for rows to replace, of which there were none until a commit."""
    cache = Cache(ROW_BYTES, [4], stores(), slot_bytes=10, name="host", keeps_read=True)
    cache.write(batch(*range(8)), rows(*range(8)))  # half of them are written below to make room
    slots, counts = cache.parts[0].slots, list[int]()
    victims = slots.victims

    def counted(*args: int, **options: bool) -> torch.Tensor:
        found = victims(*args, **options)
        counts.append(found.numel())
        return found

    monkeypatch.setattr(slots, "victims", counted)
    held = set(cache.parts[0].owners(slots.is_held.nonzero()[:, 0]).keys.tolist())
    absent = sorted(set(range(8)) - held)
    for key in absent[:3]:
        assert cache.read(batch(key), rows(0)).all()
    assert counts == [0]
    cache.commit({})
    assert cache.read(batch(absent[0]), rows(0)).all()
    assert counts == [0, 1]
    assert absent[0] in cache.parts[0].owners(slots.is_held.nonzero()[:, 0]).keys


class Gated(TableStores):
    """Stores that write when a test lets them."""

    def __init__(self) -> None:
        super().__init__([TableStore(MemoryRowStore(ROW_BYTES))])
        self.gate = threading.Event()
        self.is_full = True

    def write(self, held: RowBatch, values: torch.Tensor) -> None:
        if 13 not in held.keys:
            self.gate.wait()
        if self.is_full and 13 in held.keys:
            raise StorageError("disk: full")
        super().write(held, values)


def test_reads_do_not_wait_for_rows_that_are_written_below() -> None:
    """They waited for the disk while a write made room, and during a commit."""
    level = Gated()
    cache = Cache(ROW_BYTES, [4], level, slot_bytes=10, name="host", keeps_read=True, serves=True)
    cache.write(batch(0, 1, 2, 3), rows(10, 11, 12, 14))
    changes: list[tuple[Callable[[], None], dict[int, int]]] = [
        (lambda: cache.write(batch(4, 0), rows(20, 21)), {0: 10, 1: 11, 2: 12, 3: 14}),
        (lambda: cache.commit({}), {0: 21, 4: 20}),
    ]
    with ThreadPoolExecutor() as pool:
        for change, there in changes:
            level.gate.clear()
            changing = pool.submit(change)
            try:
                wait_for(cache.parts[0].writing.locked)
                out = rows(*there)
                assert pool.submit(cache.read, batch(*there), out).result(PATIENCE).all()
                assert out[:, 0].tolist() == list(there.values())
            finally:
                level.gate.set()
            changing.result(PATIENCE)
    out = rows(*range(5))
    assert level.read(batch(*range(5)), out).all()
    assert out[:, 0].tolist() == [21, 11, 12, 14, 20]


def test_rows_stay_where_the_level_below_takes_none() -> None:
    level = Full([TableStore(MemoryRowStore(ROW_BYTES))])
    cache = Cache(ROW_BYTES, [4], level, slot_bytes=10, name="host")
    cache.write(batch(0, 1, 2, 3), rows(0, 1, 2, 3))
    level.is_full = True
    for change in (lambda: cache.write(batch(4, 5), rows(4, 5)), lambda: cache.commit({})):
        with pytest.raises(NoSpaceError):
            change()
        out = rows(9, 9, 9, 9)
        assert cache.read(batch(0, 1, 2, 3), out).all()
        assert out[:, 0].tolist() == [0, 1, 2, 3]
    level.is_full = False
    cache.write(batch(4, 5, 6, 7), rows(4, 5, 6, 7))
    cache.commit({})
    assert level.count(0) == 8


class Interrupted(TableStores):
    """Stores of which something else happens before rows are erased."""

    then: Callable[[], object] = staticmethod(lambda: None)

    def erase(self, held: RowBatch) -> None:
        self.then()
        super().erase(held)


def test_rows_that_are_read_while_they_are_erased_are_not_kept() -> None:
    level = Interrupted([TableStore(MemoryRowStore(ROW_BYTES))])
    level.write(batch(1, 2), rows(1, 2))
    cache = Cache(ROW_BYTES, [4], level, slot_bytes=10, name="host", keeps_read=True)
    level.then = lambda: cache.read(batch(1, 2), rows(0, 0))
    cache.erase(batch(1))
    assert cache.read(batch(1, 2), rows(0, 0)).tolist() == [False, True]
    assert len(cache) == 1


def test_rows_that_are_being_written_are_waited_for() -> None:
    level = Gated()
    behind = WrittenBehind(level)
    behind.write(batch(1), rows(1))
    out = rows(0)
    assert behind.read_others(batch(2), out).tolist() == [False]
    threading.Timer(0.05, level.gate.set).start()
    assert behind.read(batch(1), out).tolist() == [True]
    behind.write(batch(13), rows(1))
    for call in (behind.wait, lambda: behind.write(batch(2), rows(2))):
        with pytest.raises(StorageError, check=at("", "disk: full")):
            call()
    # Finding L8: the error of the thread was final, and its rows were lost.
    level.is_full = False
    behind.write(batch(2), rows(2))
    for key in (13, 2):
        assert behind.read(batch(key), out).tolist() == [True]
    behind.close()


def test_a_write_that_is_under_way_is_not_forgotten() -> None:
    """A thread that heard late of an error took the next write for the one that had failed."""
    level = Gated()
    behind = WrittenBehind(level)
    behind.write(batch(13), rows(1))
    failed = behind._writing
    assert failed is not None
    has_heard, goes_on = threading.Event(), threading.Event()

    class Late(Future[None]):
        def result(self, timeout: float | None = None) -> None:
            try:
                failed.result()
            finally:
                has_heard.set()
                goes_on.wait()

    behind._writing = Late()
    reader = threading.Thread(target=behind.wait)
    reader.start()
    has_heard.wait()
    behind._writing = failed
    level.is_full = False
    behind.write(batch(2), rows(2))
    goes_on.set()
    reader.join(0.2)  # it may wait for that write
    threading.Timer(0.05, level.gate.set).start()
    assert behind.read(batch(2), rows(0)).tolist() == [True]
    reader.join()
    behind.close()
