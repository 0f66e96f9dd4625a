"""The distinct values of a column and their ids. Described in docs/encoders.md."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from terarec.errors import DataNotFoundError, FormatError
from terarec.formats import AtomicFile
from terarec.kernels.cpu.ids import Hex32Ids, Int64Ids, TextIds
from terarec.spec import FIRST_ID

ValueType = Literal["string", "hex32", "int64"]
_ARROW_TYPES = {"string": pa.large_string(), "hex32": pa.uint32(), "int64": pa.int64()}


class Vocabulary:
    """V values in the order of their ids: value i has id i + 2; 0 is missing, 1 is rare or unseen.

    Attributes:
        value_type: "string", "hex32" (32-bit numbers that raw data spells in hexadecimal), or "int64".
        values: Arrow large_string, uint32 or int64 array [V], distinct and without nulls.
        counts: int64[V], how often each occurred in the training part.
    """

    def __init__(self, value_type: ValueType, values: Any, counts: Any) -> None:
        self.value_type = value_type
        self.values: pa.Array = _array(values).cast(_ARROW_TYPES[value_type])
        self.counts: NDArray[np.int64] = np.asarray(counts, dtype=np.int64)

    @classmethod
    def from_counts(cls, value_type: ValueType, values: Any, counts: Any, min_count: int) -> Vocabulary:
        """Keep what occurred at least `min_count` times, by falling count, ties by rising value (text: by its bytes).

        Args:
            value_type: see the class.
            values: the distinct values, in any order; nulls and empty text, which are missing values, are left out.
            counts: integers, how often each occurred.
            min_count: the least count to be kept.
        """
        array = _array(values).cast(_ARROW_TYPES[value_type])
        table = pa.table({"value": array, "count": np.asarray(counts, dtype=np.int64)})
        kept = table.filter((pc.field("count") >= min_count) & pc.field("value").is_valid())
        if value_type == "string":
            kept = kept.filter(pc.field("value") != "")
        kept = kept.sort_by([("count", "descending"), ("value", "ascending")])
        return cls(value_type, kept.column("value"), kept.column("count"))

    @property
    def rows(self) -> int:
        """Number of ids, the two reserved ones included: the rows that a table for the column needs."""
        return len(self.values) + FIRST_ID

    @cached_property
    def ids(self) -> Hex32Ids | Int64Ids | TextIds:
        """The compiled table that finds the id of a value, made at first use; values are at most 2^32 - 3.

        Raises:
            ValueError: a value occurs twice.
        """
        if self.value_type == "string":
            return TextIds(*text_and_offsets(self.values))
        numbers = self.values.to_numpy(zero_copy_only=False)
        return Hex32Ids(numbers) if self.value_type == "hex32" else Int64Ids(numbers)

    def inverse(self, ids: Iterable[int]) -> list[str | int | None]:
        """The raw values of `ids`; None for missing and for rare or unseen. hex32 gives eight lower-case digits.

        Raises:
            IndexError: an id outside 0 <= id < `rows`.
        """
        values: list[str | int | None] = []
        for number in ids:
            if not 0 <= number < self.rows:
                raise IndexError(f"got id {number}, expected 0 <= id < {self.rows}")
            value = self.values[int(number) - FIRST_ID].as_py() if number >= FIRST_ID else None
            values.append(f"{value:08x}" if self.value_type == "hex32" and value is not None else value)
        return values

    def save(self, path: Path) -> None:
        """Write the Parquet file: columns value and count, row i being the value of id i + 2.

        Raises:
            StorageError: the disk is full.
        """
        file = AtomicFile(path)
        with file.guard():
            pq.write_table(pa.table({"value": self.values, "count": self.counts}), file.partial)
        file.commit()

    @classmethod
    def load(cls, path: Path, value_type: ValueType) -> Vocabulary:
        """Read what `save` wrote.

        Raises:
            DataNotFoundError: no such file.
            FormatError: not a Parquet file, other columns or types, a null, or a value that occurs twice.
        """
        if not path.is_file():
            raise DataNotFoundError(f"{path}: no such vocabulary")
        try:
            table = pq.read_table(path, partitioning=None)
        except (pa.ArrowException, OSError) as error:
            raise FormatError(f"{path}: cannot be read as Parquet ({str(error).splitlines()[0]})") from error
        expected = pa.schema([("value", _ARROW_TYPES[value_type]), ("count", pa.int64())])
        if not table.schema.equals(expected):
            found = ", ".join(f"{field.name}: {field.type}" for field in table.schema)
            raise FormatError(
                f"{path}: got columns {found}, expected value: {expected.field(0).type}, count: int64 "
                f"for a vocabulary of {value_type} values"
            )
        if any(column.null_count for column in table.columns):
            raise FormatError(f"{path}: holds nulls, expected none")
        vocabulary = cls(value_type, table.column("value"), table.column("count"))
        try:
            _ = vocabulary.ids
        except ValueError as error:
            raise FormatError(f"{path}: {error}") from error
        return vocabulary


def text_and_offsets(array: pa.LargeStringArray) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """The bytes of Arrow text, and int64[n + 1] where each begins in them; views. `array` holds no nulls."""
    _, offsets, text = array.buffers()
    count = len(array)
    if offsets is None or offsets.size == 0:  # Arrow may leave the buffers of an empty array out
        return np.empty(0, dtype=np.uint8), np.zeros(1, dtype=np.int64)
    all_offsets = np.frombuffer(offsets, dtype=np.int64, count=array.offset + count + 1)
    return np.frombuffer(text or b"", dtype=np.uint8), all_offsets[array.offset :]


def _array(values: Any) -> pa.Array:
    """`values` as one Arrow array; a list, a NumPy array, an Arrow array or a chunked one."""
    array = values if isinstance(values, pa.Array | pa.ChunkedArray) else pa.array(values)
    if not isinstance(array, pa.ChunkedArray):
        return array
    return pa.concat_arrays(array.chunks) if array.num_chunks else pa.array([], type=array.type)
