# SPDX-License-Identifier: Apache-2.0
"""The operations on tables in TensorFlow's graphs: the compiled ops, or NumPy functions where they cannot be loaded.

Every operation takes the handle of the table's variable, which gradient tapes and the order of ops in a
`tf.function` follow. The gradient of a lookup is a `tf.IndexedSlices` of distinct ids, each with the sum of its
gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf
from tensorflow.python.ops.control_flow_v2_func_graphs import WhileBodyFuncGraph
from tensorflow.python.ops.resource_variable_ops import variable_accessed
from typing_extensions import override

from terarec.errors import ConfigError
from terarec.tensorflow.tables import HERE, OPS, SPREAD, Absent, RowTable, Rule

if TYPE_CHECKING:
    from numpy.typing import NDArray

POOLINGS = {"sum": 0, "mean": 1, "sqrtn": 3}
"""Combiner -> its number in the core."""
NO_POOLING = 2


@dataclass(frozen=True, slots=True)
class Bags:
    """Ids int64[N] and where their bags begin and end.

    Attributes:
        ids: int64[N].
        row_splits: int64[B + 1]; int64[0] without pooling, which gives a vector for each id.
        weights: float32[N], or float32[0] for none.
        pooling: Number of the combiner in the core.
        is_weighted: Whether there are weights: where there are no ids, their number does not say it.
    """

    ids: tf.Tensor
    row_splits: tf.Tensor
    weights: tf.Tensor
    pooling: int
    is_weighted: bool = False


@dataclass(frozen=True, slots=True)
class Update:
    """A step of an optimizer.

    Attributes:
        rule: The rule of rows.
        numbers: Its numbers in this step, float64[n]; see `Rule.vector`.
        step: Number of the step, int64[], from 1.
    """

    rule: Rule
    numbers: tf.Tensor
    step: tf.Tensor


def single_ids(ids: tf.Tensor) -> Bags:
    """Return ids int64[N] without pooling."""
    return Bags(ids, tf.zeros([0], tf.int64), tf.zeros([0], tf.float32), NO_POOLING)


class CompiledOps:
    """The operations, by the ops of the core's library."""

    def lookup(self, table: RowTable, variable: tf.Variable, bags: Bags, absent: Absent, home: int) -> list[tf.Tensor]:
        """Return float32[B, D], or float32[N, D] without pooling, and the ids and rows that made room for new ones.

        `home` is that of the rows' `Placement`, or `HERE` where this rank has all and asks no other.
        """
        variable_accessed(variable)
        order = variable.handle if home == HERE else exchange_order()
        call: dict[str, int] = {"table": table.number, "pooling": bags.pooling, "weighted": int(bags.is_weighted)}
        call |= {"absent": int(absent), "home": home, "all_rows": table.placement.all_rows}
        inputs = (variable.handle, order, bags.ids, bags.row_splits, bags.weights)
        return list(_in_order(home, lambda: OPS.terarec_lookup(*inputs, **call)))

    def apply(self, table: RowTable, variable: tf.Variable, grad: tf.IndexedSlices, update: Update) -> None:
        """Update each row of a gradient once."""
        inputs = (grad.indices, grad.values, update.numbers, update.step)
        OPS.terarec_apply(variable.handle, *inputs, table=table.number, rule=update.rule.number)

    def change(self, table: RowTable, variable: tf.Variable, change: int, delta: tf.IndexedSlices) -> None:
        """Set rows, or add to them or subtract from them."""
        OPS.terarec_change(variable.handle, delta.indices, delta.values, table=table.number, change=change)

    def read(self, table: RowTable, variable: tf.Variable) -> tuple[tf.Tensor, tf.Tensor]:
        """Return all ids int64[n] and their rows float32[n, D]."""
        variable_accessed(variable)
        ids, rows = OPS.terarec_read(variable.handle, table=table.number)
        return ids, rows

    def size(self, table: RowTable, variable: tf.Variable) -> tf.Tensor:
        """Return int64[2]: the number of rows and their width."""
        return OPS.terarec_size(variable.handle, table=table.number)


