"""Penalties on the size of the dense weights."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Regularizer:
    """What a training step adds to its loss, over all dense weights (biases and the weights of norms included).

    Attributes:
        kind: "l1": strength / B sum |w|, gradient strength / B sign(w); "l2": strength / (2 B) sum w^2, gradient
            strength / B w. B is the batch size, as in HugeCTR.
        strength: lambda.
    """

    kind: Literal["l1", "l2"]
    strength: float

    def penalty(self, weights: Iterable[Tensor], batch_size: int) -> Tensor:
        """The term for `weights`, a scalar that autograd differentiates; 0 if there are none."""
        of_one = _absolute if self.kind == "l1" else _half_square
        terms = [of_one(weight) for weight in weights]
        total = torch.stack(terms).sum() if terms else torch.zeros(())
        return total * (self.strength / batch_size)


def _absolute(weight: Tensor) -> Tensor:
    return weight.abs().sum()


def _half_square(weight: Tensor) -> Tensor:
    return weight.square().sum() / 2
