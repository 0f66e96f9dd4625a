# SPDX-License-Identifier: Apache-2.0
"""Checks that the metrics share: scores, labels and weights of a batch as float32 columns, and the mean over labels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt
from torch import Tensor

from terarec.errors import ConfigError

Values = Tensor | npt.NDArray[np.generic]
FloatColumns = npt.NDArray[np.float32]
Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]
LabelRange = Literal["share", "gain", "value"]
"""What a label may be: a number in [0, 1], a finite number >= 0, or a finite number. NaN is unknown in all three."""

_EXPECTED = {"share": "0 to 1", "gain": "finite numbers >= 0", "value": "finite numbers"}


def as_columns(
    metric: str, scores: Values, labels: Values, *, allow_classes: bool = False
) -> tuple[FloatColumns, FloatColumns]:
    """Return `scores` and `labels`, each [B] or [B, L], as float32[B, L].

    With `allow_classes`, scores [B, C] of several classes may have labels [B] or [B, 1], the numbers of the classes.

    Raises:
        ConfigError: Shapes that differ or have more than two axes, or a score that is NaN (the row is named).
    """
    score_columns, label_columns = as_float32(scores), as_float32(labels)
    shapes = f"got scores {list(score_columns.shape)} and labels {list(label_columns.shape)}, "
    if score_columns.ndim == 1:
        score_columns = score_columns[:, None]
    if label_columns.ndim == 1:
        label_columns = label_columns[:, None]
    fits = score_columns.shape == label_columns.shape and score_columns.ndim == 2
    if not fits and not (allow_classes and _are_classes(score_columns, label_columns)):
        raise ConfigError(f"{metric}.update", f"{shapes}expected the same shape, [B] or [B, L]")
    bad = np.isnan(score_columns)
    if bad.any():
        row = int(bad.any(axis=1).argmax())
        raise ConfigError(f"{metric}.update", f"got NaN as the score of row {row}, expected numbers")
    return score_columns, label_columns


def as_weights(metric: str, weights: Values | None, rows: int) -> FloatColumns | None:
    """Return `weights` as float32[B]; None for no weights.

    Raises:
        ConfigError: Not one weight for each of the `rows` samples, or a weight that is not a finite number >= 0.
    """
    if weights is None:
        return None
    values = as_float32(weights)
    if values.shape == (rows, 1):
        values = values[:, 0]
    if values.shape != (rows,):
        raise ConfigError(f"{metric}.update", f"got weights {list(values.shape)} for {rows} samples, expected [{rows}]")
    # Negated, since NaN fails every comparison.
    bad = ~((values >= 0) & (values < np.inf))
    if bad.any():
        raise ConfigError(f"{metric}.update", f"got the weight {values[bad][0]}, expected finite numbers >= 0")
    return values


def check_labels(metric: str, labels: FloatColumns, accepted: LabelRange) -> None:
    """Raise `ConfigError` if a label is not `accepted`; NaN, an unknown label, is always accepted."""
    if accepted == "share":
        bad = (labels < 0) | (labels > 1)
    elif accepted == "gain":
        bad = (labels < 0) | (labels == np.inf)
    else:
        bad = np.isinf(labels)
    if bad.any():
        raise ConfigError(f"{metric}.update", f"got the label {labels[bad][0]}, expected {_EXPECTED[accepted]}")


def check_class_numbers(metric: str, labels: FloatColumns, num_classes: int) -> None:
    """Raise `ConfigError` if a label is not the number of a class; NaN, an unknown label, passes."""
    bad = ~(np.isnan(labels) | ((labels >= 0) & (labels < num_classes) & (labels == np.floor(labels))))
    if bad.any():
        expected = f"the number of a class, 0 to {num_classes - 1}"
        raise ConfigError(f"{metric}.update", f"got the label {labels[bad][0]}, expected {expected}")


def check_one_score(metric: str, scores: FloatColumns, labels: FloatColumns) -> None:
    """Raise `ConfigError` if scores [B, C] are those of several classes of one label."""
    if scores.shape != labels.shape:
        got = f"{scores.shape[1]} scores for {labels.shape[1]} label"
        raise ConfigError(metric, f"got {got}, expected one score a label")


def mean_over_labels(values: Sequence[float]) -> float:
    """Return the mean of one value a label; NaN for no label."""
    return sum(values) / len(values) if values else math.nan


def as_float32(values: Values) -> FloatColumns:
    """Return `values` as a float32 array in host memory; shares the memory of `values` where it can."""
    if isinstance(values, Tensor):
        values = values.detach().float().cpu().numpy()  # numpy has no bfloat16
    return np.asarray(values, dtype=np.float32)


def _are_classes(scores: FloatColumns, labels: FloatColumns) -> bool:
    return scores.ndim == 2 and scores.shape[1] > 1 and labels.shape == (len(scores), 1)
