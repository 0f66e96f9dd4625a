"""Whether a data set is one that a trained model can read."""

from __future__ import annotations

from terarec.errors import ConfigError
from terarec.spec import DatasetSpec


def check_columns(dataset: DatasetSpec, trained_on: DatasetSpec) -> None:
    """Raise `ConfigError` unless `dataset` has the columns of `trained_on`, with the same rows, in the same order."""
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
