"""Columns of the source that a data set holds as they were read, whatever the steps do to columns of their names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from terarec.etl.columns import Block, ColumnType
from terarec.spec import MetadataColumn, WorkflowSpec
from terarec.spec.dataset import MetadataType

_TYPES: dict[str, MetadataType] = {"text": "string", "integer": "int64", "number": "float64"}
"""Kind of a column -> type of the metadata column."""


def metadata_name(index: int) -> str:
    """The name that the `index`-th metadata column has beside the columns that steps read and write."""
    return f"__terarec_metadata{index}"


def with_metadata(block: Block, metadata: Sequence[str]) -> Block:
    """`block`, as it was read, with the columns `metadata` under the names that no step touches, too."""
    if not metadata:
        return block
    return block.with_columns({metadata_name(index): block.columns[name] for index, name in enumerate(metadata)})


def metadata_columns(spec: WorkflowSpec, source: Mapping[str, ColumnType]) -> tuple[MetadataColumn, ...]:
    """The metadata columns of the data set, of the types that the columns of the `source` have."""
    return tuple(MetadataColumn(name=name, type=_TYPES[source[name].kind]) for name in spec.metadata)
