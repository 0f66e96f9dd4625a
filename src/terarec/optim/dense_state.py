"""What dense optimizers keep for each parameter."""

from __future__ import annotations

import torch
from torch import Tensor, nn, optim

from terarec.errors import ConfigError
from terarec.optim.ftrl import FTRL
from terarec.optim.momentum import MovementMomentum

# Names of the tensors that are as large as a parameter, first moments before second ones. Classes before their bases.
_NAMES: tuple[tuple[type[optim.Optimizer], tuple[str, ...]], ...] = (
    (optim.Adam, ("exp_avg", "exp_avg_sq")),
    (optim.Adagrad, ("sum",)),
    (optim.RMSprop, ("square_avg",)),
    (MovementMomentum, ("momentum",)),
    (FTRL, ("sum", "linear")),
)
_COUNTING = (optim.Adam, optim.RMSprop)  # those that count the steps of each parameter, from their first one on


def dense_states(optimizer: optim.Optimizer) -> dict[str, list[Tensor]]:
    """Name of each state -> the optimizer's own tensors, one a parameter in the order of ``param_groups``.

    A state that the first step would make is made, as that step would, so that it can be filled from a file.

    Raises:
        ConfigError: an optimizer that `build_dense_optimizer` does not make.
    """
    names = _names(optimizer)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for parameter in parameters:
        _complete(optimizer, parameter, names)
    return {name: [optimizer.state[parameter][name] for parameter in parameters] for name in names}


def _names(optimizer: optim.Optimizer) -> tuple[str, ...]:
    if isinstance(optimizer, optim.SGD):
        return ("momentum_buffer",) if any(group["momentum"] for group in optimizer.param_groups) else ()
    for kind, names in _NAMES:
        if isinstance(optimizer, kind):
            return names
    raise ConfigError(f"dense_states: got {type(optimizer).__name__}, expected what build_dense_optimizer makes")


def _complete(optimizer: optim.Optimizer, parameter: nn.Parameter, names: tuple[str, ...]) -> None:
    """Make the state of `parameter`, if it has none yet."""
    state = optimizer.state[parameter]
    if not names or state.get(names[0]) is not None:
        return
    if isinstance(optimizer, _COUNTING):
        state["step"] = torch.zeros((), dtype=torch.float32)
    for name in names:
        state[name] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
    if isinstance(optimizer, FTRL):
        state["sum"].fill_(optimizer.defaults["initial_accumulator"])
