# SPDX-License-Identifier: Apache-2.0
"""Lookups: SOK's `lookup_sparse` and `all2all_dense_embedding`, and the functions of `tf.nn` under their signatures."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from terarec.errors import ConfigError
from terarec.spec.checks import quoted
from terarec.tensorflow.dynamic_variables import DynamicVariable
from terarec.tensorflow.ops import POOLINGS, Bags, single_ids
from terarec.tensorflow.tables import Absent
from terarec.tensorflow.variables import RowsVariable, needed_rows, whole_numbers

# AutoGraph would rewrite what is called in a `tf.function`; nothing here depends on the values of tensors.
_as_it_is = tf.autograph.experimental.do_not_convert


@_as_it_is
def lookup_sparse(
    params: RowsVariable | Sequence[RowsVariable],
    sp_ids: tf.SparseTensor | tf.RaggedTensor | Sequence[tf.SparseTensor | tf.RaggedTensor],
    sp_weights: tf.SparseTensor | tf.RaggedTensor | Sequence[tf.SparseTensor | tf.RaggedTensor | None] | None = None,
    combiners: str | Sequence[str] | None = None,
    use_low_frequency_filter: bool = False,
) -> tf.Tensor | list[tf.Tensor]:
    """Look bags of ids up and combine their vectors.

    Args:
        params: A variable, or one for each of `sp_ids`.
        sp_ids: Ids [B, ...]: sparse, ragged, or dense [B, n]; or a list of such.
        sp_weights: Weights of the ids, of the same rows; None for none.
        combiners: "sum", "mean" or "sqrtn", or one for each of `sp_ids`; None for "mean". A weighted mean divides by
            the sum of the weights. A row without ids gives zeros.
        use_low_frequency_filter: Whether a new id of a "hybrid" variable gets a row only with the chance that is the
            variable's `filter_ratio`, and zeros otherwise.

    Returns:
        float32[B, D], or a list of them if `sp_ids` is one.

    Raises:
        ConfigError: Another number of parts, another combiner, or ids of another kind.
        tf.errors.InvalidArgumentError: An id outside a table of fixed rows.
    """
    absent = Absent.ADMIT if use_low_frequency_filter else Absent.INSERT
    is_list = isinstance(sp_ids, list | tuple)
    ids = list(sp_ids) if is_list else [sp_ids]
    variables = list(params) if isinstance(params, list | tuple) else [params]
    weights = list(sp_weights) if isinstance(sp_weights, list | tuple) else [sp_weights] * len(ids)
    poolings = list(combiners) if isinstance(combiners, list | tuple) else [combiners or "mean"] * len(ids)
    for name, parts in (("params", variables), ("sp_weights", weights), ("combiners", poolings)):
        if len(parts) != len(ids):
            raise ConfigError(name, f"got {len(parts)}, expected {len(ids)}, one for each of sp_ids")
    vectors = [
        needed_rows("params", variable).look_up(_bags("sp_ids", one, of_one, combiner), absent)
        for variable, one, of_one, combiner in zip(variables, ids, weights, poolings, strict=True)
    ]
    return vectors if is_list else vectors[0]


@_as_it_is
def all2all_dense_embedding(param: RowsVariable, indices: tf.Tensor) -> tf.Tensor:
    """Return the rows float32[n, D] of ids [n]."""
    return needed_rows("param", param).rows_of(indices)


@_as_it_is
def sparse_read_and_evict(
    var: DynamicVariable, indices: tf.Tensor, name: str | None = None
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Return the rows of ids, and what a full variable evicted to make room for new ones.

    The ids that did not come for longest go.

    Args:
        var: A "hybrid" variable with `max_capacity`.
        indices: Ids [n].
        name: Name of the operation.

    Returns:
        The rows float32[n, D], the evicted ids [m] and their rows float32[m, D]; on several ranks, what this one had.

    Raises:
        ConfigError: Another variable, or ids of another rank.
        tf.errors.ResourceExhaustedError: More new ids than it has rows.
    """
    if not isinstance(var, DynamicVariable) or var.backend_type != "hybrid":
        raise ConfigError("var", f"got {type(var).__name__}, expected a DynamicVariable of var_type 'hybrid'")
    ids = whole_numbers("indices", indices)
    if ids.shape.rank != 1:
        raise ConfigError("indices", f"got shape {ids.shape}, expected [n]")
    with tf.name_scope(name or "sparse_read_and_evict"):
        vectors, evicted, rows = var.look_up_and_evict(single_ids(ids), Absent.INSERT)
        return vectors, tf.cast(evicted, var.key_type), rows


