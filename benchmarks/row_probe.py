# SPDX-License-Identifier: Apache-2.0
"""Measure the least time of random row accesses on this machine, by ``row_probe.cpp``, which it compiles.

A probe must run under the conditions of the kernel that it limits: the same rows of the same memory in the same order,
on the same threads, in turns. A probe in another process at another time was off by up to 1.7 x in both directions.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import tempfile
import time
from collections.abc import Callable
from functools import cache, partial
from itertools import product
from pathlib import Path

import torch
from torch import Tensor

HERE = Path(__file__).resolve().parent
CORE = HERE.parent / "csrc"
READ, MODIFY, COPY, _COPY_PAST_CACHES = range(4)
_DISTANCES = (0, 4, 8, 16, 32, 64)  # rows fetched ahead
_TRIALS = 2  # runs of each way; the faster one counts


class _Visit(ctypes.Structure):
    _fields_ = [
        ("table", ctypes.c_void_p),
        ("rows", ctypes.c_void_p),
        ("count", ctypes.c_int64),
        ("width", ctypes.c_int64),
        ("ahead", ctypes.c_int64),
        ("dense", ctypes.c_void_p),
    ]


def row_visitor(access: int, table: Tensor, *orders: Tensor, dense: Tensor | None = None) -> Callable[[], None]:
    """Return a function that accesses rows once in the fastest way: order, prefetch distance, non-temporal stores.

    Args:
        access: READ, MODIFY (the rows keep their values), or COPY to `dense`.
        table: Rows float32[V, D], D 16, 64 or 128.
        orders: Candidate orders, each int64[N] of row numbers; distinct if rows are written, since threads share them.
        dense: Vectors float32[N, D] of `allocate_rows`, for COPY.
    """
    library, threads = _library(), torch.get_num_threads()

    def visit(how: int, rows: Tensor, ahead: int) -> None:
        memory = None if dense is None else dense.data_ptr()  # read here, so that the function keeps the tensor
        visited = _Visit(table.data_ptr(), rows.data_ptr(), rows.numel(), table.shape[1], ahead, memory)
        library.visit_rows(how, ctypes.byref(visited), threads)

    hows = (COPY, _COPY_PAST_CACHES) if access == COPY else (access,)
    ways = [partial(visit, *way) for way in product(hows, orders, _DISTANCES)]
    trials = [_seconds(way) for _ in range(_TRIALS) for way in ways]
    return ways[trials.index(min(trials)) % len(ways)]


def _seconds(way: Callable[[], None]) -> float:
    start = time.perf_counter()
    way()
    return time.perf_counter() - start


@cache
def _library() -> ctypes.CDLL:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "row_probe.so"
        flags = ["-O3", "-std=c++17", "-march=native", "-shared", "-fPIC", "-Wno-psabi", f"-I{CORE}"]
        sources = [HERE / "row_probe.cpp", CORE / "common" / "parallel.cpp", CORE / "common" / "platform.cpp"]
        subprocess.run([os.environ.get("CXX", "g++"), *flags, *map(str, sources), "-o", str(path), "-ldl"], check=True)
        return ctypes.CDLL(str(path))
