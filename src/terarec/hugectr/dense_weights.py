# SPDX-License-Identifier: Apache-2.0
"""The layers of a model, and their optimizer's states, as HugeCTR's files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, optim

from terarec.errors import ConfigError, FormatError
from terarec.formats.hugectr.weights import (
    STATISTICS_SUFFIX,
    BatchNormStatistics,
    read_floats,
    read_statistics,
    write_floats,
    write_statistics,
)
from terarec.models import GraphModel
from terarec.nn.layer import FileTensor, WeightedLayer
from terarec.nn.normalization import BatchNorm
from terarec.optim.dense import dense_states

# Of SGD, both momentums, AdaGrad, RMSProp, Adam (m and v), and Ftrl (n and z).
_KNOWN = ((), ("momentum",), ("sum",), ("square_avg",), ("exp_avg", "exp_avg_sq"), ("sum", "linear"))
"""States, in file order, of the optimizers that HugeCTR has; RMSProp of layers is terarec's own."""


def save_dense(model: GraphModel, path: Path) -> None:
    """Write the weights of the layers to `path`, and the statistics of BatchNorm layers next to it."""
    # `view` turns a tensor to the file's orientation: a kernel is [in, out] there, [out, in] in torch.
    write_floats(path, (_array(entry.view(entry.tensor)) for _, entry in _entries(model)))
    layers = _batch_norms(model)
    if layers:
        write_statistics(
            _statistics_path(path),
            [BatchNormStatistics(_array(layer.running_mean), _array(layer.running_var)) for layer in layers],
        )


def load_dense(
    model: GraphModel, path: Path, *, statistics: Path | None = None, needs_statistics: bool = False
) -> None:
    """Load the weights of the layers from `path`, and the running statistics of BatchNorm layers.

    Without `statistics` the BatchNorm statistics come from the file next to `path`, if it exists.

    Raises:
        DataNotFoundError: No such file.
        FormatError: A file of another model; nothing is changed then.
    """
    entries = list(_entries(model))
    arrays = read_floats(path, [(name, _shape(entry)) for name, entry in entries])
    layers = _batch_norms(model)
    adjacent = statistics or _statistics_path(path)
    entries_read = (
        read_statistics(adjacent) if layers and (statistics or needs_statistics or adjacent.is_file()) else []
    )
    if entries_read:
        _check_widths(adjacent, entries_read, layers)
    # All files are read and checked by now, so that a damaged one changes nothing.
    with torch.no_grad():
        for (_, entry), array in zip(entries, arrays, strict=True):
            entry.view(entry.tensor).copy_(torch.from_numpy(array))
        for measured, layer in zip(entries_read, layers, strict=False):
            layer.running_mean.copy_(torch.from_numpy(measured.mean))
            layer.running_var.copy_(torch.from_numpy(measured.var))


def save_dense_optimizer_states(model: GraphModel, optimizer: optim.Optimizer, path: Path) -> None:
    """Write the optimizer states of the layers, state by state.

    Raises:
        ConfigError: An optimizer that HugeCTR does not have.
        StorageError: The disk is full.
    """
    states = _states(optimizer)
    entries = [entry for _, entry in _entries(model)]
    write_floats(path, (_array(entry.view(_state_of(entry, state))) for state in states.values() for entry in entries))


def load_dense_optimizer_states(model: GraphModel, optimizer: optim.Optimizer, path: Path) -> None:
    """Load optimizer states that `save_dense_optimizer_states` wrote; the number of steps does not change.

    Raises:
        ConfigError: An optimizer that HugeCTR does not have.
        DataNotFoundError: No such file.
        FormatError: A file of another model or optimizer; nothing is changed then.
    """
    states = _states(optimizer)
    entries = [(name, entry, state) for state in states for name, entry in _entries(model)]
    arrays = read_floats(path, [(f"{state} of {name}", _shape(entry)) for name, entry, state in entries])
    for (_, entry, state), array in zip(entries, arrays, strict=True):
        entry.view(_state_of(entry, states[state])).copy_(torch.from_numpy(array))


def _entries(model: GraphModel) -> Iterator[tuple[str, FileTensor]]:
    """Yield each part of the file with its name."""
    for layer, module in zip(model.spec.layers, model.layers, strict=True):
        # `spec.layers` lists layers in the order of the script's calls, which is the order of HugeCTR's files.
        if isinstance(module, WeightedLayer):
            for number, entry in enumerate(module.file_tensors()):
                yield f"{layer.kind} {layer.tops[0]!r}, weight {number}", entry


def _shape(entry: FileTensor) -> tuple[int, ...]:
    return tuple(entry.view(entry.tensor).shape)


def _array(tensor: Tensor) -> NDArray[np.float32]:
    array: NDArray[np.float32] = tensor.detach().float().cpu().numpy()
    return array


def _batch_norms(model: GraphModel) -> list[BatchNorm]:
    return [module for module in model.layers if isinstance(module, BatchNorm)]


def _check_widths(path: Path, entries: Sequence[BatchNormStatistics], layers: Sequence[BatchNorm]) -> None:
    widths, expected = [len(one.mean) for one in entries], [len(layer.running_mean) for layer in layers]
    if widths != expected:
        raise FormatError(path, f"holds BatchNorm layers of widths {widths}, expected {expected}")


def _statistics_path(path: Path) -> Path:
    return path.with_name(path.name + STATISTICS_SUFFIX)


def _states(optimizer: optim.Optimizer) -> dict[str, dict[int, Tensor]]:
    """Return name of a state -> id of a weight -> the optimizer's tensor."""
    states = dense_states(optimizer)
    # The order of the states is that of the file, so a set of names is not enough.
    if tuple(states) not in _KNOWN:
        raise ConfigError(
            "optimizer states",
            f"got {', '.join(states)} of {type(optimizer).__name__}, expected those of an optimizer "
            "that HugeCTR has (with momentum in HugeCTR's form)",
        )
    weights = [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]
    return {name: dict(zip(weights, values, strict=True)) for name, values in states.items()}


def _state_of(entry: FileTensor, state: Mapping[int, Tensor]) -> Tensor:
    """Return the state of a weight; zeros for a disabled bias, which files contain as well."""
    return state.get(id(entry.tensor), torch.zeros_like(entry.tensor, requires_grad=False))
