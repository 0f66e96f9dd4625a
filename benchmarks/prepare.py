# SPDX-License-Identifier: Apache-2.0
"""Encode Criteo text to Parquet with ids by frequency; compare with the same job in Polars, scans, and a bare read.

terarec runs the job twice: by the preset, and then with the workflow that the first run fitted. Scans by Polars, DuckDB
and PyArrow only parse the same text.
Every side runs in a process of its own, in turns, on the same generated log (in the page cache).
"""

import argparse
import importlib.util
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from peer_sides.criteo_job import CATEGORIES, INTEGERS, MIN_COUNT, VALID_FRACTION
from record import Row, append_rows


def with_terarec(log: Path, out: Path) -> None:
    from terarec.etl import prepare
    from terarec.etl.ready import criteo
    from terarec.etl.workflow import Workflow
    from terarec.spec import SplitByFraction

    workflow = Workflow.of(criteo(min_count=MIN_COUNT, split=SplitByFraction(valid=VALID_FRACTION)))
    prepare(workflow, [log], out)


def with_fitted_workflow(log: Path, out: Path) -> None:
    """Transform in a second run, with the workflow that `with_terarec` has fitted."""
    from terarec.etl import prepare
    from terarec.etl.workflow import Workflow

    prepare(Workflow.load(out.parent / "terarec" / "workflow"), [log], out)


def lines_by_polars(log: Path):
    """Return the log as a lazy frame."""
    import polars as pl

    schema = {"label": pl.Int32} | dict.fromkeys(INTEGERS, pl.Int32) | dict.fromkeys(CATEGORIES, pl.String)
    return pl.scan_csv(log, separator="\t", has_header=False, schema=schema)


def with_polars(log: Path, out: Path) -> None:
    """Run the job in lazy Polars with hexadecimal as text and ids by joins: the fastest of six formulations."""
    import polars as pl

    lines = lines_by_polars(log)
    rows = lines.select(pl.len()).collect(engine="streaming").item()
    train_rows = rows - round(rows * VALID_FRACTION)
    train = lines.head(train_rows)
    minima = train.select(pl.col(INTEGERS).fill_null(0).min()).collect(engine="streaming").row(0, named=True)
    ids = pl.collect_all([ids_of(train, name) for name in CATEGORIES], engine="streaming")
    logs = [(pl.col(name).fill_null(0).clip(low) + (1 - low)).log().cast(pl.Float32) for name, low in minima.items()]
    encoded = lines.with_columns(pl.col("label").cast(pl.Float32), *logs)
    for name, table in zip(CATEGORIES, ids, strict=True):
        encoded = encoded.join(table.lazy(), on=name, how="left", maintain_order="left").with_columns(
            pl.when(pl.col(name).is_null()).then(0).otherwise(pl.col("id").fill_null(1)).cast(pl.Int32).alias(name)
        ).drop("id")  # fmt: skip
    out.mkdir()
    encoded.head(train_rows).sink_parquet(out / "train.parquet", compression="snappy")
    encoded.slice(train_rows).sink_parquet(out / "valid.parquet", compression="snappy")


def ids_of(train, name):
    """Return the table of the values of a column and their ids."""
    import polars as pl

    counts = train.filter(pl.col(name).is_not_null()).group_by(name).len().filter(pl.col("len") >= MIN_COUNT)
    return counts.sort(["len", name], descending=[True, False]).select(name).with_row_index("id", offset=2)


def scan_with_polars(log: Path, out: Path) -> None:
    import polars as pl

    lines_by_polars(log).select(pl.all().null_count()).collect(engine="streaming")


def scan_with_pyarrow(log: Path, out: Path) -> None:
    import pyarrow as pa
    from pyarrow import csv

    types = dict.fromkeys(["label", *INTEGERS], pa.int32()) | dict.fromkeys(CATEGORIES, pa.string())
    with csv.open_csv(
        log,
        csv.ReadOptions(column_names=list(types)),
        csv.ParseOptions(delimiter="\t"),
        csv.ConvertOptions(column_types=types, strings_can_be_null=True),
    ) as reader:
        for _ in reader:
            pass


def scan_with_duckdb(log: Path, out: Path) -> None:
    """Count the values of every column, so that all columns are parsed."""
    import duckdb

    types = dict.fromkeys(["label", *INTEGERS], "INTEGER") | dict.fromkeys(CATEGORIES, "VARCHAR")
    read = f"read_csv('{log}', delim='\t', header=false, auto_detect=false, columns={types})"
    duckdb.sql(f"SELECT {', '.join(f'count({name})' for name in types)} FROM {read}").fetchall()


