# SPDX-License-Identifier: Apache-2.0
"""Rewrite the tables of docs/benchmarks.md from the newest row of every cell of results/peers.csv.

Run it after `peers.py`: ``python benchmarks/peer_tables.py``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from marked_page import Found, MarkedPage

HERE = Path(__file__).resolve().parent
PAGE = MarkedPage(
    rows=HERE / "results" / "peers.csv",
    page=HERE.parent / "docs" / "benchmarks.md",
    begin="<!-- peers: written by benchmarks/peer_tables.py -->",
    end="<!-- end of peers -->",
)

Cell = tuple[str, str, int]
"""Shape, distribution of the keys and batch."""


def newest(rows: Sequence[Found]) -> dict[str, dict[Cell, dict[str, Found]]]:
    """Return the last row by peer, cell and metric, in the order of the tables."""
    found: dict[str, dict[Cell, dict[str, Found]]] = {}
    for row in rows:
        shape, batch, keys = row["case"].rsplit(", ", 2)
        cell = (shape, keys, int(batch.removeprefix("batch ")))
        peer = row["peer"].split(": not run")[0]
        found.setdefault(peer, {}).setdefault(cell, {})[row["metric"]] = row
    return {peer: {cell: cells[cell] for cell in sorted(cells, key=_place)} for peer, cells in sorted(found.items())}


def _place(cell: Cell) -> tuple[int, str, str, int]:
    shape, keys, batch = cell
    return int(shape.split(" x ")[0]), shape, keys, batch


def page_tables(rows: Sequence[Found]) -> str:
    """Return Markdown: a heading and a table for each peer."""
    return "\n\n".join("\n".join(_table(peer, cells)) for peer, cells in newest(rows).items())


def _table(peer: str, cells: Mapping[Cell, Mapping[str, Found]]) -> Iterator[str]:
    metrics = sorted({metric for timed in cells.values() for metric in timed}, key=_order)
    versions = sorted({row["peer_version"] for timed in cells.values() for row in timed.values()} - {""})
    yield f"### {peer}\n\n{'; '.join(versions)}.\n"
    yield "| tables | keys | batch | " + " | ".join(map(_heading, metrics)) + " |"
    yield "|---|---|---|" + "---|" * len(metrics)
    for (shape, keys, batch), timed in cells.items():
        yield f"| {shape} | {keys} | {batch} | " + " | ".join(_figure(timed.get(metric)) for metric in metrics) + " |"


def _order(metric: str) -> tuple[int, str]:
    return metric.count(","), metric.replace("sgd", "")


def _heading(metric: str) -> str:
    found = re.fullmatch(r"forward, backward and (\w+) update", metric)
    return f"step, {found[1]}" if found else metric


def _figure(row: Found | None) -> str:
    if row is None:
        return ""
    if not row["ratio"]:
        return row["peer"].split("not run, ")[1]
    most = f" of {float(row['peer_value']) / float(row['limit']):.1f}x" if row["limit"] else ""
    return f"{float(row['value']):.3g} ms, **{float(row['ratio']):.1f}x**{most}"


if __name__ == "__main__":
    PAGE.page.write_text(PAGE.with_tables(page_tables(PAGE.read_rows())))
