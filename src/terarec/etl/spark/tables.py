"""Small tables that rows are joined with: what steps learnt, by value."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from terarec.etl.spark.expressions import ROW, column, field_getter

VALUE = "value"
"""The column of a table that rows are joined by."""

BROADCAST_ROWS = 1 << 20
"""A table of at most so many rows goes whole to every executor: tens of MB for a vocabulary."""
FREQUENT_ROWS = 1 << 16
"""Of a larger one the first rows, which are the most frequent values of a vocabulary, do."""

_SALTS = 1 << 12
_JOINED, _SALT, _FOUND = "__terarec_joined", "__terarec_salt", "__terarec_found"


class Tables:
    """Tables as Spark reads them, each written once.

    Args:
        spark: the session.
        directory: for their files; every executor sees it.
        broadcast_rows: see `BROADCAST_ROWS`.
    """

    def __init__(self, spark: SparkSession, directory: Path, broadcast_rows: int = BROADCAST_ROWS) -> None:
        self._spark = spark
        self._directory = directory
        self._broadcast_rows = broadcast_rows
        self._known: dict[str, tuple[DataFrame, DataFrame | None]] = {}

    def join(self, frame: DataFrame, key: Column, name: str, table: pa.Table) -> DataFrame:
        """`frame` with the columns of the row of `table` whose `VALUE` equals `key`; null where there is none.

        A large table is joined in two steps, so that no task gets all rows of a frequent value: the first rows of the
        table go to every executor, and only rows that they leave open meet the rest of it.

        Args:
            frame: the rows.
            key: null where missing.
            name: of the table, which is read from `table` once.
            table: `VALUE`, distinct and never null, and other columns, frequent values first.
        """
        frequent, rest = self._frames(name, table)
        others = [other for other in table.column_names if other != VALUE]
        if rest is None:
            first = frequent.withColumnRenamed(VALUE, _JOINED)
            return frame.join(F.broadcast(first), key == F.col(_JOINED), "left").drop(_JOINED)
        first = frequent.select(F.col(VALUE).alias(_JOINED), F.lit(1).alias(_FOUND), *others)
        joined = frame.withColumn(_JOINED, key).join(F.broadcast(first), _JOINED, "left")
        return _join_rest(joined, rest, others).drop(_JOINED, _FOUND)

    def join_items(self, frame: DataFrame, name: str, read: str, table: pa.Table) -> tuple[DataFrame, Sequence[str]]:
        """The same for the items of the lists `read`: each column of `table` becomes a list of those of the items."""
        place, item, found = "__terarec_place", "__terarec_item", "__terarec_items"
        items = frame.select(ROW, F.posexplode(column(read)).alias(place, item))
        others = [other for other in table.column_names if other != VALUE]
        joined = self.join(items, F.col(item), name, table)
        lists = joined.groupBy(ROW).agg(F.array_sort(F.collect_list(F.struct(place, *others))).alias(found))
        made = [F.transform(F.col(found), field_getter(other)).alias(other) for other in others]
        return frame.join(lists.select(ROW, *made), ROW, "left"), others

    def _frames(self, name: str, table: pa.Table) -> tuple[DataFrame, DataFrame | None]:
        if name not in self._known:
            if table.num_rows <= self._broadcast_rows:
                self._known[name] = (self._frame(name, table), None)
            else:
                cut = min(FREQUENT_ROWS, self._broadcast_rows)
                rest = self._frame(f"{name}-rest", table.slice(cut))
                self._known[name] = (self._frame(name, table.slice(0, cut)), rest)
        return self._known[name]

    def _frame(self, name: str, table: pa.Table) -> DataFrame:
        signed = pa.table({field: _signed(table.column(field)) for field in table.column_names})
        self._directory.mkdir(parents=True, exist_ok=True)
        path = self._directory / f"{len(self._known)}-{len(list(self._directory.iterdir()))}.parquet"
        pq.write_table(signed, path, store_schema=False)
        schema = self._spark.createDataFrame(signed.slice(0, 0)).schema
        return self._spark.read.schema(schema).parquet(str(path))


def _signed(values: pa.ChunkedArray) -> pa.ChunkedArray:
    """`values` in a type that Spark has."""
    types = {pa.uint32(): pa.int64(), pa.large_string(): pa.string()}
    if pa.types.is_large_list(values.type):
        return values.cast(pa.list_(types.get(values.type.value_type, values.type.value_type)))
    return values.cast(types.get(values.type, values.type))


def _join_rest(joined: DataFrame, rest: DataFrame, others: Sequence[str]) -> DataFrame:
    """Fill what is open from the `rest` of a table; rows that are not open are spread over the tasks."""
    is_open = F.col(_FOUND).isNull() & F.col(_JOINED).isNotNull()
    salt = F.when(is_open, F.lit(0)).otherwise(F.pmod(F.xxhash64(ROW), F.lit(_SALTS)) + 1).cast("bigint")
    key = F.when(is_open, F.col(_JOINED))
    again = [F.col(other).alias(f"__terarec_rest_{place}") for place, other in enumerate(others)]
    value = "__terarec_value"
    right = rest.select(F.col(VALUE).alias(value), F.lit(0).cast("bigint").alias(_SALT), *again)
    empty = F.lit("") if dict(rest.dtypes)[VALUE] == "string" else F.lit(0)
    left = joined.withColumns({_SALT: salt, value: F.coalesce(key, empty)})
    met = left.join(right, [_SALT, value], "left")
    filled = {other: F.coalesce(F.col(other), F.col(f"__terarec_rest_{place}")) for place, other in enumerate(others)}
    return met.withColumns(filled).drop(_SALT, value, *(f"__terarec_rest_{place}" for place in range(len(others))))
