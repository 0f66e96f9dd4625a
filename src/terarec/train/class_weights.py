# SPDX-License-Identifier: Apache-2.0
"""Weights of classes by their numbers in data."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import numpy as np

from terarec.batch import Batch
from terarec.errors import ConfigError
from terarec.spec import ClassWeights


def balanced_weights(
    batches: Iterable[Batch], labels: Sequence[str], *, untrained: Collection[str] = ()
) -> tuple[ClassWeights, ...]:
    """Return weights with which both classes of a label have the same weight in sum: n / (2 n_c) for a class c.

    This is the formula of scikit-learn's ``class_weight="balanced"``. A label between 0 and 1 counts in parts.

    Raises:
        ConfigError: A label outside [0, 1], or one without positive or without negative samples.
    """
    positive, total = np.zeros(len(labels)), 0
    for batch in batches:
        values = batch.label.double().cpu().numpy()
        is_bad = ~((values >= 0) & (values <= 1))
        if is_bad.any():
            row, column = np.argwhere(is_bad)[0]
            raise ConfigError(
                f"label {labels[column]!r}", f"got {values[row, column]:g}, expected 0 to 1 to count positive samples"
            )
        positive += values.sum(0)
        total += len(values)
    for name, count in zip(labels, positive, strict=True):
        if name not in untrained and not 0 < count < total:
            raise ConfigError(
                f"label {name!r}",
                f"got {count:g} positive of {total} training samples, expected both classes for positive_weight 'auto'",
            )
    return tuple(
        ClassWeights(negative=1.0, positive=1.0)
        if name in untrained
        else ClassWeights(negative=float(total / (2 * (total - count))), positive=float(total / (2 * count)))
        for name, count in zip(labels, positive, strict=True)
    )
