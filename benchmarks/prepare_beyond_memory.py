# SPDX-License-Identifier: Apache-2.0
"""Compare group-bys, sorts and joins of more rows than fit a memory bound with DuckDB and Polars.

terarec partitions the rows into files by hash. All sides read the same uncompressed Parquet file, have the same memory
bound (Polars takes none; its engine streams) and must give the same bits: counts of values by falling count, sums of
floats in the order of the rows, rows in the order of a shuffle, and differences by group joined back to the rows. Every
side runs in a process of its own, in turns. It needs ``pip install duckdb polars``.
"""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from record import Row, append_rows

if TYPE_CHECKING:
    from terarec.etl.sink import SinkState
    from terarec.formats.block import ColumnBlock

_BATCH_ROWS = 1 << 16
_SEED = 5
_KEYS, _FLOATS = 26, 14


@dataclass(frozen=True, kw_only=True)
class LibraryRow(Row):
    """A row with the memory bound, the peak memory of both processes, and whether the peer's result is the same."""

    bound_mib: int
    peak_mib: float
    peer_peak_mib: float
    same_bits: str
    peer_version: str


class Digest:
    """A checksum of arrays in their order, independent of the batches."""

    def __init__(self) -> None:
        self._sums: dict[str, int] = {}

    def add(self, name: str, values: np.ndarray) -> None:
        self._sums[name] = zlib.crc32(np.ascontiguousarray(values).data, self._sums.get(name, 0))

    @property
    def text(self) -> str:
        return json.dumps(self._sums, sort_keys=True)


# Input files


def write_values(path: Path, rows: int) -> None:
    """Write mostly distinct integers, and floats."""
    generator = np.random.default_rng(0)
    values = (generator.random(rows) ** 2 * 0.7 * rows).astype(np.int64) * 2654435761
    _write(path, {"value": values, "x": generator.standard_normal(rows)})


def write_rows(path: Path, rows: int) -> None:
    """Write encoded rows of a data set as wide as Criteo's, with their positions in a shuffle."""
    from terarec.kernels.cpu.encoding import xxh64_int64

    generator = np.random.default_rng(0)
    ids = np.arange(rows, dtype=np.int64)
    columns: dict[str, np.ndarray] = {"row": ids, "place": xxh64_int64(ids, _SEED).view(np.uint64)}
    columns |= {f"k{number}": generator.integers(0, 1 << 20, rows, dtype=np.int32) for number in range(_KEYS)}
    columns |= {f"f{number}": generator.random(rows, dtype=np.float32) for number in range(_FLOATS)}
    _write(path, columns)


def write_events(path: Path, rows: int) -> None:
    """Write events of users, in the order of their times."""
    generator = np.random.default_rng(0)
    users = (generator.random(rows) ** 2 * rows / 20).astype(np.int64)
    times = np.cumsum(generator.integers(0, 5, rows))
    _write(path, {"row": np.arange(rows, dtype=np.int64), "user": users, "time": times})


def _write(path: Path, columns: dict[str, np.ndarray]) -> None:
    pq.write_table(pa.table(columns), path, row_group_size=_BATCH_ROWS, compression="none", use_dictionary=False)


def _batches(path: Path) -> Iterator[pa.RecordBatch]:
    return pq.ParquetFile(path).iter_batches(_BATCH_ROWS)


# terarec


def count_values(path: Path, work: Path, bound: int) -> str:
    from terarec.etl.columns import from_arrow
    from terarec.etl.values import ValueCounts

    counts = ValueCounts({"value": "integer"}, work, bound)
    for batch in _batches(path):
        counts.add("value", from_arrow(batch.column("value"), "integer"))
        counts.maybe_spill()
    return _digest([counts.kept("value", 2, None, None)])


def sum_by_value(path: Path, work: Path, bound: int) -> str:
    from terarec.etl.partitions import GroupSums

    schema = pa.schema({"value": pa.int64(), "x": pa.float64()})
    sums = GroupSums("value", schema, {"x": "sum"}, work, bound)
    for batch in _batches(path):
        sums.add(pa.Table.from_batches([batch]))
    return _digest([sums.result(lambda table: table, None)])


class _Rows:
    """A sink that only adds the rows to a checksum."""

    def __init__(self) -> None:
        self.digest = Digest()
        self._num_rows = 0

    def write(self, split: str, rows: np.ndarray, block: object) -> None:
        self._num_rows += len(rows)
        self.digest.add("row", rows)
        self.digest.add("k0", block.keys[0])
        self.digest.add("f1", block.dense[:, 0])

    def state(self) -> SinkState:
        from terarec.etl.sink import SinkState

        return SinkState(closed={"train": [self._num_rows]})

    def finish(self) -> Iterator[None]:
        return iter(())

    def close_split(self, split: str) -> None:
        pass

    def close(self) -> None:
        pass

    def __enter__(self) -> _Rows:
        return self

    def __exit__(self, *error: object) -> None:
        pass


