"""A known logistic model behind generated labels, so that the best reachable AUC is known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from terarec.formats import Keys
from terarec.spec import RecordLayout

_FREQUENT = 32
"""Keys of a slot with an effect, the first ones: power laws make them frequent enough to be learnt."""
_DEVIATION = 2.0
"""Standard deviation of the logit; gives a best AUC of about 0.85."""


@dataclass(frozen=True, slots=True)
class PlantedModel:
    """P(label) = sigmoid(bias + sum of dense * weight + sum over keys of the key's effect), for each label.

    Attributes:
        weights: float64[L, F].
        effects: per slot float64[L, keys with an effect + 1]; the last entry is that of all other keys.
        bias: float64[L].
    """

    weights: NDArray[np.float64]
    effects: tuple[NDArray[np.float64], ...]
    bias: NDArray[np.float64]

    def logits(self, dense: NDArray[np.float32], keys: Sequence[Keys]) -> NDArray[np.float64]:
        """float64[n, L] of samples with ``dense[n, F]`` and keys that start at 0 in each slot."""
        logits = np.tile(self.bias, (len(dense), 1)) + dense @ self.weights.T
        for column, effects in zip(keys, self.effects, strict=True):
            values, offsets = column if isinstance(column, tuple) else (column, None)
            of_keys = effects[:, np.minimum(values, effects.shape[1] - 1)]
            if offsets is None:
                logits += of_keys.T
            else:
                sums = np.concatenate([np.zeros((len(effects), 1)), np.cumsum(of_keys, axis=1)], axis=1)
                logits += (sums[:, offsets[1:]] - sums[:, offsets[:-1]]).T
        return logits


def plant(
    layout: RecordLayout, generator: np.random.Generator, pilot: tuple[NDArray[np.float32], Sequence[Keys]]
) -> PlantedModel:
    """Draw a model, scaled on the `pilot` samples (dense, keys) to a fixed spread and as many positives as negatives.

    Args:
        layout: what a sample holds, with the sizes of its slots.
        generator: source of the model's numbers.
        pilot: samples like those that will be labelled.
    """
    weights = generator.standard_normal((layout.label_dim, layout.dense_dim))
    sizes = [min(size, _FREQUENT) for size in layout.slot_sizes[: layout.num_slots]]
    effects = [generator.standard_normal((layout.label_dim, size + 1)) for size in sizes]
    for table in effects:
        table[:, -1] = 0.0
    raw = PlantedModel(weights, tuple(effects), np.zeros(layout.label_dim)).logits(*pilot)
    scale = _DEVIATION / np.maximum(raw.std(axis=0), 1e-6)
    return PlantedModel(
        weights=weights * scale[:, None],
        effects=tuple(table * scale[:, None] for table in effects),
        bias=-raw.mean(axis=0) * scale,
    )
