# SPDX-License-Identifier: Apache-2.0
"""Optimizers of embedding variables: `SGD`, `Adam`, and `OptimizerWrapper` for those of Keras and tf_keras."""

from __future__ import annotations

import importlib
import weakref
from collections.abc import Iterable
from functools import wraps
from typing import Any

import numpy as np
import tensorflow as tf

from terarec.errors import ConfigError
from terarec.tensorflow import ops as table_ops
from terarec.tensorflow.ops import Update
from terarec.tensorflow.rules import check_decay, learning_rate, rule_of
from terarec.tensorflow.tables import Rule
from terarec.tensorflow.variables import (
    RowsVariable,
    check_no_strategy,
    keras_call,
    needed_rows,
    number_of,
    rows_of,
    slices_of,
)

# AutoGraph would rewrite what is called in a `tf.function`; nothing here depends on the values of tensors.
_as_it_is = tf.autograph.experimental.do_not_convert

Pair = tuple[tf.Tensor | tf.IndexedSlices | None, tf.Variable]


def filter_variables(variables: Iterable[tf.Variable]) -> tuple[list[tf.Variable], list[tf.Variable]]:
    """Return the embedding variables, and the others."""
    every = list(variables)
    ours = [one for one in every if rows_of(one) is not None]
    return ours, [one for one in every if rows_of(one) is None]


def parted(pairs: Iterable[Pair]) -> tuple[list[tuple[object, RowsVariable]], list[Pair]]:
    """Return the pairs of gradients and embedding variables, and the others; a gradient of None is left out."""
    ours, others = [], []
    for grad, variable in pairs:
        rows = rows_of(variable)
        if grad is not None and rows is not None:
            ours.append((grad, rows))
        elif grad is not None:
            others.append((grad, variable))
    return ours, others


def apply_rule(rule: Rule, rate: tf.Tensor, step: tf.Tensor, pairs: Iterable[tuple[object, RowsVariable]]) -> None:
    """Update the rows of each variable by its gradient; None is skipped, and a dense one updates all rows."""
    check_no_strategy()
    update = Update(rule, rule.vector(rate), tf.cast(step, tf.int64))
    for grad, variable in pairs:
        if grad is None:
            continue
        if not isinstance(grad, tf.IndexedSlices):
            if variable.table.grows:
                raise ConfigError(
                    "grads_and_vars", f"got a dense gradient of {variable.table.name!r}, expected of rows"
                )
            # Of a branch of `tf.cond` that does not read the variable it has no rows.
            rows = tf.where(tf.shape(grad, tf.int64)[0] == 0, np.int64(0), np.int64(len(variable.table)))
            grad = tf.IndexedSlices(grad, tf.range(rows))
        variable.table.have_states(rule)
        slices = slices_of("grads_and_vars", grad, variable.table.width)
        table_ops.ops.apply(variable.table, variable, slices, update)


class RowsState:
    """A state of an embedding variable as one of the variables of an optimizer, by which Keras saves it.

    Attributes:
        name: Name, as Keras 3 has it in `path`, too.
        dtype: float32.

    Args:
        rows: The embedding variable.
        number: Number of the state.
        name: Its name.
    """

    dtype = "float32"

    def __init__(self, rows: RowsVariable, number: int, name: str) -> None:
        self._value, self._number = rows, number
        self.name = self.path = f"{rows.table.name}/{name}"

    @property
    def shape(self) -> tf.TensorShape:
        """[V, D]."""
        return self._value.shape

    def numpy(self) -> np.ndarray:
        """Return the state float32[V, D].

        Raises:
            ConfigError: As for the rows.
        """
        return self._whole(keras_call())

    def _whole(self, by_keras: str) -> np.ndarray:
        self._value.check_whole(by_keras)
        return self._value.table.read()[2][self._number]

    def __array__(self, dtype: np.dtype[Any] | None = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self._whole(keras_call()), dtype)

    def assign(self, value: object) -> None:
        """Set the state [V, D]."""
        self._value.check_whole()
        self._value.table.set_state(self._number, np.asarray(value, np.float32))


def states_of(variables: Iterable[RowsVariable], rule: Rule) -> list[RowsState]:
    """Return the states of embedding variables by a rule, allocated if they were not."""
    every = list(variables)
    for rows in every:
        rows.table.have_states(rule)
    return [RowsState(rows, number, name) for rows in every for number, name in enumerate(rule.states)]


class SGD:
    """Gradient descent for embedding variables: w <- w - lr g.

    Attributes:
        lr: Learning rate, a variable.
        rule: Update of rows.

    Args:
        lr: Learning rate.
    """

    def __init__(self, lr: float = 0.001) -> None:
        self.lr = tf.Variable(number_of("lr", lr), trainable=False, name="learning_rate")
        self.rule = Rule(kind="sgd", numbers={})

    @_as_it_is
    def apply_gradients(self, grads_and_vars: Iterable[Pair], global_step: object = None, name: object = None) -> None:
        """Update the variables.

        Raises:
            ConfigError: One that is no embedding variable.
        """
        apply_rule(self.rule, self.lr, tf.constant(1, tf.int64), _with_rows(grads_and_vars))


