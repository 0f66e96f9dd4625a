"""What ``terarec inspect RUN --table NAME`` tells: the distribution of row norms and the rows of the largest."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from terarec.checkpoint.layout import KEYS, WEIGHTS
from terarec.checkpoint.manifest import read_manifest
from terarec.cli.inspect_checkpoint import choose_checkpoint, row_norms, table_pieces
from terarec.etl.workflow import IdValues, workflow_of
from terarec.formats import read_dataset
from terarec.models.artifact import DATASET_DIRECTORY
from terarec.models.columns import WIDE_SUFFIX

_PERCENTILES = (0, 1, 10, 50, 90, 99, 100)


def describe_table(
    path: Path, table: str, top: int, *, which: str | None = None, allow_import: Sequence[str] = ()
) -> dict[str, Any]:
    """Row norms of one table and its `top` largest rows, with the raw values that they stand for.

    Args:
        path: a RUN, or a checkpoint in one.
        table: the table.
        top: how many rows to tell.
        which: the checkpoint of a RUN: "last", "best" or a step.
        allow_import: packages whose functions the workflow may name, as for `terarec.etl.workflow.Workflow.load`.

    Raises:
        ConfigError: no such table or checkpoint.
        DataNotFoundError: no whole checkpoint.
        FormatError: a damaged file.
    """
    checkpoint = choose_checkpoint(path, which)
    width, norms, keys = 0, [], []
    for piece in table_pieces(checkpoint, read_manifest(checkpoint), table):
        width = piece[WEIGHTS].shape[1]
        norms.append(row_norms(piece[WEIGHTS]))
        keys += [piece[KEYS]] if KEYS in piece else []
    all_norms: NDArray[np.float64] = np.concatenate(norms)
    order = np.argsort(-all_norms, kind="stable")[:top]
    # Rows of a static table are in key order; a dynamic one says which key each row is of.
    rows: NDArray[np.int64] = np.concatenate(keys)[order] if keys else order
    return {
        "what": "table",
        "path": str(path),
        "checkpoint": str(checkpoint),
        "table": table,
        "rows": all_norms.size,
        "width": width,
        "zero_rows": int(np.count_nonzero(all_norms == 0)),
        "norms": _percentiles(all_norms) if all_norms.size else [],
        "largest": [
            {"row": int(row), "value": value, "norm": float(all_norms[place])}
            for row, place, value in zip(rows, order, _values(path, checkpoint, table, rows, allow_import), strict=True)
        ],
    }


def _percentiles(norms: NDArray[np.float64]) -> list[dict[str, Any]]:
    values = np.percentile(norms, _PERCENTILES)
    return [{"percentile": percent, "norm": float(value)} for percent, value in zip(_PERCENTILES, values, strict=True)]


def _values(
    path: Path, checkpoint: Path, table: str, rows: NDArray[np.int64], allow_import: Sequence[str]
) -> Sequence[str]:
    """Raw values of `rows`, if the RUN around the checkpoint is there; else nothing is known but the keys."""
    for directory in (path / DATASET_DIRECTORY, checkpoint.parent.parent / DATASET_DIRECTORY):
        if not directory.is_dir():
            continue
        for column in read_dataset(directory).categorical:
            if table in (column.name, column.name + WIDE_SUFFIX):
                return IdValues(workflow_of(directory, allow_import=allow_import), column.name).values(rows)
    return ["?"] * len(rows)
