# SPDX-License-Identifier: Apache-2.0
"""Encode Criteo text; compare with PySpark, NVTabular, DLRM's NumPy script, Polars, and scans of the text.

Run ``make peers-prepare``, then ``python benchmarks/prepare_peers.py --dlrm PATH/data_utils.py``. Every side runs in a
process of its own, in the interpreter that has its libraries, in turns, on the same generated log (in the page cache).
Slow sides may get only its first rows (``--rows-of pyspark=1000000``): rates are compared, and a result row has the
number of rows of each side. Before a peer that assigns ids by frequency is timed, each of its ids on a small log must
have as many rows as terarec's.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from json_process import HERE, median_of, threads
from peer_sides.criteo_job import VALID_FRACTION
from record import Row, append_rows

from terarec.apps.synthetic.criteo import generate

OURS, LIMIT = "terarec", "bytes"
PREPARE_PYTHON = HERE.parent / ".venv-peers-prepare" / "bin" / "python"
_OWN = Path(sys.executable)
_CHECKED_ROWS = 20_000


@dataclass(frozen=True, kw_only=True)
class Peer:
    """A peer. `does`: how its job differs; `is_checked`: whether its ids follow the same rule."""

    title: str
    python: Path
    does: str = ""
    is_checked: bool = False


PEERS = {
    "pyspark": Peer(title="PySpark DataFrames, local[cores]", python=PREPARE_PYTHON, is_checked=True),
    "nvtabular": Peer(title="NVTabular, Dask process a core", python=PREPARE_PYTHON, is_checked=True),
    "dlrm": Peer(title="DLRM data_utils.py", python=PREPARE_PYTHON, does="keeps all values, writes .npz"),
    "dlrm-processes": Peer(title="DLRM data_utils.py, process a day", python=PREPARE_PYTHON,
                           does="keeps all values, writes .npz"),
    "polars": Peer(title="Polars", python=_OWN, is_checked=True),
    "polars-scan": Peer(title="Polars", python=_OWN, does="parses only"),
    "pyarrow-scan": Peer(title="pyarrow.csv", python=_OWN, does="parses only"),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class PrepareRow(Row):
    """A row with the number of rows and the peak memory of each side, and the peer's versions."""

    rows: int
    peer_rows: int
    runs: int
    peak_mib: float
    peer_peak_mib: float
    peer_version: str


class Logs:
    """The first rows of one generated log, as a whole and in its two parts.

    Args:
        folder: Directory of all files.
        rows: Rows of the log.
    """

    def __init__(self, folder: Path, rows: int) -> None:
        self.folder = folder
        generate(folder / "log", rows=rows, days=1, seed=0)
        self._log = folder / "log" / "day_0.tsv"

    def first(self, rows: int) -> dict[str, str]:
        """Return the paths of the first `rows` rows: all, train and valid."""
        parts = {name: self.folder / str(rows) / f"{name}.tsv" for name in ("whole", "train", "valid")}
        if not parts["whole"].exists():
            parts["whole"].parent.mkdir()
            train = rows - round(rows * VALID_FRACTION)
            with self._log.open("rb") as log:
                _copy(log, parts["train"], train)
                _copy(log, parts["valid"], rows - train)
            with parts["whole"].open("wb") as whole:
                for name in ("train", "valid"):
                    with parts[name].open("rb") as part:
                        shutil.copyfileobj(part, whole, 1 << 20)
        return {name: str(path) for name, path in parts.items()}


def _copy(log: Any, to: Path, rows: int) -> None:
    with to.open("wb") as part:
        part.writelines(islice(log, rows))


