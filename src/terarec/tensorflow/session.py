# SPDX-License-Identifier: Apache-2.0
"""`init`, which SOK's scripts call first."""

from __future__ import annotations

import tensorflow as tf

from terarec.errors import ConfigError
from terarec.kernels.environment import launch

tf_version: list[int] = [int(part) for part in tf.__version__.split("-")[0].split("rc")[0].split(".")[:3]]
"""Major, minor and patch number of TensorFlow."""


def init(comm_tool: str | None = None, use_legacy_optimizer: bool = True) -> None:
    """Check that embeddings can be used here. Nothing needs it but scripts that call it.

    Args:
        comm_tool: None, or "horovod", which a single process does not need.
        use_legacy_optimizer: No effect; optimizers of Keras 3, tf_keras and tf_keras's legacy ones work.

    Raises:
        ConfigError: Another tool, or several processes.
    """
    if comm_tool not in (None, "horovod"):
        raise ConfigError("comm_tool", f"got {comm_tool!r}, expected None or 'horovod'")
    processes = launch()
    if processes is not None and processes.size > 1:
        raise ConfigError(
            "init", f"got {processes.size} processes, expected one: tables over several processes are not there yet"
        )
