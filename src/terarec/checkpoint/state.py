# SPDX-License-Identifier: Apache-2.0
"""The state of a training, as arrays and JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from terarec.errors import ConfigError, FormatError
from terarec.formats.container import BFLOAT16
from terarec.spec.checks import shortened
from terarec.spec.codec import parse_json
from terarec.storage import Store


def as_array(name: str, tensor: Tensor) -> NDArray[Any]:
    """Return `tensor` as an array in host memory, without a copy if it is there already.

    Raises:
        ConfigError: An element type that containers lack; the message has `name`.
    """
    values = tensor.detach().cpu().contiguous()
    if values.dtype == torch.bfloat16:
        # NumPy has no bfloat16 of its own: the bits go through int16, and back in `as_tensor`.
        bits: NDArray[Any] = values.view(torch.int16).numpy()
        return bits.view(BFLOAT16)
    try:
        array: NDArray[Any] = values.numpy()
    except TypeError:
        raise ConfigError("checkpoint", f"tensor {name!r} is {tensor.dtype}, expected a type that NumPy has") from None
    return array


def as_tensor(array: NDArray[Any]) -> Tensor:
    """Return `array` as a tensor that shares its memory."""
    if array.dtype == BFLOAT16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def flatten(state: Mapping[str, Any]) -> tuple[dict[str, Tensor], str]:
    """Split the result of ``torch.optim.Optimizer.state_dict()``.

    Returns:
        The tensors, named "<parameter index>.<name>", and the rest as JSON text: the parameter groups and those state
        entries that are plain numbers. Floats survive JSON to the bit.
    """
    tensors: dict[str, Tensor] = {}
    plain: dict[str, dict[str, Any]] = {}
    for index, entries in state["state"].items():
        for name, value in entries.items():
            if isinstance(value, Tensor):
                tensors[f"{index}.{name}"] = value.detach()
            else:
                plain.setdefault(str(index), {})[name] = value
    # JSON has neither tuples nor tensors, and `load_state_dict` takes what it gets: betas as a list would stay one.
    groups = [{name: _boxed(name, value) for name, value in group.items()} for group in state["param_groups"]]
    try:
        return tensors, json.dumps({"groups": groups, "plain": plain})
    except TypeError as error:
        raise ConfigError("optimizer state", f"{error}, expected tensors, numbers, strings, lists") from None


def unflatten(tensors: Mapping[str, Tensor], text: str) -> dict[str, Any]:
    """Invert `flatten`: return the argument of ``load_state_dict``.

    Raises:
        FormatError: `text` or a tensor's name is not what `flatten` writes.
    """
    try:
        rest = parse_json(text)
        state: dict[int, dict[str, Any]] = {int(index): dict(entries) for index, entries in rest["plain"].items()}
        for key, tensor in tensors.items():
            # Names of states may have dots, the index has none.
            index, _, name = key.partition(".")
            state.setdefault(int(index), {})[name] = tensor
        groups = [{name: _unboxed(value) for name, value in group.items()} for group in rest["groups"]]
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise FormatError("optimizer state", f"damaged: {shortened(repr(error))}") from None
    return {"state": state, "param_groups": groups}


def _boxed(name: str, value: Any) -> Any:
    """Return JSON for a group's option; tuples (betas) and tensors (a learning rate) keep their type."""
    if isinstance(value, tuple):
        return {"tuple": list(value)}
    if isinstance(value, Tensor):
        if value.dim() or value.dtype != torch.float32:
            raise ConfigError(
                f"optimizer option {name!r}", f"got {value.dtype}{list(value.shape)}, expected one float32"
            )
        return {"tensor": value.item()}
    return value


def _unboxed(value: Any) -> Any:
    if isinstance(value, dict):
        return tuple(value["tuple"]) if "tuple" in value else torch.tensor(value["tensor"])
    return value


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainState:
    """State of a training after some step. Nothing is copied: tensors and stores are the ones that train.

    Attributes:
        step: Training steps done.
        dense: The model's dense parameters and buffers by name.
        tables: The embedding tables by name, with the row optimizer's state in them.
        optimizer: ``state_dict()`` of the dense optimizer.
        rng: ``torch.get_rng_state()``, which dropout draws from.
        progress: JSON data: the trainer's counters, the reader's state, the row optimizer's steps.
    """

    step: int
    dense: Mapping[str, Tensor]
    tables: Mapping[str, Store]
    optimizer: Mapping[str, Any]
    rng: Tensor
    progress: Mapping[str, Any]
