# SPDX-License-Identifier: Apache-2.0
"""The calls of Horovod that scripts for the Sparse Operation Kit make, for the single process that there is.

TensorFlow is imported by the calls that need it: `python -m terarec.hugectr` provides this module for every script.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from typing import Any

from terarec.errors import ConfigError
from terarec.kernels.environment import launch

Average, Sum, Adasum, Min, Max = range(5)
"""Ways to reduce; of one process all give the same."""


def init(*_: object, **__: object) -> None:
    """Check that there is one process.

    Raises:
        ConfigError: There are several.
    """
    processes = launch()
    if processes is not None and processes.size > 1:
        raise ConfigError("horovod.init", f"got {processes.size} processes, expected one: install Horovod for several")


def rank() -> int:
    """Return the number of this process."""
    return 0


def size() -> int:
    """Return the number of processes."""
    return 1


local_rank, local_size = rank, size


def allreduce(tensor: Any, average: bool | None = None, name: str | None = None, op: int = Average, **_: object) -> Any:
    """Return the tensor."""
    return _tensor(tensor)


def allgather(tensor: Any, name: str | None = None, **_: object) -> Any:
    """Return the tensor."""
    return _tensor(tensor)


def broadcast(tensor: Any, root_rank: int, name: str | None = None, **_: object) -> Any:
    """Return the tensor."""
    return _tensor(tensor)


def broadcast_variables(variables: Iterable[Any], root_rank: int, **_: object) -> None:
    """Leave the variables as they are."""


def barrier(*_: object, **__: object) -> None:
    """Wait for nobody."""


def DistributedGradientTape(gradtape: Any, *_: object, **__: object) -> Any:  # noqa: N802 - Horovod's name
    """Return the tape."""
    return gradtape


def DistributedOptimizer(optimizer: Any, *_: object, **__: object) -> Any:  # noqa: N802 - Horovod's name
    """Return the optimizer."""
    return optimizer


def _tensor(tensor: Any) -> Any:
    tf = importlib.import_module("tensorflow")
    return tensor if isinstance(tensor, tf.IndexedSlices) else tf.convert_to_tensor(tensor)
