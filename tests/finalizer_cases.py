# SPDX-License-Identifier: Apache-2.0
"""Objects whose ends release something, and their collection while every lock is held; a program of `test_closer`."""

import _thread
import concurrent.futures.thread
import faulthandler
import gc
import logging
import shutil
import sys
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np

from terarec.closer import Stream, wait_closed
from terarec.data import Reader
from terarec.embedding import EmbeddingCollection
from terarec.formats.block import empty_from_pool
from terarec.memory.redis_rows import RedisRows
from terarec.memory.redis_server import RedisServer
from terarec.memory.rocksdb import RocksDBStore
from terarec.memory.row_file import PageReader, RowFile
from terarec.memory.row_format import RowFileOptions
from terarec.memory.shared import SharedDirectory
from terarec.memory.stack import Stack
from terarec.optim import RowOptimizer
from terarec.parallel import ordered_map, prefetched
from terarec.ps.levels import shared_level
from terarec.serve.executors import _Folder
from terarec.serve.publishing import UpdateReceiver
from terarec.serve.update_streams import KafkaTopic
from terarec.spec import AdamSpec, KafkaTopicSpec, RedisSpec, SharedMemorySpec, Tiers
from tests.data.sources import TinyGroups
from tests.embedding.test_dynamic_tables import STATIC, step
from tests.embedding.test_tiers import BATCHES, in_tiers

SECONDS = 60
NAMED = (
    threading._shutdown_locks_lock,  # type: ignore[attr-defined]
    threading._active_limbo_lock,  # type: ignore[attr-defined]
    concurrent.futures.thread._global_shutdown_lock,
    logging._lock,  # type: ignore[attr-defined]
)


def trained(tiers: Tiers) -> EmbeddingCollection:
    tables = in_tiers(STATIC, tiers)
    optimizer = RowOptimizer(tables, AdamSpec(lr=0.05))
    for batch in BATCHES[:4]:
        step(tables, optimizer, batch)
    tables(BATCHES[4])  # whose rows stay pinned, as no backward follows
    return tables


def filled(directory: Path) -> RowFile:
    file = RowFile.create(directory / "rows", 64)
    for first in range(0, 20_000, 5_000):
        file.write(np.arange(first, first + 5_000), np.zeros((5_000, 64), dtype=np.uint8))
    return file


def begun(items: Iterable[Any]) -> list[Any]:
    iterator = iter(items)
    return [next(iterator), iterator]


def connected(topic: KafkaTopic) -> KafkaTopic:
    topic._connected_producer()
    return topic


def joined(rows: RedisRows) -> RedisRows:
    rows.join()
    return rows


def watched() -> Stack:
    shared = shared_level(SharedMemorySpec(name=f"terarec-test-{uuid4().hex}"), "m", ["t"], [""], 4)
    stack = Stack([shared], 1, 16)
    stack.watch()
    return stack


OWNERS: dict[str, Callable[[Path], object]] = {
    "memory.arena_tiers.ArenaTiers": lambda at: trained(Tiers(host="28KiB", file=str(at / "tiers"))),
    "memory.stack.Stack": lambda _: watched(),
    "memory.row_file.RowFile": filled,
    "memory.row_file.PageReader": lambda _: PageReader(RowFileOptions(io="threads"), 64),
    "memory.shared.SharedDirectory": lambda _: SharedDirectory(SharedMemorySpec(name=f"terarec-test-{uuid4().hex}")),
    "memory.rocksdb.RocksDBStore": lambda at: RocksDBStore(at / "rocksdb", 64),
    "memory.redis_rows.RedisRows": lambda _: joined(
        RedisRows(RedisServer(RedisSpec(address="127.0.0.1:1")), ["t"], 16)
    ),
    "memory.redis_server.RedisServer": lambda _: RedisServer(RedisSpec()),
    "serve.update_streams.KafkaTopic": lambda _: connected(KafkaTopic(KafkaTopicSpec(brokers="127.0.0.1:1"))),
    "serve.publishing.UpdateReceiver": lambda at: UpdateReceiver(
        KafkaTopic(KafkaTopicSpec(brokers="127.0.0.1:1")), at / "replica", every_seconds=None
    ),
    "serve.executors._Folder": lambda _: _Folder(),
    "closer.Stream": lambda _: begun(Reader(TinyGroups((10,) * 50), batch_size=3, threads=3, prefetch=4)),
    "kernels.slots.Pin": lambda _: trained(Tiers(host="2MiB")),
    "formats.block._Memory": lambda _: empty_from_pool((1 << 18,), np.uint8),
}
"""Each class with a finalizer -> an instance with something to release."""

