# SPDX-License-Identifier: Apache-2.0
"""The plugin for TensorFlow: one module in one process, as TensorFlow takes seconds to import.

Optimizers are compared with formulas in float64 (`tests.tensorflow.formulas`), lookups with those of `tf.nn`.
"""

import copy
import gc
import importlib.util
import itertools
import json
import os
import pickle
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.params import in_every_run
from tests.processes import run_new_python
from tests.programs import lacks
from tests.tensorflow import formulas

if importlib.util.find_spec("tensorflow") is None:
    pytest.skip(lacks("tensorflow", "pip install 'terarec[tensorflow]'"), allow_module_level=True)

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import h5py
import keras
import tensorflow as tf
from tensorflow.python.ops import script_ops

import terarec.tensorflow as sok
from terarec.errors import ConfigError, DataNotFoundError, FormatError
from terarec.kernels.environment import Launch
from terarec.tensorflow import communication, dump_files, horovod, plugin, rules, tables
from terarec.tensorflow import ops as table_ops
from terarec.tensorflow.sok_files import HEADER_BYTES

ROWS, WIDTH = 37, 5
SHAPES = ([3], 3, [3, 0], [-1, 4], [None, 4], ["3", 4], [3.5, 4], [10**5000, 4], tf.TensorShape(None))
"""None of a table."""


