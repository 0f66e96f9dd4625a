"""What is wrong in single lines and rows that another engine found bad, in the words of `Source`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from terarec.etl.source.arrow_files import ParquetReader
from terarec.etl.source.bad_input import InputFault
from terarec.etl.source.delimited import DelimitedReader
from terarec.etl.source.json_lines import JsonLinesReader
from terarec.etl.source.raw_block import RawPart
from terarec.io import locate
from terarec.spec import BadInputPolicy, SourceSpec


def line_faults(
    spec: SourceSpec, path: str, number: int, line: bytes, header: str, policy: BadInputPolicy
) -> Sequence[InputFault]:
    """The faults of one line of a text file.

    Args:
        spec: of the files.
        path: of the file.
        number: of the line, from 1.
        line: without its end.
        header: the first line of the file, where the spec says that it is one.
        policy: with "skip" and "raise" only the first fault counts.
    """
    if spec.format == "json_lines":
        return JsonLinesReader(spec).parse(RawPart(path, number - 1, 1, 0, line), policy).faults
    reader = DelimitedReader(spec)
    names = reader.fields(path, header.encode()) if spec.header else tuple(column.name for column in spec.columns)
    return reader.parse(RawPart(path, number - 1, 1, 0, (line, names)), policy).faults


def row_faults(spec: SourceSpec, path: str, number: int, policy: BadInputPolicy) -> Sequence[InputFault]:
    """The faults of one row of a Parquet file; arguments as those of `line_faults`."""
    row = _parquet_row(path, number - 1, [column.name for column in spec.columns])
    return ParquetReader(spec).parse(RawPart(path, number - 1, 1, 0, row), policy).faults


def _parquet_row(path: str, position: int, columns: list[str]) -> pa.RecordBatch:
    with pq.ParquetFile(locate(path).open()) as opened:
        group = 0
        while position >= opened.metadata.row_group(group).num_rows:
            position -= opened.metadata.row_group(group).num_rows
            group += 1
        for batch in opened.iter_batches(row_groups=[group], columns=columns):
            if position < batch.num_rows:
                return batch.slice(position, 1)
            position -= batch.num_rows
    raise AssertionError(f"{Path(path).name} has no such row")
