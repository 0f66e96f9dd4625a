# SPDX-License-Identifier: Apache-2.0
"""The main figures of terarec: rows of benchmarks/results, as the README's table and the chart show them."""

from __future__ import annotations

import csv
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"

Result = Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class Peer:
    """How many times as fast terarec was as an alternative; `low` and `high` are the range of several cells."""

    name: str
    ratio: float
    low: float
    high: float
    cells: int = 1


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One row of the table and of the chart.

    Attributes:
        title: Name of the row in the chart.
        case: What was measured, in the table.
        speed: What terarec reached; "" where each cell has its own.
        peers: Alternatives, each measured in turns with terarec.
    """

    title: str
    case: str
    speed: str
    peers: Sequence[Peer]


def main_figures() -> list[Figure]:
    """Return the figures, in the order of a log's way to a score."""
    return [_preparation(), _update(), _step(), _tiers(), _gpu()]


def _preparation() -> Figure:
    names = {"Polars": "Polars", "NVTabular, Dask process a core": "NVTabular"}
    names["PySpark DataFrames, local[cores]"] = "PySpark"
    newest = {row["peer"]: row for row in _read("prepare_peers") if row["peer"] in names}
    rates = sorted(float(row["value"]) / 1000 for row in newest.values())
    return Figure(
        title="prepare Criteo's logs",
        case="prepare Criteo, 2 M rows of text to Parquet (2 Zen 3 cores)",
        speed=f"{rates[0]:.0f},000 to {rates[-1]:.0f},000 rows/s",
        peers=[
            _one(f"{name} {_version(newest[peer]['peer_version'])}", float(newest[peer]["ratio"]))
            for peer, name in names.items()
        ],
    )


def _update() -> Figure:
    names = {
        "FBGEMM SplitTableBatchedEmbeddingBags on CPU": "FBGEMM",
        "tf.nn.embedding_lookup_sparse a table and tf.compat.v1.train": "TensorFlow",
        "nn.EmbeddingBag(sparse=True) a table and torch.optim": "PyTorch",
    }
    newest: dict[tuple[str, str], Result] = {}
    for row in _read("peers"):
        if row["metric"] == "forward, backward and sgd update":
            newest[row["case"], row["peer"].split(": not run")[0]] = row
    peers = []
    for peer, name in names.items():
        cells = [row for (_, other), row in newest.items() if other == peer and row["ratio"]]
        ratios = [float(row["ratio"]) for row in cells]
        peers.append(
            Peer(
                name=f"{name} {_version(cells[-1]['peer_version'])}",
                ratio=statistics.median(ratios),
                low=min(ratios),
                high=max(ratios),
                cells=len(cells),
            )
        )
    return Figure(
        title="look up and update rows",
        case="lookup, backward pass and SGD of 100 tables x 8192 x 16 and x 64, and of 26 x 1 M x 128 (2 Zen 3 cores)",
        speed="",
        peers=peers,
    )


def _step() -> Figure:
    row = _newest("dlrm_step", case="DLRM 26 x 384,615 x 64, batch 8192, SGD, fp32", peer="torch.nn and torch.optim")
    return Figure(
        title="DLRM on 2 cores",
        case="DLRM step: 26 tables, 10 M rows x 64, batch 8192, SGD, fp32 (2 Zen 4 cores)",
        speed=f"{float(row['value']):.0f} ms",
        peers=[_one(f"PyTorch {_version(row['torch'])}", float(row["ratio"]))],
    )


def _tiers() -> Figure:
    case = "DLRM 26 x 1,538,461 x 64, batch 8192, AdaGrad, 20.5 GB, "
    ours = [
        row
        for row in _read("tiered_training")
        if row["case"] == f"{case}tiers" and row["page_cache"] == "used" and float(row["share"]) > 0.1
    ][-1]
    peers = []
    for name, sides in (("RocksDB", "plain PyTorch on RocksDB"), ("np.memmap", "plain PyTorch on np.memmap")):
        # Each side took turns with the same step on tables in memory, and its ratio is that to the step.
        theirs = _newest("tiered_training", case=f"{case}{sides}", page_cache="used")
        peers.append(_one(f"PyTorch on {name}", float(ours["ratio"]) / float(theirs["ratio"])))
    return Figure(
        title="tables on a disk",
        case="DLRM over tables of 20 GB on disk, 10 % of the rows in memory (2 Zen 4 cores)",
        speed=f"{float(ours['value']):,.0f} samples/s, {float(ours['ratio']):.2f} of that in memory",
        peers=peers,
    )


def _gpu() -> Figure:
    case = "DLRM, 26 tables, 39.1 M x 128 (20 GB), batch 65536, SGD, bf16, torch.compile"
    row = _newest("gpu", case=case, metric="training step")
    return Figure(
        title="DLRM on an H100",
        case="DLRM step: 20 GB of tables, batch 65,536, SGD, bf16, compiled (one H100)",
        speed=f"{float(row['value']):.1f} ms",
        peers=[_one(f"PyTorch {_version(row['torch'])}, compiled", float(row["ratio"]))],
    )


def _version(text: str) -> str:
    """Return the first version in a text, without its patch level."""
    version = re.search(r"\d+\.\d+", text)
    assert version, f"{text!r}: no version"
    return version[0]


def _one(name: str, ratio: float) -> Peer:
    return Peer(name=name, ratio=ratio, low=ratio, high=ratio)


def _newest(name: str, **columns: str) -> Result:
    return [row for row in _read(name) if all(row[column] == text for column, text in columns.items())][-1]


def _read(name: str) -> list[Result]:
    with (RESULTS / f"{name}.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def table(figures: Sequence[Figure]) -> str:
    """Return the figures as a table in Markdown."""
    rows = [f"| {figure.case} | {figure.speed} | {'; '.join(map(_text, figure.peers))} |" for figure in figures]
    return "\n".join(["| what | terarec | its speed in times that of |", "|---|---|---|", *rows])


def _text(peer: Peer) -> str:
    cells = f" (median of {peer.cells} cells; {short(peer.low)} to {short(peer.high)})" if peer.cells > 1 else ""
    return f"{short(peer.ratio)} {peer.name}{cells}"


def short(ratio: float) -> str:
    """Return a ratio with two digits."""
    return f"{ratio:.1f}x" if ratio < 9.95 else f"{ratio:.0f}x"
