# SPDX-License-Identifier: Apache-2.0
"""The calls of Horovod that scripts for the Sparse Operation Kit make, over the ranks of `sok.init`.

TensorFlow is imported by the calls that need it: `python -m terarec.hugectr` provides this module for every script.
"""

from __future__ import annotations

import copy
import importlib
import sys
from collections.abc import Iterable
from typing import Any

from terarec.errors import ConfigError
from terarec.tensorflow.communication import DEFAULT_TIMEOUT, current, join, leave, local_rank, rank, send_to_all
from terarec.tensorflow.communication import num_ranks as size

Average, Sum, Adasum, Min, Max = range(5)
"""Ways to reduce; Adasum is refused."""

__all__ = [
    "Adasum",
    "Average",
    "DistributedGradientTape",
    "DistributedOptimizer",
    "Max",
    "Min",
    "Sum",
    "allgather",
    "allreduce",
    "barrier",
    "broadcast",
    "broadcast_variables",
    "init",
    "local_rank",
    "local_size",
    "rank",
    "shutdown",
    "size",
]


def init(*_: object, **__: object) -> None:
    """Join the other processes; see `terarec.tensorflow.init`."""
    join(DEFAULT_TIMEOUT)


def shutdown() -> None:
    """Leave the other processes."""
    leave()


def local_size() -> int:
    """Return the number of processes on this machine."""
    return current().local_size or size()


def allreduce(tensor: Any, average: bool | None = None, name: str | None = None, op: int = Average, **_: object) -> Any:
    """Return the mean of a tensor over all processes, or its sum, minimum or maximum.

    Slices of all processes come one after the other, as Horovod has it.

    Args:
        tensor: Tensor of one shape in all processes, or `tf.IndexedSlices`.
        average: False for a sum; None for what `op` says.
        name: No effect.
        op: `Average`, `Sum`, `Min` or `Max`.

    Raises:
        ConfigError: Another `op`.
    """
    if average is not None:
        op = Average if average else Sum
    if op not in (Average, Sum, Min, Max):
        raise ConfigError("op", f"got {op!r}, expected Average, Sum, Min or Max")
    tf = _module("tensorflow")
    if isinstance(tensor, tf.IndexedSlices):
        if op not in (Average, Sum):
            raise ConfigError("op", f"got {op!r}, expected Average or Sum for slices")
        values = allgather(tensor.values)
        values = values / tf.cast(size(), values.dtype) if op == Average else values
        return tf.IndexedSlices(values, allgather(tensor.indices), tensor.dense_shape)
    value = tf.convert_to_tensor(tensor)
    if size() == 1:
        return value

    @tf.custom_gradient
    def reduced(own: Any) -> tuple[Any, Any]:
        every, _ = _gathered(own)
        of_ranks = tf.reshape(every, tf.concat([[size()], tf.shape(own)], axis=0))
        if op == Average:
            total = tf.reduce_sum(of_ranks, axis=0)
            result = total // size() if own.dtype.is_integer else total / tf.cast(size(), own.dtype)
        else:
            result = {Sum: tf.reduce_sum, Min: tf.reduce_min, Max: tf.reduce_max}[op](of_ranks, axis=0)
        result.set_shape(own.shape)
        return result, lambda grad: allreduce(grad, op=op if op == Average else Sum)

    return reduced(value)


def allgather(tensor: Any, name: str | None = None, **_: object) -> Any:
    """Return the tensors of all processes, one after the other on axis 0, on which alone their shapes may differ."""
    tf = _module("tensorflow")
    value = tf.convert_to_tensor(tensor)
    if size() == 1:
        return value

    @tf.custom_gradient
    def joined(own: Any) -> tuple[Any, Any]:
        every, sizes = _gathered(own)
        width = tf.reduce_prod(tf.shape(own, out_type=tf.int64)[1:]) * own.dtype.size
        ends = tf.cumsum(sizes) // tf.maximum(width, 1)
        result = tf.reshape(every, tf.concat([[-1], tf.shape(own)[1:]], axis=0))
        result.set_shape([None, *own.shape[1:]])
        end = ends[rank()]
        return result, lambda grad: allreduce(grad, op=Sum)[end - tf.shape(own, out_type=tf.int64)[0] : end]

    return joined(value)


