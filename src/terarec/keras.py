# SPDX-License-Identifier: Apache-2.0
"""A layer of bags for Keras 3 on any back end, without TensorFlow, torch or the compiled core."""

from __future__ import annotations

from numbers import Integral
from typing import Any

import keras

from terarec.errors import ConfigError

COMBINERS = ("sum", "mean", "sqrtn")


class Rows(keras.layers.Layer):
    """A layer with a table [input_dim, output_dim].

    Args:
        input_dim: Number of rows V.
        output_dim: Width D of the rows.
        embeddings_initializer: Initial values of the rows.
        embeddings_regularizer: Regularisation of the table.
        kwargs: As for ``keras.layers.Layer``.

    Raises:
        ConfigError: A size that is no number > 0.
    """

    def __init__(
        self,
        input_dim: int,
        output_dim: int,
        embeddings_initializer: Any = "uniform",
        embeddings_regularizer: Any = None,
        **kwargs: Any,
    ) -> None:
        for name, size in (("input_dim", input_dim), ("output_dim", output_dim)):
            if isinstance(size, bool) or not isinstance(size, Integral) or size < 1:
                raise ConfigError(name, f"got {size!r}, expected an integer > 0")
        super().__init__(**kwargs)
        self.input_dim, self.output_dim = int(input_dim), int(output_dim)  # JSON knows no numbers of NumPy
        self.embeddings_initializer = keras.initializers.get(embeddings_initializer)
        self.embeddings_regularizer = keras.regularizers.get(embeddings_regularizer)

    def build(self, input_shape: Any = None) -> None:
        """Make the table."""
        self.embeddings = self.add_weight(
            shape=(self.input_dim, self.output_dim),
            initializer=self.embeddings_initializer,
            regularizer=self.embeddings_regularizer,
            name="embeddings",
        )
        self.built: bool = True

    def get_config(self) -> dict[str, Any]:
        """Return the arguments."""
        return {
            **super().get_config(),
            "input_dim": self.input_dim,
            "output_dim": self.output_dim,
            "embeddings_initializer": keras.initializers.serialize(self.embeddings_initializer),
            "embeddings_regularizer": keras.regularizers.serialize(self.embeddings_regularizer),
        }


@keras.saving.register_keras_serializable(package="terarec.keras")
class EmbeddingBag(Rows):
    """A layer that combines the rows of the ids of each sample, by operations of Keras.

    It has the gradients and the speed of ``keras.layers.Embedding``. On TensorFlow,
    `terarec.tensorflow.keras.EmbeddingBag` is the faster one.

    Args:
        input_dim: Number of rows V; ids are 0 to V - 1.
        output_dim: Width D of the rows.
        combiner: "sum"; "mean", which divides by the sum of the weights; or "sqrtn", by the root of the sum of their
            squares.
        args: As for `Rows`.
        kwargs: As for `Rows`.

    Raises:
        ConfigError: Another combiner, or a size that is no number > 0.
    """

    def __init__(self, input_dim: int, output_dim: int, combiner: str = "sum", *args: Any, **kwargs: Any) -> None:
        if combiner not in COMBINERS:
            raise ConfigError("combiner", f"got {combiner!r}, expected {', '.join(map(repr, COMBINERS))}")
        super().__init__(input_dim, output_dim, *args, **kwargs)
        self.combiner = combiner

    def call(self, inputs: Any, weights: Any = None) -> Any:
        """Return [B, D] for ids [B, n], with weights [B, n] or none."""
        vectors = keras.ops.take(self.embeddings, keras.ops.cast(inputs, "int32"), axis=0)
        factors = keras.ops.ones_like(vectors[..., 0]) if weights is None else keras.ops.cast(weights, vectors.dtype)
        total = keras.ops.sum(vectors * keras.ops.expand_dims(factors, -1), axis=-2)
        if self.combiner == "sum":
            return total
        sums = keras.ops.sum(factors if self.combiner == "mean" else factors**2, axis=-1, keepdims=True)
        return keras.ops.divide_no_nan(total, sums if self.combiner == "mean" else keras.ops.sqrt(sums))

    def compute_output_spec(self, inputs: Any, weights: Any = None) -> Any:
        """Return the result's shape and type."""
        return keras.KerasTensor((*inputs.shape[:-1], self.output_dim), dtype=self.compute_dtype)

    def get_config(self) -> dict[str, Any]:
        """Return the arguments."""
        return {**super().get_config(), "combiner": self.combiner}
