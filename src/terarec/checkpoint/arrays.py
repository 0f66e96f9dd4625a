"""Tensors <-> the arrays that tensor containers hold."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from terarec.errors import ConfigError
from terarec.formats import BFLOAT16


def as_array(name: str, tensor: Tensor) -> NDArray[Any]:
    """`tensor` as an array, in host memory and without copying what is there already.

    Raises:
        ConfigError: an element type that containers lack; the message has `name`.
    """
    held = tensor.detach().cpu().contiguous()
    if held.dtype == torch.bfloat16:
        bits: NDArray[Any] = held.view(torch.int16).numpy()
        return bits.view(BFLOAT16)
    try:
        array: NDArray[Any] = held.numpy()
    except TypeError:
        raise ConfigError(f"checkpoint: tensor {name!r} is {tensor.dtype}, expected a type that NumPy has") from None
    return array


def as_tensor(array: NDArray[Any]) -> Tensor:
    """`array` as a tensor that shares its memory."""
    if array.dtype == BFLOAT16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)