@pytest.fixture(params=["compiled", "numpy"])
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run a test with the op library, then with the functions that take its place."""
    assert type(table_ops.ops) is table_ops.CompiledOps  # it loads here
    if request.param == "numpy":
        monkeypatch.setattr(table_ops, "ops", table_ops.NumPyOps())
    return str(request.param)


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(7)


def table(rng: np.random.Generator, rows: int = ROWS) -> NDArray[np.float32]:
    return rng.normal(size=(rows, WIDTH)).astype(np.float32)


def ragged(rng: np.random.Generator, rows: int = 6, below: int = ROWS, dtype: Any = tf.int64) -> tf.RaggedTensor:
    """Rows of ids, of which some repeat; the second row is empty."""
    sizes = rng.integers(1, 5, rows)
    sizes[1] = 0
    ids = rng.integers(0, below, sizes.sum()) % 11
    return tf.RaggedTensor.from_row_lengths(tf.constant(ids, dtype), sizes)


def batches(rng: np.random.Generator, count: int) -> Iterator[tuple[tf.RaggedTensor, tf.Tensor]]:
    for _ in range(count):
        yield ragged(rng), tf.constant(rng.normal(size=(6, WIDTH)), tf.float32)


@pytest.mark.usefixtures("implementation")
@pytest.mark.parametrize(
    ("combiner", "is_weighted", "in_graph"),
    in_every_run(
        [("sum", False, True), ("mean", True, True), ("sqrtn", True, False), ("mean", False, False)],
        itertools.product(["sum", "mean", "sqrtn"], [False, True], [False, True]),
    ),
)
def test_lookups_and_gradients_equal_those_of_tf_nn(
    rng: np.random.Generator, combiner: str, is_weighted: bool, in_graph: bool
) -> None:
    start, ids = table(rng), ragged(rng)
    ours, theirs = sok.Variable(start), tf.Variable(start)
    factors = tf.Variable(rng.uniform(0.5, 2.0, ids.flat_values.shape).astype(np.float32))

    def run(function: Any, variable: tf.Variable) -> tuple[tf.Tensor, Any]:
        with tf.GradientTape() as tape:
            weights = ids.with_flat_values(tf.convert_to_tensor(factors)) if is_weighted else None
            vectors = function(variable, ids, weights, combiner=combiner)
            loss = tf.reduce_sum(vectors**3)
        return vectors, tape.gradient(loss, [variable, factors])

    wrapped = tf.function(run) if in_graph else run
    vectors, gradients = wrapped(sok.embedding_lookup_sparse, ours)
    expected, expected_gradients = run(tf.nn.embedding_lookup_sparse, theirs)
    np.testing.assert_allclose(vectors, expected, atol=1e-6)
    np.testing.assert_allclose(
        tf.convert_to_tensor(gradients[0]), tf.convert_to_tensor(expected_gradients[0]), rtol=1e-5, atol=1e-5
    )
    assert len(np.unique(gradients[0].indices)) == len(gradients[0].indices)
    if is_weighted:
        np.testing.assert_allclose(gradients[1], expected_gradients[1], rtol=1e-4, atol=1e-5)
    else:
        assert gradients[1] is None


@pytest.mark.usefixtures("implementation")
def test_functions_of_tensorflow_take_our_variables(rng: np.random.Generator) -> None:
    start = table(rng)
    variable, ids = sok.Variable(start), tf.constant([[3, 3], [36, 0]])
    for read in (tf.nn.embedding_lookup, tf.gather, sok.embedding_lookup):
        np.testing.assert_array_equal(read(variable, ids), start[ids])
    bags = ragged(rng).to_sparse()
    ours, theirs = (tf.nn.embedding_lookup_sparse(one, bags, None) for one in (variable, tf.constant(start)))
    np.testing.assert_allclose(ours, theirs, atol=1e-6)
    assert variable.shape == (ROWS, WIDTH)
    np.testing.assert_array_equal(variable.numpy(), start)
    # TensorFlow's fast path in C reads variables by itself.
    np.testing.assert_allclose(tf.reduce_sum(variable, axis=0), start.sum(0), rtol=1e-5)
    np.testing.assert_allclose(variable * 2.0, 2 * start)
    with tf.GradientTape() as tape:
        loss = tf.nn.l2_loss(variable)
    np.testing.assert_array_equal(tape.gradient(loss, variable), start)


@pytest.mark.usefixtures("implementation")
def test_a_function_takes_each_variable_as_an_argument() -> None:
    read = tf.function(lambda variables, ids: sok.embedding_lookup(variables[0], ids))
    for make in (lambda value: sok.Variable(np.full((3, 2), value)), lambda value: sok.DynamicVariable(2, str(value))):
        variables = [make(value) for value in (1.0, 2.0)]
        for _ in range(2):
            assert [read([one], [0])[0, 0] for one in variables] == [1.0, 2.0]
        del variables
        assert read([make(3.0)], [0])[0, 0] == 3.0  # in place of one that is gone


@pytest.mark.usefixtures("implementation")
def test_rows_are_assigned_and_scattered_as_in_a_variable(rng: np.random.Generator) -> None:
    start, more = table(rng), table(rng)
    ours, theirs = sok.Variable(start), tf.Variable(start)
    delta = tf.IndexedSlices(tf.constant(more[:4]), tf.constant([5, 0, 5, 36]))
    for one in (ours, theirs):
        one.assign_add(more)
        one.assign_sub(2 * more)
        one.scatter_add(delta)
        one.scatter_sub(tf.IndexedSlices(delta.values * 3, delta.indices))
        one.scatter_update(tf.IndexedSlices(delta.values[:2], delta.indices[:2]))
    np.testing.assert_allclose(ours.numpy(), theirs.numpy(), atol=1e-6)
    ours.assign(start)
    np.testing.assert_array_equal(ours.numpy(), start)
    with pytest.raises(ConfigError, match="value"):
        ours.assign(start[:3])
    with pytest.raises(ConfigError):
        ours.scatter_mul(delta)


OPTIMIZERS = {
    "sgd": (lambda: keras.optimizers.SGD(0.5), lambda: formulas.sgd(0.5)),
    "momentum": (lambda: keras.optimizers.SGD(0.1, 0.9), lambda: formulas.momentum(0.1, 0.9)),
    "nesterov": (
        lambda: keras.optimizers.SGD(0.1, 0.9, nesterov=True),
        lambda: formulas.momentum(0.1, 0.9, nesterov=True),
    ),
    "adam": (lambda: keras.optimizers.Adam(0.01), lambda: formulas.adam(0.01, 0.9, 0.999, 1e-7, lazy=True)),
    "adamw": (
        lambda: keras.optimizers.AdamW(0.01, weight_decay=0.1),
        lambda: formulas.adam(0.01, 0.9, 0.999, 1e-7, lazy=True, decay=0.1),
    ),
    "nadam": (lambda: keras.optimizers.Nadam(0.01), lambda: formulas.nadam(0.01, 0.9, 0.999, 1e-7)),
    "adamax": (lambda: keras.optimizers.Adamax(0.01), lambda: formulas.adamax(0.01, 0.9, 0.999, 1e-7)),
    "adadelta": (lambda: keras.optimizers.Adadelta(0.5), lambda: formulas.adadelta(0.5, 0.95, 1e-7)),
    "adagrad": (lambda: keras.optimizers.Adagrad(0.05), lambda: formulas.adagrad(0.05, 0.1, 1e-7)),
    "ftrl": (
        lambda: keras.optimizers.Ftrl(0.05, l1_regularization_strength=0.01, l2_regularization_strength=0.02, beta=0.5),
        lambda: formulas.ftrl(0.05, 0.1, 0.01, 0.02, 0.5),
    ),
    "rmsprop": (lambda: keras.optimizers.RMSprop(0.01, 0.9), lambda: formulas.rmsprop(0.01, 0.9, 1e-7, lazy=True)),
}


@pytest.mark.parametrize(
    ("kind", "is_dynamic"),
    in_every_run(
        [
            *[("sgd", False), ("nesterov", False), ("adam", False), ("adam", True), ("adagrad", False)],
            *[("adamax", False), ("adadelta", True), ("ftrl", True), ("nadam", True)],
        ],
        itertools.product(OPTIMIZERS, [False, True]),
    ),
)
def test_a_hundred_steps_equal_the_formula(rng: np.random.Generator, kind: str, is_dynamic: bool) -> None:
    make, formula = OPTIMIZERS[kind]
    start = table(rng)
    keys = np.arange(ROWS) * 2**50 - 99 if is_dynamic else np.arange(ROWS)
    if is_dynamic:
        variable = sok.DynamicVariable(WIDTH)
        sok.assign(variable, keys, start)
    else:
        variable = sok.Variable(start)
    _compare(rng, variable, keys, start, sok.OptimizerWrapper(make()), formula())


def test_a_hundred_steps_without_the_op_library_equal_the_formula(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table_ops, "ops", table_ops.NumPyOps())
    make, formula = OPTIMIZERS["adam"]
    start = table(rng)
    _compare(rng, sok.Variable(start), np.arange(ROWS), start, sok.OptimizerWrapper(make()), formula())


OWN_OPTIMIZERS = {
    "sgd": (lambda: sok.SGD(0.5), lambda: formulas.sgd(0.5)),
    "adam": (lambda: sok.Adam(0.01), lambda: formulas.adam(0.01, 0.9, 0.999, 1e-7, lazy=False)),
    "lazy adam": (lambda: sok.Adam(0.01, lazy=True), lambda: formulas.adam(0.01, 0.9, 0.999, 1e-7, lazy=True)),
    "dense adam": (
        lambda: sok.OptimizerWrapper(keras.optimizers.Adam(0.01), lazy=False),
        lambda: formulas.adam(0.01, 0.9, 0.999, 1e-7, lazy=False),
    ),
    "dense rmsprop": (
        lambda: sok.OptimizerWrapper(keras.optimizers.RMSprop(0.01, 0.9), lazy=False),
        lambda: formulas.rmsprop(0.01, 0.9, 1e-7, lazy=False),
    ),
}


@pytest.mark.parametrize("kind", in_every_run(["sgd", "adam"], OWN_OPTIMIZERS))
def test_the_plugins_own_optimizers_equal_the_formula(rng: np.random.Generator, kind: str) -> None:
    optimizer, formula = OWN_OPTIMIZERS[kind]
    start = table(rng)
    _compare(rng, sok.Variable(start), np.arange(ROWS), start, optimizer(), formula())


def _compare(
    rng: np.random.Generator,
    variable: tf.Variable,
    keys: NDArray[np.int64],
    start: NDArray[np.float32],
    optimizer: Any,
    formula: formulas.Formula,
) -> None:
    """Train 100 steps of a square loss, in a function of TensorFlow and in float64."""
    weights = start.astype(np.float64)

    @tf.function(reduce_retracing=True)
    def step(ids: tf.RaggedTensor, target: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum((sok.lookup_sparse(variable, ids, combiners="mean") - target) ** 2)
        optimizer.apply_gradients([(tape.gradient(loss, variable), variable)])
        return loss

    for ids, target in batches(rng, 100):
        loss = step(ids.with_flat_values(tf.gather(tf.constant(keys), ids.flat_values)), target)
        expected, gradient = 0.0, np.zeros_like(weights)
        touched = np.zeros(len(weights), bool)
        for row, want in zip(ids.to_list(), target.numpy().astype(np.float64), strict=True):
            vector = weights[row].mean(0) if row else np.zeros(WIDTH)
            expected += ((vector - want) ** 2).sum()
            for key in row:
                gradient[key] += 2 * (vector - want) / len(row)
                touched[key] = True
        formula.apply(weights, gradient, touched)
        np.testing.assert_allclose(loss, expected, rtol=1e-5)
    order = np.argsort(keys)
    found, rows = sok.export(variable)
    np.testing.assert_array_equal(found, keys[order])
    np.testing.assert_allclose(rows, weights[order], rtol=1e-5, atol=2e-6)


def gradients(rng: np.random.Generator, count: int) -> Iterator[tuple[NDArray[np.int64], NDArray[np.float32]]]:
    """Gradients of rows, each ten times smaller than the one before: what is added to a root shows."""
    for number in range(count):
        yield rng.integers(0, 9, 7), (rng.normal(size=(7, WIDTH)) * 10.0**-number).astype(np.float32)


def dense(ids: NDArray[np.int64], values: NDArray[np.float32]) -> tf.Tensor:
    total = np.zeros((ROWS, WIDTH), np.float32)
    np.add.at(total, ids, values)
    return tf.constant(total)


@pytest.mark.parametrize("kind", in_every_run(["nadam", "rmsprop", "adamw"], OPTIMIZERS))
def test_without_laziness_rows_move_as_a_dense_variable_by_the_optimizer_itself(
    rng: np.random.Generator, kind: str
) -> None:
    _compare_with_dense(rng, *(OPTIMIZERS[kind][0]() for _ in range(2)))


def _compare_with_dense(rng: np.random.Generator, optimizer: Any, stock: Any) -> None:
    start = table(rng)
    ours, theirs = sok.Variable(start), tf.Variable(start)
    wrapped = sok.OptimizerWrapper(optimizer, lazy=False)
    for ids, values in gradients(rng, 6):
        wrapped.apply_gradients([(tf.IndexedSlices(tf.constant(values), tf.constant(ids)), ours)])
        stock.apply_gradients([(dense(ids, values), theirs)])
    np.testing.assert_allclose(ours.numpy(), theirs.numpy(), rtol=1e-5, atol=2e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", rules.WRAPPED)
def test_without_laziness_rows_move_as_a_dense_variable_by_an_optimizer_of_legacy_keras(
    rng: np.random.Generator, name: str
) -> None:
    tf_keras = pytest.importorskip("tf_keras", reason=lacks("tf_keras", "pip install tf_keras"))
    kind = getattr(tf_keras.optimizers, name)
    _compare_with_dense(rng, kind(0.05), kind(0.05))
    if name == "AdamW":
        partial = kind(0.05)
        partial.exclude_from_weight_decay(var_names=["bias"])
        with pytest.raises(ConfigError, match="weight_decay"):
            sok.OptimizerWrapper(partial)


BASE = keras.optimizers.Optimizer
KINDS = {name: kind for name, kind in vars(keras.optimizers).items() if isinstance(kind, type) and kind is not BASE}
STOCK = [name for name, kind in KINDS.items() if issubclass(kind, BASE)]
AROUND_OTHERS = {"LossScaleOptimizer": lambda: [keras.optimizers.SGD()], "MultiOptimizer": lambda: [lambda _: None]}


def stock(name: str) -> Any:
    return KINDS[name](*AROUND_OTHERS.get(name, list)())


def test_an_optimizer_that_is_not_wrapped_is_refused_with_the_way_to_go() -> None:
    for name in STOCK:
        if name in rules.WRAPPED:
            continue
        with pytest.raises(ConfigError, match=r"without a wrapper|\(OptimizerWrapper") as raised:
            sok.OptimizerWrapper(stock(name))
        assert raised.value.where == "optimizer"
    decaying = keras.optimizers.AdamW()
    decaying.exclude_from_weight_decay(var_names=["bias"])
    late = sok.OptimizerWrapper(keras.optimizers.AdamW()), sok.keras.OptimizerWrapper(keras.optimizers.AdamW())
    variable = sok.Variable(np.ones((2, 2)))
    for own in late:
        getattr(own, "optimizer", own).exclude_from_weight_decay(var_names=["bias"])
        with pytest.raises(ConfigError, match="weight_decay"):
            own.apply_gradients([(tf.ones((2, 2)), variable)])
    for wrong in (decaying, keras.optimizers.SGD(weight_decay=0.1)):
        with pytest.raises(ConfigError) as raised:
            sok.OptimizerWrapper(wrong)
        assert raised.value.where == "optimizer.weight_decay"


@pytest.mark.parametrize("name", in_every_run(["Adam", "Lion"], [one for one in STOCK if one not in AROUND_OTHERS]))
def test_stock_optimizers_of_keras_update_rows_as_a_dense_variable(rng: np.random.Generator, name: str) -> None:
    start = table(rng)
    layer = sok.keras.Embedding(ROWS, WIDTH)
    layer.build()
    layer.set_weights([start])
    theirs = keras.Variable(start, name="embeddings")  # Muon asks for the name
    optimizer, other = stock(name), stock(name)
    for _, values in gradients(rng, 3):
        ids = rng.permutation(ROWS)[:7]  # Keras does not sum the gradients of those that repeat
        slices = tf.IndexedSlices(tf.constant(values), tf.constant(ids), tf.constant([ROWS, WIDTH], tf.int64))
        optimizer.apply_gradients([(slices, layer.embeddings)])
        other.apply_gradients([(dense(ids, values), theirs)])
    np.testing.assert_allclose(layer.embeddings.numpy(), theirs.numpy(), rtol=1e-5, atol=2e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SGD", "Adagrad", "Ftrl", "Adam", "Adamax", "Adadelta", "RMSprop"])
def test_a_hundred_steps_equal_those_of_the_legacy_optimizer_wrapped_and_alone(
    rng: np.random.Generator, name: str
) -> None:
    tf_keras = pytest.importorskip("tf_keras", reason=lacks("tf_keras", "pip install tf_keras"))
    sok.init()
    start = table(rng)
    wrapped, alone, theirs = sok.Variable(start), sok.Variable(start), tf.Variable(start)
    schedule = tf_keras.optimizers.schedules.ExponentialDecay(0.05, 50, 0.5)
    first, second, stock = (getattr(tf_keras.optimizers.legacy, name)(schedule) for _ in range(3))
    sides = ((theirs, stock), (wrapped, sok.OptimizerWrapper(first, lazy=False)), (alone, second))
    for ids, target in batches(rng, 100):
        losses = []
        for variable, optimizer in sides:
            with tf.GradientTape() as tape:
                vectors = tf.nn.embedding_lookup_sparse(variable, ids, None, "mean")
                loss = tf.reduce_sum((vectors - target) ** 2)
            optimizer.apply_gradients([(tape.gradient(loss, variable), variable)])
            losses.append(loss)
        np.testing.assert_allclose(losses[1:], losses[0], rtol=1e-5)
    for ours in (wrapped, alone):
        np.testing.assert_allclose(ours.numpy(), theirs.numpy(), atol=2e-6)
    assert (int(first.iterations), int(second.iterations)) == (0, 100)


def test_a_schedule_and_dense_variables_go_through_the_wrapper(rng: np.random.Generator) -> None:
    schedule = keras.optimizers.schedules.ExponentialDecay(0.5, 1, 0.5)
    optimizer = sok.OptimizerWrapper(keras.optimizers.SGD(schedule))
    rows, dense = sok.Variable(np.zeros((3, 2))), tf.Variable(np.zeros(2, np.float32))
    for _ in range(2):
        slices = tf.IndexedSlices(tf.ones([2, 2]), tf.constant([1, 1]))
        optimizer.apply_gradients([(slices, rows), (tf.ones(2), dense), (None, rows)])
    np.testing.assert_allclose(dense, [-0.75, -0.75])
    np.testing.assert_allclose(rows.numpy(), [[0, 0], [-1.5, -1.5], [0, 0]])
    assert int(optimizer.iterations) == 2
    assert sok.filter_variables([rows, dense]) == ([rows], [dense])


def test_lookup_sparse_takes_lists_of_every_kind(rng: np.random.Generator) -> None:
    first, second = table(rng), table(rng)
    dynamic = sok.DynamicVariable(WIDTH, initializer="0.5", var_type="hbm")
    ids = ragged(rng)
    dense = tf.constant([[1, 2], [0, 0], [5, 9], [1, 1], [2, 2], [3, 4]])
    params = [sok.Variable(first), sok.Variable(second), dynamic]
    vectors = sok.lookup_sparse(params, [ids, dense, ids.to_sparse()], combiners=["sum", "mean", "sqrtn"])
    np.testing.assert_allclose(vectors[0], tf.nn.embedding_lookup_sparse(first, ids, None, "sum"), atol=1e-6)
    np.testing.assert_allclose(vectors[1], second[dense.numpy()].mean(1), atol=1e-6)
    sizes = ids.row_lengths().numpy()
    np.testing.assert_allclose(vectors[2][:, 0], 0.5 * np.sqrt(sizes), atol=1e-6)
    assert dynamic.size.numpy().tolist() == [len(np.unique(ids.flat_values)), WIDTH]
    assert dynamic.shape.as_list() == [None, WIDTH]
    single = sok.lookup_sparse(params[0], ids)
    assert single.shape == (6, WIDTH)
    np.testing.assert_array_equal(single[1], np.zeros(WIDTH))


@pytest.mark.parametrize(
    ("initializer", "var_type", "low", "high"),
    [(None, "hbm", 0.0, 1.0), ("uniform", "hybrid", 0.0, 1.0), ("ones", "hybrid", 1.0, 1.0), ("-2", "hbm", -2.0, -2.0)],
)
def test_new_keys_get_the_initial_values_of_sok(
    initializer: str | None, var_type: str, low: float, high: float
) -> None:
    variable = sok.DynamicVariable(8, initializer, var_type)
    keys = np.array([0, -(2**63), 2**63 - 1, 5])
    rows = sok.all2all_dense_embedding(variable, keys).numpy()
    assert low <= rows.min() <= rows.max() <= high
    np.testing.assert_array_equal(rows, sok.all2all_dense_embedding(variable, keys))
    assert len(np.unique(rows, axis=0)) == (4 if low < high else 1)


def test_tables_of_other_names_or_seeds_have_other_initial_rows() -> None:
    ids, names = tf.range(4), ("user_embedding", "item_embedding")
    rows = [sok.all2all_dense_embedding(sok.DynamicVariable(2, "uniform", name=name), ids) for name in names]
    for seed in (7, 7, 8, None):
        initial = plugin._new_rows(keras.initializers.RandomUniform(0.0, 1.0, seed=seed))
        made = tables.RowTable("item_embedding", 2, tables.Growth(initial=initial))
        rows.append(made.core.lookup(ids.numpy().astype(int), np.zeros(0, int), np.zeros(0, np.float32), 2, 1)[0])
    np.testing.assert_array_equal(rows[2], rows[3])
    assert len({np.asarray(one).tobytes() for one in rows}) == 5
    layers = [sok.All2AllDenseEmbedding(9, 2, 1, 1)(tf.constant([[[3]]])).numpy().tolist() for _ in range(2)]
    assert layers[0] != layers[1]


@pytest.mark.usefixtures("implementation")
def test_a_bounded_variable_evicts_the_ids_that_did_not_come_for_longest() -> None:
    variable = sok.DynamicVariable(2, "7", "hybrid", max_capacity=4)
    optimizer = sok.OptimizerWrapper(keras.optimizers.SGD(1.0))
    evicted = []

    @tf.function
    def step(ids: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        with tf.GradientTape() as tape:
            vectors, *gone = sok.sparse_read_and_evict(variable, ids)
            loss = tf.reduce_sum(vectors)
        optimizer.apply_gradients([(tape.gradient(loss, variable), variable)])
        return gone

    for first in range(0, 10, 2):
        keys, rows = step(tf.range(first, first + 2, dtype=tf.int64))
        evicted += keys.numpy().tolist()
        np.testing.assert_allclose(rows, np.full((len(keys), 2), 6.0))
    assert evicted == list(range(6))
    assert sorted(sok.export(variable)[0].numpy()) == [6, 7, 8, 9]
    sok.all2all_dense_embedding(variable, tf.constant([6, 11]))  # other lookups make room, too
    assert 6 in sok.export(variable)[0].numpy()
    with pytest.raises(tf.errors.ResourceExhaustedError, match="is full"):
        sok.all2all_dense_embedding(variable, tf.range(5))
    assert variable.size.numpy().tolist() == [4, 2]
    narrow = sok.DynamicVariable(1, "zeros", "hybrid", key_type=tf.int32, max_capacity=1)
    sok.assign(narrow, [-(2**31)], [[1.0]])
    for call in (
        lambda: sok.assign(narrow, np.array([0, 2**32]), [[1.0], [2.0]]),
        lambda: sok.embedding_lookup(narrow, np.array([-(2**31) - 1])),
    ):
        with pytest.raises(tf.errors.InvalidArgumentError, match="which have 32 bits"):
            call()
    assert sok.export(narrow)[0].numpy().tolist() == [-(2**31)]


@pytest.mark.usefixtures("implementation")
def test_changes_since_a_time_and_admission_are_those_of_sok() -> None:
    variable = sok.DynamicVariable(1, "3", "hybrid", filter_ratio=0.0, key_type=tf.int32)
    sok.lookup_sparse(variable, tf.ragged.constant([[1, 2], [3]], tf.int32))
    time.sleep(0.002)
    middle = datetime.now(UTC)
    filtered = sok.lookup_sparse(
        variable, tf.ragged.constant([[3, 9], [8]], tf.int32), combiners="sum", use_low_frequency_filter=True
    )
    np.testing.assert_array_equal(filtered, [[3], [0]])
    other = sok.DynamicVariable(1)
    for times in (middle, [middle], [middle, middle]):
        (keys, _), (values, _) = sok.incremental_model_dump([variable, other], times)
        assert (keys.tolist(), values.tolist(), keys.dtype) == ([3], [[3.0]], np.int32)
    (keys,), _ = sok.incremental_model_dump([variable], datetime(1970, 1, 1, tzinfo=UTC))
    assert sorted(keys.tolist()) == [1, 2, 3]


def trained(variable: tf.Variable, optimizer: Any) -> None:
    for ids in ([1, 2, 2], [2, 5, 0]):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(sok.embedding_lookup(variable, tf.constant(ids)) ** 2)
        optimizer.apply_gradients([(tape.gradient(loss, variable), variable)])


@pytest.mark.parametrize("is_dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("way", ["dump", "checkpoint"])
def test_saved_rows_and_states_continue_as_if_never_saved(
    rng: np.random.Generator, tmp_path: Path, is_dynamic: bool, way: str
) -> None:
    start = table(rng, 6)

    def make() -> tuple[tf.Variable, Any]:
        if is_dynamic:
            variable = sok.DynamicVariable(WIDTH, "zeros", name="saved")
            sok.assign(variable, np.arange(6), start)
        else:
            variable = sok.Variable(start, name="saved")
        return variable, sok.OptimizerWrapper(keras.optimizers.Adam(0.1))

    variable, optimizer = make()
    trained(variable, optimizer)
    if way == "dump":
        sok.dump(tmp_path, variable, optimizer)
    else:
        path = tf.train.Checkpoint(rows=variable, optimizer=optimizer).save(str(tmp_path / "c"))
    trained(variable, optimizer)
    expected = sok.export(variable)
    del variable, optimizer

    again, optimizer = make()
    if way == "dump":
        again.scatter_update(tf.IndexedSlices(tf.zeros([2, WIDTH]), tf.constant([2, 5])))
        sok.load(tmp_path, [again], [optimizer])
        optimizer.iterations.assign(2)
    else:
        tf.train.Checkpoint(rows=again, optimizer=optimizer).restore(path).assert_consumed()
    trained(again, optimizer)
    for got, want in zip(sok.export(again), expected, strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("way", ["dump", "checkpoint"])
def test_new_ids_after_a_load_get_the_initial_states(tmp_path: Path, way: str) -> None:
    def make() -> tuple[tf.Variable, Any]:
        variable = sok.DynamicVariable(2, "zeros", name="grown later")
        return variable, sok.OptimizerWrapper(keras.optimizers.Adagrad(0.1))

    variable, optimizer = make()
    ones = tf.IndexedSlices(tf.ones([1, 2]), tf.constant([1]))
    sok.assign(variable, [1, 2], tf.ones([2, 2]))
    optimizer.apply_gradients([(ones, variable)])
    if way == "dump":
        sok.dump(tmp_path, variable, optimizer)
    else:
        path = tf.train.Checkpoint(rows=variable, optimizer=optimizer).write(str(tmp_path / "c"))
    del variable, optimizer
    variable, optimizer = make()
    if way == "dump":
        sok.load(tmp_path, variable, optimizer)
    else:
        tf.train.Checkpoint(rows=variable, optimizer=optimizer).read(path)
    sok.embedding_lookup(variable, [3])  # before the optimizer knows the variable
    optimizer.apply_gradients([(tf.IndexedSlices(tf.ones([2, 2]), tf.constant([1, 3])), variable)])
    found = dict(zip(variable.indices.numpy().tolist(), optimizer.states(variable)["accumulator"][:, 0], strict=True))
    np.testing.assert_allclose([found[1], found[2], found[3]], [2.1, 0.1, 1.1])


@pytest.mark.parametrize("way", ["dump", "checkpoint", "saver"])
def test_rows_that_are_loaded_without_states_start_with_new_ones(tmp_path: Path, way: str) -> None:
    variable = sok.Variable(np.ones((6, 2)), name="rolled back")
    optimizer = sok.OptimizerWrapper(keras.optimizers.Adam())
    checkpoint, saver = tf.train.Checkpoint(rows=variable), sok.Saver()
    sok.dump(tmp_path, variable)
    path = checkpoint.write(str(tmp_path / "c"))
    saver.dump_to_file(variable, tmp_path)
    trained(variable, optimizer)
    assert optimizer.states(variable)["m"].numpy().any()
    if way == "dump":
        sok.load(tmp_path, variable)
    elif way == "checkpoint":
        checkpoint.read(path)
    else:
        saver.restore_from_file(variable, tmp_path)
    np.testing.assert_array_equal(variable.numpy(), np.ones((6, 2)))
    for state in optimizer.states(variable).values():
        np.testing.assert_array_equal(state, np.zeros((6, 2)))


def test_a_checkpoint_knows_when_ids_came_and_which_lookups_admitted(tmp_path: Path) -> None:
    def make() -> tf.Variable:
        return sok.DynamicVariable(1, "ones", "hybrid", max_capacity=4, filter_ratio=0.5, name="evicting")

    def admitted(variable: tf.Variable) -> list[float]:
        ids = tf.reshape(tf.range(40) + 2**20, [40, 1])
        return sok.lookup_sparse(other, ids, combiners="sum", use_low_frequency_filter=True)[:, 0].numpy().tolist()

    variable = make()
    other = sok.DynamicVariable(1, "ones", "hybrid", filter_ratio=0.5, name="admitting")
    admitted(other)
    for ids in ([1], [2], [3, 4], [1]):
        sok.embedding_lookup(variable, ids)
        time.sleep(0.001)
    path = tf.train.Checkpoint(rows=variable, other=other).write(str(tmp_path / "c"))
    expected = admitted(other)
    del variable, other
    variable = make()
    other = sok.DynamicVariable(1, "ones", "hybrid", filter_ratio=0.5, name="admitting")
    tf.train.Checkpoint(rows=variable, other=other).read(path)
    assert sok.sparse_read_and_evict(variable, [5])[1].numpy().tolist() == [2]
    assert admitted(other) == expected
    options = tf.train.CheckpointOptions(enable_async=True)
    with pytest.raises(ConfigError, match="asynchronous"):
        tf.train.Checkpoint(rows=variable).save(str(tmp_path / "a"), options=options)


def test_more_ids_than_there_is_room_for_change_nothing(tmp_path: Path) -> None:
    variable = sok.DynamicVariable(2, "ones", name="many")
    other = sok.Variable(np.zeros((2, 2)), name="beside")
    sok.embedding_lookup(variable, tf.range(10))
    sok.dump(tmp_path, [other, variable])
    path = tf.train.Checkpoint(rows=variable).write(str(tmp_path / "c"))
    del variable
    other.assign(np.ones((2, 2)))
    variable = sok.DynamicVariable(2, "7", "hybrid", name="many", max_capacity=4)
    sok.embedding_lookup(variable, [70])
    for call in (lambda: sok.load(tmp_path, [other, variable]), lambda: tf.train.Checkpoint(rows=variable).read(path)):
        with pytest.raises(ConfigError, match="got 10 saved rows, expected at most 4"):
            call()
    assert variable.indices.numpy().tolist() == [70]
    np.testing.assert_array_equal(other.numpy(), np.ones((2, 2)))


def test_ids_beyond_the_type_of_the_keys_change_nothing(tmp_path: Path) -> None:
    other = sok.Variable(np.zeros((2, 2)), name="narrow, too")
    wide = sok.DynamicVariable(2, "zeros", name="narrow")
    sok.assign(wide, [2**40], [[1.0, 1.0]])
    sok.dump(tmp_path, [other, wide])
    sok.Saver().dump_to_file(wide, tmp_path)
    path = tf.train.Checkpoint(rows=wide).write(str(tmp_path / "c"))
    del wide
    other.assign(np.ones((2, 2)))
    variable = sok.DynamicVariable(2, "zeros", "hbm", "narrow", key_type=tf.int32)
    sok.embedding_lookup(variable, [7])
    for call in (
        lambda: sok.load(tmp_path, [other, variable]),
        lambda: sok.Saver().restore_from_file(variable, tmp_path),
        lambda: tf.train.Checkpoint(rows=variable).read(path),
    ):
        with pytest.raises(ConfigError, match=f"got saved ids {2**40} .* expected those of int32"):
            call()
    assert variable.indices.numpy().tolist() == [7]
    np.testing.assert_array_equal(other.numpy(), np.ones((2, 2)))


def test_dumped_files_are_those_of_sok(rng: np.random.Generator, tmp_path: Path) -> None:
    start = table(rng, 3)
    variable = sok.Variable(start, name="user/id:x")
    sok.dump(str(tmp_path), [variable])
    keys, weights = ((tmp_path / f"user_id_x_0-{kind}").read_bytes() for kind in ("key", "weight"))
    header = f"{'user/id:x':>256}".encode() + bytes(4) + b" " * 32 + (1).to_bytes(4, "big")
    assert keys == header + np.arange(3, dtype="<i8").tobytes()
    assert weights[256:260] == (1).to_bytes(4, "big")
    assert weights[292:] == (5).to_bytes(4, "big") + start.tobytes()
    # SOK writes the keys of a static table as they come; rows are sorted by them.
    order = [2, 0, 1]
    (tmp_path / "user_id_x_0-key").write_bytes(header + np.array(order, "<i8").tobytes())
    sok.load(tmp_path, variable)
    np.testing.assert_array_equal(variable.numpy()[order], start)
    optimizer = sok.OptimizerWrapper(keras.optimizers.Adamax(0.1))  # which SOK takes for Adam
    variable, tmp_path = sok.Variable(table(rng, 6), name="a.b"), tmp_path / "states"
    trained(variable, optimizer)
    sok.dump(tmp_path, variable, optimizer)
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {f"a_b_0-{end}" for end in ("key", "weight", "Adam-m", "Adam-v")}
    # What versions before wrote.
    for path in list(tmp_path.iterdir()):
        path.rename(tmp_path / path.name.replace("_0-", "-").replace("Adam", "Adamax"))
    expected = {name: state.numpy() for name, state in optimizer.states(variable).items()}
    trained(variable, optimizer)
    sok.load(tmp_path, variable, optimizer)
    for name, state in optimizer.states(variable).items():
        np.testing.assert_array_equal(state, expected[name])


def test_files_take_the_optimizers_of_models_and_of_the_first_generation(tmp_path: Path) -> None:
    own = model(sok.keras.Embedding(ROWS, WIDTH), keras.layers.Dense(1))
    own.compile(sok.keras.OptimizerWrapper(keras.optimizers.Adagrad(0.1)), "mse")
    own.fit(np.ones((4, 2), np.int64), np.ones((4, 1)), verbose=0)
    sok.dump(tmp_path, own.layers[0].embeddings, own.optimizer)
    (rows,) = (one.rows for one in own.layers[0].weights)
    expected = rows.table.read()[2][0]
    own.fit(np.ones((4, 2), np.int64), np.ones((4, 1)), verbose=0)
    sok.load(tmp_path, own.layers[0].embeddings, own.optimizer)
    np.testing.assert_array_equal(rows.table.read()[2][0], expected)
    variable = sok.Variable(np.ones((6, 2)), name="of sok")
    for optimizer, states in ((sok.optimizers.Adam(lazy=True), {"Adam-m", "Adam-v"}), (sok.SGD(), set())):
        trained(variable, optimizer)
        sok.dump(tmp_path / type(optimizer).__name__, variable, optimizer)
        names = {path.name for path in (tmp_path / type(optimizer).__name__).iterdir()}
        assert names == {f"of sok_0-{end}" for end in {"key", "weight", *states}}


def test_variables_of_one_file_name_do_not_overwrite_each_other(tmp_path: Path) -> None:
    first, second = (sok.Variable([[value]], name=name) for value, name in ((1.0, "a/b"), (2.0, "a_b")))
    with pytest.raises(ConfigError, match="'a/b:0' and 'a_b:0' have one name of files, 'a_b_0'"):
        sok.dump(tmp_path, [first, second])
    assert not list(tmp_path.iterdir())
    sok.dump(tmp_path, first)
    with pytest.raises(FormatError, match="has the rows of 'a/b', expected those of 'a_b'"):
        sok.load(tmp_path, second)


@pytest.mark.parametrize("way", ["dump", "saver"])
@pytest.mark.parametrize("place", ["while files are written", "between two renames"])
def test_a_dump_that_ends_early_leaves_no_keys_of_other_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str, place: str
) -> None:
    variable = sok.DynamicVariable(1, "zeros", "hybrid", name="two ids", max_capacity=2)

    def dump() -> None:
        sok.dump(tmp_path, variable) if way == "dump" else sok.Saver().dump_to_file(variable, tmp_path)

    def load() -> None:
        sok.load(tmp_path, variable) if way == "dump" else sok.Saver().restore_from_file(variable, tmp_path)

    sok.assign(variable, [1, 2], [[1.0], [2.0]])
    dump()
    sok.embedding_lookup(variable, [3, 4])
    sok.assign(variable, [3, 4], [[3.0], [4.0]])
    homes, name = ([dump_files, plugin], "write_of_all") if place == "while files are written" else ([os], "replace")
    original, calls = getattr(homes[0], name), []

    def stop(*arguments: Any) -> None:
        calls.append(arguments)
        if len(calls) == 2:
            raise KeyboardInterrupt
        original(*arguments)

    with monkeypatch.context() as patch:
        for home in homes:
            patch.setattr(home, name, stop)
        with pytest.raises(KeyboardInterrupt):
            dump()
    if place == "while files are written":
        load()
        assert sok.export(variable)[1].numpy().tolist() == [[1.0], [2.0]]
    else:
        with pytest.raises(DataNotFoundError):
            load()
    dump()
    load()


def test_a_dump_without_states_leaves_none_of_other_rows(tmp_path: Path) -> None:
    variable = sok.Variable(np.ones((6, 2)), name="without")
    optimizer = sok.OptimizerWrapper(keras.optimizers.Adagrad(0.1))
    trained(variable, optimizer)
    sok.dump(tmp_path, variable, optimizer)
    (tmp_path / "without_0-notes").write_text("of the user")
    copies = {path.name: path.with_name(f"{path.name}.old") for path in sorted(tmp_path.iterdir())}
    for name, of_user in copies.items():
        of_user.write_bytes((tmp_path / name).read_bytes())
    sok.dump(tmp_path, variable)
    own = {f"without_0-{end}" for end in ("key", "weight", "notes")}
    assert {path.name for path in tmp_path.iterdir()} == own | {copy.name for copy in copies.values()}
    with pytest.raises(DataNotFoundError, match="without_0-Adagrad-accumulator"):
        sok.load(tmp_path, variable, optimizer)


def test_names_that_end_with_0_are_not_those_of_other_tables(tmp_path: Path) -> None:
    first, second = (sok.Variable([[value]], name=name) for value, name in ((1.0, "n"), (2.0, "n_0")))
    sok.dump(tmp_path, first)
    with pytest.raises(DataNotFoundError, match="n_0_0-key"):
        sok.load(tmp_path, second)
    sok.dump(tmp_path, second)
    # As older versions wrote them: "n" and "n_0".
    for kind in ("key", "weight"):
        (tmp_path / f"n_0-{kind}").rename(tmp_path / f"n-{kind}")
        (tmp_path / f"n_0_0-{kind}").rename(tmp_path / f"n_0-{kind}")
    with pytest.raises(FormatError, match="has the rows of 'n_0', expected those of 'n'"):
        sok.load(tmp_path, first)
    sok.load(tmp_path, second)
    assert (first.numpy(), second.numpy()) == (1.0, 2.0)


def test_files_that_do_not_fit_raise_and_change_nothing(rng: np.random.Generator, tmp_path: Path) -> None:
    start = table(rng, 3)
    variable = sok.Variable(start, name="fits")
    with pytest.raises(DataNotFoundError, match="fits_0-key"):
        sok.load(tmp_path, variable)
    sok.dump(tmp_path, variable)
    other = sok.Variable(np.ones((3, 2)), name="fits2")
    for kind in ("key", "weight"):
        (tmp_path / f"fits_0-{kind}").rename(tmp_path / f"fits2_0-{kind}")
    with pytest.raises(FormatError, match="expected 3 rows of 2"):
        sok.load(tmp_path, other)
    weights = (tmp_path / "fits2_0-weight").read_bytes()
    (tmp_path / "fits_0-weight").write_bytes(weights)
    for content in (weights, weights[: HEADER_BYTES - 1], (tmp_path / "fits2_0-key").read_bytes()[:-1]):
        (tmp_path / "fits_0-key").write_bytes(content)
        with pytest.raises(FormatError):
            sok.load(tmp_path, variable)
    np.testing.assert_array_equal(variable.numpy(), start)
    np.testing.assert_array_equal(other.numpy(), np.ones((3, 2)))
    with pytest.raises(ConfigError, match="optimizer"):
        sok.dump(tmp_path, variable, sok.OptimizerWrapper(keras.optimizers.Adam()))


def model(layer: Any, head: Any) -> keras.Model:
    return keras.Sequential([layer, keras.layers.Flatten(), head])


def test_a_layer_trains_as_that_of_keras_and_is_saved_with_the_optimizer(
    rng: np.random.Generator, tmp_path: Path
) -> None:
    # Distinct ids in a batch: Keras 3's optimizers do not sum the gradients of repeated ones.
    x = np.stack([rng.permutation(ROWS)[:36].reshape(12, 3) for _ in range(2)]).reshape(24, 3)
    y = rng.normal(size=(24, 1)).astype(np.float32)
    start = table(rng)
    results = []
    for layer in (sok.keras.Embedding, keras.layers.Embedding):
        keras.utils.set_random_seed(3)
        own = model(layer(ROWS, WIDTH, embeddings_initializer=keras.initializers.Constant(0)), keras.layers.Dense(1))
        own.build((None, 3))
        own.layers[0].set_weights([start])
        own.compile("sgd", "mse")
        history = own.fit(x, y, batch_size=12, epochs=3, shuffle=False, verbose=0)
        results.append((history.history["loss"], own.layers[0].get_weights()[0]))
    np.testing.assert_allclose(results[0][0], results[1][0], rtol=1e-5)
    np.testing.assert_allclose(results[0][1], results[1][1], atol=1e-6)

    keras.utils.set_random_seed(3)
    own = model(sok.keras.Embedding(ROWS, WIDTH), keras.layers.Dense(1))
    # Keras does not read its own HDF5 files of losses that were given by name.
    own.compile(sok.keras.OptimizerWrapper(keras.optimizers.Adam(0.01)), keras.losses.MeanSquaredError())
    own.fit(x, y, batch_size=12, epochs=2, shuffle=False, verbose=0)
    loaded = []
    for file in ("model.keras", "model.h5"):
        own.save(tmp_path / file)
        loaded.append(keras.saving.load_model(tmp_path / file))
    again, of_hdf5 = loaded
    # Keras 3 restores no states of optimizers from HDF5 files, and says so.
    of_hdf5.optimizer.build(of_hdf5.trainable_variables)
    with h5py.File(tmp_path / "model.h5") as content:
        saved = content["optimizer_weights"]
        of_hdf5.optimizer.set_weights([saved[name][()] for name in saved.attrs["weight_names"]])
    np.testing.assert_allclose(own.predict(x, verbose=0), again.predict(x, verbose=0))
    first, *others = (one.fit(x, y, batch_size=12, epochs=2, shuffle=False, verbose=0) for one in (own, *loaded))
    for one in others:
        assert one.history["loss"] == first.history["loss"]
    before = own.layers[0].get_weights()[0]
    own.optimizer.apply([tf.ones_like(one) for one in own.trainable_variables])  # of the variables that it has
    assert (own.layers[0].get_weights()[0] < before).all()
    own.save_weights(tmp_path / "w.weights.h5")
    again.load_weights(tmp_path / "w.weights.h5")
    np.testing.assert_array_equal(own.get_weights()[0], again.get_weights()[0])
    with pytest.raises(ConfigError, match="SavedModel"):
        own.export(tmp_path / "saved", verbose=False)


@keras.saving.register_keras_serializable(package="tests")
class WithRows(keras.Model):
    """A model with embedding variables that are no weights of it, after and before the names that Keras tracks."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.rows_of_ids = sok.Variable(np.ones((ROWS, WIDTH)))
        self.any_ids = [sok.DynamicVariable(WIDTH), {"hbm": sok.DynamicVariable(WIDTH, var_type="hbm")}]
        self.layer = sok.keras.Embedding(ROWS, WIDTH)
        self.first_generation = sok.All2AllDenseEmbedding(ROWS, WIDTH, 1, 1, use_hashtable=False)
        self.head = keras.layers.Dense(1)

    def call(self, ids: Any) -> Any:
        parts = [sok.embedding_lookup(variable, ids) for variable in self.rows()]
        first = tf.reshape(self.first_generation(tf.reshape(ids, [-1, 1, 1])), [-1, WIDTH])
        return self.head(tf.concat([*parts, self.layer(ids), first], axis=1))

    def rows(self) -> list[Any]:
        hybrid, others = self.any_ids
        return [self.rows_of_ids, hybrid, others["hbm"]]

    def step(self, ids: Any) -> float:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self(ids) - 3.0) ** 2)
        variables = [*self.trainable_variables, *self.rows()]
        self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return float(loss)


