"""FTRL-Proximal for dense parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, MutableMapping

import torch
from torch import Tensor, nn, optim

from terarec.errors import ConfigError
from terarec.spec import FTRLSpec


class FTRL(optim.Optimizer):
    """The formula of `FTRLSpec`; state: "sum" (n) from ``initial_accumulator``, and "linear" (z) from zero.

    Args:
        parameters: what learns.
        spec: the numbers; ``spec.rows`` plays no part.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], spec: FTRLSpec) -> None:
        numbers = ("lr", "beta", "l1", "l2", "eps", "initial_accumulator")
        super().__init__(parameters, {name: getattr(spec, name) for name in numbers})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One step, as of every `torch.optim.Optimizer`.

        Raises:
            ConfigError: a learning rate that is not positive: the formula divides by it.
        """
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            if not group["lr"] > 0.0:
                raise ConfigError(f"FTRL: got the learning rate {group['lr']!r}, expected one > 0: it divides by it")
            for parameter in group["params"]:
                if parameter.grad is not None:
                    _move(parameter, parameter.grad, self._state(parameter, group), group)
        return loss

    def _state(self, parameter: Tensor, group: MutableMapping[str, float]) -> MutableMapping[str, Tensor]:
        state: MutableMapping[str, Tensor] = self.state[parameter]
        if not state:
            state["sum"] = torch.full_like(parameter, group["initial_accumulator"])
            state["linear"] = torch.zeros_like(parameter)
        return state


def _move(
    weights: Tensor, grad: Tensor, state: MutableMapping[str, Tensor], numbers: MutableMapping[str, float]
) -> None:
    total, linear, lr = state["sum"], state["linear"], numbers["lr"]
    before = (total + numbers["eps"]).sqrt_()
    root = total.addcmul_(grad, grad).add(numbers["eps"]).sqrt_()
    linear.add_(grad).addcmul_(before.sub_(root), weights, value=1.0 / lr)
    shrunk = linear.sign().mul_(numbers["l1"]).sub_(linear)
    moved = shrunk.div_(root.add_(numbers["beta"]).div_(lr).add_(numbers["l2"]))
    weights.copy_(moved.masked_fill_(linear.abs() <= numbers["l1"], 0.0))