def read_bytes(log: Path, out: Path) -> None:
    with log.open("rb", buffering=0) as file:
        while file.read(1 << 20):
            pass


SIDES: dict[str, Callable[[Path, Path], None]] = {
    "terarec": with_terarec,
    "fitted workflow": with_fitted_workflow,
    "Polars": with_polars,
    "Polars scan": scan_with_polars,
    "pyarrow.csv scan": scan_with_pyarrow,
    "DuckDB scan": scan_with_duckdb,
    "reading the bytes": read_bytes,
}

SCANS = ("Polars scan", "pyarrow.csv scan", "DuckDB scan")
"""Sides that only parse. The goal of preparation is 60 % of the fastest of them."""

MODULES = {
    "terarec": ["terarec.etl.engine", "terarec.etl.ready"],
    "fitted workflow": ["terarec.etl.engine", "terarec.etl.ready"],
    "Polars": ["polars"],
    "Polars scan": ["polars"],
    "pyarrow.csv scan": ["pyarrow.csv"],
    "DuckDB scan": ["duckdb"],
    "reading the bytes": [],
}
"""Imports of a side, which are not timed."""


def load_side(name: str) -> None:
    """Import the modules of a side before the timing."""
    for module in MODULES[name]:
        importlib.import_module(module)


def run_side(name: str, log: Path, out: Path) -> None:
    """Run one side in this process; print its seconds without imports, and its peak memory."""
    from terarec.kernels.memory import peak_bytes

    load_side(name)
    start = time.perf_counter()
    SIDES[name](log, out)
    seconds = time.perf_counter() - start
    print(json.dumps({"seconds": seconds, "peak_bytes": peak_bytes()}))


def time_sides(names: list[str], log: Path, out: Path, repeats: int) -> dict[str, dict[str, float]]:
    """Return median seconds and peak memory over `repeats` turns, by name; the last output is in ``out/<name>``."""
    results: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    for _ in range(repeats):
        for name in names:
            written = out / name
            shutil.rmtree(written, ignore_errors=True)
            command = [sys.executable, __file__, "--side", name, "--log", str(log), "--out", str(written)]
            printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            results[name].append(json.loads(printed))
    return {
        name: {
            "seconds": statistics.median(turn["seconds"] for turn in turns),
            "peak_bytes": max(turn["peak_bytes"] for turn in turns),
        }
        for name, turns in results.items()
    }


def side_rows(case: str, num_rows: int, sides: dict[str, dict[str, float]]) -> list[Row]:
    """Return the rates and peak memory of the sides."""
    rates = {side: num_rows / figures["seconds"] for side, figures in sides.items()}
    ours, limit = rates["terarec"], rates["reading the bytes"]
    rows = [
        Row(case=case, metric="rate", value=ours, unit="rows/s", peer=peer, peer_value=rates[peer], limit=limit)
        for peer in ("Polars", *SCANS)
        if peer in rates
    ] or [Row(case=case, metric="rate", value=ours, unit="rows/s", limit=limit)]
    rows.append(
        Row(
            case=f"{case}, fitted workflow",
            metric="rate",
            value=rates["fitted workflow"],
            unit="rows/s",
            peer="workflow",
            peer_value=ours,
            limit=limit,
        )
    )
    rows += [
        Row(case=case, metric=f"peak memory of {side}", value=sides[side]["peak_bytes"] / 2**20, unit="MiB")
        for side in ("terarec", "Polars")
        if side in sides
    ]
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=2_000_000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--alone", action="store_true", help="leave out the peers, for logs too large for them")
    parser.add_argument("--scans", action="store_true", help="leave out the peers that do more than parse")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--log", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.side:
        run_side(arguments.side, arguments.log, arguments.out)
        return
    from terarec.apps.synthetic.criteo import generate

    own = ["terarec", "fitted workflow", "reading the bytes"]
    names = own if arguments.alone else [*own, *SCANS] if arguments.scans else list(SIDES)
    names = [name for name in names if all(map(importlib.util.find_spec, MODULES[name][:1]))]
    with tempfile.TemporaryDirectory(prefix="terarec-prepare-") as name:
        directory = Path(name)
        made = generate(directory / "log", rows=arguments.rows, days=1, seed=0)
        log = directory / "log" / "day_0.tsv"
        sides = time_sides(names, log, directory, arguments.repeats)
        log_name = f"Criteo, {arguments.rows:,} rows ({made.text_bytes / 1e9:.1f} GB)"
        rows = side_rows(f"prepare {log_name}, text to Parquet", arguments.rows, sides)
        rows.append(Row(case=f"generate {log_name}", metric="rate", value=made.rows_per_second, unit="rows/s"))
        append_rows("prepare", rows)


if __name__ == "__main__":
    main()