def sorted_content(variable: Any) -> list[NDArray[Any]]:
    """Return ids, rows and states by rising ids."""
    ids, rows, states = variable.table.read()
    return [part[np.argsort(ids)] for part in (ids, rows, *states)]


def test_variables_that_are_attributes_of_a_model_are_in_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = np.array([1, 3, 7, 1])
    own = WithRows()
    own.compile(sok.keras.OptimizerWrapper(keras.optimizers.Adam(0.1)), "mse")
    for _ in range(2):
        own.step(ids)
    own.save(tmp_path / "model.keras")
    own.save_weights(tmp_path / "own.weights.h5")
    others = WithRows(), keras.saving.load_model(tmp_path / "model.keras")
    for other, file in zip(others, ("own.weights.h5", "model.keras"), strict=True):
        other(ids + 1)  # ids that the files lack go
        other.load_weights(tmp_path / file)
        np.testing.assert_array_equal(other(ids), own(ids))
        for ours, theirs in zip(own.rows(), other.rows(), strict=True):
            np.testing.assert_equal(sorted_content(theirs), sorted_content(ours))
    again = others[1]
    again.compile(sok.keras.OptimizerWrapper(keras.optimizers.Adam(0.1)), "mse")
    again.optimizer.build(again.trainable_variables + again.rows())
    for ours, theirs in zip(own.optimizer.variables, again.optimizer.variables, strict=True):
        theirs.assign(ours.numpy())
    assert [again.step(ids) for _ in range(3)] == [own.step(ids) for _ in range(3)]
    with h5py.File(tmp_path / "own.weights.h5") as content:
        names: list[str] = []
        content.visit(names.append)
    assert sum(name.endswith("vars/rows") for name in names) == len(own.rows())  # each once

    class Without(keras.Model):
        def call(self, inputs: Any) -> Any:
            return inputs

    without, with_rows = Without(), Without()
    without.head = with_rows.head = keras.layers.Dense(1)
    for one in (without, with_rows):
        one.head(np.ones((1, 1)))
        one(np.ones((1, 1)))
    without.save_weights(tmp_path / "without.weights.h5")
    with_rows.rows = sok.Variable(np.ones((2, 2)))
    with pytest.raises(ValueError, match="the file has no 'clock' of it"):
        with_rows.load_weights(tmp_path / "without.weights.h5")
    with pytest.warns(UserWarning, match="the file has no 'clock' of it"):
        with_rows.load_weights(tmp_path / "without.weights.h5", skip_mismatch=True)
    launch = Launch(rank=0, size=2, local_size=2, local_rank=0, has_address=True, is_mpi=False)
    monkeypatch.setattr(communication, "_joined", [launch])
    with pytest.raises(ConfigError, match="on 2 ranks"):
        with_rows.save_weights(tmp_path / "ranks.weights.h5")


