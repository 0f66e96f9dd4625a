"""The columns of delimited text: how the parser reads each, and what it gives."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from terarec.etl.cleaning import SECONDS
from terarec.etl.columns import Column
from terarec.etl.source.raw_block import FieldFaults
from terarec.etl.source.settle import without_bad
from terarec.etl.source.times import beyond_years, parse_times
from terarec.kernels.delimited_types import DelimitedField, FieldType, ParsedColumn
from terarec.spec import SourceColumn


def delimited_field(column: SourceColumn | None) -> DelimitedField:
    """How the parser reads a column; None stands for a field that is none."""
    if column is None:
        return DelimitedField("skip")
    separator = (column.separator or "").encode()
    if column.type == "time":
        return DelimitedField("integer" if column.format is None else "text", separator)
    field_type: FieldType = column.type
    return DelimitedField(field_type, separator)


def parsed_column(source: SourceColumn, values: ParsedColumn, found: list[FieldFaults]) -> Column:
    """A column as the parser read it, its times read, too; bad ones are added to those that were `found`."""
    if source.type == "time" and source.format is not None:
        return _times(source, values, found)
    if values.text_offsets is not None:
        return Column("text", _text_array(values), None, values.list_offsets)
    if source.type == "time":
        return _seconds(source, values, found)
    kind = source.type
    missing = None if kind == "number" else values.missing
    return Column(kind, values.values, missing, values.list_offsets)


def _seconds(source: SourceColumn, values: ParsedColumn, found: list[FieldFaults]) -> Column:
    seconds, bad = values.values, beyond_years(values.values)
    column = Column("integer", seconds, values.missing, values.list_offsets)
    if not bad.any():
        return column
    missing = bad if values.missing is None else bad | values.missing
    column = Column("integer", np.where(bad, 0, seconds), missing, values.list_offsets)
    column, faults = without_bad(column, source, bad, "time", SECONDS, pa.array(seconds))
    found.append(faults)
    return column


def _times(source: SourceColumn, values: ParsedColumn, found: list[FieldFaults]) -> Column:
    assert source.format is not None
    texts = _text_array(values)
    seconds, bad = parse_times(texts, source.format)
    missing = bad if values.missing is None else bad | values.missing
    column = Column("integer", seconds, missing if missing.any() else None, values.list_offsets)
    if not bad.any():
        return column
    column, faults = without_bad(column, source, bad, "time", f"a time like {source.format!r}", texts)
    found.append(faults)
    return column


def _text_array(values: ParsedColumn) -> pa.LargeStringArray:
    """Parsed text as Arrow's, without a copy; null where missing."""
    assert values.text_offsets is not None
    nulls = None
    if values.missing is not None:
        nulls = pa.py_buffer(np.packbits(~values.missing, bitorder="little"))
    buffers: list[Any] = [pa.py_buffer(values.text_offsets), pa.py_buffer(values.values)]
    return pa.LargeStringArray.from_buffers(len(values.text_offsets) - 1, *buffers, nulls)
