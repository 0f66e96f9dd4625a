"""How the columns of a data set were made, and what their ids stand for: from its workflow, or from its encoders."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from terarec.cli.raw_values import raw_values
from terarec.spec import BucketizeEncoder, CategoricalColumn, DatasetSpec, DenseColumn, VocabularyEncoder


class ColumnValues(Protocol):
    """How one column was made.

    Attributes:
        kind: of the step or encoder that made it; None where values are as they were.
        num_reserved: of the first ids, those that stand for no value of their own: 0 missing, then rare or unseen ones.
    """

    kind: str | None
    num_reserved: int

    def values(self, ids: NDArray[np.int64]) -> Sequence[str]:
        """What each of ``ids int64[n]`` stands for, as text."""
        ...


class EncodedValues:
    """The `ColumnValues` of a column with an encoder, or with none."""

    def __init__(self, directory: Path, column: DenseColumn | CategoricalColumn | None) -> None:
        self._directory = directory
        encoder = None if column is None else column.encoder
        self._encoder = encoder if isinstance(encoder, VocabularyEncoder | BucketizeEncoder) else None
        self.kind: str | None = None if encoder is None else encoder.kind
        self.num_reserved = 0 if self._encoder is None else 1 + isinstance(self._encoder, VocabularyEncoder)

    def values(self, ids: NDArray[np.int64]) -> Sequence[str]:
        """What each of ``ids int64[n]`` stands for, as text."""
        return raw_values(self._directory, self._encoder, ids)


def column_values(directory: Path, spec: DatasetSpec, names: Sequence[str]) -> list[ColumnValues]:
    """How the columns `names` of the data set in `directory` were made; labels are as they were.

    Raises:
        DataNotFoundError: a file of the workflow is missing.
        FormatError: a damaged one.
    """
    if spec.workflow is not None:
        from terarec.etl.workflow import IdValues, Workflow

        workflow = Workflow.load(directory / spec.workflow)
        labels = {label.name: label.source for label in workflow.spec.labels}
        return [IdValues(workflow.plan, workflow.states, labels.get(name, name)) for name in names]
    made: tuple[DenseColumn | CategoricalColumn, ...] = (*spec.dense, *spec.categorical)
    columns = {column.name: column for column in made}
    return [EncodedValues(directory, columns.get(name)) for name in names]
