# SPDX-License-Identifier: Apache-2.0
"""Layers and the optimizer for Keras 3 on TensorFlow: `Embedding`, `EmbeddingBag`, `OptimizerWrapper`.

``keras.layers.Embedding(V, D)`` becomes ``sok.keras.Embedding(V, D)``: rows lie in the compiled core, and a step costs
as much as the rows that it touches.
"""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from terarec.errors import ConfigError
from terarec.keras import EmbeddingBag as PlainBag
from terarec.keras import Rows
from terarec.tensorflow.lookups import combine, embedding_lookup
from terarec.tensorflow.optimizers import apply_rule, parted, states_of
from terarec.tensorflow.rules import check_decay, learning_rate, rule_of
from terarec.tensorflow.tables import Growth, RowTable
from terarec.tensorflow.variables import RowsVariable, Variable, live_variable, numbers_of, placement_of, rows_of

_PACKAGE = "terarec"


def layer_rows(
    name: str, initializer: Any, shape: tuple[int, int], growth: Growth | None, *, trainable: bool = True
) -> RowsVariable:
    """Return an embedding variable of a layer; arguments are those of `RowsWeight`."""
    # Models made again have layers of the same path; unlike a user's names these are not chosen to find them again.
    number, free = 0, name
    while live_variable(free) is not None:
        number += 1
        free = f"{name}_{number}"
    if growth is None:
        rows: RowsVariable = Variable(initializer(shape, dtype="float32"), trainable=trainable, name=free)
    else:
        rows = RowsVariable(RowTable(free, shape[1], growth, placement=placement_of(None)), trainable=trainable)
    rows.is_of_layer = True
    return rows


class RowsWeight(keras.Variable):
    """A weight of a layer whose value is an embedding variable.

    Args:
        initializer: Initial values of a table of fixed rows, of all ranks.
        growth: Growth of a table of any keys; None for fixed rows.
        rows_name: Name of the embedding variable; "" for the path of the weight.
        kwargs: As for ``keras.Variable``.
    """

    def __init__(self, initializer: Any, *, growth: Growth | None = None, rows_name: str = "", **kwargs: Any) -> None:
        self._growth, self._rows_name = growth, rows_name
        self._shape: Any
        super().__init__(initializer, **kwargs)

    def _initialize_with_initializer(self, initializer: Any) -> None:
        name = self._rows_name or self.path
        value = layer_rows(name, initializer, self._shape, self._growth, trainable=self.trainable)
        if self._growth is None:
            self._shape = tuple(value.shape)  # of this rank
        self._value = value

    @property
    def rows(self) -> RowsVariable:
        """The embedding variable."""
        return self._value


class _CoreRows(Rows):
    """A layer with a table of the core."""

    embeddings: RowsWeight

    def __init__(self, *args: Any, embeddings_constraint: None = None, **kwargs: Any) -> None:
        if embeddings_constraint is not None:
            raise ConfigError("embeddings_constraint", f"got {embeddings_constraint!r}, expected None for rows")
        super().__init__(*args, **kwargs)
        self.supports_jit = False  # XLA does not know the ops of tables
        if keras.backend.backend() != "tensorflow":
            raise ConfigError("KERAS_BACKEND", f"got {keras.backend.backend()!r}, expected 'tensorflow'")

    def build(self, input_shape: Any = None) -> None:
        """Make the table."""
        if self.built:
            return
        with tf.init_scope():
            self.embeddings = RowsWeight(
                self.embeddings_initializer,
                shape=(self.input_dim, self.output_dim),
                dtype="float32",
                trainable=self.trainable,
                name="embeddings",
            )
        self.embeddings.regularizer = self.embeddings_regularizer
        self.built: bool = True


