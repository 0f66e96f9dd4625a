# SPDX-License-Identifier: Apache-2.0
"""Keras on TensorFlow: the model in Keras layers, its step one `tf.function`, with Keras's own Adam."""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf
from json_process import threads

from keras_sides import workload as sizes
from keras_sides.workload import Floats, Inputs, Workload

tf.config.threading.set_intra_op_parallelism_threads(threads())
tf.config.threading.set_inter_op_parallelism_threads(threads())


class Cross(keras.layers.Layer):
    """A layer of DCN: x0 (x . w) + b + x."""

    def build(self, shapes: list[tuple[int | None, int]]) -> None:
        self.kernel = self.add_weight(shape=(shapes[0][1], 1))
        self.bias = self.add_weight(shape=(shapes[0][1],), initializer="zeros")

    def call(self, inputs: list[tf.Tensor]) -> tf.Tensor:
        first, x = inputs
        return first * tf.matmul(x, self.kernel) + self.bias + x


class KerasModel:
    """Implements `Side`. All slots share one table and one gather, which is faster than a layer for each slot."""

    version = f"tensorflow-cpu {tf.__version__}, keras {keras.__version__}"

    def __init__(self, workload: Workload, _mode: str) -> None:
        self.workload = workload
        self.offsets = [np.cumsum([0, *rows[:-1]]) for rows in (workload.slot_rows, workload.wide_rows)]
        self.table = keras.layers.Embedding(sum(workload.slot_rows), sizes.WIDTH)
        self.wide = keras.layers.Embedding(sum(workload.wide_rows), 1) if workload.wide_rows else None
        self.dense = [keras.layers.Dense(sizes.HIDDEN, activation="relu") for _ in range(2)]
        self.last = keras.layers.Dense(1)
        self.crosses = [Cross() for _ in range(sizes.CROSS_LAYERS if workload.model == "dcn" else 0)]
        self.model = self._model()
        self.optimizer = keras.optimizers.Adam(sizes.LR, beta_1=sizes.BETA1, beta_2=sizes.BETA2, epsilon=sizes.EPSILON)
        self.optimizer.build(self.model.trainable_variables)
        self.loss = keras.losses.BinaryCrossentropy(from_logits=True)
        self._train = tf.function(self._one_step, jit_compile=True)

    def load(self, weights: dict[str, Floats]) -> None:
        self.table.set_weights([weights["table"]])
        if self.wide is not None:
            self.wide.set_weights([weights["wide"]])
        for name, layer in zip(("fc1", "fc2", "fc3"), (*self.dense, self.last), strict=True):
            layer.set_weights([weights[f"{name}_kernel"], weights[f"{name}_bias"]])
        for number, layer in enumerate(self.crosses):
            layer.set_weights([weights["cross_kernels"][number][:, None], weights["cross_biases"][number]])

    def prepare(self, batches: list[Inputs]) -> None:
        self.batches = [
            (
                [
                    tf.constant(batch.dense),
                    *(
                        tf.constant((keys + offsets).astype(np.int32))
                        for keys, offsets in zip((batch.keys, batch.wide_keys), self.offsets, strict=True)
                        if keys.shape[1]
                    ),
                ],
                tf.constant(batch.label),
            )
            for batch in batches
        ]

    def step(self, number: int) -> tf.Tensor:
        return self._train(*self.batches[number])

    def _model(self) -> keras.Model:
        dense = keras.Input((sizes.NUM_DENSE,))
        keys = keras.Input((len(self.workload.slot_rows),), dtype="int32")
        x = keras.layers.Concatenate()([keras.layers.Flatten()(self.table(keys)), dense])
        deep = x
        for layer in self.dense:
            deep = keras.layers.Dropout(self.workload.dropout)(layer(deep))
        if self.wide is None:
            crossed = x
            for cross in self.crosses:
                crossed = cross([x, crossed])
            return keras.Model([dense, keys], self.last(keras.layers.Concatenate()([deep, crossed])))
        wide_keys = keras.Input((len(self.workload.wide_rows),), dtype="int32")
        wide = keras.ops.sum(self.wide(wide_keys), axis=1)
        return keras.Model([dense, keys, wide_keys], keras.layers.Add()([self.last(deep), wide]))

    def _one_step(self, inputs: list[tf.Tensor], label: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = self.loss(label, self.model(inputs, training=True))
        variables = self.model.trainable_variables
        self.optimizer.apply(tape.gradient(loss, variables), variables)
        return loss
