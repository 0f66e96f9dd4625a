"""Arrow arrays as the columns that a spec names, with what is wrong in them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from terarec.errors import FormatError
from terarec.etl.cleaning import SECONDS, Cleaning
from terarec.etl.columns import Column, from_arrow
from terarec.etl.source.raw_block import FieldFaults
from terarec.etl.source.settle import without_bad
from terarec.etl.source.text_values import parse_texts
from terarec.etl.source.times import beyond_years, parse_times
from terarec.formats.block import offsets_of
from terarec.spec import SourceColumn, SourceSpec

_EXPECTED = {
    "integer_range": "a signed integer of 64 bits",
    "infinite": "a finite number",
    "hex": "up to 8 hexadecimal digits, or an integer from 0 to 4294967295",
    "integer": "an integer",
    "number": "a number",
    "time": SECONDS,
}


def check_type(path: str, column: SourceColumn, found: pa.DataType) -> None:
    """Check that an Arrow type holds what the spec says of a column.

    Raises:
        FormatError: another type.
    """
    inner = value_type(found)
    is_list = _is_list(found)
    written = is_string(inner)
    accepted = {
        "text": written,
        "integer": pa.types.is_integer(inner)
        or pa.types.is_floating(inner)
        or (written and column.separator is not None),
        "number": _is_number(inner) or (written and column.separator is not None),
        "hex32": written or pa.types.is_integer(inner),
        "time": written if column.format is not None else pa.types.is_integer(inner),
    }[column.type] or (column.type == "time" and _is_moment(inner))
    fits = is_list or written if column.separator is not None else not is_list
    if not (accepted and fits):
        lists = "" if column.separator is None else " in lists or separated text"
        raise FormatError(f"{path}: column {column.name!r} is {found}, expected {column.type}{lists}")


def value_type(found: pa.DataType) -> pa.DataType:
    """The type of the values of dictionaries and of lists."""
    while pa.types.is_dictionary(found) or _is_list(found):
        found = found.value_type
    return found


def read_column(array: Any, column: SourceColumn, spec: SourceSpec, faults: list[FieldFaults]) -> Column:
    """The column of an Arrow array (or chunked array); what is no value of its type is missing and goes to `faults`."""
    if isinstance(array, pa.ChunkedArray):
        array = array.combine_chunks() if array.num_chunks != 1 else array.chunk(0)
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    if column.separator is not None and is_string(array.type):
        texts = array.cast(pa.large_string())
        array = pc.split_pattern(Cleaning.of_files(spec).texts(texts), column.separator)
    offsets = None
    if _is_list(array.type):
        lengths = pc.fill_null(pc.list_value_length(array), 0).to_numpy(zero_copy_only=False)
        offsets = offsets_of(lengths)
        array = array.flatten()
        if pa.types.is_dictionary(array.type):
            array = array.dictionary_decode()
    values, kind, bad = _read_values(array, column, spec)
    read = Column(values.type, values.values, values.missing, offsets)
    if bad is not None and bad.any():
        expected = _EXPECTED[kind] if column.format is None or kind != "time" else f"a time like {column.format!r}"
        read, fields = without_bad(read, column, bad, kind, expected, array)
        faults.append(fields)
    return read


def _read_values(array: Any, column: SourceColumn, spec: SourceSpec) -> tuple[Column, str, NDArray[np.bool_] | None]:
    """The values of a plain array, the kind of fault that they may have, and which do, bool[m]."""
    if is_string(array.type):
        return _read_texts(Cleaning.of_files(spec).texts(array.cast(pa.large_string())), column)
    if column.type == "number":
        # Integers of more than 53 bits are rounded, as text is.
        numbers = from_arrow(array.cast(pa.float64(), safe=False), "number").values
        infinite: NDArray[np.bool_] = np.isinf(numbers)
        return Column("number", np.where(infinite, np.nan, numbers)), "infinite", infinite
    if column.type == "time" and _is_moment(array.type):
        array = array.cast(pa.timestamp("us"), safe=False).cast(pa.int64())
        micros = from_arrow(array, "integer")
        return Column("integer", micros.values // 1_000_000, micros.missing), "time", None
    if pa.types.is_floating(array.type):
        return _whole_numbers(array)
    kind, bad = "integer_range", None
    if column.type == "hex32" or array.type == pa.uint64():
        last = 2**63 - 1
        if column.type == "hex32":
            kind, last = "hex", 2**32 - 1
        wide = array if array.type == pa.uint64() else array.cast(pa.int64())
        beyond = pc.or_(pc.less(wide, pa.scalar(0, wide.type)), pc.greater(wide, pa.scalar(last, wide.type)))
        bad = pc.fill_null(beyond, False).to_numpy(zero_copy_only=False)
        array = pc.if_else(beyond, pa.scalar(None, type=wide.type), wide)
    if column.type == "time":
        seconds = from_arrow(array, "integer")
        late = beyond_years(seconds.values)
        if late.any():
            missing = seconds.is_missing() | late
            return Column("integer", np.where(late, 0, seconds.values), missing), "time", late
    return from_arrow(array, "hex32" if column.type == "hex32" else "integer"), kind, bad


def _whole_numbers(array: Any) -> tuple[Column, str, NDArray[np.bool_]]:
    """Integers that a table holds as floats, since some of them are missing."""
    numbers = from_arrow(array.cast(pa.float64()), "number").values
    missing = np.isnan(numbers)
    good = (np.abs(numbers) < 2**53) & (np.floor(numbers) == numbers)
    integers = np.where(good, numbers, 0).astype(np.int64)
    bad: NDArray[np.bool_] = ~good & ~missing
    return Column("integer", integers, None if good.all() else ~good), "integer", bad


def _read_texts(texts: pa.LargeStringArray, column: SourceColumn) -> tuple[Column, str, NDArray[np.bool_] | None]:
    if column.type == "text":
        return Column("text", texts), "utf8", None
    if column.type == "time" and column.format is not None:
        seconds, unreadable = parse_times(texts, column.format)
        missing = unreadable | texts.is_null().to_numpy(zero_copy_only=False)
        return Column("integer", seconds, missing if missing.any() else None), "time", unreadable
    kind = "integer" if column.type == "time" else column.type
    values, bad = parse_texts(texts, kind)
    late = beyond_years(values.values) if column.type == "time" else None
    if bad is None and late is not None and late.any():
        return Column("integer", np.where(late, 0, values.values), values.is_missing() | late), "time", late
    return values, {"integer": "integer", "number": "number", "hex32": "hex"}[kind], bad


def is_string(found: pa.DataType) -> bool:
    """Whether values are text."""
    return bool(pa.types.is_string(found) or pa.types.is_large_string(found) or pa.types.is_string_view(found))


def _is_list(found: pa.DataType) -> bool:
    return bool(pa.types.is_list(found) or pa.types.is_large_list(found) or pa.types.is_fixed_size_list(found))


def _is_number(found: pa.DataType) -> bool:
    return bool(pa.types.is_floating(found) or pa.types.is_integer(found) or pa.types.is_decimal(found))


def _is_moment(found: pa.DataType) -> bool:
    return bool(pa.types.is_timestamp(found) or pa.types.is_date(found))
