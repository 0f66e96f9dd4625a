"""What to make of a CSV file: its layout, which columns matter and how each is encoded, and how it is split."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from terarec.spec import checks


@dataclass(frozen=True, kw_only=True, slots=True)
class CsvLayout:
    """How a text file holds a table. Files that end in .gz, .bz2, .zst or .lz4 are decompressed while read.

    Attributes:
        delimiter: one character between the fields; white space around a field is dropped.
        names: the columns' names, in order, for files without a header line; empty to take the first line's.
        missing: fields that stand for a missing value.
    """

    delimiter: str = ","
    names: tuple[str, ...] = ()
    missing: tuple[str, ...] = ("", "?")

    def __post_init__(self) -> None:
        if not isinstance(self.delimiter, str) or len(self.delimiter) != 1 or not self.delimiter.isascii():
            checks.fail(self, "delimiter", "one ASCII character")
        if self.delimiter in '"\r\n':
            checks.fail(self, "delimiter", "a character other than a quote or a line end")
        checks.distinct(self, "names", self.names)


@dataclass(frozen=True, kw_only=True, slots=True)
class CsvOptions:
    """Columns and splits of a data set made from CSV files. Columns that are not named are left out.

    Attributes:
        label: the target's column.
        positives: the label's values that mean 1, all others meaning 0; empty if the column holds numbers.
        dense: columns of numbers, standardized to mean 0 and deviation 1 of the training part.
        log: columns of numbers that count something: ln(x + shift), for long tails.
        categorical: columns of texts that become ids.
        integer_categorical: columns of integers, such as user ids, that become ids. Of a column x that is a number as
            well (in `dense` or `log`) the ids are in the categorical column ``x_id``.
        buckets: columns of numbers -> at most so many intervals; the interval of column x becomes an id in the
            categorical column ``x_bucket``. Bounds are quantiles of the training part. x may be a number or an
            integer of the lists above as well.
        keys: columns of integers that stay as they are, any int64: keys of dynamic tables.
        min_count: a category's values that occur less often in the training part share one id.
        valid_fraction: share of the rows, taken from the end, that becomes the split "valid".
        valid: files of the split "valid", instead of `valid_fraction`.
        test: files of the split "test".
        layout: of all the files.
        storage: "parquet" or "raw" shards.
        name: of the data set; None takes the output directory's.
    """

    label: str
    positives: tuple[str, ...] = ()
    dense: tuple[str, ...] = ()
    log: tuple[str, ...] = ()
    categorical: tuple[str, ...] = ()
    integer_categorical: tuple[str, ...] = ()
    buckets: Mapping[str, int] = field(default_factory=dict)
    keys: tuple[str, ...] = ()
    min_count: int = 1
    valid_fraction: float = 0.0
    valid: tuple[Path, ...] = ()
    test: tuple[Path, ...] = ()
    layout: CsvLayout = field(default_factory=CsvLayout)
    storage: Literal["parquet", "raw"] = "parquet"
    name: str | None = None

    def __post_init__(self) -> None:
        checks.positive_int(self, "min_count")
        checks.finite_float(self, "valid_fraction", low=0.0, high=0.9)
        checks.one_of(self, "storage", ("parquet", "raw"))
        if self.name is not None:
            checks.name(self)
        numbers = {*self.dense, *self.log, *self.integer_categorical, *self.buckets, *self.keys}
        for column in self.categorical:
            if column in numbers:
                checks.refuse(
                    self,
                    "categorical",
                    f"column {column!r} is also read as a number, expected it in integer_categorical (--ids)",
                )
        checks.distinct(self, "columns", self.column_names)
        if self.valid_fraction and self.valid:
            checks.refuse(self, "valid_fraction", "got valid (--valid) as well, expected one of them")
        if len(self.column_names) == 1:
            checks.refuse(
                self,
                "",
                "got no column to learn from, expected dense, log, categorical, integer_categorical, buckets or keys "
                "(--dense, --log, --categorical, --ids, --buckets or --keys)",
            )
        if self.keys and self.storage == "raw":
            checks.refuse(self, "storage", "got 'raw', which holds no keys of 64 bits (--keys), expected 'parquet'")
        for column, count in self.buckets.items():
            if isinstance(count, bool) or not isinstance(count, int) or count < 2:
                checks.refuse(self, "buckets", f"got {count!r} for {column!r}, expected an integer >= 2")

    @property
    def column_names(self) -> tuple[str, ...]:
        """The data set's columns: label, dense, log, categorical, integer_categorical, buckets, keys."""
        integers = (self.id_name(column) for column in self.integer_categorical)
        buckets = (self.bucket_name(column) for column in self.buckets)
        return (self.label, *self.dense, *self.log, *self.categorical, *integers, *buckets, *self.keys)

    @property
    def raw_names(self) -> tuple[str, ...]:
        """The distinct columns to read from the files."""
        numbers = (*self.dense, *self.log)
        named = (self.label, *numbers, *self.categorical, *self.integer_categorical, *self.buckets, *self.keys)
        return tuple(dict.fromkeys(named))

    def id_name(self, column: str) -> str:
        """Name of the categorical column that holds the ids of the integers of `column`."""
        return f"{column}_id" if column in self.dense or column in self.log else column

    def bucket_name(self, column: str) -> str:
        """Name of the categorical column that holds the interval of `column`."""
        return f"{column}_bucket"
