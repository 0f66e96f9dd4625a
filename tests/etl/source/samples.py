# SPDX-License-Identifier: Apache-2.0
"""Small sources and what their blocks hold."""

import numpy as np
import pyarrow as pa

from terarec.spec import SourceColumn, SourceSpec

MIXED = (
    SourceColumn(name="clicks", type="integer"),
    SourceColumn(name="price", type="number"),
    SourceColumn(name="code", type="hex32"),
    SourceColumn(name="brand", type="text"),
    SourceColumn(name="tags", type="text", separator="|"),
    SourceColumn(name="sizes", type="integer", separator=" "),
    SourceColumn(name="seen", type="time", format="%Y-%m-%d %H:%M:%S"),
    SourceColumn(name="at", type="time"),
)


def mixed(file_format, **options):
    """A spec with a column of each type."""
    return SourceSpec(format=file_format, columns=MIXED, **options)


_CELLS = {
    "clicks": [3, None, -1],
    "price": [1.5, None, 2.0],
    "code": ["0a", None, "FFFFFFFF"],
    "brand": ["x", None, "caf\u00e9"],
    "tags": [["a", "b"], [], [None, "c"]],
    "sizes": [[1, 2], [], [7]],
    "seen": ["1970-01-02 00:00:01", None, "2024-02-29 23:59:59"],
    "at": [7, None, 0],
}
ROWS = [{name: cells[row] for name, cells in _CELLS.items()} for row in range(3)]


def delimited_line(row, delimiter="\t"):
    """A row as a line."""
    lists = {"tags": "|", "sizes": " "}

    def field(name):
        value = row[name]
        if name in lists:
            return lists[name].join("" if item is None else str(item) for item in value)
        return "" if value is None else str(value)

    return delimiter.join(field(column.name) for column in MIXED)


EXPECTED = {**_CELLS, "code": [10, None, 2**32 - 1], "seen": [86401, None, 1709251199]}


def rows_of(source, after=None):
    """All blocks of a source, or those behind one, as (row ids, name -> values)."""
    rows, columns = [], {}
    for block in source.blocks() if after is None else map(source.read_block, source.raw_blocks(after)):
        rows += block.ids.tolist()
        for name, column in block.columns.items():
            assert len(column) == block.num_rows
            columns.setdefault(name, []).extend(column.to_pylist())
    return rows, columns


def write_lines(path, lines):
    """`lines` as a file."""
    path.write_bytes(b"".join(line if isinstance(line, bytes) else line.encode() + b"\n" for line in lines))
    return path


def arrow_table(rows=ROWS):
    """Rows as an Arrow table, with lists of its own and written times."""
    types = {
        "clicks": pa.int32(),
        "price": pa.float32(),
        "code": pa.string(),
        "brand": pa.string(),
        "tags": pa.list_(pa.string()),
        "sizes": pa.large_list(pa.int64()),
        "seen": pa.string(),
        "at": pa.int64(),
    }
    arrays = {name: pa.array([row[name] for row in rows], type=kind) for name, kind in types.items()}
    arrays["brand"] = arrays["brand"].dictionary_encode()
    return pa.table({"other": np.arange(len(rows)), **arrays})
