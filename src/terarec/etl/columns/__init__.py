"""Blocks of rows between the sources, the operators and the sinks of a workflow."""

from terarec.etl.columns.arrow import ARROW_TYPES, from_arrow, to_arrow
from terarec.etl.columns.block import SPLIT_NAMES, TEST, TRAIN, VALID, Block, concatenate_blocks
from terarec.etl.columns.cleaning import FIRST_SECOND, LAST_SECOND, SECONDS, SPACE, Cleaning
from terarec.etl.columns.column import (
    DTYPES,
    Column,
    ColumnType,
    Kind,
    concatenate_columns,
    offsets_of,
    text_buffers,
    text_lengths,
)
from terarec.etl.columns.row_fault import REFUSED_SHOWN, RowFaultError

__all__ = [
    "ARROW_TYPES",
    "DTYPES",
    "FIRST_SECOND",
    "LAST_SECOND",
    "REFUSED_SHOWN",
    "SECONDS",
    "SPACE",
    "SPLIT_NAMES",
    "TEST",
    "TRAIN",
    "VALID",
    "Block",
    "Cleaning",
    "Column",
    "ColumnType",
    "Kind",
    "RowFaultError",
    "concatenate_blocks",
    "concatenate_columns",
    "from_arrow",
    "offsets_of",
    "text_buffers",
    "text_lengths",
    "to_arrow",
]