@pytest.mark.parametrize("is_list", [False, True], ids=["rows", "list"])
def test_a_layer_takes_the_rows_and_arguments_of_that_of_keras(rng: np.random.Generator, is_list: bool) -> None:
    start = table(rng)
    layer = sok.keras.Embedding(
        np.int64(ROWS), WIDTH, weights=[start] if is_list else start, input_length=3, trainable=False
    )
    np.testing.assert_array_equal(layer(np.array([[3, 0]])), start[[[3, 0]]])
    assert not layer.trainable_weights
    json.dumps(layer.get_config())


def test_rows_that_an_optimizer_was_not_built_with_are_refused() -> None:
    """Its states would be in no file."""
    first, second = sok.Variable(np.ones((2, 2))), sok.Variable(np.ones((2, 2)))
    optimizer = sok.keras.OptimizerWrapper("adam")
    optimizer.apply_gradients([(tf.ones((2, 2)), first)])
    with pytest.raises(ConfigError) as raised:
        optimizer.apply_gradients([(tf.ones((2, 2)), second)])
    assert raised.value.where == "trainable_variables"


@pytest.mark.usefixtures("implementation")
@pytest.mark.parametrize("is_dynamic", [False, True])
def test_a_branch_that_looks_up_has_gradients_beside_one_that_does_not(
    rng: np.random.Generator, is_dynamic: bool
) -> None:
    tf_keras = pytest.importorskip("tf_keras", reason=lacks("tf_keras", "pip install tf_keras"))
    start = table(rng)
    theirs = tf.Variable(start)
    ours = sok.DynamicVariable(WIDTH) if is_dynamic else sok.Variable(start)
    if is_dynamic:
        sok.assign(ours, tf.range(ROWS), start)

    @tf.function
    def square(variable: tf.Variable, ids: tf.Tensor) -> tf.Tensor:
        return tf.reduce_sum(tf.nn.embedding_lookup(variable, ids) ** 2)

    def step(variable: tf.Variable, optimizer: Any, number: tf.Tensor) -> None:
        ids = tf.stack([number, number, 2 * number])
        with tf.GradientTape() as tape:
            loss = tf.switch_case(
                number % 3,
                [lambda: square(variable, ids), lambda: 0.0, lambda: 2.0 * square(variable, ids + 1)],
            )
        optimizer.apply_gradients([(tape.gradient(loss, variable), variable)])

    # Rows without a gradient, which a branch gives to all, move in either.
    optimizers = sok.Adam(0.1), tf_keras.optimizers.legacy.Adam(0.1)
    for variable, optimizer in zip((ours, theirs), optimizers, strict=True):
        in_graph = tf.function(step)
        for number in range(6):
            in_graph(variable, optimizer, tf.constant(number))
    ids, rows = sok.export(ours)
    np.testing.assert_allclose(rows, theirs.numpy()[ids], atol=1e-6)