def shuffle(path: Path, work: Path, bound: int) -> str:
    from terarec.etl.shuffle import ShuffledSink
    from terarec.etl.sink import SinkState

    sink, rows = _Rows(), pq.ParquetFile(path).metadata.num_rows
    with ShuffledSink(
        sink,
        work / "shuffle",
        num_labels=1,
        seed=_SEED,
        estimated_bytes=rows * 4 * (_KEYS + _FLOATS),
        memory_bytes=bound,
        rows_per_commit=rows,
        begin=SinkState(),
    ) as shuffled:
        for ids, _, block in _blocks(path):
            shuffled.write("train", ids, block)
        shuffled.close()
    return sink.digest.text


def _blocks(path: Path) -> Iterator[tuple[np.ndarray, np.ndarray, ColumnBlock]]:
    """Yield ids, positions and rows, in the form that preparation has them."""
    from terarec.formats.block import ColumnBlock

    for batch in _batches(path):
        columns = {name: column.to_numpy() for name, column in zip(batch.schema.names, batch.columns, strict=True)}
        floats = np.stack([columns[f"f{number}"] for number in range(_FLOATS)], axis=1)
        keys = tuple(columns[f"k{number}"] for number in range(_KEYS))
        yield columns["row"], columns["place"], ColumnBlock(label=floats[:, :1], dense=floats[:, 1:], keys=keys)


def lag_by_user(path: Path, work: Path, bound: int) -> str:
    from terarec.etl.columns import Rows, from_arrow
    from terarec.etl.engine.grouped import GroupedRows, _Scatter, partition_count
    from terarec.etl.ops import DifferenceLag

    file, step = pq.ParquetFile(path), DifferenceLag(columns=("time",), group="user", order="row", outputs=("lag",))
    count = partition_count(file.metadata.num_rows * 24, bound)
    scatter = _Scatter(step, 0, work / "in-0", count)
    for batch in _batches(path):
        columns = {name: from_arrow(batch.column(name), "integer") for name in ("row", "user", "time")}
        scatter.add(*scatter.observe(Rows(columns, batch.column("row").to_numpy())))
    scatter.finish_into(work / "out-0")
    joined, digest = GroupedRows(work, (0,), count), Digest()
    for end in range(_BATCH_ROWS, file.metadata.num_rows + _BATCH_ROWS, _BATCH_ROWS):
        block = joined.rows_before(end)
        (lag,) = block.columns.values()
        digest.add("row", block.ids)
        digest.add("lag", lag.fill_null(-1).to_numpy())
    return digest.text


# DuckDB


def _duckdb(sql: str, path: Path, work: Path, bound: int, threads: int | None = None) -> str:
    import duckdb

    connection = duckdb.connect()
    connection.execute(f"SET memory_limit = '{bound >> 20}MiB'; SET temp_directory = '{work}'")
    if threads is not None:
        connection.execute(f"SET threads = {threads}")
    result = connection.execute(sql.format(file=f"read_parquet('{path}')"))
    return _digest(pa.Table.from_batches([batch]) for batch in result.to_arrow_reader(_BATCH_ROWS))


def shuffle_by_duckdb(path: Path, work: Path, bound: int) -> str:
    """Shuffle by a sink over DuckDB, which takes blocks of preparation one by one and returns them in the new order."""
    import duckdb

    from terarec.etl.shuffle import block_from_table, block_to_batch

    sink = _Rows()
    connection = duckdb.connect(str(work / "rows.duckdb"))
    connection.execute(f"SET memory_limit = '{bound >> 20}MiB'; SET temp_directory = '{work}'")
    for number, (ids, place, block) in enumerate(_blocks(path)):
        batch = pa.Table.from_batches([block_to_batch(ids, block, place)])
        connection.register("batch", batch)
        connection.execute(f"{'INSERT INTO rows' if number else 'CREATE TABLE rows AS'} SELECT * FROM batch")
    result = connection.execute("SELECT * FROM rows ORDER BY place, row").to_arrow_reader(1 << 14)
    for batch in result:
        table = pa.Table.from_batches([batch])
        sink.write("train", table.column("row").to_numpy(), block_from_table(table, 1))
    connection.close()
    return sink.digest.text


