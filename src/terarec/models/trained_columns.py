# SPDX-License-Identifier: Apache-2.0
"""Comparison of the columns and ids of a data set with those that a model was trained on."""

from __future__ import annotations

import filecmp
import re
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from terarec.errors import ConfigError, FormatError
from terarec.formats.dataset import workflow_files
from terarec.io.opening import arrow_file, read_bytes
from terarec.spec import CategoricalColumn, DatasetSpec
from terarec.spec.codec import parse_json
from terarec.spec.dataset import MISSING_ID

_FREE = ("split", "weight", "metadata")
"""Fields of a workflow that do not change the inputs of a model."""
_VOCABULARY_FILE = re.compile(r".+/states/(?P<step>\d+)-categorify-(?P<column>.+)\.parquet")


def check_columns(dataset: DatasetSpec, directory: Path, trained_on: DatasetSpec, trained_directory: Path) -> None:
    """Raise `ConfigError` unless `dataset` has the columns of `trained_on`: names, order, rows, hotness, workflow.

    Equal rows are not enough: ids that were fitted on other logs mean other values. So the fitted state of
    workflows is compared to the byte, and their steps; how rows were split, sample weights and metadata change neither.

    Args:
        dataset: Description of the data to read.
        directory: Directory of the data set.
        trained_on: Description of the training data.
        trained_directory: Directory of its workflow, ``RUN/dataset``.
    """
    _check_names(dataset, trained_on)
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


def check_missing_ids(dataset: DatasetSpec, trained_on: DatasetSpec, read: Collection[str]) -> None:
    """Raise `ConfigError` unless id 0 means the same in `dataset`, to train on with, as in `trained_on`.

    Args:
        dataset: Description of the data to read.
        trained_on: Description of the training data.
        read: Columns that the model reads; the others may differ.
    """
    for name in (column.name for column in dataset.categorical if column.name in read):
        meanings = [
            "a missing value" if spec.missing_key(name) == MISSING_ID else "a value" for spec in (dataset, trained_on)
        ]
        if meanings[0] != meanings[1]:
            raise ConfigError(
                f"data set {dataset.name!r}, column {name!r}",
                f"id 0 is {meanings[0]}, expected {meanings[1]} as in training; "
                "`given` in dataset.json or records.json says which",
            )


def check_added_ids(dataset: DatasetSpec, directory: Path, trained_on: DatasetSpec, trained_directory: Path) -> None:
    """Raise `ConfigError` unless `dataset` has the columns of `trained_on` with all of its ids; others may follow them.

    The arguments are those of `check_columns`. The error names the first difference: the column, the id, and what it
    stood for.
    """
    _check_names(dataset, trained_on)
    where = f"data set {dataset.name!r}"
    for column, known in zip(dataset.categorical, trained_on.categorical, strict=True):
        are_counted = column.rows is not None and known.rows is not None
        if replace(column, rows=known.rows) != known or (column.rows != known.rows and not are_counted):
            raise ConfigError(
                f"{where}, column {column.name!r}",
                f"{_shape(column)}, expected {_shape(known)} as in training, or more",
            )
        if column.rows is not None and known.rows is not None and column.rows < known.rows:
            problem = f"id {column.rows} is gone: {_shape(column)}, expected {_shape(known)} as in training, or more"
            raise ConfigError(f"{where}, column {column.name!r}", problem)
    files = workflow_files(dataset, directory)
    known_files = workflow_files(trained_on, trained_directory)
    for file in sorted({*files, *known_files}):
        if file not in files or file not in known_files:
            has = "has no" if file not in files else "has the additional"
            raise ConfigError(where, f"{has} file {file} of its workflow, expected that of {trained_directory}")
        if _are_alike(directory / file, trained_directory / file):
            continue
        vocabulary = _VOCABULARY_FILE.fullmatch(file)
        if vocabulary is None:
            raise ConfigError(where, f"{file} is not that of the training in {trained_directory}; was it fitted again?")
        difference = _first_difference(directory, trained_directory, file, int(vocabulary["step"]))
        if difference is not None:
            raise ConfigError(f"{where}, column {unquote(vocabulary['column'])!r}", difference)


def _first_difference(directory: Path, known_directory: Path, file: str, step: int) -> str | None:
    """Describe the first id of a known vocabulary that another one lacks or gives to another value, if there is one."""
    values, known = _vocabulary(directory / file), _vocabulary(known_directory / file)
    if values.type != known.type:
        return f"its vocabulary has values of {values.type}, expected {known.type} as in training"
    shared = min(len(values), len(known))
    if values[:shared].equals(known[:shared]) and len(values) >= len(known):
        return None
    # Searched piece by piece: vocabularies may have many millions of values.
    place = next((place for place in range(shared) if values[place] != known[place]), shared)
    now = f"now {values[place].as_py()!r}" if place < len(values) else "which is gone"
    return (
        f"id {_first_id(directory / file, step) + place} was {known[place].as_py()!r}, {now}; expected all ids to stay"
    )


def _first_id(file: Path, step: int) -> int:
    """Return the id of the first value in a vocabulary: after those of missing, rare and unseen values."""
    content = parse_json(read_bytes(file.parents[1] / "workflow.json"))
    return 1 + int(content["workflow"]["steps"][step].get("hash_buckets", 1))


def _vocabulary(file: Path) -> Any:
    """Read the values of a vocabulary, in the order of their ids."""
    import pyarrow.parquet as pq  # which takes longer to load than most commands need

    from terarec.formats.parquet import arrow_errors

    with arrow_errors(str(file)), arrow_file(file) as source:
        table = pq.ParquetFile(source, page_checksum_verification=True).read()
    if table.column_names != ["value", "count"]:
        raise FormatError(file, f"got the columns {', '.join(table.column_names)}, expected value and count")
    return table.column("value").combine_chunks()


def _check_names(dataset: DatasetSpec, trained_on: DatasetSpec) -> None:
    if dataset.column_names != trained_on.column_names:
        raise ConfigError(
            f"data set {dataset.name!r}",
            f"got the columns {', '.join(dataset.column_names)}, "
            f"expected those that the model was trained on: {', '.join(trained_on.column_names)}",
        )


def _are_alike(path: Path, known: Path) -> bool:
    """Return whether two files of workflows are equal, apart from fields that no model depends on."""
    # Bytes first: most data sets have a copy of the file, and only a difference needs parsing. Not shallow, because a
    # copy may have the size and time of another file.
    if filecmp.cmp(path, known, shallow=False):
        return True
    if path.name != "workflow.json":
        return False
    one, other = _encoding(path), _encoding(known)
    return one is not None and one == other


def _encoding(path: Path) -> dict[str, Any] | None:
    """Return the part of a ``workflow.json`` that determines the encoding of values; None for another file."""
    try:
        content = parse_json(read_bytes(path))
    except ValueError:
        return None
    if not isinstance(content, dict) or not isinstance(content.get("workflow"), dict):
        return None
    return {**content, "workflow": {name: value for name, value in content["workflow"].items() if name not in _FREE}}


def _shape(column: CategoricalColumn) -> str:
    rows = "any keys" if column.rows is None else f"{column.rows} rows"
    return rows if column.hotness == 1 else f"{rows} in lists of {column.hotness}"