OTHERS: dict[str, Callable[[Path], object]] = {
    "ordered_map": lambda _: begun(ordered_map(str, range(100), 2)),
    "prefetched": lambda _: begun(prefetched((number for number in range(100)), 3)),
    "RowFile.items": lambda at: begun(filled(at).items(100)),
    "reader without a thread": lambda _: begun(Reader(TinyGroups((10,) * 50), batch_size=3, threads=3, prefetch=0)),
}


def locks() -> dict[int, Any]:
    """Return the locks that objects refer to, by their id."""
    kinds = (_thread.LockType, _thread.RLock)
    return {id(held): held for held in gc.get_referents(*gc.get_objects()) if type(held) in kinds}


def collect_under_locks(former: dict[int, Any]) -> None:
    """Collect garbage while this thread and another one hold every lock: former ones, and those made since."""
    ready, go, end = (_thread.allocate_lock() for _ in range(3))
    for signal in (ready, go, end):
        signal.acquire()
    reentrant: list[Any] = []

    # A reentrant lock stops only the threads that do not hold it.
    def hold() -> None:
        go.acquire()
        held = [lock for lock in reentrant if lock.acquire(blocking=False)]
        ready.release()
        end.acquire()
        for lock in held:
            lock.release()

    threading.Thread(target=hold, daemon=True).start()
    mine = {id(signal) for signal in (ready, go, end)}
    all_locks = former | locks()
    plain = [lock for number, lock in all_locks.items() if type(lock) is _thread.LockType and number not in mine]
    reentrant += [lock for lock in all_locks.values() if type(lock) is _thread.RLock]
    go.release()
    ready.acquire()
    held = [lock for lock in plain if lock.acquire(blocking=False)]
    assert all(lock.acquire(blocking=False) is False for lock in NAMED), "not all locks are held"
    gc.collect()
    for lock in held:
        lock.release()
    end.release()


def check(name: str, make: Callable[[Path], object], directory: Path, former: dict[int, Any]) -> None:
    """Leave an object in a reference cycle, collect it, and check that its threads and files go."""
    directory.mkdir()
    before = set(threading.enumerate())
    cycle: list[object] = [make(directory)]
    cycle.append(cycle)
    del cycle
    collect_under_locks(former)
    wait_closed()
    gc.collect()  # what only the releases have freed
    wait_closed()
    for thread in set(threading.enumerate()) - before:
        thread.join(SECONDS)
    assert not list(directory.glob("tiers/*")), f"{name}: files are left"


def check_removed(name: str, make: Callable[[Path], object], directory: Path) -> None:
    """Leave an object whose directory is removed before it is released, and check that the release does not mind."""
    directory.mkdir()
    made = make(directory)
    for path in (directory, getattr(made, "path", directory)):
        shutil.rmtree(path, ignore_errors=True)
    del made
    gc.collect()
    wait_closed()
    assert not errors, f"{name}: {errors}"


errors: list[str] = []
"""What releases have raised."""

if __name__ == "__main__":
    faulthandler.dump_traceback_later(SECONDS, exit=True)
    threading.excepthook = lambda report: errors.append(repr(report.exc_value))
    gc.disable()  # a collection that comes before the locks are held would show nothing
    Stream(number for number in range(3)).close()  # starts the thread that closes, which stays
    former = locks()
    gc.freeze()  # imports and their locks, so that collections are quick
    for number, (name, make) in enumerate((OWNERS | OTHERS).items()):
        print(name, flush=True)
        check(name, make, Path(sys.argv[1]) / str(number), former)
        check_removed(name, make, Path(sys.argv[1]) / f"{number}-removed")
