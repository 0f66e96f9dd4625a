# SPDX-License-Identifier: Apache-2.0
"""PySpark on all cores of one machine: only DataFrame functions, ids by broadcast joins."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pyspark
from pyspark.sql import Column, DataFrame, SparkSession, Window
from pyspark.sql import functions as F

from peer_sides.criteo_job import CATEGORIES, INTEGERS, MIN_COUNT, Counts, Job
from peer_sides.id_counts import id_counts

_DRIVER_MEMORY = "8g"
_SHUFFLE_PARTITIONS_A_CORE = 4


class DataFrames:
    """Implements `Side`.

    All categories are counted in one shuffle, as rows of (column, value). Each column has one broadcast join, so the
    rows are never shuffled. Both parts are joined and written in one job.
    """

    version = f"pyspark {pyspark.__version__}"

    def __init__(self, threads: int) -> None:
        self.spark = (
            SparkSession.builder.master(f"local[{threads}]")
            .config("spark.driver.memory", _DRIVER_MEMORY)
            .config("spark.ui.enabled", "false")
            .config("spark.sql.shuffle.partitions", _SHUFFLE_PARTITIONS_A_CORE * threads)
            .config("spark.sql.adaptive.enabled", "false")
            .config("spark.local.dir", tempfile.gettempdir())
            .getOrCreate()
        )
        self.spark.range(1).count()

    def prepare(self, job: Job) -> None:
        train = self._lines(job.train)
        lows = train.agg(*[F.min(F.coalesce(name, F.lit(0))).alias(name) for name in INTEGERS]).first()
        ids = _ids(train).persist()
        numbers = [_log(name, lows[name]).cast("float").alias(name) for name in INTEGERS]
        parts = [self._lines(part).withColumn("part", F.lit(part.stem)) for part in (job.train, job.valid)]
        encoded = parts[0].union(parts[1]).select("part", "label", *numbers, *CATEGORIES)
        for number, name in enumerate(CATEGORIES):
            encoded = _encoded(encoded, ids.filter(F.col("column") == number), name)
        encoded.write.partitionBy("part").parquet(str(job.out / "encoded"))
        ids.unpersist()

    def counts(self, job: Job) -> Counts | None:
        train = job.out / "encoded" / f"part={job.train.stem}"
        return id_counts(sorted(train.glob("*.parquet")), special=(0, 1))

    def _lines(self, path: Path) -> DataFrame:
        columns = ["label float", *(f"{name} int" for name in INTEGERS), *(f"{name} string" for name in CATEGORIES)]
        return self.spark.read.csv(str(path), sep="\t", schema=", ".join(columns))


def _log(name: str, low: int) -> Column:
    return F.log(F.greatest(F.coalesce(name, F.lit(0)), F.lit(low)) + (1 - low))


def _ids(train: DataFrame) -> DataFrame:
    """Return (column, value, id) of the values that are kept."""
    pairs = train.select(F.posexplode(F.array(*CATEGORIES)).alias("column", "value")).filter("value is not null")
    counts = pairs.groupBy("column", "value").count().filter(F.col("count") >= MIN_COUNT)
    rank = F.row_number().over(Window.partitionBy("column").orderBy(F.desc("count"), "value"))
    return counts.select("column", "value", (rank + 1).alias("id"))


def _encoded(rows: DataFrame, ids: DataFrame, name: str) -> DataFrame:
    """Return `rows` with the values of a column replaced by ids."""
    table = F.broadcast(ids.select(F.col("value").alias(name), F.col("id")))
    found = F.when(F.col(name).isNull(), 0).otherwise(F.coalesce("id", F.lit(1))).cast("int")
    return rows.join(table, on=name, how="left").withColumn(name, found).drop("id")
