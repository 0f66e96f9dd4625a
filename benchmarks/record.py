# SPDX-License-Identifier: Apache-2.0
"""Timing and result rows, shared by all benchmarks.

A ratio always compares two figures that one run measured in turns, since the machines are shared.
"""

import csv
import datetime
import importlib.metadata
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path

import terarec

RESULTS = Path(__file__).resolve().parent / "results"
_COSTS = {"s", "ms", "us", "MiB", "nat", "bytes a byte", "bytes a live byte"}  # units for which less is better


@dataclass(frozen=True)
class Timing:
    """Seconds of repeated runs."""

    minimum: float
    median: float


@dataclass(frozen=True, kw_only=True)
class Row:
    """One figure. The fields of a subclass become further columns.

    Attributes:
        case: Workload, with sizes.
        metric: Measured quantity.
        value: The figure.
        unit: Unit of the figure; less is better for the units in `_COSTS`, more for all others.
        peer: Alternative that a user would otherwise run.
        peer_value: The peer's figure, from the same run.
        limit: Best figure that the hardware allows, from the same run.
    """

    case: str
    metric: str
    value: float
    unit: str
    peer: str = ""
    peer_value: float | None = None
    limit: float | None = None


def measure(function: Callable[[], object], repeats: int) -> Timing:
    """Time `function` after a warm-up run."""
    return measure_in_turns({"": function}, repeats)[""]


def measure_in_turns(functions: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, Timing]:
    """Time several functions in turns, so that other load on the machine affects all alike."""
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for function in functions.values():
        function()
    for _ in range(repeats):
        for name, function in functions.items():
            start = time.perf_counter()
            function()
            seconds[name].append(time.perf_counter() - start)
    return {name: Timing(min(times), statistics.median(times)) for name, times in seconds.items()}


def append_rows(name: str, rows: Iterable[Row], *, dry: bool = False) -> None:
    """Print `rows` and, unless `dry`, append them to ``results/<name>.csv`` with date, versions and hardware."""
    path = Path(os.devnull) if dry else RESULTS / f"{name}.csv"
    path.parent.mkdir(exist_ok=True)
    is_new = not path.exists()
    with path.open("a", newline="") as file:
        writer: csv.DictWriter[str] | None = None
        for row in rows:
            figures = {**_context(), **_figures(row)}
            if writer is None:
                writer = csv.DictWriter(file, list(figures), lineterminator="\n")
                if is_new:
                    writer.writeheader()
            writer.writerow(figures)
            file.flush()  # a long run may be interrupted
            print(_line(row), flush=True)


def rows_of_this_commit(name: str) -> list[dict[str, str]]:
    """Return the rows of ``results/<name>.csv`` that have the commit of this tree."""
    path, version = RESULTS / f"{name}.csv", str(_context()["terarec"])
    with path.open(newline="") as file:
        return [row for row in csv.DictReader(file) if row["terarec"] == version]


def _context() -> dict[str, object]:
    return {
        "date": datetime.date.today().isoformat(),
        "terarec": f"{terarec.__version__}+{_commit()}",
        "torch": importlib.metadata.version("torch"),
        "python": platform.python_version(),
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
    }


def _figures(row: Row) -> dict[str, object]:
    return {
        "case": row.case,
        "metric": row.metric,
        "value": f"{row.value:.6g}",
        "unit": row.unit,
        "peer": row.peer,
        "peer_value": "" if row.peer_value is None else f"{row.peer_value:.6g}",
        "ratio": "" if row.peer_value is None else f"{_better(row, row.peer_value):.3f}",
        "limit": "" if row.limit is None else f"{row.limit:.6g}",
        "share_of_limit": "" if row.limit is None else f"{_better(row, row.limit):.3f}",
        **{field.name: _text(getattr(row, field.name)) for field in fields(row)[len(fields(Row)) :]},
    }


def _text(value: object) -> object:
    return "" if value is None else f"{value:.6g}" if isinstance(value, float) else value


def _better(row: Row, other: float) -> float:
    """Return the factor by which the row's figure is better than `other`."""
    return other / row.value if row.unit in _COSTS else row.value / other


def _line(row: Row) -> str:
    line = f"{row.case}: {row.metric} {row.value:.4g} {row.unit}"
    if row.peer_value is not None:
        line += f", {_better(row, row.peer_value):.2f} x {row.peer} ({row.peer_value:.4g})"
    if row.limit is not None:
        line += f", {_better(row, row.limit):.0%} of the limit ({row.limit:.4g})"
    return line


def _commit() -> str:
    """Return the commit, with "-dirty" if more than the results differs: a run of many rows changes those itself."""
    commit = _git("describe", "--always")
    changed = _git("status", "--porcelain", "--untracked-files=no", "--", ":/", ":(exclude,top)benchmarks/results")
    return (commit + "-dirty" * bool(changed)) or "unknown"


def _git(*arguments: str) -> str:
    result = subprocess.run(["git", *arguments], cwd=RESULTS.parent, capture_output=True, text=True, check=False)
    return result.stdout.strip()


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    named = {key.strip(): value.strip() for key, value in fields.items()}
    model = named.get("model name", platform.processor())
    return f"{model} (family {named.get('cpu family', '?')} model {named.get('model', '?')})"