@cache
def _order() -> tf.Variable:
    with tf.init_scope(), tf.device("CPU:0"):
        return tf.Variable(0, trainable=False, name="order_of_exchanges")


def exchange_order() -> tf.Tensor:
    """Return the resource that all ops take that exchange with other ranks, so that they run in their order."""
    return _order().handle


def _in_order(home: int, call: Callable[[], Any]) -> Any:
    """Make an op that exchanges with other ranks, after those that were made before it in a graph.

    The graphs of gradients do not order ops by their resources, as functions do.
    """
    if home == HERE or tf.executing_eagerly():
        return call()
    graph = tf.compat.v1.get_default_graph()
    before = getattr(graph, "_terarec_last_exchange", None)
    with tf.control_dependencies([] if before is None else [before]):
        result = call()
    graph._terarec_last_exchange = tf.nest.flatten(result)[0].op
    return result


def gather(tensor: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Return the plain bytes uint8[n] of a tensor on all ranks, one after the other, and their numbers int64[R]."""
    content = tf.reshape(tf.bitcast(tensor, tf.uint8), [-1])
    sizes, every = _in_order(SPREAD, lambda: OPS.terarec_gather(exchange_order(), content))
    return every, sizes


def _slices(indices: tf.Tensor, values: tf.Tensor, size: tf.Tensor, width: int | None) -> tf.IndexedSlices:
    # Keras asks for the number of their axes.
    indices.set_shape([None])
    values.set_shape([None, width])
    size.set_shape([2])
    # In graphs of the type of TensorFlow's own slices, which those of the other branch of a `tf.cond` have.
    of_type = size if tf.executing_eagerly() else tf.saturate_cast(size, tf.int32)
    return tf.IndexedSlices(values, indices, dense_shape=of_type)


def _check_no_loop(graph: object) -> None:
    """Raise `ConfigError` if an op is in a loop whose gradient is taken from outside; `graph` is the op's."""
    # TensorFlow adds up the gradients of a loop's steps from zeros of the variable's own, empty tensor.
    if isinstance(graph, WhileBodyFuncGraph) and graph is not tf.compat.v1.get_default_graph():
        raise ConfigError(
            "tf.while_loop",
            "has no gradient of embedding variables that are looked up or read in it, expected a lookup of all ids "
            "before the loop, or a gradient tape inside of it",
        )


if OPS is not None:

    @tf.RegisterGradient("TerarecLookup")
    def _lookup_gradient(op: tf.Operation, grad: tf.Tensor, *_: object) -> list[tf.IndexedSlices | tf.Tensor | None]:
        _check_no_loop(getattr(op, "graph", None))  # a tape has no op
        call = {name: op.get_attr(name) for name in ("table", "pooling", "weighted", "home", "all_rows")}
        inputs = (*op.inputs, tf.convert_to_tensor(grad))
        indices, values = _in_order(call["home"], lambda: OPS.terarec_merge(*inputs, **call))
        slices = _slices(indices, values, OPS.terarec_size(op.inputs[0], table=call["table"]), op.outputs[0].shape[-1])
        if not call["weighted"]:
            return [slices, None, None, None, None]
        of_weights = _in_order(call["home"], lambda: OPS.terarec_weight_gradient(*inputs, **call))
        return [slices, None, None, None, of_weights]

    @tf.RegisterGradient("TerarecRead")
    def _read_gradient(op: tf.Operation, _: tf.Tensor, grad: tf.Tensor) -> tf.Tensor:
        _check_no_loop(getattr(op, "graph", None))
        return grad


class NumPyOps(CompiledOps):
    """The same by `tf.numpy_function`: no op library, but Python's lock in every step."""

    @override
    def lookup(self, table: RowTable, variable: tf.Variable, bags: Bags, absent: Absent, home: int) -> list[tf.Tensor]:
        pooling, of = bags.pooling, table.core
        variable_accessed(variable)

        def run(ids: NDArray[Any], row_splits: NDArray[Any], weights: NDArray[Any]) -> tuple[object, ...]:
            if bags.is_weighted and len(weights) != len(ids):
                raise ValueError(f"weights: got {len(weights)}, expected {len(ids)}")
            return of.lookup(ids, row_splits, weights, pooling, int(absent))

        # Unlike what a tape alone records, it is found from outside of the function or branch with the lookup.
        @tf.custom_gradient
        def look_up(_: tf.Tensor, *inputs: tf.Tensor) -> tuple[list[tf.Tensor], Callable[..., Any]]:
            graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()

            def gradient(grad: tf.Tensor, *_: object) -> list[tf.IndexedSlices | tf.Tensor | None]:
                _check_no_loop(graph)
                arguments = [*inputs, tf.convert_to_tensor(grad)]
                indices, values = _call(lambda i, s, w, g: of.merge(i, s, w, g, pooling), arguments, "if")
                slices = _slices(indices, values, self.size(table, variable), table.width)
                if not bags.is_weighted:
                    return [slices, None, None, None]
                (of_weights,) = _call(lambda i, s, w, g: (of.weight_gradient(i, s, w, g, pooling),), arguments, "f")
                of_weights.set_shape(bags.weights.shape)
                return [slices, None, None, of_weights]

            return _call(run, inputs, "fif"), gradient

        # The gradient of reading the variable's own, empty tensor is that of its resource; of the resource itself the
        # gradient of a branch would need a copy.
        own = tf.raw_ops.ReadVariableOp(resource=variable.handle, dtype=tf.float32)
        return list(look_up(own, bags.ids, bags.row_splits, bags.weights))

    @override
    def apply(self, table: RowTable, variable: tf.Variable, grad: tf.IndexedSlices, update: Update) -> None:
        number = update.rule.number

        def run(ids: NDArray[Any], rows: NDArray[Any], numbers: NDArray[Any], step: NDArray[Any]) -> tuple[()]:
            table.core.apply(ids, rows, numbers, int(step), number)
            return ()

        _call(run, [grad.indices, grad.values, update.numbers, update.step], "")

    @override
    def change(self, table: RowTable, variable: tf.Variable, change: int, delta: tf.IndexedSlices) -> None:

        def run(ids: NDArray[Any], rows: NDArray[Any]) -> tuple[()]:
            table.core.change(ids, rows, change)
            return ()

        _call(run, [delta.indices, delta.values], "")

    @override
    def read(self, table: RowTable, variable: tf.Variable) -> tuple[tf.Tensor, tf.Tensor]:
        variable_accessed(variable)

        @tf.custom_gradient
        def read(_: tf.Tensor) -> tuple[list[tf.Tensor], Callable[..., tf.Tensor]]:
            graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()

            def gradient(_: tf.Tensor, grad: tf.Tensor) -> tf.Tensor:
                _check_no_loop(graph)
                return grad

            return _call(lambda: table.core.read()[:2], [], "if"), gradient

        ids, rows = read(variable.handle)
        return ids, rows

    @override
    def size(self, table: RowTable, variable: tf.Variable) -> tf.Tensor:
        (size,) = _call(lambda: (np.array([table.core.size(), table.width]),), [], "i")
        return size


def _call(function: Callable[..., tuple[object, ...]], inputs: Sequence[tf.Tensor], types: str) -> list[tf.Tensor]:
    """Call a function of arrays in the graph; `types` has "i" or "f" for each of its results."""

    def run(*arrays: NDArray[Any]) -> list[object]:
        # A function without a result still is a node of the graph: it returns a number that nobody reads.
        return [*function(*arrays), np.int64(0)]

    all_types = [*({"i": tf.int64, "f": tf.float32}[kind] for kind in types), tf.int64]
    try:
        return list(tf.nest.flatten(tf.numpy_function(run, inputs, all_types))[:-1])
    # In a graph TensorFlow converts them so; outside of one they come as they are.
    except ValueError as error:
        raise tf.errors.InvalidArgumentError(None, None, str(error)) from error
    except MemoryError as error:
        raise tf.errors.ResourceExhaustedError(None, None, str(error)) from error


ops: CompiledOps = CompiledOps() if OPS is not None else NumPyOps()
"""The implementation in use."""
