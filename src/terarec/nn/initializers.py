# SPDX-License-Identifier: Apache-2.0
"""Initial weights: distributions, and the names by which a layer's options choose among them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from terarec.nn.layer import LayerOption, choice

SCHEMES = ("default", "uniform", "xavier_norm", "xavier_uniform", "zero")


@dataclass(frozen=True, slots=True)
class Distribution:
    """A distribution of initial weights.

    Attributes:
        kind: "normal" (mean 0), "uniform" (around 0) or "constant".
        scale: Standard deviation, greatest absolute value, or the value.
    """

    kind: Literal["normal", "uniform", "constant"]
    scale: float

    def fill_(self, tensor: Tensor, generator: torch.Generator) -> None:
        """Fill `tensor` with random numbers."""
        with torch.no_grad():
            if self.kind == "normal":
                tensor.normal_(0.0, self.scale, generator=generator)
            elif self.kind == "uniform":
                tensor.uniform_(-self.scale, self.scale, generator=generator)
            else:
                tensor.fill_(self.scale)


def normal(std: float) -> Distribution:
    """Return a normal distribution with mean 0."""
    return Distribution("normal", std)


def uniform(limit: float) -> Distribution:
    """Return a uniform distribution over [-limit, limit)."""
    return Distribution("uniform", limit)


def constant(value: float) -> Distribution:
    """Return the distribution of a constant."""
    return Distribution("constant", value)


def xavier_normal(fan_in: int, fan_out: int) -> Distribution:
    """Return the normal distribution of variance 2 / (in + out) (Glorot and Bengio 2010)."""
    return normal(math.sqrt(2.0 / (fan_in + fan_out)))


def xavier_uniform(fan_in: int, fan_out: int) -> Distribution:
    """Return the uniform distribution of variance 2 / (in + out) (Glorot and Bengio 2010)."""
    return uniform(math.sqrt(6.0 / (fan_in + fan_out)))


def scheme_option(name: str, meaning: str) -> LayerOption:
    """Return an option that chooses the initial weights by name."""
    return choice(name, meaning, SCHEMES, default="default")


def by_scheme(
    scheme: str,
    *,
    default: Distribution,
    uniform: Distribution | None = None,
    fans: tuple[int, int] | None = None,
) -> Distribution:
    """Return the distribution that `scheme` names.

    Args:
        scheme: One of `SCHEMES`.
        default: The layer's own.
        uniform: Distribution of "uniform"; None for `default`.
        fans: (in, out) of the two Xavier schemes; the default where the layer does not distinguish them.
    """
    # A scheme that a layer of HugeCTR does not know falls back to the layer's default there, and so it does here.
    if scheme == "zero":
        return constant(0.0)
    if scheme == "uniform" and uniform is not None:
        return uniform
    if scheme == "xavier_norm" and fans is not None:
        return xavier_normal(*fans)
    if scheme == "xavier_uniform" and fans is not None:
        return xavier_uniform(*fans)
    return default


def linear_distributions(
    fan_in: int, fan_out: int, weight_init: str = "default", bias_init: str = "default"
) -> tuple[Distribution, Distribution]:
    """Return initial weight and bias of a fully connected layer.

    By default the weight is Xavier-normal and the bias normal with variance 1 / out, as in the DLRM paper's code
    (Naumov et al. 2019) and HugeCTR's InnerProduct; "uniform" has limits 1 / (in + out) and 1 / out.
    """
    weight = by_scheme(
        weight_init,
        default=xavier_normal(fan_in, fan_out),
        uniform=uniform(1.0 / (fan_in + fan_out)),
        fans=(fan_in, fan_out),
    )
    bias = by_scheme(
        # A bias has no inputs: its Xavier schemes have the fans (0, out).
        bias_init,
        default=normal(math.sqrt(1.0 / fan_out)),
        uniform=uniform(1.0 / fan_out),
        fans=(0, fan_out),
    )
    return weight, bias


def dense_distributions(init: str) -> Callable[[int, int], tuple[Distribution, Distribution]]:
    """Return a function (fan_in, fan_out) -> initial weight and bias of a fully connected layer, by a model's `init`.

    Args:
        init: "default" (see `linear_distributions`); "xavier_normal" or "xavier_uniform" with biases 0 (Glorot and
            Bengio 2010); "kaiming_uniform", weight and bias uniform within 1 / sqrt(in), which is what
            `torch.nn.Linear` takes; "normal", standard deviation 0.01 with biases 0.
    """
    return _DENSE[init]


_DENSE: dict[str, Callable[[int, int], tuple[Distribution, Distribution]]] = {
    "default": linear_distributions,
    "xavier_normal": lambda fan_in, fan_out: (xavier_normal(fan_in, fan_out), constant(0.0)),
    "xavier_uniform": lambda fan_in, fan_out: (xavier_uniform(fan_in, fan_out), constant(0.0)),
    "kaiming_uniform": lambda fan_in, _: (uniform(fan_in**-0.5), uniform(fan_in**-0.5)),
    "normal": lambda *_: (normal(0.01), constant(0.0)),
}
