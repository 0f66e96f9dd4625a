# SPDX-License-Identifier: Apache-2.0
"""Compare steps of embeddings in TensorFlow with TensorFlow's own: NVIDIA's synthetic benchmark of its plugin.

100 slots with 10 ids each of 8,192 rows a slot, summed, then a dense layer, the loss and both optimizers, without the
six layers of 1,024 that come between in NVIDIA's model unless ``--layers`` asks for them. Peers are a stacked table by
`tf.nn.embedding_lookup` and by `tf.nn.embedding_lookup_sparse`, and a table for each slot; all take turns in one
process, which does not load torch. Adam is the dense one: all rows move in every step.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import tensorflow as tf
from record import Row, append_rows, measure_in_turns

import terarec.tensorflow as sok

SLOTS, IDS, ROWS = 100, 10, 8192
OPTIMIZERS = {"sgd": lambda: keras.optimizers.SGD(0.1), "adam": lambda: keras.optimizers.Adam(0.01)}


@dataclass(frozen=True, kw_only=True)
class TensorFlowRow(Row):
    """A row with the fastest steps and TensorFlow's version.

    Attributes:
        minimum: Fastest step, in ms.
        peer_minimum: Fastest step of the peer, in ms.
        tensorflow: Version.
    """

    minimum: float
    peer_minimum: float
    tensorflow: str


class Model:
    """A side: its tables, how it looks up, and its step.

    Args:
        tables: Variables.
        look_up: Function of the tables and the ids int64[B, SLOTS, IDS] to float32[B, SLOTS * D].
        optimizer: Of the tables.
        kind: Name of the optimizer of the dense layers.
        layers: Number of dense layers of 1,024.
        width: Width D of the rows.
    """

    def __init__(
        self,
        tables: list[tf.Variable],
        look_up: Callable[[list[tf.Variable], tf.Tensor], tf.Tensor],
        optimizer: keras.optimizers.Optimizer | sok.OptimizerWrapper,
        kind: str,
        layers: int,
        width: int,
    ) -> None:
        keras.utils.set_random_seed(0)
        self.dense = keras.Sequential(
            [keras.layers.Dense(1024, "relu") for _ in range(layers)] + [keras.layers.Dense(1)]
        )
        self.dense.build((None, SLOTS * width))
        dense_optimizer = OPTIMIZERS[kind]()
        loss_of = keras.losses.BinaryCrossentropy(from_logits=True)

        @tf.function
        def step(ids: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
            with tf.GradientTape() as tape:
                loss = loss_of(labels, self.dense(look_up(tables, ids)))
            of_tables, of_dense = tape.gradient(loss, [tables, self.dense.trainable_variables])
            optimizer.apply_gradients(list(zip(of_tables, tables, strict=True)))
            dense_optimizer.apply_gradients(list(zip(of_dense, self.dense.trainable_variables, strict=True)))
            return loss

        self.step = step


def stacked(ids: tf.Tensor) -> tf.Tensor:
    """Return ids of one table of all slots."""
    return ids + tf.range(SLOTS, dtype=tf.int64)[:, None] * ROWS


def by_core(tables: list[tf.Variable], ids: tf.Tensor) -> tf.Tensor:
    bags = tf.RaggedTensor.from_uniform_row_length(tf.reshape(stacked(ids), [-1]), IDS)
    vectors = sok.lookup_sparse(tables[0], bags, combiners="sum")
    return tf.reshape(vectors, [-1, SLOTS * tables[0].shape[1]])


def by_gather(tables: list[tf.Variable], ids: tf.Tensor) -> tf.Tensor:
    vectors = tf.reduce_sum(tf.nn.embedding_lookup(tables[0], stacked(ids)), axis=2)
    return tf.reshape(vectors, [-1, SLOTS * tables[0].shape[1]])


def by_sparse(tables: list[tf.Variable], ids: tf.Tensor) -> tf.Tensor:
    bags = tf.RaggedTensor.from_uniform_row_length(tf.reshape(stacked(ids), [-1]), IDS)
    vectors = tf.nn.embedding_lookup_sparse(tables[0], bags, None, "sum")
    return tf.reshape(vectors, [-1, SLOTS * tables[0].shape[1]])


def by_tables(tables: list[tf.Variable], ids: tf.Tensor) -> tf.Tensor:
    vectors = [tf.reduce_sum(tf.nn.embedding_lookup(one, ids[:, slot]), axis=1) for slot, one in enumerate(tables)]
    return tf.concat(vectors, axis=1)


def models(width: int, kind: str, layers: int) -> dict[str, Model]:
    """Return the sides, with the same rows."""
    start = np.random.default_rng(0).uniform(-0.05, 0.05, (SLOTS * ROWS, width)).astype(np.float32)
    rows_optimizer = sok.OptimizerWrapper(OPTIMIZERS[kind](), lazy=False)
    sides = {"terarec": Model([sok.Variable(start)], by_core, rows_optimizer, kind, layers, width)}
    for name, look_up in (("stacked embedding_lookup", by_gather), ("stacked embedding_lookup_sparse", by_sparse)):
        sides[name] = Model([tf.Variable(start)], look_up, OPTIMIZERS[kind](), kind, layers, width)
    parts = [tf.Variable(part) for part in np.split(start, SLOTS)]
    sides["a table for each slot"] = Model(parts, by_tables, OPTIMIZERS[kind](), kind, layers, width)
    return sides


def run(side: Model, ids: tf.Tensor, labels: tf.Tensor) -> np.ndarray:
    return side.step(ids, labels).numpy()


def main() -> None:
    """Measure and record the cases."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, nargs="+", default=[1024, 8192])
    parser.add_argument("--width", type=int, nargs="+", default=[4, 16, 64])
    parser.add_argument("--optimizer", nargs="+", choices=OPTIMIZERS, default=list(OPTIMIZERS))
    parser.add_argument(
        "--layers", type=int, default=0, help="dense layers of 1,024 between the embedding and the loss"
    )
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--dry", action="store_true", help="print the results without recording them")
    options = parser.parse_args()
    rng = np.random.default_rng(1)
    for width in options.width:
        for kind in options.optimizer:
            sides = models(width, kind, options.layers)
            for batch in options.batch:
                ids = tf.constant(rng.integers(0, ROWS, (batch, SLOTS, IDS)))
                labels = tf.constant(rng.integers(0, 2, (batch, 1)).astype(np.float32))
                losses = {name: float(side.step(ids, labels)) for name, side in sides.items()}
                # Later ones differ: Keras's Adam does not sum the gradients of an id that repeats.
                assert batch != options.batch[0] or np.ptp(list(losses.values())) < 1e-3, losses
                functions = {name: partial(run, side, ids, labels) for name, side in sides.items()}
                timings = measure_in_turns(functions, options.repeats)
                ours = timings.pop("terarec")
                rows = [
                    TensorFlowRow(
                        case=f"{batch} x {SLOTS} x {IDS}, width {width}, {kind}, {options.layers} layers",
                        metric="step",
                        value=1e3 * ours.median,
                        unit="ms",
                        peer=peer,
                        peer_value=1e3 * timing.median,
                        minimum=1e3 * ours.minimum,
                        peer_minimum=1e3 * timing.minimum,
                        tensorflow=tf.__version__,
                    )
                    for peer, timing in timings.items()
                ]
                append_rows("tensorflow_step", rows, dry=options.dry)
            del sides


if __name__ == "__main__":
    main()
