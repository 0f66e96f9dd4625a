"""Adam with the paper's epsilon hat."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn, optim


class EpsilonHatAdam(optim.Adam):
    """w <- w - lr sqrt(1 - beta2^t) / (1 - beta1^t) m / (sqrt(v) + eps_hat), as `AdamSpec.eps_hat` asks for.

    It is `torch.optim.Adam`, fused, with the epsilon of each step set to eps_hat / sqrt(1 - beta2^t): multiplying
    numerator and denominator of torch's formula by that root gives this one. All parameters of a group step together.

    Args:
        parameters: what learns.
        lr: learning rate.
        betas: decays of the two moments.
        eps_hat: see the formula.
    """

    def __init__(
        self, parameters: Iterable[nn.Parameter], *, lr: float, betas: tuple[float, float], eps_hat: float
    ) -> None:
        super().__init__(parameters, lr=lr, betas=betas, eps=eps_hat, fused=True)
        self.defaults |= {"eps_hat": eps_hat, "num_steps": 0}
        for group in self.param_groups:
            group.update(eps_hat=eps_hat, num_steps=0)

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """One step, as of every `torch.optim.Optimizer`."""
        for group in self.param_groups:
            group["num_steps"] += 1
            group["eps"] = group["eps_hat"] / math.sqrt(1.0 - group["betas"][1] ** group["num_steps"])
        return super().step(closure)