def lag_by_duckdb(path: Path, work: Path, bound: int) -> str:
    """Sort the rows by user, and the results back, in DuckDB; the operator is terarec's, as in a workflow."""
    import duckdb

    from terarec.etl.columns import Rows, from_arrow
    from terarec.etl.ops import DifferenceLag

    step = DifferenceLag(columns=("time",), group="user", order="row", outputs=("lag",))
    connection = duckdb.connect(str(work / "rows.duckdb"))
    connection.execute(f"SET memory_limit = '{bound >> 20}MiB'; SET temp_directory = '{work}'")
    connection.execute("CREATE TABLE done (row BIGINT, lag BIGINT)")
    reading = connection.cursor()
    ordered = reading.execute(f"SELECT row, user, time FROM read_parquet('{path}') ORDER BY user, row")
    rest: list[pa.Table] = []

    def insert(rows: pa.Table) -> None:
        columns = {name: from_arrow(rows.column(name), "integer") for name in rows.column_names}
        block = step.transform(Rows(columns, rows.column("row").to_numpy()), None)
        made = pa.table({"row": rows.column("row"), "lag": block.columns["lag"]})
        connection.register("made", made)
        connection.execute("INSERT INTO done SELECT * FROM made")

    for batch in ordered.to_arrow_reader(_BATCH_ROWS * 8):
        users = batch.column("user").to_numpy()
        whole = int(np.searchsorted(users, users[-1]))  # rows of users who end in this batch
        if whole:
            insert(pa.concat_tables([*rest, pa.Table.from_batches([batch.slice(0, whole)])]))
            rest = []
        rest.append(pa.Table.from_batches([batch.slice(whole)]))
    insert(pa.concat_tables(rest))
    result = connection.execute("SELECT * FROM done ORDER BY row").to_arrow_reader(_BATCH_ROWS)
    return _digest(pa.Table.from_batches([batch]) for batch in result)


COUNT_SQL = "SELECT value, count(*) AS count FROM {file} GROUP BY value HAVING count(*) >= 2 ORDER BY 2 DESC, 1"
SUM_SQL = "SELECT value, sum(x) AS x FROM {file} GROUP BY value ORDER BY 1"
SHUFFLE_SQL = "SELECT * EXCLUDE (place) FROM {file} ORDER BY place, row"
LAG_SQL = "SELECT row, time - lag(time) OVER (PARTITION BY user ORDER BY row) AS lag FROM {file} ORDER BY row"


# Polars


def _polars(query: Callable[[object], object], path: Path) -> str:
    import polars as pl

    return _digest([query(pl.scan_parquet(path)).collect(engine="streaming").to_arrow()])


def polars_counts(path: Path, work: Path, bound: int) -> str:
    import polars as pl

    def query(rows):
        counts = rows.group_by("value").agg(pl.len().cast(pl.Int64).alias("count")).filter(pl.col("count") >= 2)
        return counts.sort(["count", "value"], descending=[True, False])

    return _polars(query, path)


def polars_sums(path: Path, work: Path, bound: int) -> str:
    import polars as pl

    return _polars(lambda rows: rows.group_by("value").agg(pl.col("x").sum()).sort("value"), path)


def polars_shuffle(path: Path, work: Path, bound: int) -> str:
    return _polars(lambda rows: rows.sort("place", "row").drop("place"), path)


def polars_lag(path: Path, work: Path, bound: int) -> str:
    import polars as pl

    lag = pl.col("time").diff().over("user", order_by="row").alias("lag")
    return _polars(lambda rows: rows.select("row", lag).sort("row"), path)


def _digest(tables: Iterable[pa.Table]) -> str:
    """Return the checksum of a result; of wide rows, only of two columns."""
    digest = Digest()
    for table in tables:
        for name in table.column_names:
            if len(table.column_names) <= 2 or name in ("row", "k0", "f1"):
                column = table.column(name)
                if column.null_count:
                    column = pc.fill_null(column, -1)
                digest.add(name, column.to_numpy())
    return digest.text


Side = Callable[[Path, Path, int], str]


@dataclass(frozen=True, kw_only=True)
class Case:
    """A task: its input and its sides; the first side is terarec."""

    title: str
    rows: int
    write: Callable[[Path, int], None]
    sides: dict[str, Side]


def _by_duckdb(sql: str, threads: int | None = None) -> Side:
    return lambda path, work, bound: _duckdb(sql, path, work, bound, threads)


