"""JSON objects line by line, with what is wrong in each."""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from typing import Any

import numpy as np
import pyarrow as pa

from terarec.etl.cleaning import Cleaning
from terarec.etl.source.bad_input import show
from terarec.etl.source.raw_block import FieldFaults
from terarec.etl.source.text import MAX_LINE_BYTES
from terarec.spec import SourceColumn, SourceSpec
from terarec.spec.codec import parse_json

_TYPES = {"text": pa.string(), "hex32": pa.string(), "integer": pa.int64(), "number": pa.float64()}
_EXPECTED = {
    "json": "a JSON object in one line",
    "oversized_line": f"a line of at most {MAX_LINE_BYTES} bytes",
    "text": "text in quotes",
    "integer": "an integer",
    "integer_range": "a signed integer of 64 bits",
    "number": "a number",
    "infinite": "a finite number",
}


WELL_FORMED = re.compile(
    r"(?:[^\\]|\\[^u]|\\u(?![dD][89a-fA-F])[0-9a-fA-F]{4}|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2})*+"
)
"""JSON text without lone surrogates, which are no text. Java reads the expression alike."""


class _FaultError(Exception):
    """A line or a field is wrong; its argument is the kind."""


def read_objects(text: bytes, spec: SourceSpec) -> tuple[pa.Table, list[FieldFaults]]:
    """The columns of `spec` in the lines of `text`, null for what is wrong, and that.

    A list column comes as lists of texts.
    """
    rows = [line.removesuffix(b"\r") for line in text.split(b"\n")]
    values: dict[str, list[Any]] = {column.name: [] for column in spec.columns}
    faults: defaultdict[tuple[str, str], list[tuple[int, str]]] = defaultdict(list)
    cleaning = Cleaning.of_files(spec)
    for row, line in enumerate(filter(None, rows)):
        try:
            fields = _object(line)
        except _FaultError as fault:
            faults["", str(fault)].append((row, show(line)))
            fields = {}
        for column in spec.columns:
            value = fields.get(column.name)
            try:
                read = _read(value, column, cleaning)
            except _FaultError as fault:
                faults[column.name, str(fault)].append((row, show(json.dumps(value, ensure_ascii=False))))
                read = None
            values[column.name].append(read)
    table = pa.table({column.name: pa.array(values[column.name], type=_type(column)) for column in spec.columns})
    found = [
        FieldFaults(name or None, kind, _EXPECTED[kind], np.array([row for row, _ in bad]), [got for _, got in bad])
        for (name, kind), bad in faults.items()
    ]
    return table, found


def _object(line: bytes) -> dict[str, Any]:
    if len(line) > MAX_LINE_BYTES:
        raise _FaultError("oversized_line")
    try:
        text = line.decode()
        if "\\u" in text and not WELL_FORMED.fullmatch(text):
            raise _FaultError("json")
        fields = parse_json(text, parse_constant=_refuse_constant)
    except ValueError:
        raise _FaultError("json") from None
    if not isinstance(fields, dict):
        raise _FaultError("json")
    return fields


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def _read(value: Any, column: SourceColumn, cleaning: Cleaning) -> Any:
    value = cleaning.value(value)
    if value is None:
        return None
    kind = column.type
    if kind == "time":
        kind = "integer" if column.format is None else "text"
    if column.separator is None:
        return _read_value(value, kind)
    if isinstance(value, str):
        return value.split(column.separator)
    if not isinstance(value, list):
        raise _FaultError("json")
    items = [None if item is None else _read_value(item, kind) for item in cleaning.values(value)]
    return [item if item is None or isinstance(item, str) else repr(item) for item in items]


def _read_value(value: Any, kind: str) -> Any:
    if kind in ("text", "hex32"):
        if not isinstance(value, str):
            raise _FaultError("text")
        return value
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _FaultError(kind)
    if kind == "integer" and isinstance(value, float):
        if not (value.is_integer() and abs(value) < 2**53):
            raise _FaultError(kind)
        return int(value)
    if kind == "integer" and not -(2**63) <= value < 2**63:
        raise _FaultError("integer_range")
    return _finite(value) if kind == "number" else value


def _finite(value: int | float) -> float:
    """A number as the nearest float64."""
    try:
        number = float(value)
    except OverflowError:
        raise _FaultError("infinite") from None
    if math.isinf(number):
        raise _FaultError("infinite")
    return number


def _type(column: SourceColumn) -> pa.DataType:
    if column.separator is not None:
        return pa.list_(pa.string())
    kind = column.type
    if kind == "time":
        kind = "integer" if column.format is None else "text"
    return _TYPES[kind]
