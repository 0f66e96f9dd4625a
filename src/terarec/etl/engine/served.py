# SPDX-License-Identifier: Apache-2.0
"""Files of served records, which have what grouped steps made of other rows."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import NamedTuple

import pyarrow as pa

from terarec.closer import stream
from terarec.errors import ConfigError, FormatError
from terarec.etl.source.arrow_files import parquet_tables, read_schema
from terarec.etl.source.blocks import SourceFile
from terarec.etl.source.source import read_as
from terarec.etl.workflow import Workflow
from terarec.etl.workflow.serving import EncodedRecords


class ServedBlock(NamedTuple):
    """Some records of a file, as they were served and as the workflow encodes them."""

    served: pa.Table
    encoded: EncodedRecords


def are_served(workflow: Workflow, files: Sequence[SourceFile]) -> bool:
    """Return whether all files are of Parquet and have the columns of records that are served."""
    if read_as(workflow.spec.source, files).format != "parquet":
        return False
    columns = [set(read_schema(file.path, "parquet").names) for file in files]
    return all(workflow.record_columns.keys() <= of_file for of_file in columns)


@stream
def read_served(workflow: Workflow, file: SourceFile) -> Generator[ServedBlock]:
    """Yield the records of a file, in order; a block is in memory at a time.

    Raises:
        FormatError: A damaged file, or a value that the workflow does not take.
    """
    first = 0
    for table in parquet_tables(file.path, tuple(workflow.record_columns)):
        try:
            encoded = workflow.encode(table)
        except ConfigError as error:
            # The error counts the rows of the block.
            place = f"{file.path}: behind its first {first:,} rows" if first else file.path
            raise FormatError(place, str(error)) from None
        yield ServedBlock(table, encoded)
        first += table.num_rows
