# SPDX-License-Identifier: Apache-2.0
"""The ranks: the processes that train together, and what SOK calls them, with one GPU each.

Nothing here imports TensorFlow but `join`, where there are several processes.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from terarec.errors import CollectiveError, ConfigError
from terarec.kernels.environment import Launch, launch
from terarec.tensorflow.joining import connect

if TYPE_CHECKING:
    from numpy.typing import NDArray

DEFAULT_TIMEOUT = 300.0
"""Seconds without progress after which an exchange between ranks fails."""


_ALONE = Launch(rank=0, size=1, local_size=1, local_rank=0, has_address=False, is_mpi=False)
_joined: list[Launch] = []
"""The launch of this process, once it has joined the others."""


def join(timeout: float = DEFAULT_TIMEOUT) -> Launch:
    """Join the processes that torchrun or mpirun started with this one; calls after the first return the same.

    Args:
        timeout: Seconds within which all have to come, and without progress in which an exchange fails later.

    Raises:
        ConfigError: A timeout that is not positive, or variables of the launcher that do not fit.
        CollectiveError: Ranks that do not come.
    """
    if not 0 < timeout < float("inf"):
        raise ConfigError("timeout", f"got {timeout!r}, expected seconds > 0")
    if not _joined:
        launched = launch() or _ALONE
        if launched.size > 1:
            tables = importlib.import_module("terarec.tensorflow.tables")
            if tables.OPS is None:
                raise ConfigError("init", f"got {launched.size} processes, expected one: the op library is not loaded")
            sockets = [-1 if one is None else one.detach() for one in connect(launched, timeout)]
            tables.core.join(launched.rank, sockets, timeout)
        _joined.append(launched)
    return _joined[0]


def current() -> Launch:
    """Return the launch of this process, which has joined the others; a process alone need not have.

    Raises:
        ConfigError: It is one of several, and has not.
    """
    if _joined:
        return _joined[0]
    launched = launch() or _ALONE
    if launched.size > 1:
        raise ConfigError("init", f"this is one of {launched.size} processes, expected a call of sok.init() first")
    return launched


def leave() -> None:
    """Close the connections to the other ranks; they see it when they next need this one."""
    if _joined and _joined[0].size > 1:
        importlib.import_module("terarec.tensorflow.tables").core.leave()
    _joined.clear()


def rank() -> int:
    """Return the number of this process."""
    return current().rank


def num_ranks() -> int:
    """Return the number of processes."""
    return current().size


def local_rank() -> int:
    """Return the number of this process on its machine."""
    return current().local_rank


num_gpus = num_ranks
global_gpu_id = rank


def num_gpu_per_rank() -> int:
    """Return 1: each process counts as a GPU."""
    return 1


def id_in_rank() -> int:
    """Return 0, the number of the process's only part."""
    return 0


def send_to_all(what: str, parts: list[NDArray[np.uint8]]) -> list[NDArray[np.uint8]]:
    """Send ``parts[r]`` to each rank r, and return what each has sent to this one.

    Args:
        what: Name of the exchange, the same on all ranks.
        parts: Bytes for each rank.

    Raises:
        CollectiveError: A rank has ended, does not answer, or is at another exchange.
    """
    if len(parts) == 1:
        return parts
    core = importlib.import_module("terarec.tensorflow.tables").core
    try:
        received: list[NDArray[np.uint8]] = core.exchange(what, [np.ascontiguousarray(part) for part in parts])
    except (RuntimeError, ValueError) as error:
        raise CollectiveError(str(error), collective=what) from None
    return received


def gathered(what: str, arrays: Sequence[NDArray[Any]]) -> list[NDArray[Any]]:
    """Return arrays whose numbers are those of all ranks, one rank after the other, and flat.

    Args:
        what: Name of the exchange, the same on all ranks.
        arrays: Arrays of this rank, of the same types on all.

    Raises:
        CollectiveError: As `send_to_all`.
    """
    size, results = num_ranks(), []
    for array in arrays:
        content = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        results.append(np.concatenate(send_to_all(what, [content] * size)).view(array.dtype))
    return results
