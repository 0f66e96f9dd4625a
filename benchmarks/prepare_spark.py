# SPDX-License-Identifier: Apache-2.0
"""Encode Criteo text to Parquet by Spark on this machine; compare with the local engine and PySpark's DataFrames.

Run ``python benchmarks/prepare_spark.py``. Each side runs in a process of its own, in turns, on the same generated log
in the page cache. Imports and the start of Spark and Java are not timed; the start of its Python workers is. PySpark is
slow, so it may get only the first rows (``--peer-rows``): rates are compared, and a result row has the number of rows
of each side.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import prepare
from peer_sides.criteo_job import MIN_COUNT, VALID_FRACTION, Job
from record import Row, append_rows

LOCAL, SPARK, PYSPARK, BYTES = "local engine", "Spark engine", "PySpark DataFrames", "reading the bytes"
THREADS = len(os.sched_getaffinity(0))
MASTER = f"local[{THREADS}]"


@dataclass(frozen=True, kw_only=True)
class SparkRow(Row):
    """A row with the number of rows of each side, the number of turns, and the version of PySpark."""

    rows: int
    peer_rows: int | None = None
    runs: int
    pyspark: str


def by_spark_engine(job: Job) -> float:
    """Return the seconds of terarec on Spark."""
    from terarec.etl import prepare as prepare_data
    from terarec.etl.ready import criteo
    from terarec.etl.spark import spark_session
    from terarec.etl.workflow import Workflow
    from terarec.spec import PrepareOptions, SplitByFraction

    workflow = Workflow.of(criteo(min_count=MIN_COUNT, split=SplitByFraction(valid=VALID_FRACTION)))
    settings = {"spark.ui.enabled": "false", "spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1"}
    with spark_session(MASTER, settings) as spark:
        spark.range(1).count()
        start = time.perf_counter()
        prepare_data(workflow, [job.whole], job.out / "spark", PrepareOptions(engine="spark", spark_master=MASTER))
        return time.perf_counter() - start


def by_pyspark(job: Job) -> float:
    """Return the seconds of the fastest known formulation in DataFrames."""
    from peer_sides.prepare_pyspark import DataFrames

    side = DataFrames(job.threads)
    start = time.perf_counter()
    side.prepare(job)
    return time.perf_counter() - start


def _by_local_side(name: str) -> Callable[[Job], float]:
    def run(job: Job) -> float:
        prepare.load_side(name)
        start = time.perf_counter()
        prepare.SIDES[name](job.whole, job.out / "local")
        return time.perf_counter() - start

    return run


SIDES: dict[str, Callable[[Job], float]] = {
    LOCAL: _by_local_side("terarec"),
    SPARK: by_spark_engine,
    PYSPARK: by_pyspark,
    BYTES: _by_local_side("reading the bytes"),
}


def seconds_of(side: str, folder: Path) -> float:
    """Run a side in a process of its own; return its seconds."""
    with tempfile.TemporaryDirectory(prefix="out-", dir=folder.parent) as out:
        command = [sys.executable, "-W", "ignore", __file__, "--side", side, "--log", str(folder), "--out", out]
        environment = {**os.environ, "TMPDIR": out}
        done = subprocess.run(command, env=environment, check=False, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{side} ended with status {done.returncode}: {done.stderr[-2000:]}")
    return float(json.loads(done.stdout.splitlines()[-1]))


def cut(log: Path, rows: int, folder: Path) -> Path:
    """Write the first rows of a log to `folder`, split into train and valid."""
    folder.mkdir()
    train = rows - round(rows * VALID_FRACTION)
    with log.open("rb") as text:
        for name, count in (("train", train), ("valid", rows - train)):
            with (folder / f"{name}.tsv").open("wb") as part:
                part.writelines(islice(text, count))
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=5_000_000)
    parser.add_argument("--peer-rows", type=int, default=1_000_000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--generated", type=Path, help="rows of the generated log")
    parser.add_argument("--peers", nargs="+", choices=(LOCAL, PYSPARK), default=[LOCAL, PYSPARK])
    parser.add_argument("--dry", action="store_true", help="print the figures without appending them to the results")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--log", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        parts = {name: options.log / f"{name}.tsv" for name in ("whole", "train", "valid")}
        print(json.dumps(SIDES[options.side](Job(**parts, out=options.out, threads=THREADS))))
        return
    import pyspark

    from terarec.apps.synthetic.criteo import generate

    with tempfile.TemporaryDirectory(prefix="terarec-prepare-spark-") as name:
        directory = Path(name)
        log = options.generated
        if log is None:
            generate(directory / "log", rows=options.rows, days=1, seed=0)
            log = directory / "log" / "day_0.tsv"
        whole = directory / "whole"
        whole.mkdir()
        (whole / "whole.tsv").symlink_to(log.resolve())
        few = cut(log, options.peer_rows, directory / "few")
        seconds: dict[str, list[float]] = {side: [] for side in (SPARK, *options.peers, BYTES)}
        for _ in range(options.repeats):
            for side in seconds:
                seconds[side].append(seconds_of(side, few if side == PYSPARK else whole))
    rates = {
        side: (options.peer_rows if side == PYSPARK else options.rows) / statistics.median(times)
        for side, times in seconds.items()
    }
    case = f"prepare Criteo on Spark, {MASTER}, {options.rows:,} rows, text to Parquet"
    rows = [
        SparkRow(
            case=case,
            metric="rate",
            value=rates[SPARK],
            unit="rows/s",
            peer=peer,
            peer_value=rates[peer],
            limit=rates[BYTES],
            rows=options.rows,
            peer_rows=options.peer_rows if peer == PYSPARK else options.rows,
            runs=options.repeats,
            pyspark=pyspark.__version__,
        )
        for peer in options.peers
    ]
    append_rows("prepare_spark", rows, dry=options.dry)


if __name__ == "__main__":
    main()
