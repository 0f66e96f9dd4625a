# SPDX-License-Identifier: Apache-2.0
"""Rows with weights that are not finite, which no checkpoint holds."""

from __future__ import annotations

from torch import Tensor

from terarec.errors import TrainingError
from terarec.ops.row_update import are_finite


def check_finite(table: str, keys: Tensor, weights: Tensor) -> None:
    """Raise `TrainingError` with the first key of ``keys int64[n]`` whose ``weights [n, D]`` are not all finite."""
    if not are_finite(weights):
        raise not_finite(table, keys[(~weights.isfinite().all(dim=1)).to(keys.device)])


def not_finite(table: str, keys: Tensor) -> TrainingError:
    """Return the error for rows of ``keys int64[n]``."""
    name = f"table {table!r}"
    others = f" and {keys.numel() - 1:,} others" if keys.numel() > 1 else ""
    return TrainingError(
        name,
        f"the row of key {int(keys[0])}{others} got weights that are not finite, which are not saved; a lower learning "
        "rate may help",
        layer=name,
    )