class Adam(tf.Module):
    """Adam for embedding variables alone, whose rows without a gradient move, too, as in a dense Adam.

    Attributes:
        iterations: Number of steps.
        lr: Learning rate, a variable.
        rule: Update of rows.

    Args:
        learning_rate: Learning rate.
        beta_1: Decay of the first moment.
        beta_2: Decay of the second moment.
        epsilon: Constant that is added to the root of the second moment.
        name: Name.
        lazy: Whether rows without a gradient are left alone.
        lr: The same as `learning_rate`.
    """

    def __init__(
        self,
        learning_rate: float = 0.001,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-7,
        name: str = "Plugin_Adam",
        *,
        lazy: bool = False,
        lr: float | None = None,
    ) -> None:
        super().__init__(name=name)
        rate = number_of("learning_rate", learning_rate) if lr is None else number_of("lr", lr)
        self.lr = tf.Variable(rate, trainable=False, name="learning_rate")
        self.iterations = tf.Variable(0, trainable=False, dtype=tf.int64, name="iterations")
        arguments = {"beta1": ("beta_1", beta_1), "beta2": ("beta_2", beta_2), "eps_hat": ("epsilon", epsilon)}
        numbers = {own: number_of(*argument) for own, argument in arguments.items()}
        self.rule = Rule(kind="adam", numbers=numbers, states=("m", "v"), is_global=not lazy)

    @_as_it_is
    def apply_gradients(
        self,
        grads_and_vars: Iterable[Pair],
        global_step: object = None,
        name: object = None,
        experimental_aggregate_gradients: bool = True,
    ) -> None:
        """Update the variables.

        Raises:
            ConfigError: One that is no embedding variable.
        """
        apply_rule(self.rule, self.lr, self.iterations.assign_add(1), _with_rows(grads_and_vars))


class OptimizerWrapper(tf.Module):
    """An optimizer of Keras or tf_keras whose updates of embedding variables are the core's; it updates others itself.

    Rows without a gradient are left alone, as SOK's wrapper does; with ``lazy=False`` they get the update that the
    optimizer itself gives them. For `Model.compile`, use `terarec.tensorflow.keras.OptimizerWrapper`.

    Attributes:
        optimizer: The wrapped optimizer, whose learning rate and schedule are used.
        iterations: Number of steps.
        rule: Update of rows.

    Args:
        optimizer: SGD, Adam, AdamW, Nadam, Adamax, Adadelta, Adagrad, Ftrl or RMSprop, of Keras 3, tf_keras, or
            tf_keras's legacy ones. Steps of embedding variables alone leave its own number of steps as it is.
        lazy: Whether rows without a gradient are left alone.

    Raises:
        ConfigError: Another optimizer, or an option that rows do not have.
    """

    def __init__(self, optimizer: Any, *, lazy: bool = True) -> None:
        super().__init__()
        self.rule = rule_of(optimizer, lazy=lazy)
        self.optimizer = optimizer
        self.iterations = tf.Variable(0, trainable=False, dtype=tf.int64, name="iterations")

    @property
    def lr(self) -> tf.Tensor:
        """The learning rate of the next step."""
        return learning_rate(self.optimizer, self.iterations)

    # Not `get_slot`: checkpoints take objects with this method for optimizers whose states are variables.
    def states(self, variable: RowsVariable) -> dict[str, tf.Tensor]:
        """Return the states float32[n, D] of an embedding variable by name, their rows in the order of its table.

        Raises:
            ConfigError: It was in no step yet.
        """
        states = variable.table.read()[2]
        if len(states) < len(self.rule.states):
            raise ConfigError("variable", f"{variable.table.name!r} has no states yet, expected a step before")
        return {name: tf.constant(state) for name, state in zip(self.rule.states, states, strict=False)}

    @_as_it_is
    def apply_gradients(self, grads_and_vars: Iterable[Pair], global_step: object = None, name: object = None) -> None:
        """Update the variables; a gradient of None is skipped."""
        check_decay(self.optimizer)
        ours, others = parted(grads_and_vars)
        rate = self.lr
        apply_rule(self.rule, rate, self.iterations.assign_add(1), ours)
        if others:
            self.optimizer.apply_gradients(others)
        if global_step is not None:
            tf.convert_to_tensor(global_step.assign_add(1))  # type: ignore[attr-defined]


def wrap_legacy_optimizers() -> None:
    """Let tf_keras's legacy optimizers update embedding variables without `OptimizerWrapper`, as dense ones.

    By themselves they write to the resource of a variable, where a table has no rows.
    """
    kind = importlib.import_module("tf_keras").optimizers.legacy.Optimizer
    original, original_weights = kind.apply_gradients, kind._create_all_weights
    if hasattr(original, "updates_rows"):
        return

    def _create_all_weights(self: Any, variables: Iterable[tf.Variable]) -> None:
        ours, others = filter_variables(variables)
        original_weights(self, others)
        known = {id(rows_of(weight)) for weight in self._weights}
        new = [rows for one in ours if (rows := rows_of(one)) is not None and id(rows) not in known]
        for rows in new:
            rows.legacy_optimizer = weakref.ref(self)
        self._weights += states_of(new, rule_of(self, lazy=False)) if new else []

    @_as_it_is
    @wraps(original)
    def apply_gradients(self: Any, grads_and_vars: Iterable[Pair], *args: object, **kwargs: object) -> object:
        pairs = list(grads_and_vars)
        ours, others = parted(pairs)
        if not ours:
            return original(self, pairs, *args, **kwargs)
        with tf.init_scope():
            self._create_all_weights([variable for _, variable in pairs])
            step = self.iterations
        apply_rule(rule_of(self, lazy=False), learning_rate(self, step), step + 1, ours)
        return original(self, others, *args, **kwargs) if others else step.assign_add(1)

    apply_gradients.updates_rows = True
    kind.apply_gradients, kind._create_all_weights = apply_gradients, _create_all_weights


def _with_rows(pairs: Iterable[Pair]) -> list[tuple[object, RowsVariable]]:
    return [(grad, needed_rows("grads_and_vars", variable)) for grad, variable in pairs]