def run(side: str, logs: Logs, rows: int, options: argparse.Namespace, *, counted: bool = False) -> dict[str, Any]:
    """Return the answer of a side's worker for the first `rows` rows."""
    out = logs.folder / "out"
    out.mkdir()
    job = {**logs.first(rows), "out": str(out), "threads": threads(), "counted": counted}
    python = PEERS[side].python if side in PEERS else _OWN
    environment = {**os.environ, "DLRM_DATA_UTILS": str(options.dlrm), "TMPDIR": str(logs.folder)}
    try:
        result = subprocess.run(
            [str(python), "-W", "ignore", "-m", "peer_sides.prepare_worker", side, json.dumps(job)],
            cwd=HERE, env=environment, capture_output=True, text=True, check=False,
        )  # fmt: skip
    finally:
        shutil.rmtree(out)
    if result.returncode:
        raise SystemExit(f"{side} ended with status {result.returncode}: {result.stderr[-2000:]}")
    answer: dict[str, Any] = json.loads(result.stdout)
    return answer


def check(peer: str, logs: Logs, options: argparse.Namespace) -> None:
    """Exit unless each id has as many training rows in the peer's output as in terarec's, in every column."""
    rows = min(_CHECKED_ROWS, options.rows)
    ours, theirs = (run(side, logs, rows, options, counted=True)["counts"] for side in (OURS, peer))
    for column, counts in ours.items():
        if counts != theirs[column]:
            raise SystemExit(f"{peer}: rows of the ids of {column} are {theirs[column][:9]}, terarec's {counts[:9]}")


def compare(peer: str, logs: Logs, options: argparse.Namespace) -> PrepareRow:
    """Return the result row of one peer, with all sides in turns."""
    if PEERS[peer].is_checked:
        check(peer, logs, options)
    rows = {OURS: options.rows, LIMIT: options.rows, peer: options.rows_of.get(peer, options.rows)}
    answers: dict[str, list[dict[str, Any]]] = {side: [] for side in rows}
    for _ in range(options.repeats):
        for side in rows:
            answers[side].append(run(side, logs, rows[side], options))
    rates = {side: rows[side] / median_of(answers[side], "seconds") for side in rows}
    peaks = {side: max(answer["peak_bytes"] for answer in answers[side]) / 2**20 for side in rows}
    does = f" ({PEERS[peer].does})" if PEERS[peer].does else ""
    return PrepareRow(
        case="prepare Criteo, text to Parquet, ids by frequency from 15 on",
        metric="rate",
        value=rates[OURS],
        unit="rows/s",
        peer=PEERS[peer].title + does,
        peer_value=rates[peer],
        limit=rates[LIMIT],
        rows=rows[OURS],
        peer_rows=rows[peer],
        runs=options.repeats,
        peak_mib=peaks[OURS],
        peer_peak_mib=peaks[peer],
        peer_version=answers[peer][0]["version"],
    )


def _rows_of(text: str) -> tuple[str, int]:
    peer, _, rows = text.partition("=")
    if peer not in PEERS or not rows.isdigit():
        raise argparse.ArgumentTypeError(f"got {text!r}, expected <peer>=<rows> with one of {', '.join(PEERS)}")
    return peer, int(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peer", nargs="+", choices=PEERS, default=list(PEERS))
    parser.add_argument(
        "--rows", type=int, default=2_000_000, help="rows of terarec and of peers that --rows-of does not name"
    )
    parser.add_argument(
        "--rows-of", nargs="+", type=_rows_of, default=[], metavar="PEER=ROWS", help="fewer for slow ones"
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--dlrm", type=Path, help="data_utils.py of a checkout of facebookresearch/dlrm")
    parser.add_argument("--folder", type=Path, help="directory on a disk with space for six times the log")
    parser.add_argument("--dry", action="store_true", help="print the figures without appending them to the results")
    options = parser.parse_args()
    options.rows_of = dict(options.rows_of)
    if options.dlrm is None:
        options.peer = [peer for peer in options.peer if not peer.startswith("dlrm")]
        print("DLRM left out: --dlrm names no data_utils.py", flush=True)
    with tempfile.TemporaryDirectory(prefix="terarec-prepare-", dir=options.folder) as folder:
        logs = Logs(Path(folder), options.rows)
        for peer in options.peer:
            append_rows("prepare_peers", [compare(peer, logs, options)], dry=options.dry)


if __name__ == "__main__":
    main()
