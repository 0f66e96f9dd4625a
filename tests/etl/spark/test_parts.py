"""What the Spark engine is made of."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from terarec.errors import MissingDependencyError
from terarec.etl.columns import Block, from_arrow
from terarec.etl.engine.split import RowBounds, assign
from terarec.etl.spark.session import check_spark
from terarec.kernels.cpu.encoding import xxh64_int64
from terarec.spec import SplitByFiles, SplitByFraction, SplitByHash, SplitByTime, SplitByUser
from tests.etl.spark.shop import exploded


@pytest.mark.parametrize("seed", [0, 1, 42, 2**63 - 1, 7])
def test_hashes_take_any_seed(spark: Any, seed: int) -> None:
    from pyspark.sql import functions as F

    from terarec.etl.spark.expressions import hashed

    values = [0, 1, -1, 2**63 - 1, -(2**63), 123456789]
    frame = spark.createDataFrame(pa.table({"value": pa.array(values, pa.int64())}))
    found = frame.select("value", hashed(F.col("value"), seed).alias("hash")).toArrow()
    expected = xxh64_int64(np.array(found.column("value")), seed)
    assert found.column("hash").to_pylist() == expected.tolist()


def test_lines_are_numbered_whatever_the_partitions(spark: Any, tmp_path: Path) -> None:
    from terarec.etl.spark.lines import number_lines

    choose = random.Random(0)
    paths, expected = [], []
    for file, rows in enumerate([2000, 1, 0, 3000]):
        path = tmp_path / f"{file}.txt"
        lines = [f"{file} {row} " + "\u00e9" * choose.randint(0, 40) for row in range(rows)]
        held = [item for line in lines for item in ([line, ""] if choose.random() < 0.1 else [line])]
        path.write_text("\n".join(["header", *held]), "latin-1")
        paths.append(str(path))
        expected += [(file, held.index(line) + 2, line) for line in lines]
    numbered = number_lines(spark, paths, header=True, encoding="latin-1")
    assert numbered.frame.rdd.getNumPartitions() > 5
    found = sorted((row[3], (row[1], row[2], row[0])) for row in numbered.frame.collect())
    assert [row for row, _ in found] == list(range(5001))
    assert [what for _, what in found] == expected
    assert numbered.file_rows == (2000, 1, 0, 3000)
    assert numbered.headers == ("header",) * 4


def test_values_are_found_at_positions(spark: Any) -> None:
    from pyspark.sql import functions as F

    from terarec.etl.spark.ranks import number_below, values_at

    choose = np.random.default_rng(0)
    keys = np.unique(choose.integers(-(2**63), 2**63 - 1, 3000))
    frame = spark.createDataFrame(pa.table({"k": choose.permutation(keys)}))
    positions = [0, 1, 100, 1500, len(keys) - 1]
    assert values_at(frame, F.col("k"), positions) == [int(keys[position]) for position in positions]
    bounds = [int(key) for key in keys[10::17]]
    found = frame.select("k", number_below(F.col("k"), bounds).alias("n")).toArrow()
    assert found.column("n").to_pylist() == np.searchsorted(bounds, found.column("k"), side="right").tolist()


@pytest.mark.parametrize("broadcast_rows", [1000, 30])
def test_tables_are_joined_whole_and_in_two_steps(spark: Any, tmp_path: Path, broadcast_rows: int) -> None:
    from pyspark.sql import functions as F

    from terarec.etl.spark.expressions import ROW
    from terarec.etl.spark.tables import VALUE, Tables

    choose = random.Random(1)
    words = [f"w{number}" for number in range(100)]
    asked = [choose.choice([None, "unseen", "", words[0], choose.choice(words)]) for _ in range(500)]
    frame = spark.createDataFrame(pa.table({ROW: pa.array(range(500)), "word": pa.array(asked, pa.string())}))
    table = pa.table({VALUE: pa.array(words, pa.large_string()), "id": pa.array(range(100))})
    joined = Tables(spark, tmp_path, broadcast_rows).join(frame, F.col("word"), "words", table)
    known = {word: number for number, word in enumerate(words)}
    found = {row[ROW]: row["id"] for row in joined.collect()}
    assert found == {row: known.get(word) for row, word in enumerate(asked)}


@pytest.mark.parametrize(
    ("split", "bounds"),
    [
        (SplitByFraction(valid=0.2, test=0.1), RowBounds(valid_from=280, test_from=360, end=400)),
        (SplitByFiles(valid=1, test=1), RowBounds(valid_from=100, test_from=300, end=400)),
        (SplitByHash(valid=0.3, test=0.2, seed=9), None),
        (SplitByUser(column="user", valid=0.3, test=0.2, seed=5), None),
        (SplitByTime(column="time", valid_from=300.0, test_from=350.5), None),
    ],
)
def test_rows_are_split_as_the_local_engine_does(spark: Any, split: Any, bounds: RowBounds | None) -> None:
    from terarec.etl.spark.expressions import ROW
    from terarec.etl.spark.splits import split_column

    users = [None if row % 9 == 0 else f"u{row % 40}" for row in range(400)]
    times = [None if row % 7 == 0 else row for row in range(400)]
    table = pa.table({ROW: pa.array(range(400)), "user": pa.array(users), "time": pa.array(times)})
    spec = dataclasses.replace(exploded(split), steps=(), categorical=(), dense=("stock",))
    frame = spark.createDataFrame(table)
    found = frame.select(ROW, split_column(spec, frame, [100, 200, 100]).alias("split")).toArrow().sort_by(ROW)
    columns = {"user": from_arrow(table.column("user"), "text"), "time": from_arrow(table.column("time"), "integer")}
    expected = assign(split, bounds)(Block(columns, np.arange(400)))
    assert found.column("split").to_pylist() == expected.tolist()


def test_a_missing_java_is_told_in_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("pyspark", reason="PySpark is not installed")
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    with pytest.raises(MissingDependencyError, match=r"needs Java 17 or later, found .*/bin/java, which does not run"):
        check_spark()
    java = tmp_path / "bin" / "java"
    java.parent.mkdir()
    java.write_text("#!/bin/sh\necho 'openjdk version \"11.0.2\" 2019-01-15' >&2\n")
    java.chmod(0o755)
    with pytest.raises(MissingDependencyError, match="needs Java 17 or later, found Java 11 at"):
        check_spark()
