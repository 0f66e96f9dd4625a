# SPDX-License-Identifier: Apache-2.0
"""Measure lookups of served tables in every tier, sessions with a cache, and lookups during updates.

The limit of lookups is a lookup in training: a dynamic table of the same rows, whose index and kernels the host tier
also uses. The limit of sessions is the same model with its tables in memory. All sides of a part are timed in turns.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TextIO

import numpy as np
import torch
from record import Row, append_rows, measure_in_turns

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tests.ps.redis_processes import PROGRAM, running

from terarec.batch import Batch, Jagged
from terarec.embedding import EmbeddingCollection
from terarec.embedding.lookups import LookupCollection
from terarec.memory.guarded import Guarded
from terarec.memory.redis_server import RedisServer
from terarec.models.artifact import tables, without_tables
from terarec.models.registry import build_model
from terarec.ps.cache import ModelCaches
from terarec.ps.levels import disk_level, host_level, redis_level
from terarec.ps.table import TableGroup, TableTiers
from terarec.spec import (
    CacheSpec,
    CategoricalColumn,
    DatasetSpec,
    DenseColumn,
    DLRMSpec,
    DynamicTableSpec,
    FeatureSpec,
    HostMemorySpec,
    LabelColumn,
    RocksDBSpec,
    RowFileSpec,
)
from terarec.storage import RowValues

WIDTH = 128
REQUESTED = 16_384
CHUNK = 1 << 16
BATCHES = 2  # in a turn, each of other keys, which the CPU caches do not hold
WARMING = 60  # batches that fill the session's caches


def filled(level: Guarded, rows: int, *, flushes: bool = True) -> TableTiers:
    """Return a table in a level, filled with the rows of the keys 0 <= key < rows."""
    tier = TableGroup(["t"], WIDTH, [level]).table(0)
    generator = torch.Generator().manual_seed(0)
    for begin in range(0, rows, CHUNK):
        keys = torch.arange(begin, min(begin + CHUNK, rows))
        tier.insert(keys, torch.randn(keys.numel(), WIDTH, generator=generator))
    if flushes:
        tier.flush()
    return tier


def trained_table(rows: int) -> EmbeddingCollection:
    collection = EmbeddingCollection(
        [DynamicTableSpec(name="t", width=WIDTH)], [FeatureSpec(name="f", table="t", pooling="none")]
    ).eval()
    for begin in range(0, rows, CHUNK):
        keys = torch.arange(begin, min(begin + CHUNK, rows))
        collection.tables["t"].import_(RowValues(keys=keys, weights=torch.randn(keys.numel(), WIDTH)))
    return collection


def lookups(rows: int, turns: int) -> Iterator[Row]:
    requested = torch.from_numpy(np.random.default_rng(1).integers(0, rows, REQUESTED))
    jagged = Jagged(names=("f",), keys=requested, offsets=torch.arange(REQUESTED + 1))
    with ExitStack() as held, torch.no_grad():
        folder = Path(held.enter_context(tempfile.TemporaryDirectory()))
        collection = trained_table(rows)
        tiers = {
            "host memory": filled(host_level(HostMemorySpec(), ["t"], WIDTH), rows),
            "host memory, 8 partitions": filled(host_level(HostMemorySpec(num_partitions=8), ["t"], WIDTH), rows),
            "row file, warm": filled(
                disk_level(RowFileSpec(path=".", cache_bytes=1 << 30), [folder / "rows"], ["t"], WIDTH), rows
            ),
            "row file without a cache, warm": filled(
                disk_level(RowFileSpec(path=".", cache_bytes=0), [folder / "pages"], ["t"], WIDTH), rows
            ),
        }
        if importlib.util.find_spec("rocksdict"):
            tiers["RocksDB"] = filled(disk_level(RocksDBSpec(path="."), [folder / "rocks"], ["t"], WIDTH), rows)
        if PROGRAM is not None and importlib.util.find_spec("redis"):
            server = held.enter_context(running(folder / "redis", "--appendonly", "no"))
            connections = RedisServer(server.spec(num_partitions=8, timeout_seconds=30.0))
            tiers["Redis 8 partitions"] = filled(redis_level(connections, ["hps_et.m.t"], WIDTH), rows)
        timed = {name: lambda tier=tier: tier.lookup(requested) for name, tier in tiers.items()}
        timed["training"] = lambda: collection(jagged)
        found = measure_in_turns(timed, turns)
        for name in tiers:
            yield Row(
                case=f"{REQUESTED:,} keys of {rows:,} rows of {4 * WIDTH} bytes",
                metric=f"lookups in {name}",
                value=REQUESTED / found[name].median,
                unit="rows/s",
                peer="lookup of training",
                peer_value=REQUESTED / found["training"].median,
            )
        for tier in tiers.values():
            tier.close()


class Zipf:
    """Batches of keys of 26 features, by Zipf 1.05."""

    def __init__(self, rows: int, batch_size: int) -> None:
        self._shares = (np.arange(1, rows + 1, dtype=np.float64) ** -1.05).cumsum()
        self._order = np.random.default_rng(7).permutation(rows)
        self._batch_size = batch_size

    def batches(self, seed: int) -> Iterator[Batch]:
        rng = np.random.default_rng(seed)
        names = tuple(f"C{number}" for number in range(26))
        offsets = torch.arange(26 * self._batch_size + 1)
        while True:
            ranks = self._shares.searchsorted(rng.random(26 * self._batch_size) * self._shares[-1])
            sparse = Jagged(names=names, keys=torch.from_numpy(self._order[ranks]), offsets=offsets)
            yield Batch(dense=torch.rand(self._batch_size, 13), label=torch.zeros(self._batch_size, 1), sparse=sparse)


def sessions(rows: int, batch_size: int, turns: int) -> Iterator[Row]:
    """Measure a DLRM of 26 tables with 10 % of the rows in caches, over each tier."""
    dataset = DatasetSpec(
        name="zipf",
        storage="parquet",
        labels=(LabelColumn(name="label"),),
        dense=tuple(DenseColumn(name=f"I{number}") for number in range(13)),
        categorical=tuple(CategoricalColumn(name=f"C{number}", rows=rows) for number in range(26)),
    )
    spec = DLRMSpec(width=WIDTH, bottom=(512, 256, WIDTH), top=(1024, 1024, 512, 256))
    whole = build_model(spec, dataset).eval()
    held_rows = {name: table.export(table.keys()) for name, table in tables(whole).items()}
    drawn = Zipf(rows, batch_size)
    prepared = list(itertools.islice(drawn.batches(0), (turns + 1) * BATCHES))

    def scorer(model: torch.nn.Module) -> Callable[[], None]:
        coming = iter(prepared)

        def score() -> None:
            with torch.inference_mode():
                for batch in itertools.islice(coming, BATCHES):
                    model(batch)

        return score

    with ExitStack() as held:
        folder = Path(held.enter_context(tempfile.TemporaryDirectory()))
        server = None
        if PROGRAM is not None:
            process = held.enter_context(running(folder / "redis", "--appendonly", "no"))
            server = RedisServer(process.spec(num_partitions=8, timeout_seconds=30.0))
        timed, caches = {}, {}
        kinds = {"row files": RowFileSpec(path="."), "row files alone": RowFileSpec(path=".", cache_bytes=0)}
        for kind in (*kinds, "Redis") if server else kinds:
            names = list(held_rows)
            if kind == "Redis":
                assert server is not None
                level = redis_level(server, [f"hps_et.m.{name}" for name in names], WIDTH)
            else:
                level = disk_level(kinds[kind], [folder / kind / name for name in names], names, WIDTH)
            group = TableGroup(names, WIDTH, [level])
            behind = {name: group.table(number) for number, name in enumerate(names)}
            for name, part in held_rows.items():
                behind[name].insert(part.keys, part.weights)
                behind[name].flush()
            caches[kind] = ModelCaches(behind, dict.fromkeys(behind, rows // 10), CacheSpec())
            held.callback(caches[kind].close)
            model = build_model(spec, dataset).eval()
            model.load_state_dict(
                {key: value for key, value in whole.state_dict().items() if ".tables." not in key}, strict=False
            )
            model = without_tables(model)
            lookups = {name: cache.lookup for name, cache in caches[kind].caches.items()}
            connected = [module for module in model.modules() if isinstance(module, LookupCollection)]
            for module in connected:
                module.connect(lookups, caches[kind].bags)
            for batch in itertools.islice(drawn.batches(1), WARMING):
                connected[0](batch.sparse)
            with torch.inference_mode():
                assert torch.equal(model(prepared[0]), whole(prepared[0]))
            timed[kind] = scorer(model)
        before = {kind: hits_of(caches[kind]) for kind in timed}
        found = measure_in_turns({**timed, "memory": scorer(whole)}, turns)
        samples = BATCHES * batch_size
        for kind in timed:
            hits, keys = (now - then for now, then in zip(hits_of(caches[kind]), before[kind], strict=True))
            yield Row(
                case=f"DLRM 26 x {rows:,} rows x {WIDTH}, batches of {batch_size:,}, Zipf 1.05, "
                f"hit rate {hits / keys:.2f}",
                metric=f"session with a cache of 10 % over {kind}",
                value=samples / found[kind].median,
                unit="samples/s",
                peer="tables in memory",
                peer_value=samples / found["memory"].median,
            )


def hits_of(caches: ModelCaches) -> tuple[int, int]:
    counted = [cache.statistics() for cache in caches.caches.values()]
    return sum(one.hits for one in counted), sum(one.keys for one in counted)


@contextmanager
def in_background(work: object) -> Iterator[None]:
    thread = threading.Thread(target=work)  # type: ignore[arg-type]
    thread.start()
    yield
    thread.join()


def updates(rows: int) -> Iterator[Row]:
    """Insert a million rows while another thread looks keys up."""
    table = filled(host_level(HostMemorySpec(), ["t"], WIDTH), rows)
    keys = torch.from_numpy(np.random.default_rng(2).permutation(rows))
    values = torch.randn(rows, WIDTH)
    requested = keys[:1024]
    waits: list[float] = []
    delays: list[float] = []  # for each lookup, the time for which its thread was runnable but had no core
    is_done = threading.Event()

    def look_up() -> None:
        with Path(f"/proc/self/task/{threading.get_native_id()}/schedstat").open() as counters:
            while not is_done.is_set():
                before = without_core(counters)
                start = time.perf_counter()
                table.lookup(requested)
                waits.append(time.perf_counter() - start)
                delays.append(without_core(counters) - before)

    for _ in range(50):
        table.lookup(requested)
    alone = []
    for _ in range(200):
        start = time.perf_counter()
        table.lookup(requested)
        alone.append(time.perf_counter() - start)
    with in_background(look_up):
        start = time.perf_counter()
        for begin in range(0, rows, CHUNK):
            table.insert(keys[begin : begin + CHUNK], values[begin : begin + CHUNK])
        seconds = time.perf_counter() - start
        is_done.set()
    case = f"{rows:,} rows of {4 * WIDTH} bytes into host memory, lookups of 1,024 keys beside"
    yield Row(case=case, metric="update", value=seconds, unit="s")
    yield Row(case=case, metric="lookup, median", value=1e3 * float(np.median(waits)), unit="ms")
    yield Row(
        case=case,
        metric="lookup, 99th percentile",
        value=1e3 * float(np.quantile(waits, 0.99)),
        unit="ms",
        peer="without an update",
        peer_value=1e3 * float(np.quantile(alone, 0.99)),
    )
    yield Row(case=case, metric="lookup, 99.9th percentile", value=1e3 * float(np.quantile(waits, 0.999)), unit="ms")
    yield Row(case=case, metric="lookup, longest", value=1e3 * max(waits), unit="ms")
    with_core = 1e3 * (np.array(waits) - delays)
    for metric, value in (("99.9th percentile", np.quantile(with_core, 0.999)), ("longest", with_core.max())):
        yield Row(case=case, metric=f"lookup, {metric}, less the time without a core", value=float(value), unit="ms")


def without_core(counters: TextIO) -> float:
    """Return the seconds that a thread has waited for a core."""
    counters.seek(0)
    return 1e-9 * int(counters.read().split()[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", choices=("lookups", "sessions", "updates"), action="append")
    parser.add_argument("--rows", type=int, default=300_000)
    parser.add_argument("--table-rows", type=int, default=20_000)
    parser.add_argument("--batch-size", type=int, default=1024)
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--dry", action="store_true", help="print the figures without appending them to the results")
    options = parser.parse_args()
    parts = options.part or ["lookups", "sessions", "updates"]
    if "lookups" in parts:
        append_rows("parameter_server", lookups(options.rows, options.turns), dry=options.dry)
    if "updates" in parts:
        append_rows("parameter_server", updates(options.rows), dry=options.dry)
    if "sessions" in parts:
        append_rows(
            "parameter_server", sessions(options.table_rows, options.batch_size, options.turns), dry=options.dry
        )


if __name__ == "__main__":
    main()
