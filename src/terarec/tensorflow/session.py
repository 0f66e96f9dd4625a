# SPDX-License-Identifier: Apache-2.0
"""`init`, which SOK's scripts call first."""

from __future__ import annotations

import importlib.util
import re

import tensorflow as tf

from terarec.errors import ConfigError
from terarec.tensorflow.communication import DEFAULT_TIMEOUT, join
from terarec.tensorflow.optimizers import wrap_legacy_optimizers

tf_version: list[int] = [int(part) for part in re.findall(r"\d+", tf.__version__)[:3]]
"""Major, minor and patch number of TensorFlow."""


def init(comm_tool: str | None = None, use_legacy_optimizer: bool = True, *, timeout: float = DEFAULT_TIMEOUT) -> None:
    """Join the other processes that torchrun or mpirun started; a process alone need not call it.

    Args:
        comm_tool: None, "horovod" or "single", which make no difference: the launcher says who is there.
        use_legacy_optimizer: Whether tf_keras's legacy optimizers, where it is installed, update embedding variables
            without `OptimizerWrapper`. Where `tf.keras` is tf_keras, `tf.keras.optimizers` and `tf.optimizers` become
            these, as in SOK.
        timeout: Seconds within which all have to come, and without progress in which an exchange fails later.

    Raises:
        ConfigError: Another tool, or variables of the launcher that do not fit.
        CollectiveError: Processes that do not come.
    """
    set_comm_tool(comm_tool)
    join(timeout)
    if use_legacy_optimizer and importlib.util.find_spec("tf_keras") is not None:
        wrap_legacy_optimizers()
        legacy = getattr(tf.keras.optimizers, "legacy", None)
        if legacy is not None and legacy.Optimizer.__name__ == "OptimizerV2":
            tf.keras.optimizers = tf.optimizers = legacy


def set_comm_tool(tool: str | None) -> None:
    """Check the name of a library for communication, of which none is needed.

    Raises:
        ConfigError: Neither None, "horovod" nor "single".
    """
    if tool not in (None, "horovod", "single"):
        raise ConfigError("comm_tool", f"got {tool!r}, expected None, 'horovod' or 'single'")