def broadcast(tensor: Any, root_rank: int, name: str | None = None, **_: object) -> Any:
    """Return the tensor of the process `root_rank`; its shape is the same in all."""
    tf = _module("tensorflow")
    value = tf.convert_to_tensor(tensor)
    if not 0 <= root_rank < size():
        raise ConfigError("root_rank", f"got {root_rank!r}, expected a rank below {size()}")
    if size() == 1:
        return value

    @tf.custom_gradient
    def sent(own: Any) -> tuple[Any, Any]:
        flat = tf.reshape(own, [-1])
        every, _ = _gathered(flat if rank() == root_rank else flat[:0])
        result = tf.reshape(every, tf.shape(own))

        def gradient(grad: Any) -> Any:
            total = allreduce(grad, op=Sum)
            return total if rank() == root_rank else tf.zeros_like(total)

        return result, gradient

    return sent(value)


def broadcast_variables(variables: Iterable[Any], root_rank: int, **_: object) -> None:
    """Set variables to those of the process `root_rank`; embedding variables, of which each has a part, stay."""
    for variable in variables:
        if not _is_ours(variable):
            variable.assign(broadcast(variable, root_rank))


def barrier(*_: object, **__: object) -> None:
    """Wait for all processes."""
    numpy = _module("numpy")
    send_to_all("barrier", [numpy.zeros(0, numpy.uint8)] * size())


class DistributedGradientTape:
    """A gradient tape whose gradients are means over all processes; those of embedding variables stay as they are.

    Args:
        gradtape: The tape.
        op: As for `allreduce`.
        kwargs: Other arguments of Horovod's, without an effect.
    """

    def __init__(self, gradtape: Any, *_: object, op: int = Average, **kwargs: object) -> None:
        self._tape, self._op = gradtape, op

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tape, name)

    def __enter__(self) -> DistributedGradientTape:
        self._tape.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._tape.__exit__(*error)

    def gradient(self, target: Any, sources: Any, output_gradients: Any = None, **options: Any) -> Any:
        """Return the gradients of `target`, in the structure of `sources`."""
        tf = _module("tensorflow")
        grads = self._tape.gradient(target, sources, output_gradients, **options)
        flat = list(sources) if isinstance(sources, list | tuple) else [sources]
        reduced = _reduced(tf.nest.flatten(grads), flat, self._op)
        return reduced if isinstance(sources, list | tuple) else reduced[0]


def DistributedOptimizer(optimizer: Any, *_: object, op: int = Average, **__: object) -> Any:  # noqa: N802 - Horovod's name
    """Return an optimizer of Keras or tf_keras like this one, which applies the means of gradients over all processes.

    Args:
        optimizer: The optimizer.
        op: As for `allreduce`.
    """
    if size() == 1:
        return optimizer
    kind = type(optimizer)
    if hasattr(kind, "apply"):  # Keras 3

        def apply(self: Any, grads: Any, trainable_variables: Any = None) -> Any:
            variables = self._trainable_variables if trainable_variables is None else list(trainable_variables)
            return kind.apply(self, _reduced(list(grads), variables, op), variables)

        methods: dict[str, Any] = {"apply": apply}
    else:

        def apply_gradients(self: Any, grads_and_vars: Any, *arguments: Any, **options: Any) -> Any:
            grads, variables = zip(*grads_and_vars, strict=True)
            pairs = zip(_reduced(list(grads), list(variables), op), variables, strict=True)
            return kind.apply_gradients(self, pairs, *arguments, **options)

        methods = {"apply_gradients": apply_gradients}
    # Of the same name: what an optimizer does to rows is found by it.
    averaging: Any = type(kind.__name__, (kind,), methods)
    if not hasattr(kind, "from_config"):  # those of embedding variables
        own = copy.copy(optimizer)
        own.__class__ = averaging
        return own
    return averaging.from_config(optimizer.get_config())


def _reduced(grads: list[Any], variables: list[Any], op: int) -> list[Any]:
    return [
        grad if grad is None or _is_ours(variable) else allreduce(grad, op=op)
        for grad, variable in zip(grads, variables, strict=True)
    ]


def _is_ours(variable: Any) -> bool:
    return _module("terarec.tensorflow.variables").rows_of(variable) is not None


def _gathered(tensor: Any) -> tuple[Any, Any]:
    """Return the numbers [n] of a tensor on all ranks, one after the other, and their bytes on each, int64[R]."""
    tf = _module("tensorflow")
    ops = _module("terarec.tensorflow.ops")
    if tensor.dtype == tf.bool:
        every, sizes = ops.gather(tf.cast(tensor, tf.uint8))
        return tf.cast(every, tf.bool), sizes
    every, sizes = ops.gather(tensor)
    width = tensor.dtype.size
    return tf.bitcast(tf.reshape(every, [-1, width]) if width > 1 else every, tensor.dtype), sizes


def _module(name: str) -> Any:
    # In a `tf.function` AutoGraph would follow the import, and warn that it cannot.
    return sys.modules.get(name) or importlib.import_module(name)
