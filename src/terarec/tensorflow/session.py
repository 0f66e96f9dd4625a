# SPDX-License-Identifier: Apache-2.0
"""`init`, which SOK's scripts call first."""

from __future__ import annotations

import tensorflow as tf

from terarec.errors import ConfigError
from terarec.tensorflow.communication import DEFAULT_TIMEOUT, join

tf_version: list[int] = [int(part) for part in tf.__version__.split("-")[0].split("rc")[0].split(".")[:3]]
"""Major, minor and patch number of TensorFlow."""


def init(comm_tool: str | None = None, use_legacy_optimizer: bool = True, *, timeout: float = DEFAULT_TIMEOUT) -> None:
    """Join the other processes that torchrun or mpirun started; a process alone need not call it.

    Args:
        comm_tool: None, or "horovod", which is not needed.
        use_legacy_optimizer: No effect; optimizers of Keras 3, tf_keras and tf_keras's legacy ones work.
        timeout: Seconds within which all have to come, and without progress in which an exchange fails later.

    Raises:
        ConfigError: Another tool, or variables of the launcher that do not fit.
        CollectiveError: Processes that do not come.
    """
    set_comm_tool(comm_tool)
    join(timeout)


def set_comm_tool(tool: str | None) -> None:
    """Check the name of a library for communication, of which none is needed.

    Raises:
        ConfigError: Neither None nor "horovod".
    """
    if tool not in (None, "horovod"):
        raise ConfigError("comm_tool", f"got {tool!r}, expected None or 'horovod'")
