# SPDX-License-Identifier: Apache-2.0
"""What each rank runs for `test_ranks`: ``python -m tests.tensorflow.rank_program CASE DIR``.

Every rank computes the whole batch in float64, and takes its own part of the samples.
"""

import importlib
import importlib.util
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from numpy.typing import NDArray

import terarec.tensorflow as sok
from terarec.errors import ConfigError
from terarec.tensorflow import horovod as hvd
from tests.tensorflow import formulas

ROWS, WIDTH, BATCH = 23, 3, 12
SEED = 5
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def own_samples() -> slice:
    return slice(sok.rank(), None, sok.num_gpus())


def start_of(number: int) -> NDArray[np.float32]:
    return np.random.default_rng(number).normal(size=(ROWS, WIDTH)).astype(np.float32)


def bags_of(rng: np.random.Generator) -> tuple[list[list[int]], list[list[float]]]:
    ids = [rng.integers(0, ROWS, rng.integers(0, 5)).tolist() for _ in range(BATCH)]
    return ids, [rng.uniform(0.5, 2.0, len(one)).tolist() for one in ids]


def ragged(rows: list[list[Any]], dtype: Any) -> tf.RaggedTensor:
    return tf.ragged.constant(rows, dtype=dtype, ragged_rank=1, row_splits_dtype=tf.int64)


