"""Whether a data set is one that a trained model can read."""

from __future__ import annotations

import filecmp
from pathlib import Path

from terarec.errors import ConfigError
from terarec.formats import encoding_files
from terarec.spec import CategoricalColumn, DatasetSpec, DenseColumn, LabelColumn


def check_columns(dataset: DatasetSpec, directory: Path, trained_on: DatasetSpec, trained_directory: Path) -> None:
    """Raise `ConfigError` unless `dataset` has the columns of `trained_on`: names, order, rows, encoders.

    Equal rows are not enough: ids that were learnt on other logs mean other things. So vocabularies and workflows are
    compared to the byte.

    Args:
        dataset: what is to be read.
        directory: where it is.
        trained_on: what the model knows.
        trained_directory: where its vocabularies or its workflow are, ``RUN/dataset``.
    """
    if dataset.column_names != trained_on.column_names:
        raise ConfigError(
            f"data set {dataset.name!r}: got the columns {', '.join(dataset.column_names)}, "
            f"expected those that the model was trained on: {', '.join(trained_on.column_names)}"
        )
    for column, known in zip(dataset.categorical, trained_on.categorical, strict=True):
        if column.rows != known.rows:
            raise ConfigError(
                f"data set {dataset.name!r}, column {column.name!r}: {column.rows} rows, expected {known.rows} as in "
                "training; were its ids learnt anew?"
            )
    for one, other in zip(_columns(dataset), _columns(trained_on), strict=True):
        if one != other:
            raise ConfigError(
                f"data set {dataset.name!r}, column {one.name!r}: encoded otherwise than in training, expected the "
                f"encoder in {trained_directory}; was it learnt anew?"
            )
    files = encoding_files(dataset, directory)
    known_files = encoding_files(trained_on, trained_directory)
    for file in files:
        if file not in known_files or not filecmp.cmp(directory / file, trained_directory / file, shallow=False):
            raise ConfigError(
                f"data set {dataset.name!r}: {file} is not that of the training in {trained_directory}; were its ids "
                "learnt anew?"
            )


def _columns(dataset: DatasetSpec) -> tuple[LabelColumn | DenseColumn | CategoricalColumn, ...]:
    return (*dataset.labels, *dataset.dense, *dataset.categorical)
