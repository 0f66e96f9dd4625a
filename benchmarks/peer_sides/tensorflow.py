# SPDX-License-Identifier: Apache-2.0
"""TensorFlow: `embedding_lookup_sparse` per table, `GradientTape`, and an optimizer that takes `IndexedSlices`."""

from __future__ import annotations

import numpy as np
import tensorflow as tf
from json_process import threads
from numpy.typing import NDArray

from peer_sides.cell import INITIAL_ACCUMULATOR, LR, SCALE, Inputs, Shape

tf.config.threading.set_intra_op_parallelism_threads(threads())
tf.config.threading.set_inter_op_parallelism_threads(threads())


class SparseLookups:
    """Implements `Side`. A step is one graph, with the fast lookup and the optimizers that have sparse kernels."""

    version = f"tensorflow-cpu {tf.__version__}"

    def __init__(self, shape: Shape, rule: str) -> None:
        self.shape = shape
        size = (shape.rows, shape.width)
        self.variables = [tf.Variable(tf.fill(size, SCALE)) for _ in range(shape.tables)]
        if rule == "sgd":
            self.optimizer = tf.compat.v1.train.GradientDescentOptimizer(LR)
        else:
            self.optimizer = tf.compat.v1.train.AdagradOptimizer(LR, initial_accumulator_value=INITIAL_ACCUMULATOR)
        self._forward = tf.function(self._look_up)
        self._step = tf.function(self._train)

    def load(self, tables: NDArray[np.float32]) -> None:
        for variable, table in zip(self.variables, tables, strict=True):
            variable.assign(table)

    def prepare(self, inputs: Inputs) -> None:
        """Pack the inputs in few tensors; the graph splits them. To pass 100 of each takes 16 ms (two Zen 3 cores)."""
        batch, hotness = inputs.grad.shape[0], self.shape.hotness
        self.places = tf.constant(
            np.stack([np.repeat(np.arange(batch), hotness), np.tile(np.arange(hotness), batch)], axis=1)
        )
        self.keys = tf.constant(inputs.keys)
        grads = inputs.grad.reshape(batch, self.shape.tables, self.shape.width)
        self.grads = tf.constant(grads.transpose(1, 0, 2))

    def forward(self) -> list[tf.Tensor]:
        return self._forward(self.keys, self.places)

    def step(self) -> None:
        self._step(self.keys, self.places, self.grads)

    def pooled(self) -> NDArray[np.float32]:
        return np.concatenate([part.numpy() for part in self.forward()], axis=1)

    def tables(self) -> NDArray[np.float32]:
        return np.stack([variable.numpy() for variable in self.variables])

    def _look_up(self, keys: tf.Tensor, places: tf.Tensor) -> list[tf.Tensor]:
        size = (places[-1, 0] + 1, self.shape.hotness)
        return [
            tf.nn.embedding_lookup_sparse(
                variable, tf.SparseTensor(places, ids, size), None, combiner="sum", allow_fast_lookup=True
            )
            for variable, ids in zip(self.variables, tf.unstack(keys), strict=True)
        ]

    def _train(self, keys: tf.Tensor, places: tf.Tensor, grads: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            pooled = self._look_up(keys, places)
        slices = tape.gradient(pooled, self.variables, output_gradients=tf.unstack(grads))
        self.optimizer.apply_gradients(list(zip(slices, self.variables, strict=True)))
