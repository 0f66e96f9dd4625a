"""Whether a data set has the columns that a model was trained on."""

from __future__ import annotations

import filecmp
from pathlib import Path
from typing import Any

from terarec.errors import ConfigError
from terarec.formats import workflow_files
from terarec.spec import CategoricalColumn, DatasetSpec
from terarec.spec.codec import parse_json

_FREE = ("split", "weight", "metadata")
"""Fields of a workflow that change nothing of what a model reads."""


def check_columns(dataset: DatasetSpec, directory: Path, trained_on: DatasetSpec, trained_directory: Path) -> None:
    """Raise `ConfigError` unless `dataset` has the columns of `trained_on`: names, order, rows, hotness, workflow.

    Equal rows are not enough: ids that were fitted on other logs mean other values. So the fitted state of
    workflows is compared to the byte, and their steps; how rows were split, sample weights and metadata change neither.

    Args:
        dataset: What is to be read.
        directory: Where it is.
        trained_on: What the model knows.
        trained_directory: Where its workflow is, ``RUN/dataset``.
    """
    if dataset.column_names != trained_on.column_names:
        raise ConfigError(
            f"data set {dataset.name!r}",
            f"got the columns {', '.join(dataset.column_names)}, "
            f"expected those that the model was trained on: {', '.join(trained_on.column_names)}",
        )
    for column, known in zip(dataset.categorical, trained_on.categorical, strict=True):
        if column != known:
            raise ConfigError(
                f"data set {dataset.name!r}, column {column.name!r}",
                f"{_shape(column)}, expected {_shape(known)} as in training; were its ids fitted again?",
            )
    files = workflow_files(dataset, directory)
    known_files = workflow_files(trained_on, trained_directory)
    for file in sorted({*files, *known_files}):
        is_known = file in files and file in known_files
        if not is_known or not _are_alike(directory / file, trained_directory / file):
            raise ConfigError(
                f"data set {dataset.name!r}",
                f"{file} is not that of the training in {trained_directory}; were its ids fitted again?",
            )


def _are_alike(path: Path, known: Path) -> bool:
    """Return whether two files of workflows hold the same, apart from what no model depends on."""
    if filecmp.cmp(path, known, shallow=False):
        return True
    if path.name != "workflow.json":
        return False
    one, other = _encoding(path), _encoding(known)
    return one is not None and one == other


def _encoding(path: Path) -> dict[str, Any] | None:
    """Return what of a ``workflow.json`` decides how values become what a model reads; None for a file that is none."""
    try:
        content = parse_json(path.read_bytes())
    except ValueError:
        return None
    if not isinstance(content, dict) or not isinstance(content.get("workflow"), dict):
        return None
    if content.get("version") == 2:
        content["version"] = 3  # which has added `weight` and `metadata` alone
    return {**content, "workflow": {name: value for name, value in content["workflow"].items() if name not in _FREE}}


def _shape(column: CategoricalColumn) -> str:
    rows = "any keys" if column.rows is None else f"{column.rows} rows"
    return rows if column.hotness == 1 else f"{rows} in lists of {column.hotness}"
