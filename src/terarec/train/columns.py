"""Whether a data set is one that a trained model can read."""

from __future__ import annotations

import filecmp
from pathlib import Path

from terarec.errors import ConfigError
from terarec.formats import workflow_files
from terarec.spec import CategoricalColumn, DatasetSpec


def check_columns(dataset: DatasetSpec, directory: Path, trained_on: DatasetSpec, trained_directory: Path) -> None:
    """Raise `ConfigError` unless `dataset` has the columns of `trained_on`: names, order, rows, hotness, workflow.

    Equal rows are not enough: ids that were learnt on other logs mean other things. So workflows are compared to the
    byte.

    Args:
        dataset: what is to be read.
        directory: where it is.
        trained_on: what the model knows.
        trained_directory: where its workflow is, ``RUN/dataset``.
    """
    if dataset.column_names != trained_on.column_names:
        raise ConfigError(
            f"data set {dataset.name!r}: got the columns {', '.join(dataset.column_names)}, "
            f"expected those that the model was trained on: {', '.join(trained_on.column_names)}"
        )
    for column, known in zip(dataset.categorical, trained_on.categorical, strict=True):
        if column != known:
            raise ConfigError(
                f"data set {dataset.name!r}, column {column.name!r}: {_shape(column)}, expected {_shape(known)} as in "
                "training; were its ids learnt anew?"
            )
    files = workflow_files(dataset, directory)
    known_files = workflow_files(trained_on, trained_directory)
    for file in sorted({*files, *known_files}):
        is_known = file in files and file in known_files
        if not is_known or not filecmp.cmp(directory / file, trained_directory / file, shallow=False):
            raise ConfigError(
                f"data set {dataset.name!r}: {file} is not that of the training in {trained_directory}; were its ids "
                "learnt anew?"
            )


def _shape(column: CategoricalColumn) -> str:
    rows = "any keys" if column.rows is None else f"{column.rows} rows"
    return rows if column.hotness == 1 else f"{rows} in lists of {column.hotness}"