def test_stock_optimizers_add_up_the_gradients_of_steps(rng: np.random.Generator) -> None:
    """Keras does so for tables of one column only where it knows the number of axes."""
    ids, goal = rng.integers(0, ROWS, (8, 3)), np.ones((8, 3))
    weights = []
    for kind in (sok.keras.Embedding, keras.layers.Embedding):
        model = keras.Sequential([kind(ROWS, 1, embeddings_initializer="ones"), keras.layers.Flatten()])
        model.compile(keras.optimizers.SGD(0.1, gradient_accumulation_steps=2), "mse")
        model.fit(ids, goal * 2.0, batch_size=4, shuffle=False, verbose=0)
        weights += model.get_weights()
    np.testing.assert_allclose(*weights, atol=1e-6)


def test_a_branch_that_reads_all_rows_changes_none_where_it_is_not_taken() -> None:
    variable, optimizer = sok.Variable(np.ones((3, 2), np.float32)), sok.SGD(0.5)

    @tf.function
    def step(is_read: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            loss = tf.cond(is_read, lambda: tf.reduce_sum(variable + 0.0), lambda: 0.0)
        optimizer.apply_gradients([(tape.gradient(loss, variable), variable)])

    for is_read, expected in ((False, 1.0), (True, 0.5)):
        step(tf.constant(is_read))
        np.testing.assert_array_equal(variable, np.full((3, 2), expected))


@pytest.mark.usefixtures("implementation")
@pytest.mark.parametrize("is_read", [False, True])
def test_a_tape_outside_of_a_function_has_gradients_of_the_rows_in_it(is_read: bool) -> None:
    variable = sok.Variable(np.ones((3, 2), np.float32))
    factors = tf.Variable([1.0, 2.0, 3.0])

    @tf.function
    def total() -> tf.Tensor:
        if is_read:
            return tf.reduce_sum((variable + 0.0) * factors[:, None])
        ids = tf.RaggedTensor.from_row_lengths([1, 1, 2], [2, 1])
        return tf.reduce_sum(sok.lookup_sparse(variable, ids, ids.with_flat_values(factors * 1.0), "sum"))

    with tf.GradientTape() as tape:
        loss = total()
    of_rows, of_factors = tape.gradient(loss, [variable, factors])
    expected = [[1.0], [2.0], [3.0]] if is_read else [[0.0], [3.0], [3.0]]
    np.testing.assert_array_equal(tf.convert_to_tensor(of_rows), np.broadcast_to(expected, (3, 2)))
    np.testing.assert_array_equal(of_factors, [2.0, 2.0, 2.0])


@pytest.mark.usefixtures("implementation")
def test_a_loop_has_gradients_of_rows_by_a_tape_inside_of_it_alone() -> None:
    start = np.ones((3, 2), np.float32)
    variable, optimizer = sok.Variable(start), sok.SGD(1.0)

    @tf.function
    def train(steps: tf.Tensor) -> None:
        for step in tf.range(steps):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(sok.embedding_lookup(variable, [step]))
            optimizer.apply_gradients([(tape.gradient(loss, variable), variable)])

    train(tf.constant(2))
    np.testing.assert_array_equal(variable, start - [[1.0], [1.0], [0.0]])

    @tf.function
    def gradient(steps: tf.Tensor) -> tf.IndexedSlices:
        with tf.GradientTape() as tape:
            total = tf.zeros([1, 2])
            for step in tf.range(steps):
                total += sok.embedding_lookup(variable, [step])
        return tape.gradient(total, variable)

    with pytest.raises(ConfigError, match="a gradient tape inside of it"):
        gradient(tf.constant(2))


def test_a_variable_is_not_copied_to_an_ordinary_one() -> None:
    variable = sok.Variable(np.ones((2, 2)))
    for way in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(ConfigError, match="cannot be copied or pickled"):
            way(variable)


def test_a_variable_is_made_in_a_function_as_outside() -> None:
    made: list[sok.Variable] = []

    @tf.function
    def look_up(ids: tf.Tensor) -> tf.Tensor:
        if not made:
            made.append(sok.Variable(shape=[4, 2], initializer=tf.ones_initializer()))
            made.append(sok.Variable(lambda: tf.ones([4, 2])))
        return sok.embedding_lookup(made[0], ids) + sok.embedding_lookup(made[1], ids)

    np.testing.assert_array_equal(look_up(tf.constant([1, 3])), np.full((2, 2), 2.0))
    with pytest.raises(ConfigError, match="initial_value"):
        tf.function(lambda rows: sok.Variable(rows))(tf.ones([4, 2]))


def test_rows_of_any_ids_are_in_no_file_without_them(tmp_path: Path) -> None:
    layer = sok.All2AllDenseEmbedding(8, WIDTH, 1, 1)
    inputs = keras.Input((1, 1), dtype="int64")
    own = keras.Model(inputs, layer(inputs))
    own(np.array([[[2**40]]]))
    optimizer = sok.keras.OptimizerWrapper(keras.optimizers.Adam())
    optimizer.build(own.trainable_variables)
    for call in (
        lambda: own.save(tmp_path / "model.h5"),
        lambda: own.save(tmp_path / "model.keras"),
        lambda: own.save_weights(tmp_path / "model.weights.h5"),
        own.get_weights,
        optimizer.variables[-1].numpy,
        layer.embedding_variable.numpy,
        lambda: np.asarray(layer.embedding_variable),
        lambda: layer.embedding_variable.assign(np.zeros((1, WIDTH))),
        lambda: layer.embedding_variable.value(),
        lambda: layer.embedding_variable + 0.0,
        lambda: tf.gather_nd(layer.embedding_variable, [[2**40]]),
    ):
        with pytest.raises(ConfigError, match="ids of any value"):
            call()


def test_a_plain_copy_is_exported_and_served_without_terarec(rng: np.random.Generator, tmp_path: Path) -> None:
    ids, given = keras.Input((2,), dtype="int64"), keras.Input((3,), dtype="int64")
    factors = keras.Input((3,))
    bags = [sok.keras.EmbeddingBag(ROWS, WIDTH, combiner)(given, factors) for combiner in ("sum", "mean", "sqrtn")]
    rows = keras.layers.Flatten()(sok.keras.Embedding(ROWS, WIDTH)(ids))
    own = keras.Model([ids, given, factors], keras.layers.Dense(1)(keras.layers.Concatenate()([rows, *bags])))
    batch = [rng.integers(0, ROWS, (4, 2)), rng.integers(0, ROWS, (4, 3)), rng.uniform(0.5, 2, (4, 3)).astype("f4")]
    expected = own(batch)
    copy = sok.keras.plain(own)
    assert not sok.filter_variables(copy.trainable_variables)[0]
    np.testing.assert_allclose(copy(batch), expected, rtol=1e-5, atol=1e-6)
    copy.export(tmp_path / "saved", verbose=False)
    loaded = tf.saved_model.load(tmp_path / "saved")  # its variables live as long
    served = loaded.serve([tf.constant(one) for one in batch])
    np.testing.assert_allclose(served, expected, rtol=1e-5, atol=1e-6)
    copy.save(tmp_path / "plain.keras")
    again = keras.saving.load_model(tmp_path / "plain.keras")
    np.testing.assert_allclose(again(batch), expected, rtol=1e-5, atol=1e-6)

    class Own(keras.Model):
        def call(self, inputs: Any) -> Any:
            return inputs

    with pytest.raises(ConfigError, match="cannot be copied"):
        sok.keras.plain(Own())


def test_a_layer_of_bags_takes_every_kind_of_ids(rng: np.random.Generator) -> None:
    start, ids = table(rng), ragged(rng)
    for combiner in ("sum", "mean", "sqrtn"):
        layer = sok.keras.EmbeddingBag(ROWS, WIDTH, combiner)
        layer.build()
        layer.set_weights([start])
        expected = tf.nn.embedding_lookup_sparse(start, ids, None, combiner)
        for kind in (ids, ids.to_sparse()):
            np.testing.assert_allclose(layer(kind), expected, atol=1e-6)
        weights = tf.constant([[2.0, 0.5]] * 3)
        dense = tf.constant([[1, 2], [3, 4], [5, 5]])
        got = layer(dense, weights)
        factor = {"sum": 1.0, "mean": 2.5, "sqrtn": np.sqrt(4.25)}[combiner]
        np.testing.assert_allclose(got, (start[dense] * weights.numpy()[..., None]).sum(1) / factor, atol=1e-6)
    copy = sok.keras.EmbeddingBag.from_config(layer.get_config())
    assert (copy.input_dim, copy.output_dim, copy.combiner) == (ROWS, WIDTH, "sqrtn")


def slots(rng: np.random.Generator, keys: NDArray[np.int64]) -> NDArray[np.int64]:
    return rng.choice(keys, (4, 3, 2))


@pytest.mark.parametrize("use_hashtable", [True, False], ids=["any keys", "rows"])
def test_the_layers_of_the_first_generation_train_as_tensorflow(rng: np.random.Generator, use_hashtable: bool) -> None:
    assert sok.Init(global_batch_size=4, seed=1).numpy() == b"OK"
    keys = np.arange(12) * (2**40 if use_hashtable else 1)
    start = table(rng, 12)
    weights = tf.Variable(start)
    dense = sok.All2AllDenseEmbedding(12, WIDTH, 3, 2, use_hashtable=use_hashtable)
    pooled = sok.DistributedEmbedding("Mean", 12, WIDTH, 3, 2, use_hashtable=use_hashtable)
    for layer in (dense, pooled):
        rows = tf.IndexedSlices(tf.constant(start), tf.constant(keys))
        layer.embedding_variable.scatter_update(rows)
    optimizers = [sok.optimizers.Adam(lr=0.1), sok.SGD(0.1), keras.optimizers.SGD(0.1)]
    expected = formulas.adam(0.1, 0.9, 0.999, 1e-7, lazy=False)
    oracle = start.astype(np.float64)
    head = tf.Variable(1.0)
    for _ in range(3):
        ids = slots(rng, keys)
        sparse = tf.sparse.from_dense(tf.constant(ids.reshape(12, 2) + 1))
        bags = tf.SparseTensor(sparse.indices, sparse.values - 1, sparse.dense_shape)
        with tf.GradientTape() as tape:
            first, second = dense(ids), pooled(bags)
            loss = head * (tf.reduce_sum(first**2) + tf.reduce_sum(second**2))
        assert (first.shape, second.shape) == ((4, 3, 2, WIDTH), (4, 3, WIDTH))
        variables = [head, *dense.trainable_variables, *pooled.trainable_variables]
        ours, others = sok.split_embedding_variable_from_others(variables)
        assert len(ours) == 2
        assert others == [head]
        gradients = tape.gradient(loss, ours)
        with sok.OptimizerScope(ours):
            optimizers[0].apply_gradients([(gradients[0], ours[0])], experimental_aggregate_gradients=False)
            optimizers[1].apply_gradients([(gradients[1], ours[1])])
        at = np.searchsorted(keys, ids)
        gradient = np.zeros_like(oracle)
        np.add.at(gradient, at.ravel(), 2 * oracle[at.ravel()])
        expected.apply(oracle, gradient, np.isin(np.arange(12), at))
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.reduce_mean(tf.gather(weights, at), axis=2) ** 2)
        optimizers[2].apply_gradients([(tape.gradient(loss, weights), weights)])
    np.testing.assert_allclose(sok.export(dense.embedding_variable)[1], oracle, atol=1e-5)
    np.testing.assert_allclose(sok.export(pooled.embedding_variable)[1], weights, atol=1e-6)
    flat = sok.All2AllDenseEmbedding(12, WIDTH, 3, 2, dynamic_input=True, use_hashtable=use_hashtable)
    assert flat(tf.constant(keys[:5])).shape == (5, WIDTH)


