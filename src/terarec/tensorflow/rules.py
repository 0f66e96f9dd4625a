# SPDX-License-Identifier: Apache-2.0
"""Optimizers of Keras and tf_keras as update rules of rows.

The reference is the de-duplicated gradient of tf_keras's legacy optimizers: an id that comes twice in a batch has one
gradient, the sum of both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import tensorflow as tf

from terarec.errors import ConfigError
from terarec.tensorflow.tables import Rule

_REFUSED = {
    "amsgrad": False,
    "centered": False,
    "weight_decay": None,
    "clipnorm": None,
    "clipvalue": None,
    "global_clipnorm": None,
    "use_ema": False,
    "gradient_accumulation_steps": None,
    "loss_scale_factor": None,
    "l2_shrinkage_regularization_strength": 0.0,
}
"""Options of optimizers that change the formula -> the value that does not."""


def rule_of(optimizer: object, *, lazy: bool) -> Rule:
    """Return the rule of an optimizer for rows.

    Args:
        optimizer: Optimizer of Keras 3, tf_keras or tf_keras's legacy ones: SGD, Adam, Adamax, Adadelta,
            Adagrad, Ftrl or RMSprop.
        lazy: Whether rows without a gradient are left alone in a step, also by Adam, which would decay their moments.

    Raises:
        ConfigError: Another optimizer, or an option that rows do not have.
    """
    name = type(optimizer).__name__
    if name not in _RULES or not hasattr(optimizer, "get_config"):
        raise ConfigError("optimizer", f"got {name}, expected {', '.join(_RULES)} of Keras or tf_keras")
    config = optimizer.get_config()
    for option, neutral in _REFUSED.items():
        if config.get(option, neutral) not in (neutral, None, 0, False):
            raise ConfigError(f"optimizer.{option}", f"got {config[option]!r}, expected {neutral!r} for rows")
    rule = _RULES[name](config)
    return replace(rule, is_global=not lazy and name in ("Adam", "RMSprop"))


def learning_rate(optimizer: Any, step: tf.Tensor) -> tf.Tensor:
    """Return the learning rate at a step from 0, whatever step the optimizer itself is at."""
    if hasattr(optimizer, "_decayed_lr"):  # the legacy ones' name for it; they read their own number of the step
        own, optimizer._iterations = optimizer._iterations, step
        try:
            return optimizer._decayed_lr(tf.float32)
        finally:
            optimizer._iterations = own
    rate = optimizer._learning_rate
    if hasattr(rate, "get_config"):  # a schedule
        return rate(step)
    return tf.convert_to_tensor(rate() if callable(rate) else rate)


def _sgd(config: Mapping[str, Any]) -> Rule:
    momentum = float(config.get("momentum") or 0.0)
    if not momentum:
        return Rule(kind="sgd", numbers={})
    numbers = {"beta1": momentum, "lr_in_momentum": 1.0}
    return Rule(kind="nesterov" if config.get("nesterov") else "momentum", numbers=numbers, states=("momentum",))


def _adam(config: Mapping[str, Any]) -> Rule:
    numbers = {"beta1": config["beta_1"], "beta2": config["beta_2"], "eps_hat": config["epsilon"]}
    return Rule(kind="adam", numbers=numbers, states=("m", "v"))


def _adamax(config: Mapping[str, Any]) -> Rule:
    numbers = {"beta1": config["beta_1"], "beta2": config["beta_2"], "eps": config["epsilon"]}
    return Rule(kind="adamax", numbers=numbers, states=("m", "v"))


def _adadelta(config: Mapping[str, Any]) -> Rule:
    numbers = {"beta2": config["rho"], "eps": config["epsilon"]}
    return Rule(kind="adadelta", numbers=numbers, states=("accum_grad", "accum_var"))


def _adagrad(config: Mapping[str, Any]) -> Rule:
    return Rule(
        kind="adagrad",
        numbers={"eps": config["epsilon"]},
        states=("accumulator",),
        initial=config["initial_accumulator_value"],
    )


def _ftrl(config: Mapping[str, Any]) -> Rule:
    if config["learning_rate_power"] != -0.5:
        raise ConfigError(
            "optimizer.learning_rate_power", f"got {config['learning_rate_power']!r}, expected -0.5 for rows"
        )
    # TensorFlow's formula has twice the l2 of FTRL.
    numbers = {
        "beta": config.get("beta", 0.0),
        "l1": config["l1_regularization_strength"],
        "l2": 2.0 * config["l2_regularization_strength"],
    }
    initial = config["initial_accumulator_value"]
    return Rule(kind="ftrl", numbers=numbers, states=("accumulator", "linear"), initial=initial)


def _rmsprop(config: Mapping[str, Any]) -> Rule:
    if config.get("momentum"):
        raise ConfigError("optimizer.momentum", f"got {config['momentum']!r}, expected 0 for rows with RMSprop")
    return Rule(kind="rmsprop", numbers={"beta2": config["rho"], "eps": config["epsilon"]}, states=("rms",))


_RULES: dict[str, Callable[[Mapping[str, Any]], Rule]] = {
    "SGD": _sgd,
    "Adam": _adam,
    "Adamax": _adamax,
    "Adadelta": _adadelta,
    "Adagrad": _adagrad,
    "Ftrl": _ftrl,
    "RMSprop": _rmsprop,
}
"""Name of the optimizer's class -> its rule; the names of its states are those of the legacy class's slots."""
