# SPDX-License-Identifier: Apache-2.0
"""Compare the recall and time of faiss and usearch in approximate search of the largest dot products, 1 M x 64.

The vectors resemble trained ones: their spectrum decays (the standard deviation of direction i is i^-0.5), they cluster
around 2,000 centres, and their lengths differ (log-normal, 0.2). Queries are drawn the same way. The indices search by
Euclidean distance; one more number per item gives all items the same length (Bachrach et al. 2014).

The reference is an exact search, as `terarec.serve.ItemIndex` does for small catalogues; its time is the peer of each
row. The row of an index has the least effort whose mean recall of the best 100 reaches 0.95, or else the greatest
effort; the recall of all efforts is printed. Searches of a batch run in turns; the figure is the median.

Building takes minutes on one thread. ``--folder`` keeps indices, and saves every 50,000 items, so that a run can
continue where the previous one ended, and so that searches can be measured separately.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import faiss
import numpy as np
import torch
from numpy.typing import NDArray
from record import Row, append_rows, measure_in_turns
from usearch.index import Index, MetricKind

WIDTH, K, CENTRES, WANTED, PIECE = 64, 100, 2_000, 0.95, 50_000
NEIGHBORS, BUILD_EFFORT = 32, 40
EFFORTS = (100, 200, 300, 400, 600, 800, 1200)
PROBES = (8, 16, 32, 64, 96, 128, 256)
Floats = NDArray[np.float32]
Integers = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class IndexRow(Row):
    """A row with the recall of the search, and the build time and size of the index."""

    recall: float
    effort: int
    one_query_ms: float
    build_cpu_seconds: float
    bytes: int


def vectors(count: int, seed: int) -> Floats:
    """Return this many vectors."""
    rng = np.random.default_rng(seed)
    scale = np.arange(1, WIDTH + 1, dtype=np.float32) ** -0.5
    centres = np.random.default_rng(99).standard_normal((CENTRES, WIDTH), dtype=np.float32)
    found = centres[rng.integers(0, CENTRES, count)] + rng.standard_normal((count, WIDTH), dtype=np.float32)
    return found * scale * rng.lognormal(0, 0.2, (count, 1)).astype(np.float32)


class FaissGraph:
    """HNSW of faiss."""

    name, efforts = "faiss HNSW", EFFORTS

    def __init__(self, path: Path, items: Floats) -> None:
        del items
        self._path = path
        if path.exists():
            self._index = faiss.read_index(str(path))
        else:
            self._index = faiss.IndexHNSWFlat(WIDTH + 1, NEIGHBORS, faiss.METRIC_L2)
            self._index.hnsw.efConstruction = BUILD_EFFORT

    def __len__(self) -> int:
        return int(self._index.ntotal)

    def add(self, items: Floats) -> None:
        self._index.add(items)

    def save(self) -> None:
        faiss.write_index(self._index, str(self._path))

    def search(self, queries: Floats, effort: int) -> Integers:
        return self._index.search(queries, K, params=faiss.SearchParametersHNSW(efSearch=effort))[1]


class FaissLists(FaissGraph):
    """Inverted lists (IVF) of faiss."""

    name, efforts = "faiss IVF4096", PROBES

    def __init__(self, path: Path, items: Floats) -> None:
        self._path = path
        if path.exists():
            self._index = faiss.read_index(str(path))
        else:
            self._index = faiss.index_factory(WIDTH + 1, "IVF4096,Flat", faiss.METRIC_L2)
            self._index.train(items[:: max(1, len(items) // 160_000)])

    def search(self, queries: Floats, effort: int) -> Integers:
        return self._index.search(queries, K, params=faiss.SearchParametersIVF(nprobe=effort))[1]


class USearch:
    """HNSW of usearch. A node has twice as many neighbours on the lowest level, as in faiss."""

    name, efforts = "usearch HNSW", EFFORTS

    def __init__(self, path: Path, items: Floats) -> None:
        del items
        self._path = path
        self._index = Index(
            ndim=WIDTH + 1,
            metric=MetricKind.L2sq,
            dtype="f32",
            connectivity=NEIGHBORS,
            expansion_add=BUILD_EFFORT,
        )
        if path.exists():
            self._index.load(str(path))

    def __len__(self) -> int:
        return len(self._index)

    def add(self, items: Floats) -> None:
        keys = np.arange(len(self), len(self) + len(items), dtype=np.uint64)
        self._index.add(keys, items, threads=torch.get_num_threads())

    def save(self) -> None:
        self._index.save(str(self._path))

    def search(self, queries: Floats, effort: int) -> Integers:
        self._index.expansion_search = effort
        found = self._index.search(queries, K, threads=torch.get_num_threads() if len(queries) > 1 else 1)
        return found.keys.reshape(len(queries), K).astype(np.int64)


SIDES = (FaissGraph, FaissLists, USearch)
Side = FaissGraph | USearch


def of_equal_length(items: Floats) -> Floats:
    """Append one number to each vector, so that all have the same length."""
    squares = np.square(items).sum(1, keepdims=True)
    return np.concatenate([items, np.sqrt(squares.max() - squares)], axis=1)


def exact(items: Floats, queries: Floats) -> Integers:
    """Return the best items of each query by all products."""
    held = torch.from_numpy(items).T
    parts = [(part @ held).topk(K).indices for part in torch.from_numpy(queries).split(16)]
    return torch.cat(parts).numpy()


def recall_of(found: Integers, best: Integers) -> float:
    """Return the mean recall: the share of the best items among the found ones."""
    return float(np.mean([len(np.intersect1d(a, b)) / K for a, b in zip(found, best, strict=True)]))


def built(kind: type[Side], items: Floats, folder: Path) -> tuple[Side, float]:
    """Return an index of all items, and the CPU seconds of its construction."""
    spent_file = folder / f"{kind.__name__}.json"
    spent = json.loads(spent_file.read_text()) if spent_file.exists() else 0.0
    started = time.process_time()
    side = kind(folder / kind.__name__, items)
    if len(side):
        started = time.process_time()
    while len(side) < len(items):
        side.add(items[len(side) : len(side) + PIECE])
        spent, started = spent + time.process_time() - started, time.process_time()
        side.save()
        spent_file.write_text(json.dumps(spent))
        print(f"{side.name}: {len(side)} items after {spent:.0f} s of CPU time", flush=True)
        started = time.process_time()
    return side, spent


def measured(items: Floats, queries: Floats, folder: Path, repeats: int, kinds: Sequence[type[Side]]) -> list[IndexRow]:
    """Return the row of each index."""
    best, longer = exact(items, queries), of_equal_length(items)
    extended = np.concatenate([queries, np.zeros((len(queries), 1), np.float32)], axis=1)
    found = [built(kind, longer, folder) for kind in kinds]
    sides = {side.name: side for side, _ in found}
    chosen: dict[str, tuple[int, float]] = {}
    for name, side in sides.items():
        for effort in side.efforts:
            chosen[name] = effort, recall_of(side.search(extended, effort), best)
            print(f"{name}, effort {effort}: recall {chosen[name][1]:.4f}", flush=True)
            if chosen[name][1] >= WANTED:
                break
    functions: Mapping[str, Callable[[], object]] = {
        "exact": lambda: exact(items, queries[:64]),
        **{name: lambda s=side, e=chosen[name][0]: s.search(extended, e) for name, side in sides.items()},
    }
    seconds = {name: timing.median for name, timing in measure_in_turns(functions, repeats).items()}
    rate_of_exact = 64 / seconds.pop("exact")
    ones = {
        name: lambda s=side, e=chosen[name][0]: [s.search(extended[i : i + 1], e) for i in range(50)]
        for name, side in sides.items()
    }
    of_one = {name: timing.median / 50 for name, timing in measure_in_turns(ones, repeats).items()}
    return [
        IndexRow(
            case=f"{side.name}, {len(items)} items, D={WIDTH}, best {K}",
            metric="queries of a batch",
            value=len(queries) / seconds[side.name],
            unit="queries/s",
            peer="exact",
            peer_value=rate_of_exact,
            recall=chosen[side.name][1],
            effort=chosen[side.name][0],
            one_query_ms=1e3 * of_one[side.name],
            build_cpu_seconds=spent,
            bytes=(folder / type(side).__name__).stat().st_size,
        )
        for side, spent in found
    ]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--items", type=int, default=1_000_000)
    parser.add_argument("--queries", type=int, default=300)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--kinds", help="indices to compare, such as FaissGraph,FaissLists; all if unset")
    parser.add_argument("--dry", action="store_true", help="print the figures without appending them to the results")
    options = parser.parse_args()
    faiss.omp_set_num_threads(torch.get_num_threads())
    with tempfile.TemporaryDirectory() as made:
        folder = options.folder or Path(made)
        folder.mkdir(parents=True, exist_ok=True)
        items, queries = vectors(options.items, 0), vectors(options.queries, 1)
        kinds = [kind for kind in SIDES if not options.kinds or kind.__name__ in options.kinds.split(",")]
        rows = measured(items, queries, folder, options.repeats, kinds)
        append_rows("vector_index", rows, dry=options.dry)


if __name__ == "__main__":
    main()