def test_keys_are_inserted_in_training_alone() -> None:
    layer = sok.All2AllDenseEmbedding(4, 2, 1, 2, key_dtype="uint32", embedding_initializer="ones")
    np.testing.assert_array_equal(layer(tf.constant([[[7, 8]]], tf.uint32), training=False), np.zeros((1, 1, 2, 2)))
    assert layer.embedding_variable.size.numpy().tolist() == [0, 2]
    np.testing.assert_array_equal(layer(tf.constant([[[7, 8]]], tf.uint32)), np.ones((1, 1, 2, 2)))
    assert layer.embedding_variable.size.numpy().tolist() == [2, 2]
    default = sok.All2AllDenseEmbedding(1000, 4, 1, 1)
    rows = default(tf.reshape(tf.range(1000), [1000, 1, 1])).numpy()
    assert -0.05 <= rows.min() < -0.04 < 0.04 < rows.max() <= 0.05


def test_files_of_the_first_generation_have_plain_keys_and_rows(rng: np.random.Generator, tmp_path: Path) -> None:
    saver, start = sok.Saver(), table(rng, 3)
    layer = sok.All2AllDenseEmbedding(5, WIDTH, 1, 1, name="first")
    variable = layer.embedding_variable
    assert saver.load_embedding_values(variable, [start[:1], start[1:]]).numpy() == b"OK"
    assert saver.dump_to_file(layer.embeddings, str(tmp_path)).numpy() == b"OK"
    name = variable.table.name
    assert name.startswith("EmbeddingVariable")  # SOK's names, so that its files are found
    keys, values = (tmp_path / f"{name}_{kind}.file" for kind in ("keys", "values"))
    assert keys.read_bytes() == np.arange(3, dtype="<i8").tobytes()
    assert values.read_bytes() == start.tobytes()
    keys.write_bytes(np.array([9, 2**31, 4], "<u4").tobytes())
    saver.restore_from_file(variable, tmp_path)
    ids, rows = sok.export(variable)
    assert ids.numpy().tolist() == [4, 9, 2**31]
    np.testing.assert_array_equal(rows, start[[2, 0, 1]])
    for content in (b"", bytes(13)):
        keys.write_bytes(content)
        with pytest.raises(FormatError):
            saver.restore_from_file(variable, tmp_path)
    assert variable.size.numpy()[0] == 3
    fixed = sok.All2AllDenseEmbedding(3, WIDTH, 1, 1, use_hashtable=False, name="first_fixed").embedding_variable
    saver.dump_to_file(fixed, tmp_path)
    path = tmp_path / f"{fixed.table.name}_keys.file"
    path.write_bytes(np.array([0, 1, 1], "<i8").tobytes())
    with pytest.raises(FormatError, match="expected 0 to 2"):
        saver.restore_from_file(fixed, tmp_path)


