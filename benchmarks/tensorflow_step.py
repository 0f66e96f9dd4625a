# SPDX-License-Identifier: Apache-2.0
"""Compare steps of embeddings in TensorFlow with TensorFlow's own; one call measures every case.

NVIDIA's synthetic benchmark of its plugin, 100 slots with 10 ids each, in three readings: "slots", a table of 8,192
rows for each slot, summed; "shared", one table of 8,192 rows without a combiner; "hashed", the same behind a hash
table, as NVIDIA measured it in 2021. Then a dense layer, the loss and both optimizers; without the six layers of 1,024
that come between in NVIDIA's model, and with them. Peers of "slots" are a stacked table by `tf.nn.embedding_lookup` and
by `tf.nn.embedding_lookup_sparse`, and a table for each slot; each as it is and, where XLA has its ops, compiled by it.
Adam is the dense one: all rows move in every step.

"deepfm" is the embedding part of a DeepFM, 26 tables of a million rows by layers of Keras with its Adam, against those
of terarec with the lazy one. "memory" is the peak of a process with one side alone.

All sides of a case take turns in one process, which does not load torch.
"""

from __future__ import annotations

import argparse
import itertools
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import tensorflow as tf
from record import Row, append_rows, measure_in_turns

import terarec.tensorflow as sok

SLOTS, IDS, ROWS = 100, 10, 8192
FIELDS, FIELD_ROWS, FIELD_WIDTH = 26, 1_000_000, 16
MOST_BYTES = 6 << 30
"""Bytes of the rows of a batch, which a gather has several times; larger cases are left out."""
OPTIMIZERS = {"sgd": lambda: keras.optimizers.SGD(0.1), "adam": lambda: keras.optimizers.Adam(0.01)}
Lookup = Callable[[list[tf.Variable], tf.Tensor], tf.Tensor]


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


@dataclass(frozen=True, kw_only=True)
class Side:
    """How a model keeps its tables.

    Attributes:
        tables: Function that makes the variables.
        look_up: Function of the tables and the ids int64[B, SLOTS, IDS] to float32[B, n].
        is_ours: Whether rows are the core's.
        is_compiled: Whether XLA compiles the step.
    """

    tables: Callable[[], list[tf.Variable]]
    look_up: Lookup
    is_ours: bool = False
    is_compiled: bool = False