@keras.saving.register_keras_serializable(package=_PACKAGE)
class Embedding(_CoreRows):
    """The layer of ``keras.layers.Embedding``, with a table of the core.

    Args:
        input_dim: Number of rows V; ids are 0 to V - 1.
        output_dim: Width D of the rows.
        embeddings_initializer: Initial values of the rows.
        embeddings_regularizer: Regularisation of the whole table, which costs a copy of it in every step.
        embeddings_constraint: None.
        mask_zero: Whether id 0 is masked in the layers that follow.
        weights: Rows [V, D] of all ranks, or a list of them, in place of those of the initializer; None for these.
        input_length: No effect: Keras's layer accepts it, too.

    Raises:
        ConfigError: Another value.
    """

    def __init__(
        self,
        input_dim: int,
        output_dim: int,
        *args: Any,
        mask_zero: bool = False,
        weights: Any = None,
        input_length: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(input_dim, output_dim, *args, **kwargs)
        self.mask_zero = self.supports_masking = mask_zero
        if weights is None:
            return
        rows = numbers_of("weights", weights[0] if isinstance(weights, list) and len(weights) == 1 else weights)
        if rows.shape != (self.input_dim, self.output_dim):
            raise ConfigError(
                "weights", f"got shape {list(rows.shape)}, expected [{self.input_dim}, {self.output_dim}]"
            )
        self.build()
        table = self.embeddings.rows
        table.assign(rows[table.table.placement.rows])

    def call(self, inputs: Any) -> Any:
        """Return the rows [..., D] of ids [...], dense or ragged."""
        ids = inputs if isinstance(inputs, tf.RaggedTensor) else tf.cast(inputs, tf.int64)
        return tf.cast(embedding_lookup(self.embeddings.rows, ids), self.compute_dtype)

    def compute_mask(self, inputs: Any, mask: Any = None) -> Any:
        """Return where ids are not 0, if they are masked."""
        return keras.ops.not_equal(inputs, 0) if self.mask_zero else None

    def compute_output_spec(self, inputs: Any) -> Any:
        """Return the result's shape and type."""
        is_ragged = {"ragged": True} if getattr(inputs, "ragged", False) else {}  # which Keras knows from 3.9 on
        return keras.KerasTensor((*inputs.shape, self.output_dim), dtype=self.compute_dtype, **is_ragged)

    def get_config(self) -> dict[str, Any]:
        """Return the arguments."""
        return {**super().get_config(), "mask_zero": self.mask_zero}


@keras.saving.register_keras_serializable(package=_PACKAGE)
class EmbeddingBag(_CoreRows, PlainBag):
    """A layer that combines the rows of the ids of each sample.

    Args:
        input_dim: Number of rows V; ids are 0 to V - 1.
        output_dim: Width D of the rows.
        combiner: "sum", "mean" or "sqrtn".
        embeddings_initializer: Initial values of the rows.
        embeddings_regularizer: Regularisation of the whole table, which costs a copy of it in every step.
        embeddings_constraint: None.

    Raises:
        ConfigError: Another value.
    """

    def call(self, inputs: Any, weights: Any = None) -> Any:
        """Return [B, D] for ids [B, n], dense, ragged or sparse, with weights of the same form or none."""
        vectors = combine(self.embeddings.rows, inputs, weights, self.combiner)
        if inputs.shape[0] is not None:
            vectors.set_shape([inputs.shape[0], self.output_dim])
        return tf.cast(vectors, self.compute_dtype)


def plain(model: Any) -> Any:
    """Return a copy of a model with Keras's own embedding layers and the same weights, which `export` can write.

    A SavedModel of the copy is served by programs that have no terarec. Bags are then `terarec.keras.EmbeddingBag`.

    Args:
        model: Functional or sequential model, whose bags have dense ids.

    Raises:
        ConfigError: Another kind of model, or rows that are on several ranks.
    """

    def layer_of(layer: Any) -> Any:
        config = layer.get_config()
        if isinstance(layer, Embedding):
            return keras.layers.Embedding.from_config(config)
        return (PlainBag if isinstance(layer, EmbeddingBag) else type(layer)).from_config(config)

    try:
        copy = keras.models.clone_model(model, clone_function=layer_of, recursive=True)
    except ValueError as error:
        raise ConfigError("model", f"cannot be copied: {error}") from None
    copy.set_weights(model.get_weights())
    return copy


@keras.saving.register_keras_serializable(package=_PACKAGE)
class OptimizerWrapper(keras.optimizers.Optimizer):
    """An optimizer for `Model.compile` whose updates of embedding layers are the core's; see `sok.OptimizerWrapper`.

    Args:
        optimizer: SGD, Adam, AdamW, Nadam, Adamax, Adadelta, Adagrad, Ftrl or RMSprop of Keras, or its name.
        lazy: Whether rows without a gradient are left alone.
        name: Name.

    Raises:
        ConfigError: Another optimizer, or an option that rows do not have.
    """

    def __init__(self, optimizer: Any, lazy: bool = True, name: str = "rows") -> None:
        inner = keras.optimizers.get(optimizer)
        super().__init__(learning_rate=0.0, name=name)
        self.rule = rule_of(inner, lazy=lazy)
        self.inner, self.lazy = inner, lazy

    @property
    def learning_rate(self) -> Any:
        """The wrapped optimizer's."""
        return self.inner.learning_rate if hasattr(self, "inner") else 0.0

    @learning_rate.setter
    def learning_rate(self, rate: Any) -> None:
        if hasattr(self, "inner"):
            self.inner.learning_rate = rate

    def build(self, variables: Any) -> None:
        """Make the states."""
        if self.built or not variables:  # Keras builds that of an HDF5 file without variables
            return
        # Keras would track what is set, and save it as states.
        object.__setattr__(self, "_trainable_variables", list(variables))
        for rows in self._embeddings():
            rows.table.have_states(self.rule)
        self.inner.build([one for one in variables if rows_of(one) is None])
        self.built: bool = True

    # Not an attribute or a property, whose variables Keras would save.
    def _embeddings(self) -> list[RowsVariable]:
        return [rows for one in self._trainable_variables if (rows := rows_of(one)) is not None]

    def exclude_from_weight_decay(self, var_list: Any = None, var_names: Any = None) -> None:
        """Leave variables out of the wrapped optimizer's decay, which raises an error if it has one for rows."""
        self.inner.exclude_from_weight_decay(var_list, var_names)

    def apply(self, grads: Any, trainable_variables: Any = None) -> Any:
        """Update the variables, or those that it was built with; a gradient of None is skipped.

        Raises:
            ConfigError: An embedding variable that it was not built with, whose states no file would have.
        """
        check_decay(self.inner)
        variables = list(self._trainable_variables if trainable_variables is None else trainable_variables)
        if not self.built:
            with tf.init_scope():
                self.build(variables)
        ours, others = parted(zip(grads, variables, strict=True))
        known = {id(rows) for rows in self._embeddings()}
        for _, rows in ours:
            if id(rows) not in known:
                raise ConfigError(
                    "trainable_variables",
                    f"got {rows.table.name!r}, expected those of the first step, or a new optimizer",
                )
        self.iterations.assign_add(1)
        # Before the wrapped optimizer's step, which moves its schedule on.
        apply_rule(self.rule, learning_rate(self.inner, self.inner.iterations), self.iterations.value, ours)
        if others:
            self.inner.apply([grad for grad, _ in others], [one for _, one in others])
        else:
            self.inner.iterations.assign_add(1)

    @property
    def variables(self) -> list[Any]:
        """Its own variables, the wrapped optimizer's, and the states of layers' rows: what Keras saves.

        Those of other embedding variables are saved with them.
        """
        of_layers = [rows for rows in self._embeddings() if rows.is_of_layer]
        return [*self._variables, *self.inner.variables, *states_of(of_layers, self.rule)]

    def set_weights(self, weights: Any) -> None:
        """Set all `variables`; Keras, which reads HDF5 files, warns if they are other ones.

        Raises:
            ValueError: Another number of them.
        """
        for variable, weight in zip(self.variables, weights, strict=True):
            variable.assign(weight)

    def get_config(self) -> dict[str, Any]:
        """Return the arguments."""
        return {"optimizer": keras.optimizers.serialize(self.inner), "lazy": self.lazy, "name": self.name}

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> OptimizerWrapper:
        """Return the optimizer of `get_config`."""
        return cls(**{**config, "optimizer": keras.optimizers.deserialize(config["optimizer"])})