CASES = {
    "counts": Case(
        title="count 10,000,000 integers, 3,200,000 kept, by falling count",
        rows=10_000_000,
        write=write_values,
        sides={"terarec": count_values, "DuckDB": _by_duckdb(COUNT_SQL), "Polars": polars_counts},
    ),
    "sums": Case(
        title="sum 10,000,000 floats by integer in the order of the rows",
        rows=10_000_000,
        write=write_values,
        sides={
            "terarec": sum_by_value,
            "DuckDB": _by_duckdb(SUM_SQL),
            "DuckDB, 1 thread": _by_duckdb(SUM_SQL, 1),
            "Polars": polars_sums,
        },
    ),
    "shuffle": Case(
        title="shuffle 2,000,000 rows of 160 bytes by the hash of their ids",
        rows=2_000_000,
        write=write_rows,
        sides={
            "terarec": shuffle,
            "DuckDB": _by_duckdb(SHUFFLE_SQL),
            "DuckDB, as a sink": shuffle_by_duckdb,
            "Polars": polars_shuffle,
        },
    ),
    "lag": Case(
        title="difference of 10,000,000 times to the last of the same user, joined back",
        rows=10_000_000,
        write=write_events,
        sides={
            "terarec": lag_by_user,
            "DuckDB": _by_duckdb(LAG_SQL),
            "DuckDB, our operator": lag_by_duckdb,
            "Polars": polars_lag,
        },
    ),
}


_MODULES = {
    "terarec": ("terarec.etl.engine", "terarec.etl.ops", "terarec.etl.shuffle", "terarec.etl.values"),
    "DuckDB": ("duckdb",),
    "Polars": ("polars",),
}
"""Imports of a side, which are not timed."""


def run_side(case: str, side: str, path: Path, bound: int) -> None:
    """Run one side in this process; print its seconds without imports, its peak memory and its checksum."""
    from terarec.kernels.memory import peak_bytes

    for module in _MODULES[side.split(",")[0]]:
        importlib.import_module(module)
    with tempfile.TemporaryDirectory(dir=path.parent) as work:
        start = time.perf_counter()
        digest = CASES[case].sides[side](path, Path(work), bound)
        seconds = time.perf_counter() - start
    print(json.dumps({"seconds": seconds, "peak_bytes": peak_bytes(), "digest": digest}))


def compare(name: str, folder: Path, bound: int, repeats: int, chosen: list[str]) -> Iterator[LibraryRow]:
    """Yield the result rows of one case, with all sides in turns."""
    case, path = CASES[name], folder / f"{name}.parquet"
    case.write(path, case.rows)
    sides = [side for side in case.sides if side == "terarec" or side.split(",")[0] in chosen]
    turns: dict[str, list[dict[str, object]]] = {side: [] for side in sides}
    for _ in range(repeats):
        for side in list(turns):
            command = [sys.executable, __file__, "--side", name, side, "--file", str(path), "--bound", str(bound >> 20)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                print(f"{name}, {side}: {done.stderr.strip().splitlines()[-1]}", flush=True)
                del turns[side]
            else:
                turns[side].append(json.loads(done.stdout.splitlines()[-1]))
    path.unlink()
    rates = {side: case.rows / statistics.median(turn["seconds"] for turn in found) for side, found in turns.items()}
    peaks = {side: max(turn["peak_bytes"] for turn in found) / 2**20 for side, found in turns.items()}
    print(f"{name}: peak MiB { ({side: round(peak) for side, peak in peaks.items()}) }", flush=True)
    (own,) = {turn["digest"] for turn in turns["terarec"]}
    for side in sides[1:]:
        if side not in turns:
            continue
        digests = {turn["digest"] for turn in turns[side]}
        same_bits = "yes" if digests == {own} else "no" if len(digests) == 1 else "no, and differs from run to run"
        print(f"{name}, {side}: same bits: {same_bits}")
        yield LibraryRow(
            case=case.title,
            metric="rate",
            value=rates["terarec"],
            unit="rows/s",
            peer=side,
            peer_value=rates[side],
            bound_mib=bound >> 20,
            peak_mib=peaks["terarec"],
            peer_peak_mib=peaks[side],
            same_bits=same_bits,
            peer_version=metadata.version(side.split(",")[0].lower()),
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--peer", nargs="+", choices=("DuckDB", "Polars"), default=["DuckDB", "Polars"])
    parser.add_argument("--bound", type=int, default=128, help="bound of memory in MiB")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="directory on a disk with space for a few times the rows")
    parser.add_argument("--dry", action="store_true", help="print the figures without appending them to the results")
    parser.add_argument("--side", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--file", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        run_side(*options.side, options.file, options.bound << 20)
        return
    with tempfile.TemporaryDirectory(prefix="terarec-beyond-", dir=options.folder) as folder:
        for name in options.case:
            rows = compare(name, Path(folder), options.bound << 20, options.repeats, options.peer)
            append_rows("prepare_beyond_memory", rows, dry=options.dry)


if __name__ == "__main__":
    main()
