# SPDX-License-Identifier: Apache-2.0
"""Optimizers of Keras and tf_keras as update rules of rows.

A rule has the formula of the optimizer itself, with one difference: as in tf_keras's legacy optimizers, an id that
comes twice in a batch has one gradient, the sum of both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import tensorflow as tf

from terarec.errors import ConfigError
from terarec.tensorflow.tables import Rule

_REFUSED = {
    "amsgrad": False,
    "centered": False,
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
        optimizer: One of `_RULES`, of Keras 3, tf_keras or tf_keras's legacy ones.
        lazy: Whether rows without a gradient are left alone in a step, also by those that would move them.

    Raises:
        ConfigError: Another optimizer, or an option that rows do not have.
    """
    name, is_legacy = type(optimizer).__name__, hasattr(optimizer, "_decayed_lr")
    if name in ("LossScaleOptimizer", "MultiOptimizer"):
        raise ConfigError("optimizer", f"got {name}, expected those in it, as in {name}(OptimizerWrapper(...))")
    if name not in _RULES or not hasattr(optimizer, "get_config") or (is_legacy and name == "Nadam"):
        raise ConfigError(
            "optimizer",
            f"got {'legacy.' * is_legacy}{name}, expected {', '.join(_RULES)} of Keras or tf_keras; without a wrapper "
            "Keras's own optimizers update a table of fixed rows, all rows in each step",
        )
    config = optimizer.get_config()
    for option, neutral in _REFUSED.items():
        if config.get(option, neutral) not in (neutral, None, 0, False):
            raise ConfigError(f"optimizer.{option}", f"got {config[option]!r}, expected {neutral!r} for rows")
    rule = _RULES[name](config)
    if decay := config.get("weight_decay"):
        if rule.kind != "adam":
            raise ConfigError("optimizer.weight_decay", f"got {decay!r}, expected None, or Adam or AdamW for all rows")
        check_decay(optimizer)
        rule = replace(rule, kind="adamw", numbers={**rule.numbers, "weight_decay": decay})
    if is_legacy:  # whose updates by slices leave rows without a gradient alone, but for these two
        return replace(rule, is_global=not lazy and rule.kind in ("adam", "rmsprop"))
    if rule.kind in ("adagrad", "rmsprop"):  # which add epsilon under the root
        rule = replace(rule, numbers={**rule.numbers, "eps": 0.0, "eps_hat": rule.numbers["eps"]})
    return replace(rule, is_global=not lazy and rule.kind not in ("sgd", "adagrad"))


def check_decay(optimizer: object) -> None:
    """Raise `ConfigError` if an optimizer's weight decay leaves variables out; the user may say so late."""
    names = (f"_exclude_from_weight_decay{rest}" for rest in ("", "_names", "_pattern"))
    if getattr(optimizer, "weight_decay", None) and any(getattr(optimizer, name, None) for name in names):
        raise ConfigError("optimizer.weight_decay", "got variables that are left out, expected the decay of all rows")


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


def _moments(kind: str, config: Mapping[str, Any], *, eps: str = "eps") -> Rule:
    numbers = {"beta1": config["beta_1"], "beta2": config["beta_2"], eps: config["epsilon"]}
    return Rule(kind=kind, numbers=numbers, states=("m", "v"))


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
    "Adam": partial(_moments, "adam", eps="eps_hat"),
    "AdamW": partial(_moments, "adam", eps="eps_hat"),
    "Nadam": partial(_moments, "nadam"),
    "Adamax": partial(_moments, "adamax"),
    "Adadelta": _adadelta,
    "Adagrad": _adagrad,
    "Ftrl": _ftrl,
    "RMSprop": _rmsprop,
}
"""Name of the optimizer's class -> its rule; the names of its states are those of the legacy class's slots."""
WRAPPED = tuple(_RULES)
"""Names of the classes that have a rule."""
