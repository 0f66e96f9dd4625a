"""The raw columns of a record, and what encodes them: a workflow, or the encoders of a data set without one."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from terarec.etl.columns import ColumnType
from terarec.etl.encoders import Encoders
from terarec.etl.workflow import Workflow
from terarec.formats import read_dataset
from terarec.spec import CategoricalColumn, DatasetSpec, DenseColumn, VocabularyEncoder

ColumnKind = Literal["number", "integer", "string"]


@dataclass(frozen=True, kw_only=True, slots=True)
class InputColumn:
    """A raw column of a record.

    Attributes:
        name: of the column.
        kind: what its values are.
        hotness: 1 for one value a record; more for a list of at most so many values; None for one of any length.
    """

    name: str
    kind: ColumnKind
    hotness: int | None = 1


def load_encoding(directory: Path) -> Encoders | Workflow:
    """What encodes raw values as those of the data set in `directory` were; its shards are not needed.

    Raises:
        DataNotFoundError: no data set, or a file that it names is missing.
        FormatError: a file is damaged.
    """
    workflow = read_dataset(directory).workflow
    return Encoders.load(directory) if workflow is None else Workflow.load(directory / workflow)


def input_columns(encoding: Encoders | Workflow) -> tuple[InputColumn, ...]:
    """The raw columns of a record."""
    if isinstance(encoding, Encoders):
        return _of_data_set(encoding.spec)
    return tuple(_of_workflow(encoding, name, found) for name, found in encoding.record_columns.items())


def _of_workflow(workflow: Workflow, name: str, found: ColumnType) -> InputColumn:
    kinds: dict[str, ColumnKind] = {"number": "number", "integer": "integer", "text": "string", "hex32": "string"}
    source = workflow.spec.source.column(name)
    is_written_time = source is not None and source.format is not None
    # A list of at most one value is a list all the same.
    hotness = (None if found.max_length is None else max(found.max_length, 2)) if found.is_list else 1
    return InputColumn(name=name, kind="string" if is_written_time else kinds[found.kind], hotness=hotness)


def _of_data_set(dataset: DatasetSpec) -> tuple[InputColumn, ...]:
    """The raw columns; one that several columns are made from takes the narrowest kind of values they read."""
    kinds: dict[str, list[ColumnKind]] = {name: [] for name in dataset.raw_names}
    columns: list[DenseColumn | CategoricalColumn] = [*dataset.dense, *dataset.categorical]
    for column in columns:
        kinds[column.raw_name].append(_kind(column))
    hotness = {column.raw_name: column.hotness for column in dataset.categorical}
    narrowest: tuple[ColumnKind, ...] = ("string", "integer", "number")
    return tuple(
        InputColumn(name=name, kind=min(found, key=narrowest.index), hotness=hotness.get(name, 1))
        for name, found in kinds.items()
    )


def _kind(column: DenseColumn | CategoricalColumn) -> ColumnKind:
    if isinstance(column, DenseColumn):
        return "number"
    if isinstance(column.encoder, VocabularyEncoder):
        return "integer" if column.encoder.value_type == "int64" else "string"
    return "integer" if column.encoder is None else "number"
