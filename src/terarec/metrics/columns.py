"""What the metrics share: scores and labels of a batch as checked columns, and the mean over labels."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from torch import Tensor

from terarec.errors import ConfigError

Values = Tensor | npt.NDArray[np.generic]
FloatColumns = npt.NDArray[np.float32]


def as_columns(metric: str, scores: Values, labels: Values) -> tuple[FloatColumns, FloatColumns]:
    """`scores` and `labels`, each [B] or [B, L], as float32[B, L].

    Raises:
        ConfigError: shapes that differ or have more than two axes, or a score that is NaN (the row is named).
    """
    score_columns, label_columns = _float32(scores), _float32(labels)
    if score_columns.shape != label_columns.shape or score_columns.ndim not in (1, 2):
        raise ConfigError(
            f"{metric}.update: got scores {list(score_columns.shape)} and labels {list(label_columns.shape)}, "
            "expected the same shape, [B] or [B, L]"
        )
    if score_columns.ndim == 1:
        score_columns, label_columns = score_columns[:, None], label_columns[:, None]
    bad = np.isnan(score_columns)
    if bad.any():
        row = int(bad.any(axis=1).argmax())
        raise ConfigError(f"{metric}.update: got NaN as the score of row {row}, expected numbers")
    return score_columns, label_columns


def mean_over_labels(values: Sequence[float]) -> float:
    """The mean of one value a label; NaN for no label."""
    return sum(values) / len(values) if values else math.nan


def _float32(values: Values) -> FloatColumns:
    if isinstance(values, Tensor):
        values = values.detach().float().cpu().numpy()  # numpy has no bfloat16
    return np.asarray(values, dtype=np.float32)