def train(_: Path) -> None:
    """Compare 100 steps of every kind of table in one function with the formulas, weights within 1e-6."""
    last = sok.num_gpus() - 1
    dynamic = sok.DynamicVariable(WIDTH, "0.5", var_type="hbm", name="dynamic")
    variables = [
        sok.Variable(start_of(0), name="spread"),
        sok.Variable(start_of(1), name="local", mode=f"localized:{last}"),
        dynamic,
        sok.Variable(start_of(3), name="weighted"),
        sok.DynamicVariable(WIDTH, "0.5", var_type="hybrid", name="local dynamic", mode=f"localized:{last}"),
    ]
    combiners = ["sum", "mean", "sum", "mean", "mean"]
    oracle = [start_of(0), start_of(1), np.full((ROWS, WIDTH), 0.5), start_of(3), np.full((ROWS, WIDTH), 0.5)]
    weights = [one.astype(np.float64) for one in oracle]
    optimizers = [sok.SGD(0.02), sok.OptimizerWrapper(keras.optimizers.Adam(0.01))]
    rules: list[Callable[[], formulas.Formula]] = [
        lambda: formulas.sgd(0.02),
        lambda: formulas.adam(0.01, 0.9, 0.999, 1e-7, lazy=True),
    ]
    of_variable = [0, 1, 1, 1, 0]
    states = [rules[number]() for number in of_variable]
    rng = np.random.default_rng(SEED)
    target = rng.normal(size=(BATCH, WIDTH))

    @tf.function(reduce_retracing=True)
    def step(ids: list[tf.RaggedTensor], factors: tf.RaggedTensor, goal: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        with tf.GradientTape() as tape:
            tape.watch(factors.flat_values)
            vectors = sok.lookup_sparse(variables, ids, [None, None, None, factors, None], combiners)
            loss = tf.add_n([tf.reduce_sum((one - goal) ** 2) for one in vectors])
        *grads, of_weights = tape.gradient(loss, [*variables, factors.flat_values])
        for number, optimizer in enumerate(optimizers):
            pairs = [
                one for one, of in zip(zip(grads, variables, strict=True), of_variable, strict=True) if of == number
            ]
            optimizer.apply_gradients(pairs)
        return loss, of_weights

    for _ in range(100):
        drawn = [bags_of(rng) for _ in variables]
        own = [ragged(ids[own_samples()], tf.int64) for ids, _ in drawn]
        factors = ragged(drawn[3][1][own_samples()], tf.float32)
        loss, of_weights = step(own, factors, tf.constant(target[own_samples()], tf.float32))
        expected, expected_of_weights = 0.0, []
        for number, ((ids, given), combiner) in enumerate(zip(drawn, combiners, strict=True)):
            gradient, touched = np.zeros((ROWS, WIDTH)), np.zeros(ROWS, bool)
            for sample, (row, factor) in enumerate(zip(ids, given, strict=True)):
                scale = np.asarray(factor, np.float32).astype(np.float64) if number == 3 else np.ones(len(row))
                total = 1.0 if combiner == "sum" or not row else scale.sum()
                vector = scale @ weights[number][row] / total if row else np.zeros(WIDTH)
                error = 2 * (vector - target[sample])
                expected += ((vector - target[sample]) ** 2).sum()
                np.add.at(gradient, row, scale[:, None] / total * error)
                touched[row] = True
                if number == 3 and sample % sok.num_gpus() == sok.rank() and row:
                    expected_of_weights += [(weights[3][one] @ error - vector @ error) / total for one in row]
            states[number].apply(weights[number], gradient, touched)
        np.testing.assert_allclose(hvd.allreduce(loss, op=hvd.Sum), expected, rtol=1e-5)
        np.testing.assert_allclose(of_weights, expected_of_weights, rtol=1e-4, atol=1e-5)
    for variable, wanted in zip(variables, weights, strict=True):
        ids, rows = sok.export(variable)
        np.testing.assert_allclose(rows, wanted[ids], atol=1e-6, rtol=1e-6)
        placement = variable.table.placement
        assert variable.target_gpu == (0 if sok.num_gpus() == 1 else placement.home)
        np.testing.assert_array_equal(placement.owns(ids.numpy()), True)
    assert variables[0].shape == (len(range(ROWS)[own_samples()]), WIDTH)
    assert variables[0].global_shape == (ROWS, WIDTH)
    assert variables[1].shape == (ROWS if sok.rank() == last else 0, WIDTH)
    for variable, wanted in ((variables[1], weights[1]), (variables[4], weights[4])):
        if sok.rank() != last:
            with pytest.raises(ConfigError, match=f"its rows are on rank {last}"):
                tf.nn.embedding_lookup(variable, [1, 2])
            continue
        with tf.GradientTape() as tape:  # by TensorFlow's own lookup on this rank alone, as scripts of SOK do
            found = tf.function(tf.nn.embedding_lookup)(variable, [1, 2, 2])
        np.testing.assert_allclose(found, wanted[[1, 2, 2]], atol=1e-6)
        gradient = tape.gradient(found, variable)
        assert dict(zip(gradient.indices.numpy(), gradient.values.numpy()[:, 0], strict=True)) == {1: 1.0, 2: 2.0}


def horovod(_: Path) -> None:
    """Compare the calls of Horovod's with NumPy, in and outside of a graph."""
    size, rank = hvd.size(), hvd.rank()
    every = [np.arange(6, dtype=np.float32).reshape(2, 3) * (one + 1) for one in range(size)]
    for wrap in (lambda function: function, tf.function):
        for op, expected in ((hvd.Sum, sum(every)), (hvd.Average, sum(every) / size), (hvd.Max, every[-1])):
            found = wrap(lambda one, op=op: hvd.allreduce(one, op=op))(tf.constant(every[rank]))
            np.testing.assert_allclose(found, expected, rtol=1e-6)
        joined = wrap(hvd.allgather)(tf.constant(every[rank][: rank + 1]))
        np.testing.assert_array_equal(joined, np.concatenate([one[: n + 1] for n, one in enumerate(every)]))
        np.testing.assert_array_equal(wrap(lambda one: hvd.broadcast(one, size - 1))(every[rank]), every[-1])
    for dtype in (tf.int64, tf.float64, tf.float16, tf.uint8):
        assert hvd.allreduce(tf.constant([rank + 1], dtype), op=hvd.Sum).numpy() == [size * (size + 1) // 2]
    assert hvd.allgather(tf.constant([rank == 0])).numpy().tolist() == [one == 0 for one in range(size)]
    slices = hvd.allreduce(tf.IndexedSlices(tf.ones([1, 2]) * (rank + 1), tf.constant([rank])), op=hvd.Sum)
    assert slices.indices.numpy().tolist() == list(range(size))
    assert slices.values.numpy()[:, 0].tolist() == [one + 1.0 for one in range(size)]
    dense, rows = tf.Variable([float(rank)]), sok.Variable(np.ones((4, 2)), name="rows")
    hvd.broadcast_variables([dense, rows], root_rank=size - 1)
    assert dense.numpy() == [size - 1.0]
    with hvd.DistributedGradientTape(tf.GradientTape()) as tape:
        loss = (rank + 1.0) * (dense[0] + tf.reduce_sum(sok.embedding_lookup(rows, [1])))
    of_dense, of_rows = tape.gradient(loss, [dense, rows])
    np.testing.assert_allclose(of_dense, [(size + 1) / 2])
    assert of_rows.values.numpy().sum() == (size * (size + 1) if rank == 1 % size else 0)
    with tf.GradientTape(persistent=True) as tape:
        value = tf.Variable(every[rank])
        loss = tf.reduce_sum((rank + 1.0) * hvd.allreduce(value, op=hvd.Sum))
        of_joined = tf.reduce_sum((rank + 1.0) * hvd.allgather(value))
    for one in (loss, of_joined):
        np.testing.assert_allclose(tape.gradient(one, value), np.full((2, 3), size * (size + 1) / 2))
    of_rows = tf.IndexedSlices(tf.ones([1, 2]), tf.constant([0]))
    wrapped = hvd.DistributedOptimizer(sok.OptimizerWrapper(keras.optimizers.SGD(1.0)))
    wrapped.apply_gradients([(tf.constant([rank + 1.0]), dense), (of_rows, rows)])
    np.testing.assert_allclose(dense.numpy(), [size - 1 - (size + 1) / 2])
    hvd.DistributedOptimizer(sok.SGD(1.0)).apply_gradients([(of_rows, rows)])
    np.testing.assert_array_equal(rows.numpy()[0], [-1.0, -1.0])
    hvd.barrier()


def in_keras(_: Path) -> None:
    """Train a model of Keras by `fit` on parts of each batch, and compare it with one that gets whole batches."""
    size, rng = sok.num_gpus(), np.random.default_rng(SEED)
    ids, labels = rng.integers(0, ROWS, (24, 2)), rng.normal(size=(24, 1)).astype(np.float32)
    rows, kernel = start_of(0), rng.normal(size=(2 * WIDTH, 1)).astype(np.float32)
    model = keras.Sequential([sok.keras.Embedding(ROWS, WIDTH), keras.layers.Flatten(), keras.layers.Dense(1)])
    model.build((None, 2))
    table = model.layers[0].embeddings.rows
    table.assign(rows[table.table.placement.rows])
    model.layers[2].set_weights([kernel, np.zeros(1, np.float32)])
    dense = hvd.DistributedOptimizer(keras.optimizers.SGD(0.05))
    model.compile(sok.keras.OptimizerWrapper(dense), lambda y, p: tf.reduce_mean((y - p) ** 2))
    own = own_samples()
    for first in range(0, 24, 12):
        batch = slice(first, first + 12)
        model.fit(ids[batch][own], labels[batch][own], batch_size=12 // size, epochs=1, shuffle=False, verbose=0)
    weights, bias, table_rows = kernel.astype(np.float64), np.zeros(1), rows.astype(np.float64)
    for first in range(0, 24, 12):
        batch = slice(first, first + 12)
        flat = table_rows[ids[batch]].reshape(12, -1)
        error = 2 * (flat @ weights + bias - labels[batch]) / 12
        of_rows = np.zeros_like(table_rows)
        # Gradients of rows are sums over the ranks of those of their means.
        np.add.at(of_rows, ids[batch].ravel(), size * (error @ weights.T).reshape(-1, WIDTH))
        weights, bias = weights - 0.05 * flat.T @ error, bias - 0.05 * error.sum(0)
        table_rows -= 0.05 * of_rows
    np.testing.assert_allclose(model.layers[2].get_weights()[0], weights, atol=1e-6)
    np.testing.assert_allclose(sok.export(table)[1], table_rows[table.table.placement.rows], atol=1e-6)
    layer = sok.All2AllDenseEmbedding(ROWS, WIDTH, 1, 2, use_hashtable=False, name="first")
    sok.Saver().load_embedding_values(layer.embeddings, start_of(2))
    found = layer(tf.constant(ids[:, None] % ROWS))
    np.testing.assert_array_equal(found, start_of(2)[ids[:, None]])


def faults(_: Path) -> None:
    """Let one rank look an id up that there is not: all raise, and the next step works."""
    variable = sok.Variable(start_of(0), name="known")
    problem = "ids: got 30 at position 0, expected 0 <= id < 23, the rows of variable 'known'"
    for rank in range(sok.num_gpus()):
        ids = [[ROWS + 7 if sok.rank() == rank else 1]]
        with pytest.raises(tf.errors.InvalidArgumentError, match=problem) as raised:
            sok.lookup_sparse(variable, tf.ragged.constant(ids))
        assert (f"rank {rank}: " in str(raised.value)) == (rank != sok.rank())
        np.testing.assert_allclose(sok.embedding_lookup(variable, [3]), start_of(0)[[3]])
    full = sok.DynamicVariable(2, "ones", "hybrid", name="full", max_capacity=2)
    with pytest.raises(tf.errors.OpError, match="is full"):
        sok.all2all_dense_embedding(full, tf.range(6 * sok.num_gpus()))


def graphs(_: Path) -> None:
    """Take gradients of a function outside of it, of many tables that no data orders."""
    variables = [sok.Variable(start_of(number), name=f"table {number}") for number in range(8)]
    ids = tf.constant([[1, 2], [ROWS - 1, 1]])

    @tf.function
    def loss_of(ids: tf.Tensor) -> tf.Tensor:
        return tf.add_n([tf.reduce_sum(sok.lookup_sparse(one, ids, combiners="sum") ** 2) for one in variables])

    for _ in range(20):
        with tf.GradientTape() as tape:
            loss = loss_of(ids)
        grads = tape.gradient(loss, variables)
    for number, (grad, variable) in enumerate(zip(grads, variables, strict=True)):
        expected = np.zeros((ROWS, WIDTH))
        for row in ids.numpy():
            np.add.at(expected, row, 2 * start_of(number)[row].sum(0) * sok.num_gpus())
        found = tf.convert_to_tensor(tf.IndexedSlices(grad.values, grad.indices, variable.shape))
        np.testing.assert_allclose(found, expected[variable.table.placement.rows], rtol=1e-5)


def empty(_: Path) -> None:
    """Let one rank have no ids of a weighted feature, in and outside of a graph."""
    variable, last = sok.Variable(np.ones((ROWS, WIDTH)), name="weighted"), sok.rank() == sok.num_gpus() - 1
    rows: list[list[int]] = [[], []] if last else [[1, 2], [3]]
    ids = ragged(rows, tf.int64)
    factors = ragged([[2.0 * one for one in row] for row in rows], tf.float32)

    def run(ids: tf.RaggedTensor, factors: tf.RaggedTensor) -> tuple[tf.IndexedSlices, tf.Tensor]:
        with tf.GradientTape() as tape:
            tape.watch(factors.flat_values)
            loss = tf.reduce_sum(sok.lookup_sparse(variable, ids, factors, "sum"))
        of_rows, of_factors = tape.gradient(loss, [variable, factors.flat_values])
        return of_rows, of_factors

    for wrap in (lambda function: function, tf.function):
        for _ in range(2):
            of_rows, of_factors = wrap(run)(ids, factors)
            np.testing.assert_array_equal(of_factors, np.full(0 if last else 3, WIDTH))
            sums = hvd.allreduce(tf.reduce_sum(of_rows.values), op=hvd.Sum)
            np.testing.assert_array_equal(sums, (sok.num_gpus() - 1) * 12.0 * WIDTH)


def checkpoints(folder: Path) -> None:
    """Save and restore the part of each rank; what another one has written, and Keras's files, are refused."""
    size, rank = sok.num_gpus(), sok.rank()
    variable, start = sok.Variable(start_of(0), name="saved"), start_of(0)
    path = tf.train.Checkpoint(rows=variable).write(str(folder / str(rank)))
    variable.assign(tf.zeros_like(variable))
    hvd.barrier()
    tf.train.Checkpoint(rows=variable).read(path)
    np.testing.assert_array_equal(variable.numpy(), start[variable.table.placement.rows])
    model = keras.Sequential([sok.keras.Embedding(ROWS, WIDTH)])
    model.build((None, 2))
    weights = folder / f"{rank}.weights.h5"
    if size == 1:
        model.save_weights(weights)
        return
    other = (rank + 1) % size
    with pytest.raises(ConfigError, match=f"got a checkpoint of rank {other} of {size}, expected one of rank {rank}"):
        tf.train.Checkpoint(rows=variable).read(str(folder / str(other)))
    for save in (lambda: model.save_weights(weights), lambda: model.save(folder / f"{rank}.h5")):
        with pytest.raises(ConfigError, match=f"its rows are on {size} ranks"):
            save()
    if importlib.util.find_spec("tf_keras"):
        in_layers_of_tf_keras(folder, variable)


def in_layers_of_tf_keras(folder: Path, variable: tf.Variable) -> None:
    """Refuse to save a part of the rows as the whole of a weight, wherever the layer has it."""
    tf_keras = importlib.import_module("tf_keras")

    class Holding(tf_keras.layers.Layer):
        def __init__(self, held: Any) -> None:
            super().__init__()
            self.held = held

        def call(self, inputs: Any) -> Any:
            return inputs

        def get_config(self) -> dict[str, Any]:
            return {}

    module = tf.Module()
    module.rows = variable
    for number, held in enumerate((variable, [variable], module)):
        model = tf_keras.Sequential([Holding(held)])
        model.build((None, 2))
        path = folder / f"{sok.rank()}-{number}"
        saves = [partial(model.save_weights, f"{path}.h5"), model.get_weights, partial(model.save, f"{path}.keras")]
        for save in saves[: 2 if held is module else 3]:  # tf_keras leaves out what modules have in the last
            with pytest.raises(ConfigError, match=f"its rows are on {sok.num_gpus()} ranks"):
                save()
    optimizer = tf_keras.optimizers.legacy.Adam()
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(sok.embedding_lookup(variable, [1]))
    optimizer.apply_gradients([(tape.gradient(loss, variable), variable)])
    with pytest.raises(ConfigError, match=f"its rows are on {sok.num_gpus()} ranks"):
        optimizer.get_weights()
    assert variable.numpy().shape == np.asarray(variable).shape == tuple(variable.shape)


NAMES = ("static table", "dynamic table", "local table")


def tables() -> tuple[list[tf.Variable], Any]:
    variables = [
        sok.Variable(np.zeros((ROWS, WIDTH)), name=NAMES[0]),
        sok.DynamicVariable(WIDTH, "zeros", name=NAMES[1]),
        sok.Variable(np.zeros((ROWS, WIDTH)), name=NAMES[2], mode="localized:0"),
    ]
    optimizer = sok.OptimizerWrapper(keras.optimizers.Adagrad(0.1))
    return variables, optimizer


def write(folder: Path) -> None:
    """Write files of tables, whose rows and states come from their ids."""
    variables, optimizer = tables()
    for variable in variables:
        sok.assign(variable, tf.range(ROWS, dtype=tf.int64), start_of(1))
    ids = tf.range(ROWS, dtype=tf.int64)[own_samples()]
    with tf.GradientTape() as tape:
        loss = tf.add_n([tf.reduce_sum(sok.embedding_lookup(one, ids) ** 2) for one in variables])
    optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
    sok.dump(folder, variables, optimizer)
    sok.Saver().dump_to_file(variables[0], folder)
    (found,), _ = sok.incremental_model_dump([variables[1]], EPOCH)
    assert sorted(found.tolist()) == list(range(ROWS))


def read(folder: Path) -> None:
    """Read them, on another number of ranks."""
    variables, optimizer = tables()
    sok.load(folder, variables, optimizer)
    start = start_of(1).astype(np.float64)
    state = 0.1 + 4 * start**2
    for variable in variables:
        ids, rows = sok.export(variable)
        np.testing.assert_allclose(rows, (start - 0.2 * start / (np.sqrt(state) + 1e-7))[ids], atol=1e-6)
        names, _, (found,) = variable.table.read()
        np.testing.assert_allclose(found, state[variable.table.placement.all_ids(names)], rtol=1e-5)
    variables[0].assign(tf.zeros_like(variables[0]))
    sok.Saver().restore_from_file(variables[0], folder)
    np.testing.assert_allclose(variables[0].numpy()[0], start[sok.rank()] - 0.2 * start[sok.rank()] / (
        np.sqrt(state[sok.rank()]) + 1e-7), atol=1e-6)  # fmt: skip


CASES = {
    "train": train,
    "horovod": horovod,
    "keras": in_keras,
    "faults": faults,
    "graphs": graphs,
    "empty": empty,
    "checkpoints": checkpoints,
    "write": write,
    "read": read,
}

if __name__ == "__main__":
    sok.init(timeout=300.0)
    CASES[sys.argv[1]](Path(sys.argv[2]))
    print("done")