class Model:
    """A side with its dense layers and its step.

    Args:
        side: The side.
        kind: Name of the optimizer.
        layers: Number of dense layers of 1,024.
        inputs: Number of columns that the lookup gives.
    """

    def __init__(self, side: Side, kind: str, layers: int, inputs: int) -> None:
        keras.utils.set_random_seed(0)
        dense = keras.Sequential([keras.layers.Dense(1024, "relu") for _ in range(layers)] + [keras.layers.Dense(1)])
        dense.build((None, inputs))
        tables = side.tables()
        of_rows = sok.OptimizerWrapper(OPTIMIZERS[kind](), lazy=False) if side.is_ours else OPTIMIZERS[kind]()
        of_dense = OPTIMIZERS[kind]()
        for optimizer, variables in ((of_dense, dense.trainable_variables), (of_rows, tables)):
            if not isinstance(optimizer, sok.OptimizerWrapper):
                optimizer.build(variables)  # XLA makes no variables
        loss_of = keras.losses.BinaryCrossentropy(from_logits=True)

        @tf.function(jit_compile=side.is_compiled)
        def step(ids: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
            with tf.GradientTape() as tape:
                loss = loss_of(labels, dense(side.look_up(tables, ids)))
            grads, dense_grads = tape.gradient(loss, [tables, dense.trainable_variables])
            of_rows.apply_gradients(list(zip(grads, tables, strict=True)))
            of_dense.apply_gradients(list(zip(dense_grads, dense.trainable_variables, strict=True)))
            return loss

        self.step = step


def stacked(ids: tf.Tensor) -> tf.Tensor:
    """Return ids of one table of all slots."""
    return ids + tf.range(SLOTS, dtype=tf.int64)[:, None] * ROWS


def pooled(tables: list[tf.Variable], vectors: tf.Tensor) -> tf.Tensor:
    return tf.reshape(vectors, [-1, SLOTS * tables[0].shape[1]])


def flat(tables: list[tf.Variable], vectors: tf.Tensor) -> tf.Tensor:
    return tf.reshape(vectors, [-1, SLOTS * IDS * tables[0].shape[1]])


def bags(ids: tf.Tensor) -> tf.RaggedTensor:
    return tf.RaggedTensor.from_uniform_row_length(tf.reshape(stacked(ids), [-1]), IDS)


def by_core(tables: list[tf.Variable], ids: tf.Tensor) -> tf.Tensor:
    return pooled(tables, sok.lookup_sparse(tables[0], bags(ids), combiners="sum"))


def by_gather(tables: list[tf.Variable], ids: tf.Tensor) -> tf.Tensor:
    return pooled(tables, tf.reduce_sum(tf.nn.embedding_lookup(tables[0], stacked(ids)), axis=2))


def by_sparse(tables: list[tf.Variable], ids: tf.Tensor) -> tf.Tensor:
    return pooled(tables, tf.nn.embedding_lookup_sparse(tables[0], bags(ids), None, "sum"))


def by_tables(tables: list[tf.Variable], ids: tf.Tensor) -> tf.Tensor:
    vectors = [tf.reduce_sum(tf.nn.embedding_lookup(one, ids[:, slot]), axis=1) for slot, one in enumerate(tables)]
    return tf.concat(vectors, axis=1)


def by_core_flat(tables: list[tf.Variable], ids: tf.Tensor) -> tf.Tensor:
    return flat(tables, sok.embedding_lookup(tables[0], ids))


def by_gather_flat(tables: list[tf.Variable], ids: tf.Tensor) -> tf.Tensor:
    return flat(tables, tf.nn.embedding_lookup(tables[0], ids))


def by_hash_table() -> Lookup:
    """Return the lookup of 2021: a row of the table for each id that comes, found by a hash table."""
    index = tf.lookup.experimental.DenseHashTable(tf.int64, tf.int64, -1, -1, -2, initial_num_buckets=4 * ROWS)
    index.insert(tf.range(ROWS, dtype=tf.int64), tf.range(ROWS, dtype=tf.int64))
    # Keys of one axis alone.
    return lambda tables, ids: by_gather_flat(tables, tf.reshape(index.lookup(tf.reshape(ids, [-1])), tf.shape(ids)))


def grown(start: np.ndarray) -> list[tf.Variable]:
    variable = sok.DynamicVariable(start.shape[1], "zeros", var_type="hbm")
    sok.assign(variable, np.arange(len(start)), start)
    return [variable]


def sides_of(reading: str, width: int) -> dict[str, Side]:
    """Return the sides of a reading, which begin with the same rows."""
    rows = ROWS * (SLOTS if reading == "slots" else 1)
    start = np.random.default_rng(0).uniform(-0.05, 0.05, (rows, width)).astype(np.float32)
    plain: Callable[[], list[tf.Variable]] = lambda: [tf.Variable(start)]  # noqa: E731
    ours: Callable[[], list[tf.Variable]] = lambda: [sok.Variable(start)]  # noqa: E731
    if reading == "hashed":
        core = Side(tables=lambda: grown(start), look_up=by_core_flat, is_ours=True)
        return {"terarec": core, "DenseHashTable and embedding_lookup": Side(tables=plain, look_up=by_hash_table())}
    if reading == "shared":
        sides = {"terarec": Side(tables=ours, look_up=by_core_flat, is_ours=True)}
        peers = {"embedding_lookup": Side(tables=plain, look_up=by_gather_flat)}
    else:
        sides = {"terarec": Side(tables=ours, look_up=by_core, is_ours=True)}
        peers = {
            "stacked embedding_lookup": Side(tables=plain, look_up=by_gather),
            "stacked embedding_lookup_sparse": Side(tables=plain, look_up=by_sparse),
            "a table for each slot": Side(
                tables=lambda: [tf.Variable(part) for part in np.split(start, SLOTS)], look_up=by_tables
            ),
        }
    for name, peer in peers.items():
        sides[name] = peer
        sides[f"{name}, XLA"] = Side(tables=peer.tables, look_up=peer.look_up, is_compiled=True)
    return sides


def columns(reading: str, width: int) -> int:
    return SLOTS * width * (1 if reading == "slots" else IDS)


def batch_of(batch: int) -> tuple[tf.Tensor, tf.Tensor]:
    rng = np.random.default_rng(1)
    labels = rng.integers(0, 2, (batch, 1)).astype(np.float32)
    return tf.constant(rng.integers(0, ROWS, (batch, SLOTS, IDS))), tf.constant(labels)


def run(model: Model, ids: tf.Tensor, labels: tf.Tensor) -> np.ndarray:
    return model.step(ids, labels).numpy()


def measure_reading(
    reading: str, width: int, kind: str, layers: int, batches: list[int], repeats: int
) -> Iterator[Row]:
    """Yield the rows of a reading."""
    models = {
        name: Model(side, kind, layers, columns(reading, width)) for name, side in sides_of(reading, width).items()
    }
    for batch in batches:
        case = f"{reading}, {batch} x {SLOTS} x {IDS}, width {width}, {kind}, {layers} layers"
        if 4 * batch * SLOTS * IDS * width > MOST_BYTES:
            print(f"{case}: left out, a gather needs more than {MOST_BYTES >> 30} GiB for the rows of a batch")
            continue
        ids, labels = batch_of(batch)
        losses: dict[str, float] = {}
        for name, model in list(models.items()):
            try:
                losses[name] = float(model.step(ids, labels))
            except (tf.errors.InvalidArgumentError, tf.errors.UnimplementedError):
                if not name.endswith("XLA"):
                    raise
                del models[name]
                print(f"{case}: {name} has ops that XLA does not compile for a CPU")
        # Later ones differ: Keras's Adam does not sum the gradients of an id that repeats.
        assert batch != batches[0] or np.ptp(list(losses.values())) < 1e-3, losses
        yield from compared(case, {name: partial(run, model, ids, labels) for name, model in models.items()}, repeats)


def compared(case: str, steps: dict[str, Callable[[], object]], repeats: int) -> Iterator[Row]:
    """Yield a row for each peer of "terarec"."""
    timings = measure_in_turns(steps, repeats)
    ours = timings.pop("terarec")
    for peer, timing in timings.items():
        yield TensorFlowRow(
            case=case,
            metric="step",
            value=1e3 * ours.median,
            unit="ms",
            peer=peer,
            peer_value=1e3 * timing.median,
            minimum=1e3 * ours.minimum,
            peer_minimum=1e3 * timing.minimum,
            tensorflow=tf.__version__,
        )


def measure_deepfm(rows: int, batch: int, repeats: int) -> Iterator[Row]:
    """Yield the row of the embedding part of a DeepFM: its tables, a sum of all numbers as the score, and Adam."""
    rng = np.random.default_rng(1)
    ids = tf.constant(rng.integers(0, rows, (batch, FIELDS)))
    labels = tf.constant(rng.integers(0, 2, batch).astype(np.float32))

    def step_of(
        layer: Callable[..., keras.layers.Layer], optimizer: keras.optimizers.Optimizer
    ) -> Callable[[], object]:
        layers = [layer(rows, FIELD_WIDTH, embeddings_initializer="zeros") for _ in range(FIELDS)]
        for one in layers:
            one.build((batch,))
        weights = [one.trainable_variables[0] for one in layers]
        optimizer.build(weights)

        @tf.function
        def step(ids: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
            with tf.GradientTape() as tape:
                scores = tf.add_n([tf.reduce_sum(one(ids[:, field]), axis=1) for field, one in enumerate(layers)])
                loss = tf.reduce_mean(tf.nn.sigmoid_cross_entropy_with_logits(labels, scores))
            optimizer.apply(tape.gradient(loss, [one.value for one in weights]), weights)
            return loss

        return lambda: step(ids, labels).numpy()

    ours = sok.keras.OptimizerWrapper(keras.optimizers.Adam(0.01))
    steps = {
        "terarec": step_of(sok.keras.Embedding, ours),
        "keras.layers.Embedding": step_of(keras.layers.Embedding, keras.optimizers.Adam(0.01)),
    }
    yield from compared(f"deepfm, {batch} x {FIELDS} x {rows} rows, width {FIELD_WIDTH}, adam", steps, repeats)


def peak_of(name: str, width: int, batch: int) -> float:
    """Return the MiB that a process needs at most for three steps of one side with Adam."""
    command = [sys.executable, __file__, "--peak", name, "--width", str(width), "--batch", str(batch)]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1])


