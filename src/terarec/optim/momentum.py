"""Momentum that adds up movements."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import nn, optim


class MovementMomentum(optim.Optimizer):
    """m <- momentum m - lr g;  w <- w + m, or with `nesterov` w <- w + momentum m - lr g.

    Unlike `torch.optim.SGD`, whose momentum adds up gradients and takes the rate of the present step for all of them,
    each gradient keeps the rate of its own step: `MomentumSpec.lr_in_momentum`. State: "momentum", from zero.

    Args:
        parameters: what learns.
        lr: learning rate.
        momentum: see the formula.
        nesterov: which formula.
    """

    def __init__(
        self, parameters: Iterable[nn.Parameter], *, lr: float, momentum: float, nesterov: bool = False
    ) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": momentum, "nesterov": nesterov})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One step, as of every `torch.optim.Optimizer`."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            lr, momentum = group["lr"], group["momentum"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["momentum"] = torch.zeros_like(parameter)
                held = state["momentum"].mul_(momentum).add_(parameter.grad, alpha=-lr)
                if group["nesterov"]:
                    parameter.add_(held, alpha=momentum).add_(parameter.grad, alpha=-lr)
                else:
                    parameter.add_(held)
        return loss
