"""A probe of what a step costs on this machine and between its ranks, for `terarec.dist.planner`."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import replace

import torch

from terarec.batch import Jagged
from terarec.dist.planner import MachineCosts
from terarec.dist.ranks import Ranks
from terarec.embedding import EmbeddingCollection
from terarec.optim import RowOptimizer
from terarec.spec import AdaGradSpec, FeatureSpec, TableSpec

SECONDS = 5.0
"""Time of a probe."""
_WIDTHS = (16, 128)
_TABLE_BYTES = 1 << 26  # more than the caches that a core of present processors has for itself
_KEYS = 1 << 14
_MESSAGE_BYTES = 1 << 24
_FEWEST = 3  # repeats of each measurement, however long one takes


def probe(ranks: Ranks, *, seconds: float = SECONDS) -> MachineCosts:
    """Measure lookups and updates of rows in memory and, with several ranks, the links between them.

    All ranks call it; all get what is the slowest on any of them. Links that are not there, such as those between
    machines where all ranks are on one, keep the assumed speed.

    Args:
        ranks: The ranks.
        seconds: Seconds that it takes, about.
    """
    parts = 2 * len(_WIDTHS) + 3
    looked_up, updated = [], []
    for width in _WIDTHS:
        lookup, update = _rows(width, seconds / parts)
        looked_up.append(lookup)
        updated.append(update)
    found = dict(zip(("lookup_seconds", "lookup_byte_seconds"), _line(looked_up, 4), strict=True))
    found |= zip(("update_seconds", "update_byte_seconds"), _line(updated, 8), strict=True)
    names = list(found)
    slowest = ranks.all_reduce_("probe of rows", torch.tensor([found[name] for name in names]), "max").tolist()
    costs = replace(MachineCosts(source="probe of rows"), **dict(zip(names, slowest, strict=True)))
    if ranks.size == 1:
        return costs
    nodes = ranks.nodes
    here = [rank for rank in range(ranks.size) if nodes[rank] == nodes[ranks.rank]]
    there = [rank for rank in range(ranks.size) if nodes[rank] != nodes[ranks.rank]]
    latency = _message_seconds(ranks, list(range(ranks.size)), 0, seconds / parts)
    links = {"latency": max(latency, 1e-9), "source": "probe of rows and links"}
    for name, others in (("local_bandwidth", here), ("bandwidth", there)):
        # All ranks take part, those without such links with nothing to send.
        taken = _message_seconds(ranks, others, _MESSAGE_BYTES, seconds / parts)
        sent = _MESSAGE_BYTES * len([rank for rank in others if rank != ranks.rank])
        least = ranks.all_reduce_(
            "probe of links", torch.tensor([sent / taken if sent else float("inf")]), "min"
        ).item()
        if least != float("inf"):
            links[name] = least
    return replace(costs, **links)  # type: ignore[arg-type]


def _rows(width: int, seconds: float) -> tuple[float, float]:
    """Return the seconds of a lookup and of an update by AdaGrad for each of many distinct rows."""
    rows = _TABLE_BYTES // (4 * width)
    tables = EmbeddingCollection(
        [TableSpec(name="probe", rows=rows, width=width, initializer="zeros")],
        [FeatureSpec(name="probe", table="probe")],
    )
    tables.is_exchanged = True  # each rank has a table of its own here, and means to
    optimizer = RowOptimizer(tables, AdaGradSpec(lr=0.01))
    generator = torch.Generator().manual_seed(0)
    offsets = torch.arange(_KEYS + 1)
    lookups: list[float] = []
    updates: list[float] = []
    end = time.monotonic() + 2 * seconds
    while len(lookups) <= _FEWEST or time.monotonic() < end:
        keys = torch.randint(0, rows, (_KEYS,), generator=generator)
        start = time.perf_counter()
        pooled = tables(Jagged(names=("probe",), keys=keys, offsets=offsets)).pooled
        between = time.perf_counter()
        pooled.backward(pooled.detach())
        optimizer.step()
        updates.append((time.perf_counter() - between) / _KEYS)
        lookups.append((between - start) / _KEYS)
    return statistics.median(lookups[1:]), statistics.median(updates[1:])


def _line(seconds: list[float], bytes_per_column: int) -> tuple[float, float]:
    """Return the seconds for a row and for each of its bytes, from the seconds at `_WIDTHS`."""
    slope = (seconds[1] - seconds[0]) / (bytes_per_column * (_WIDTHS[1] - _WIDTHS[0]))
    slope = max(slope, 1e-12)  # a wide row that takes no longer than a narrow one
    return max(seconds[0] - slope * bytes_per_column * _WIDTHS[0], 1e-10), slope


def _message_seconds(ranks: Ranks, others: list[int], num_bytes: int, seconds: float) -> float:
    """Return the median seconds of an exchange in which this rank sends and gets so many bytes to and from `others`."""
    sizes = [num_bytes if rank in others and rank != ranks.rank else 0 for rank in range(ranks.size)]
    values = torch.zeros(sum(sizes), dtype=torch.uint8)

    def once() -> float:
        ranks.barrier("probe of links")
        start = time.perf_counter()
        ranks.all_to_all("probe of links", values, sizes, sizes)
        return time.perf_counter() - start

    once()
    first = ranks.all_reduce_("probe of links", torch.tensor([once()]), "max").item()
    return _median(once, max(_FEWEST, min(50, int(seconds / first))))


def _median(once: Callable[[], float], repeats: int) -> float:
    return statistics.median(once() for _ in range(repeats))