@_as_it_is
def embedding_lookup(
    params: RowsVariable,
    ids: tf.Tensor | tf.RaggedTensor,
    max_norm: float | None = None,
    name: str | None = None,
) -> tf.Tensor | tf.RaggedTensor:
    """Return the rows float32[..., D] of ids [...], as `tf.nn.embedding_lookup` does.

    Args:
        params: A variable.
        ids: Integers, dense or ragged.
        max_norm: Norm that longer rows are scaled to; None for no limit.
        name: Name of the operation.

    Raises:
        ConfigError: Another kind of `params` or `ids`.
        tf.errors.InvalidArgumentError: An id outside a table of fixed rows.
    """
    variable = needed_rows("params", params)
    if isinstance(ids, tf.RaggedTensor):
        return ids.with_flat_values(embedding_lookup(variable, ids.flat_values, max_norm, name))
    rows = variable.rows_of(whole_numbers("ids", ids), name)
    return rows if max_norm is None else tf.clip_by_norm(rows, max_norm, axes=[-1])


@_as_it_is
def embedding_lookup_sparse(
    params: RowsVariable,
    sp_ids: tf.SparseTensor | tf.RaggedTensor,
    sp_weights: tf.SparseTensor | tf.RaggedTensor | None,
    combiner: str | None = None,
    max_norm: float | None = None,
    name: str | None = None,
    allow_fast_lookup: bool = False,
) -> tf.Tensor:
    """Return the combined rows float32[B, D] of bags, as `tf.nn.embedding_lookup_sparse` does.

    It returns a row of zeros for every row without ids; `tf.nn` leaves those at the end out.

    Args:
        params: A variable.
        sp_ids: Ids, sparse or ragged.
        sp_weights: Weights of the ids; None for none.
        combiner: "sum", "mean" or "sqrtn"; None for "mean".
        max_norm: None.
        name: Name of the operation.
        allow_fast_lookup: No effect.

    Raises:
        ConfigError: Another combiner, or ids of another kind.
        tf.errors.InvalidArgumentError: An id outside a table of fixed rows.
    """
    if max_norm is not None:
        raise ConfigError("max_norm", f"got {max_norm!r}, expected None: rows are combined as they are")
    with tf.name_scope(name or "embedding_lookup_sparse"):
        bags = _bags("sp_ids", sp_ids, sp_weights, combiner or "mean")
        return needed_rows("params", params).look_up(bags)


def combine(
    variable: RowsVariable,
    ids: tf.Tensor | tf.SparseTensor | tf.RaggedTensor,
    weights: tf.Tensor | tf.SparseTensor | tf.RaggedTensor | None,
    combiner: str,
    *,
    absent: Absent = Absent.INSERT,
) -> tf.Tensor:
    """Return the combined rows float32[B, D] of bags; see `lookup_sparse`."""
    return variable.look_up(_bags("inputs", ids, weights, combiner), absent)


def _bags(argument: str, ids: object, weights: object, combiner: object) -> Bags:
    if not isinstance(combiner, str) or combiner not in POOLINGS:
        raise ConfigError("combiner", f"got {quoted(combiner)}, expected {', '.join(map(repr, POOLINGS))}")
    values, row_splits = _flat(argument, ids)
    factors = tf.zeros([0], tf.float32)
    if weights is not None:
        of_ids, _ = _flat("sp_weights", weights)
        factors = tf.cast(of_ids, tf.float32)
        sizes = (factors.shape[0], values.shape[0])
        if None not in sizes and sizes[0] != sizes[1]:
            raise ConfigError("sp_weights", f"got {sizes[0]} weights, expected {sizes[1]}, one for each id")
    return Bags(whole_numbers(argument, values), row_splits, factors, POOLINGS[combiner], weights is not None)


def _flat(argument: str, rows: object) -> tuple[tf.Tensor, tf.Tensor]:
    """Return values [N] and where their rows begin and end, int64[B + 1]."""
    if isinstance(rows, tf.SparseTensor):
        first, of_values = tf.range(rows.dense_shape[0] + 1, dtype=tf.int64), rows.indices[:, 0]
        message = f"{argument}: rows are not in order, expected those of tf.sparse.reorder"
        tf.debugging.assert_less_equal(of_values[:-1], of_values[1:], message)
        return rows.values, tf.searchsorted(of_values, first, out_type=tf.int64)
    if isinstance(rows, tf.RaggedTensor):
        if rows.ragged_rank != 1 or rows.flat_values.shape.rank != 1:
            raise ConfigError(argument, f"got shape {rows.shape}, expected [rows, (ids)]")
        return rows.values, tf.cast(rows.row_splits, tf.int64)
    dense = tf.convert_to_tensor(rows)
    if dense.shape.rank != 2:
        raise ConfigError(argument, f"got shape {dense.shape}, expected a sparse, ragged or dense tensor [rows, ids]")
    shape = tf.shape(dense, out_type=tf.int64)
    return tf.reshape(dense, [-1]), tf.range(shape[0] + 1) * shape[1]