TRAINS_WITH_LEGACY_KERAS = """
import sys

import numpy as np
import tensorflow as tf

import terarec.tensorflow as sok
from terarec.errors import ConfigError


class Model(tf.keras.Model):
    def __init__(self):
        super().__init__()
        self.rows = sok.DistributedEmbedding("sum", 8, 4, 2, 3)

    def call(self, inputs, training=True):
        return self.rows(inputs, training=training)


sok.Init(global_batch_size=2)
model, saver = Model(), sok.Saver()
saver.load_embedding_values(model.rows.embedding_variable, np.ones((8, 4), np.float32))
assert model(tf.keras.Input((3,), sparse=True, dtype=tf.int64)).shape[1:] == (2, 4)
with tf.GradientTape() as tape:
    total = tf.reduce_sum(model(tf.sparse.from_dense(np.array([[1, 2, 0], [0, 0, 3], [1, 0, 0], [7, 0, 0]]))))
ours, others = sok.split_embedding_variable_from_others(model.trainable_variables)
assert not others
sok.SGD(0.5).apply_gradients(zip(tape.gradient(total, ours), ours))
for file in ("model.h5", "model.weights.h5"):
    try:
        model.save_weights(f"{sys.argv[1]}/{file}")
    except ConfigError as error:
        assert "ids of any value" in str(error)
    else:
        raise AssertionError(file)
path = f"{sys.argv[1]}/checkpoint"
model.save_weights(path)
ours[0].scatter_update(tf.IndexedSlices(tf.zeros([1, 4]), tf.constant([1])))
model.load_weights(path)
saver.dump_to_file(ours[0], sys.argv[1])
"""


@pytest.mark.skipif(importlib.util.find_spec("tf_keras") is None, reason=lacks("tf_keras", "pip install tf_keras"))
def test_the_layers_of_the_first_generation_train_in_models_of_legacy_keras(tmp_path: Path) -> None:
    """Finding M14: upstream's notebook from SOK to the parameter server has a model of Keras 2."""
    done = run_new_python(TRAINS_WITH_LEGACY_KERAS, tmp_path, environment={"TF_USE_LEGACY_KERAS": "1"})
    assert done.returncode == 0, done.stderr
    keys = np.fromfile(tmp_path / "EmbeddingVariable_keys.file", np.int64)
    rows = np.fromfile(tmp_path / "EmbeddingVariable_values.file", np.float32).reshape(-1, 4)
    np.testing.assert_array_equal(np.sort(keys), np.arange(8))
    np.testing.assert_array_equal(rows[np.argsort(keys), 0], 1 - 0.5 * np.array([0, 2, 1, 1, 0, 0, 0, 1]))


CONTINUES_FROM_LEGACY_FILES = """
import os
import sys

import numpy as np
import tensorflow as tf
from tf_keras.optimizers import legacy

import terarec.tensorflow as sok
from terarec.errors import ConfigError


@tf.keras.utils.register_keras_serializable()
class Rows(tf.keras.layers.Layer):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.rows = sok.Variable(np.ones((9, 4), np.float32))

    def call(self, inputs):
        return tf.reshape(sok.embedding_lookup(self.rows, inputs), [-1, 8])


sok.init()
rng = np.random.default_rng(0)
ids, labels = rng.integers(0, 9, (6, 2)), rng.normal(size=(6, 1))
inputs = tf.keras.Input((2,), dtype=tf.int64)
model = tf.keras.Model(inputs, tf.keras.layers.Dense(1)(Rows()(inputs)))
model.compile(legacy.Adam(0.01), "mse")
losses = []
for number in range(2):
    losses.append(model.fit(ids, labels, epochs=2, shuffle=False, verbose=0).history["loss"])
    if number == 0:
        model.save(sys.argv[1])
again = tf.keras.models.load_model(sys.argv[1])
assert again.fit(ids, labels, epochs=2, shuffle=False, verbose=0).history["loss"] == losses[1]
folder = os.path.dirname(sys.argv[1])
for save, name in ((again.save, "model.keras"), (again.save_weights, "model.weights.h5")):
    try:
        save(f"{folder}/{name}")
    except ConfigError as error:
        assert "no states of legacy optimizers" in str(error)
    else:
        raise AssertionError(name)
again.save_weights(f"{folder}/weights.h5")
again.compile("sgd", "mse")
again.save(f"{folder}/again.keras")
"""


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("tf_keras") is None, reason=lacks("tf_keras", "pip install tf_keras"))
def test_files_of_legacy_keras_have_the_states_of_its_legacy_optimizers(tmp_path: Path) -> None:
    file, environment = tmp_path / "model.h5", {"TF_USE_LEGACY_KERAS": "1"}
    done = run_new_python(CONTINUES_FROM_LEGACY_FILES, file, environment=environment)
    assert done.returncode == 0, done.stderr


def test_a_layer_is_found_by_its_name() -> None:
    made = sok.get_embedding(
        "by name",
        sok.DistributedEmbedding,
        combiner="sum",
        max_vocabulary_size_per_gpu=4,
        embedding_vec_size=2,
        slot_num=1,
        max_nnz=2,
    )
    assert sok.get_embedding("by name") is made
    made.embedding_variable.scatter_update(tf.IndexedSlices(tf.fill([1, 2], 7.0), tf.constant([3])))
    del made
    gc.collect()
    np.testing.assert_array_equal(sok.export(sok.get_embedding("by name").embedding_variable)[1], [[7.0, 7.0]])


