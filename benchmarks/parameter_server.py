"""Lookups of served tables in every tier, sessions behind a cache, and updates beside lookups.

The limit of lookups is the lookup of training: a dynamic table of the same rows, whose index and kernels the host tier
shares. The limit of sessions is the same model with its tables in memory. Everything of a part is timed in turns.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import torch
from record import Row, append_rows, measure_in_turns

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tests.ps.redis_processes import PROGRAM, running

from terarec.batch import Batch, Jagged
from terarec.embedding import EmbeddingCollection
from terarec.models.artifact import tables, without_tables
from terarec.models.registry import build_model
from terarec.ps import EmbeddingCache, HostMemoryTier, RedisServer, RedisTier, TableTiers, Tier
from terarec.ps.disk import rocksdb_tier, row_file_tier
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
from terarec.storage import Rows

WIDTH = 128
ASKED = 16_384
CHUNK = 1 << 16


def filled(tier: Tier, rows: int, *, flushes: bool = True) -> Tier:
    """Insert rows of the keys 0 <= key < rows."""
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
        collection.tables["t"].import_(Rows(keys=keys, weights=torch.randn(keys.numel(), WIDTH)))
    return collection


def lookups(rows: int, turns: int) -> Iterator[Row]:
    asked = torch.from_numpy(np.random.default_rng(1).integers(0, rows, ASKED))
    jagged = Jagged(names=("f",), keys=asked, offsets=torch.arange(ASKED + 1))
    with ExitStack() as held, torch.no_grad():
        folder = Path(held.enter_context(tempfile.TemporaryDirectory()))
        collection = trained_table(rows)
        tiers = {
            "host memory": filled(HostMemoryTier("t", WIDTH), rows),
            "host memory, 8 partitions": filled(HostMemoryTier("t", WIDTH, HostMemorySpec(num_partitions=8)), rows),
            "row file, warm": filled(row_file_tier(RowFileSpec(path="."), folder / "rows", "t", WIDTH), rows),
        }
        if importlib.util.find_spec("rocksdict"):
            tiers["RocksDB"] = filled(rocksdb_tier(RocksDBSpec(path="."), folder / "rocks", "t", WIDTH), rows)
        if PROGRAM is not None and importlib.util.find_spec("redis"):
            server = held.enter_context(running(folder / "redis", "--appendonly", "no"))
            redis = RedisTier(RedisServer(server.spec(num_partitions=8, timeout_seconds=30.0)), "hps_et.m.t", WIDTH)
            tiers["Redis 8 partitions"] = filled(redis, rows)
        timed = {name: lambda tier=tier: tier.lookup(asked) for name, tier in tiers.items()}
        timed["training"] = lambda: collection(jagged)
        found = measure_in_turns(timed, turns)
        for name in tiers:
            yield Row(
                case=f"{ASKED:,} keys of {rows:,} rows of {4 * WIDTH} bytes",
                metric=f"lookups in {name}",
                value=ASKED / found[name].median,
                unit="rows/s",
                peer="lookup of training",
                peer_value=ASKED / found["training"].median,
            )
        for tier in tiers.values():
            tier.close()


def zipf_keys(rows: int, count: int, exponent: float, rng: np.random.Generator) -> np.ndarray:
    weights = np.arange(1, rows + 1, dtype=np.float64) ** -exponent
    ranks = rng.choice(rows, size=count, p=weights / weights.sum())
    return np.random.default_rng(7).permutation(rows)[ranks]


def sessions(rows: int, batch_size: int, turns: int) -> Iterator[Row]:
    """DLRM of 26 tables, with 10 % of the rows in caches, over each tier."""
    dataset = DatasetSpec(
        name="zipf",
        storage="parquet",
        labels=(LabelColumn(name="label"),),
        dense=tuple(DenseColumn(name=f"I{number}") for number in range(13)),
        categorical=tuple(CategoricalColumn(name=f"C{number}", rows=rows) for number in range(26)),
    )
    spec = DLRMSpec(width=WIDTH, bottom=(512, 256, WIDTH), top=(1024, 1024, 512, 256))
    whole = build_model(spec, dataset).eval()
    rng = np.random.default_rng(0)
    batches = []
    for _ in range(4):
        keys = np.concatenate([zipf_keys(rows, batch_size, 1.05, rng) for _ in range(26)])
        names = tuple(column.name for column in dataset.categorical)
        sparse = Jagged(names=names, keys=torch.from_numpy(keys), offsets=torch.arange(26 * batch_size + 1))
        batches.append(Batch(dense=torch.rand(batch_size, 13), label=torch.zeros(batch_size, 1), sparse=sparse))
    held_rows = {name: table.export(table.keys()) for name, table in tables(whole).items()}

    def score(model: torch.nn.Module) -> None:
        with torch.inference_mode():
            for batch in batches:
                model(batch)

    with ExitStack() as held:
        folder = Path(held.enter_context(tempfile.TemporaryDirectory()))
        server = None
        if PROGRAM is not None:
            process = held.enter_context(running(folder / "redis", "--appendonly", "no"))
            server = RedisServer(process.spec(num_partitions=8, timeout_seconds=30.0))
        made, caches = {}, {}
        for kind in ("row file", "Redis") if server else ("row file",):
            lookups = {}
            for name, part in held_rows.items():
                if kind == "Redis":
                    assert server is not None
                    tier: Tier = RedisTier(server, f"hps_et.m.{name}", WIDTH)
                else:
                    tier = row_file_tier(RowFileSpec(path="."), folder / name, name, WIDTH)
                tier.insert(part.keys, part.weights)
                tier.flush()
                cache = EmbeddingCache(TableTiers([tier]), rows // 10, CacheSpec())
                lookups[name] = cache.lookup
                caches[kind, name] = cache
            model = build_model(spec, dataset).eval()
            model.load_state_dict(
                {key: value for key, value in whole.state_dict().items() if ".tables." not in key}, strict=False
            )
            made[kind] = without_tables(model)
            for module in made[kind].modules():
                if hasattr(module, "connect"):
                    module.connect(lookups)
            score(made[kind])
        timed = {kind: lambda model=model: score(model) for kind, model in made.items()}
        timed["memory"] = lambda: score(whole)
        found = measure_in_turns(timed, turns)
        samples = len(batches) * batch_size
        for kind in made:
            statistics = [cache.statistics() for (of, _), cache in caches.items() if of == kind]
            rate = sum(one.hits for one in statistics) / sum(one.keys for one in statistics)
            yield Row(
                case=f"DLRM 26 x {rows:,} rows x {WIDTH}, batches of {batch_size:,}, Zipf 1.05, hit rate {rate:.2f}",
                metric=f"session with a cache of 10 % over {kind}",
                value=samples / found[kind].median,
                unit="samples/s",
                peer="tables in memory",
                peer_value=samples / found["memory"].median,
            )


@contextmanager
def beside(work: object) -> Iterator[None]:
    thread = threading.Thread(target=work)  # type: ignore[arg-type]
    thread.start()
    yield
    thread.join()


def updates(rows: int) -> Iterator[Row]:
    """Insert a million rows while another thread looks keys up."""
    table = TableTiers([filled(HostMemoryTier("t", WIDTH), rows)])
    keys = torch.from_numpy(np.random.default_rng(2).permutation(rows))
    values = torch.randn(rows, WIDTH)
    asked = keys[:1024]
    waits: list[float] = []
    is_done = threading.Event()

    def look_up() -> None:
        while not is_done.is_set():
            start = time.perf_counter()
            table.lookup(asked)
            waits.append(time.perf_counter() - start)

    for _ in range(50):
        table.lookup(asked)
    alone = []
    for _ in range(200):
        start = time.perf_counter()
        table.lookup(asked)
        alone.append(time.perf_counter() - start)
    with beside(look_up):
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
    yield Row(case=case, metric="lookup, longest", value=1e3 * max(waits), unit="ms")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", choices=("lookups", "sessions", "updates"), action="append")
    parser.add_argument("--rows", type=int, default=300_000)
    parser.add_argument("--table-rows", type=int, default=4_000)
    parser.add_argument("--batch-size", type=int, default=1024)
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--dry", action="store_true", help="print the rows and keep none")
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