def measure_memory(width: int, batch: int) -> Iterator[Row]:
    """Yield the peaks of memory."""
    names = [name for name in sides_of("slots", width) if not name.endswith("XLA")]
    peaks = {name: peak_of(name, width, batch) for name in names}
    ours = peaks.pop("terarec")
    for peer, peak in peaks.items():
        yield TensorFlowRow(
            case=f"memory, {batch} x {SLOTS} x {IDS}, width {width}, adam",
            metric="peak",
            value=ours,
            unit="MiB",
            peer=peer,
            peer_value=peak,
            minimum=ours,
            peer_minimum=peak,
            tensorflow=tf.__version__,
        )


READINGS = ("slots", "shared", "hashed")


def main() -> None:
    """Measure and record the cases."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=(*READINGS, "deepfm", "memory"), default=None)
    parser.add_argument("--batch", type=int, nargs="+", default=[1024, 8192, 65536])
    parser.add_argument("--width", type=int, nargs="+", default=[4, 16, 64])
    parser.add_argument("--optimizer", nargs="+", choices=OPTIMIZERS, default=list(OPTIMIZERS))
    parser.add_argument("--layers", type=int, nargs="+", default=[0, 6], help="numbers of dense layers of 1,024")
    parser.add_argument("--field-rows", type=int, default=FIELD_ROWS, help="rows of a table of deepfm")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--peak", help=argparse.SUPPRESS)  # a side, in a process of its own
    parser.add_argument("--dry", action="store_true", help="print the results without recording them")
    options = parser.parse_args()
    if options.peak:
        side = sides_of("slots", options.width[0])[options.peak]
        model = Model(side, "adam", 0, columns("slots", options.width[0]))
        ids, labels = batch_of(options.batch[0])
        for _ in range(3):
            run(model, ids, labels)
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
        return
    parts: list[Iterator[Row]] = []
    chosen = options.only or (*READINGS, "deepfm", "memory")
    for reading in [one for one in READINGS if one in chosen]:
        widths = options.width if reading == "slots" else [4]  # NVIDIA's
        for width, kind, layers in itertools.product(widths, options.optimizer, options.layers):
            parts.append(measure_reading(reading, width, kind, layers, options.batch, options.repeats))
    if "deepfm" in chosen:
        parts.append(measure_deepfm(options.field_rows, options.batch[0], options.repeats))
    if "memory" in chosen:
        parts.append(measure_memory(16, options.batch[0]))
    for part in parts:
        append_rows("tensorflow_step", part, dry=options.dry)


if __name__ == "__main__":
    main()