def test_bad_input_names_the_argument(rng: np.random.Generator, implementation: str) -> None:
    known = f"known by {implementation}"  # errors keep the variable of the first run alive
    variable = sok.Variable(table(rng), name=known)
    ids = ragged(rng)
    for wrong in ([[ROWS]], [[-1]]):
        with pytest.raises(tf.errors.InvalidArgumentError, match=f"ids: got {wrong[0][0]} .* variable '{known}'"):
            sok.lookup_sparse(variable, tf.ragged.constant(wrong))
    unordered = tf.SparseTensor([[1, 0], [0, 0]], [5, 7], [2, 1])
    for wrap in (lambda function: function, tf.function):
        with pytest.raises(tf.errors.InvalidArgumentError, match=r"sp_ids: .* tf\.sparse\.reorder"):
            wrap(sok.lookup_sparse)(variable, unordered)
    spec = tf.RaggedTensorSpec([None, None], tf.int64)
    factors = tf.RaggedTensorSpec([None, None], tf.float32)
    weighted = tf.function(lambda i, w: sok.lookup_sparse(variable, i, w), input_signature=[spec, factors])
    with pytest.raises(tf.errors.InvalidArgumentError, match="weights: "):
        weighted(tf.ragged.constant([[1, 2]], tf.int64), tf.ragged.constant([[]], tf.float32, ragged_rank=1))
    with pytest.raises(tf.errors.InvalidArgumentError, match="ids: got 37"):
        variable.scatter_add(tf.IndexedSlices(tf.ones([1, WIDTH]), tf.constant([ROWS])))
    cases: list[tuple[str, Any]] = [
        ("combiner", lambda: sok.lookup_sparse(variable, ids, combiners="max")),
        ("combiners", lambda: sok.lookup_sparse([variable], [ids], combiners=["sum", "sum"])),
        ("params", lambda: sok.lookup_sparse([variable], [ids, ids])),
        ("params", lambda: sok.lookup_sparse(tf.Variable(table(rng)), ids)),
        ("sp_ids", lambda: sok.lookup_sparse(variable, ids.with_flat_values(tf.cast(ids.flat_values, tf.float32)))),
        ("sp_ids", lambda: sok.lookup_sparse(variable, tf.constant([1, 2]))),
        ("sp_weights", lambda: sok.lookup_sparse(variable, ids, tf.ragged.constant([[1.0]]))),
        ("ids", lambda: sok.embedding_lookup(variable, [1.0])),
        ("indices", lambda: sok.assign(variable, [1.0], np.ones((1, WIDTH)))),
        ("values", lambda: sok.assign(variable, [1], np.ones((1, WIDTH + 1)))),
        ("indices", lambda: sok.all2all_dense_embedding(variable, tf.constant([1.0]))),
        ("name", lambda: sok.Variable(table(rng), name=known)),
        ("dtype", lambda: sok.Variable(table(rng), dtype=tf.float64)),
        ("mode", lambda: sok.Variable(table(rng), mode="localized:1")),
        ("mode", lambda: sok.Variable(table(rng), mode=f"localized:{'1' * 5000}")),
        ("mode", lambda: sok.Variable(table(rng), mode=10**5000)),
        ("initial_value", lambda: sok.Variable(np.zeros((2, 3, 4)))),
        ("initial_value", lambda: sok.Variable([[1.0], [2.0, 3.0]])),
        ("initial_value", lambda: sok.Variable("rows")),
        ("initializer", lambda: sok.Variable(shape=[3, 4], initializer=lambda shape, dtype: tf.zeros([3, 5]))),
        *[("shape", partial(sok.Variable, shape=shape, initializer=tf.zeros_initializer())) for shape in SHAPES],
        ("name", lambda: sok.Variable(table(rng), name=5)),
        ("name", lambda: sok.Variable(table(rng), name="\ud800")),
        ("name", lambda: sok.Variable(table(rng), name="a\0b")),
        ("dtype", lambda: sok.Variable(table(rng), dtype="float33")),
        ("dimension", lambda: sok.DynamicVariable(0)),
        ("dimension", lambda: sok.DynamicVariable(-(10**5000))),
        ("dimension", lambda: sok.DynamicVariable(10**5000)),
        ("initializer", lambda: sok.DynamicVariable(4, "9" * 5000)),
        ("initializer", lambda: sok.DynamicVariable(4, "nan")),
        ("initializer", lambda: sok.DynamicVariable(4, "1e39")),
        ("max_capacity", lambda: sok.DynamicVariable(4, max_capacity=0)),
        ("max_capacity", lambda: sok.DynamicVariable(4, max_capacity=2**63)),
        ("max_capacity", lambda: sok.DynamicVariable(4, max_capacity="9" * 5000)),
        ("key_type", lambda: sok.DynamicVariable(4, key_type="int33")),
        ("combiner", lambda: sok.lookup_sparse(variable, ids, combiners=[["sum"]])),
        ("combiner", lambda: sok.lookup_sparse(variable, ids, combiners=5)),
        ("lr", lambda: sok.SGD("fast")),
        ("learning_rate", lambda: sok.Adam(keras.optimizers.schedules.CosineDecay(0.1, 5))),
        ("beta_1", lambda: sok.Adam(beta_1=float("nan"))),
        ("var_type", lambda: sok.DynamicVariable(4, var_type="disk")),
        ("initializer", lambda: sok.DynamicVariable(4, "glorot")),
        ("key_type", lambda: sok.DynamicVariable(4, key_type=tf.float32)),
        ("no_such_option", lambda: sok.DynamicVariable(4, no_such_option=1)),
        ("evict_strategy", lambda: sok.DynamicVariable(4, evict_strategy="kCustomized")),
        ("filter_ratio", lambda: sok.DynamicVariable(4, filter_ratio=1.5)),
        ("var", lambda: sok.sparse_read_and_evict(variable, tf.constant([1]))),
        ("sok_vars", lambda: sok.incremental_model_dump([variable], datetime.now(UTC))),
        ("time_threshold", lambda: sok.incremental_model_dump([sok.DynamicVariable(4)], datetime(2026, 1, 1))),
        ("time_threshold", lambda: sok.incremental_model_dump([], [datetime.now(UTC)] * 2)),
        ("timeout", lambda: sok.init(timeout=0.0)),
        ("optimizer.clipnorm", lambda: sok.OptimizerWrapper(keras.optimizers.SGD(clipnorm=1.0))),
        ("grads_and_vars", lambda: sok.SGD().apply_gradients([(tf.ones(1), tf.Variable([1.0]))])),
        ("grads_and_vars", lambda: sok.SGD().apply_gradients([(tf.IndexedSlices(tf.ones([1, 3]), [0]), variable)])),
        ("comm_tool", lambda: sok.init("carrier pigeon")),
        ("var", lambda: sok.export(tf.Variable([1.0]))),
        ("input_dim", lambda: sok.keras.Embedding(0, 3)),
        ("weights", lambda: sok.keras.Embedding(3, 2, weights=[np.ones((2, 3))])),
        ("combiner", lambda: sok.keras.EmbeddingBag(3, 3, "max")),
        ("global_batch_size", lambda: sok.Init(global_batch_size=0)),
        ("combiner", lambda: sok.DistributedEmbedding("max", 4, 4, 1, 1)),
        ("slot_num", lambda: sok.All2AllDenseEmbedding(4, 4, 0, 1)),
        ("key_dtype", lambda: sok.All2AllDenseEmbedding(4, 4, 1, 1, key_dtype="float32")),
        ("key_dtype", lambda: sok.All2AllDenseEmbedding(4, 4, 1, 1, key_dtype="keys")),
        ("embedding_initializer", lambda: sok.All2AllDenseEmbedding(4, 4, 1, 1, embedding_initializer="orthogonal")),
        ("inputs", lambda: sok.All2AllDenseEmbedding(4, 4, 1, 1).call(tf.constant([[1]]))),
        ("inputs", lambda: sok.DistributedEmbedding("sum", 4, 4, 1, 1).call(tf.constant([[1]]))),
        ("name", lambda: sok.get_embedding("no such layer")),
        ("variables", lambda: sok.split_embedding_variable_from_others(variable)),
        ("tensors", lambda: sok.Saver().load_embedding_values(variable, np.ones((2, 3)))),
        ("tensors", lambda: sok.Saver().load_embedding_values(variable, [np.ones((2, 3)), np.ones((2, 4))])),
        ("tensors", lambda: sok.Saver().load_embedding_values(variable, [])),
        ("embedding_variable", lambda: sok.Saver().dump_to_file(tf.Variable([1.0]), "nowhere")),
    ]

    @tf.function
    def look_up() -> tf.Tensor:
        return sok.lookup_sparse(variable, ids, combiners="max")

    cases.append(("combiner", look_up))
    for where, call in cases:
        with pytest.raises(ConfigError) as raised:
            call()
        assert raised.value.where == where
        assert len(str(raised.value)) < 400
    strategy = tf.distribute.MirroredStrategy(["CPU:0"])
    slices = tf.IndexedSlices(tf.ones([1, WIDTH]), tf.constant([0], tf.int64))
    wrapped, before = sok.OptimizerWrapper(keras.optimizers.SGD()), variable.numpy()
    for change in (
        lambda: sok.Variable(table(rng)),
        lambda: strategy.run(lambda: sok.SGD().apply_gradients([(slices, variable)])),
        lambda: strategy.run(lambda: wrapped.apply_gradients([(slices, variable)])),
        lambda: variable.assign(before + 1),
    ):
        with strategy.scope(), pytest.raises(ConfigError) as raised:
            change()
        assert raised.value.where == "strategy"
    np.testing.assert_array_equal(variable, before)


def test_calls_of_horovod_give_what_one_process_has() -> None:
    horovod.init()
    slices = tf.IndexedSlices(tf.ones([1, 2]), tf.constant([0]))
    assert (horovod.rank(), horovod.size(), horovod.local_rank(), horovod.local_size()) == (0, 1, 0, 1)
    assert horovod.allreduce(slices, op=horovod.Sum).values is slices.values
    for call in (horovod.allreduce, horovod.allgather, lambda tensor: horovod.broadcast(tensor, root_rank=0)):
        np.testing.assert_array_equal(call([1.0, 2.0]), [1.0, 2.0])
    optimizer = keras.optimizers.SGD(1.0)
    assert horovod.DistributedOptimizer(optimizer) is optimizer
    variable = tf.Variable(2.0)
    with horovod.DistributedGradientTape(tf.GradientTape()) as tape:
        loss = variable**2
    assert tape.gradient(loss, variable).numpy() == 4.0
    for where, wrong in (
        ("op", lambda: horovod.allreduce(1.0, op=horovod.Adasum)),
        ("root_rank", lambda: horovod.broadcast(1.0, root_rank=1)),
    ):
        with pytest.raises(ConfigError) as raised:
            wrong()
        assert raised.value.where == where


def test_one_of_several_processes_has_to_join_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    communication.leave()
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="one of 2 processes"):
        sok.Variable([[1.0]])


def test_an_op_whose_variable_is_gone_says_so() -> None:
    variable = sok.Variable(np.zeros((2, 2)))
    number, handle = variable.table.number, variable.handle
    del variable
    with pytest.raises(tf.errors.FailedPreconditionError, match="was deleted"):
        table_ops.OPS.terarec_size(handle, table=number)


def test_tensorflow_has_the_private_registry_that_serving_layers_write_to() -> None:
    """A release without it has to be left out by the extra "tensorflow"."""

    def negated(array: NDArray[np.float32]) -> NDArray[np.float32]:
        return -array

    script_ops._py_funcs._funcs["terarec.test"] = negated
    (negative,) = tf.raw_ops.PyFuncStateless(input=[tf.constant([1.0])], token="terarec.test", Tout=[tf.float32])
    assert negative.numpy().tolist() == [-1.0]


def test_the_plugin_never_loads_torch() -> None:
    program = (
        "import sys, terarec.tensorflow as sok; assert 'tensorflow' not in sys.modules;"
        "sok.init(); v = sok.Variable([[1.0, 2.0]]); sok.keras.Embedding(2, 2);"
        "sok.SGD(1.0).apply_gradients([(v * 0.5, v)]); print(v.numpy().tolist(), 'torch' in sys.modules)"
    )
    result = run_new_python(program, environment={"TF_CPP_MIN_LOG_LEVEL": "3"})
    assert result.returncode == 0, result.stderr
    assert result.stdout.split("\n")[0] == "[[0.5, 1.0]] False"
