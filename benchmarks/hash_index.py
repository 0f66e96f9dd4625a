# SPDX-License-Identifier: Apache-2.0
"""Compare the hash index with a Python dict, Polars and TorchRec's managed collisions: search, insertion, memory.

Keys are random int64. An insertion inserts all keys in batches of the usual size (26 features x 16384) into an empty
index, so it includes all growth. Its figure is the median of three such runs, or one run for a peer. The limit of a
search is a probe that reads one random cache line per key, from as much memory as the index takes, in turns with the
search. Polars runs what its users would write: a join with a table of keys and rows, and for insertion an anti-join,
unique and concatenation per batch. TorchRec runs in the interpreter of `.venv-peers`, if it is installed there
(``make peers``). ``--large`` adds 100 M keys, which take 4 GB.
"""

import argparse
import json
import statistics
import subprocess
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from record import Row, append_rows, measure, measure_in_turns
from row_probe import READ, row_visitor
from torch import Tensor

from terarec.kernels.hash_index import new_hash_index
from terarec.kernels.rows import allocate_rows

BATCH = 26 * 16384
SEARCHED = 1 << 20
REPEATS = 9
PEERS = Path(__file__).resolve().parents[1] / ".venv-peers" / "bin" / "python"
NO_ROWS = torch.empty(0, dtype=torch.int64)


def keys_of(count: int) -> Tensor:
    """Return random keys, nearly all distinct."""
    return torch.randint(-(2**63), 2**63 - 1, (count,), generator=torch.Generator().manual_seed(0))


def searched_of(keys: Tensor) -> Tensor:
    """Return some of the keys, in random order."""
    return keys[torch.randint(keys.numel(), (SEARCHED,), generator=torch.Generator().manual_seed(1))]


def median_rate(function: Callable[[], object], count: int) -> float:
    """Return the median rate in millions per second."""
    return count / measure(function, REPEATS).median / 1e6


def insert_ours(keys: Tensor) -> tuple[object, list[float]]:
    """Return the index of all keys, and the seconds of each batch."""
    index, seconds = new_hash_index("cpu", "cpu"), []
    for batch in torch.split(keys, BATCH):
        held = len(index)
        start = time.perf_counter()
        index.insert(batch, NO_ROWS, held)
        seconds.append(time.perf_counter() - start)
    return index, seconds


def lines_of(num_bytes: int) -> Callable[[], None]:
    """Return a function that reads `SEARCHED` random cache lines from this many bytes of memory."""
    lines = torch.from_numpy(allocate_rows((num_bytes // 64, 16))).fill_(1.0)
    places = torch.randint(lines.shape[0], (SEARCHED,), generator=torch.Generator().manual_seed(2))
    return row_visitor(READ, lines, places)


def ours(keys: Tensor) -> dict[str, float]:
    """Return the figures of the index for these keys."""
    index, seconds = insert_ours(keys)
    runs = [seconds, insert_ours(keys)[1], insert_ours(keys)[1]]
    recurring = [min(batch) for batch in zip(*runs, strict=True)]  # growth comes at the same batch in each run
    searched = searched_of(keys)
    absent = keys_of(keys.numel() + SEARCHED)[keys.numel() :]
    searches = {"find": lambda: index.find(searched), "find absent": lambda: index.find(absent)}
    timings = measure_in_turns(searches | {"lines": lines_of(index.memory_bytes)}, REPEATS)
    return {name: SEARCHED / timing.median / 1e6 for name, timing in timings.items()} | {
        "insert": keys.numel() / statistics.median(map(sum, runs)) / 1e6,
        "stall": (max(recurring) - statistics.median(recurring)) * 1e3,
        "bytes": index.memory_bytes / len(index),
    }


def python_dict(keys: Tensor) -> dict[str, float]:
    """Return the same figures of a dict."""
    held: dict[int, int] = {}
    start = time.perf_counter()
    for key in keys.tolist():
        held.setdefault(key, len(held))
    seconds = time.perf_counter() - start
    searched = searched_of(keys)[: SEARCHED // 8]
    find = median_rate(lambda: torch.tensor([held.get(key, -1) for key in searched.tolist()]), searched.numel())
    return {"insert": keys.numel() / seconds / 1e6, "find": find}


def polars(keys: Tensor) -> dict[str, float]:
    """Return the same figures of Polars' joins; empty if Polars is not installed."""
    try:
        import polars as pl
    except ModuleNotFoundError:
        print("Polars left out: not installed, see `make bench`", flush=True)
        return {}
    held = pl.DataFrame(schema={"key": pl.Int64, "row": pl.Int64})
    start = time.perf_counter()
    for batch in torch.split(keys, BATCH):
        frame = pl.DataFrame({"key": batch.numpy()})
        new = frame.join(held, on="key", how="anti").unique(maintain_order=True)
        rows = pl.Series("row", range(held.height, held.height + new.height), dtype=pl.Int64)
        held = pl.concat([held, new.with_columns(rows)])
    seconds = time.perf_counter() - start
    searched = pl.DataFrame({"key": searched_of(keys).numpy()})
    find = median_rate(lambda: searched.join(held, on="key", how="left", maintain_order="left"), SEARCHED)
    return {"insert": keys.numel() / seconds / 1e6, "find": find}


def torchrec(count: int) -> dict[str, float]:
    """Return the figures of `MCHManagedCollisionModule` by the Python of `.venv-peers`; empty if not installed."""
    if not PEERS.exists():
        return {}
    script = Path(__file__).with_name("hash_index_torchrec.py")
    result = subprocess.run([str(PEERS), str(script), str(count)], capture_output=True, text=True, check=False)
    if result.returncode:
        print(f"TorchRec left out: {result.stderr.strip().splitlines()[-1]}", flush=True)
        return {}
    figures: dict[str, float] = json.loads(result.stdout.splitlines()[-1])
    return figures


def rows_of(count: int, with_peers: bool) -> list[Row]:
    """Return the result rows for this many keys."""
    keys = keys_of(count)
    figures = ours(keys)
    peers = {"dict": python_dict(keys), "polars": polars(keys), "torchrec": torchrec(count)} if with_peers else {}
    case = f"hash index, {count // 1_000_000} M keys, batches of {BATCH}"
    rows = []
    for metric, limit in (("insert", None), ("find", figures["lines"])):
        named = [(peer, found[metric]) for peer, found in peers.items() if metric in found] or [("", None)]
        ours_alone = Row(case=case, metric=metric, value=figures[metric], unit="M keys/s", limit=limit)
        rows += [replace(ours_alone, peer=peer, peer_value=value) for peer, value in named]
    absent, limit = figures["find absent"], figures["lines"]
    rows.append(Row(case=case, metric="find absent keys", value=absent, unit="M keys/s", limit=limit))
    rows.append(Row(case=case, metric="longest batch above the median", value=figures["stall"], unit="ms"))
    rows.append(Row(case=case, metric="memory of a key", value=figures["bytes"], unit="bytes"))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--large", action="store_true", help="also run 100 M keys")
    parser.add_argument("--without-peers", action="store_true", help="ours alone")
    chosen = parser.parse_args()
    for count in (1_000_000, 10_000_000):
        append_rows("hash_index", rows_of(count, not chosen.without_peers))
    if chosen.large:
        append_rows("hash_index", rows_of(100_000_000, False))


if __name__ == "__main__":
    main()
