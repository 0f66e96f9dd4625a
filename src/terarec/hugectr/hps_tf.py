# SPDX-License-Identifier: Apache-2.0
"""HugeCTR's package `hierarchical_parameter_server`: lookups in a parameter server for models of TensorFlow.

Layers are those of ``tf.keras``: of Keras 3, or of tf_keras where ``TF_USE_LEGACY_KERAS=1``. In a graph, a lookup is an
operation that names the file, the model and the table, and that reads the file when it first runs. So a SavedModel with
it runs in every process that has imported this module.
"""

from __future__ import annotations

import json
from numbers import Integral
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from terarec.errors import MissingDependencyError
from terarec.hugectr.errors import WrongInputError
from terarec.hugectr.inference.hps import shared_hps
from terarec.spec.checks import quoted

try:
    import tensorflow as tf
    from tensorflow.python.ops import script_ops
except ModuleNotFoundError as error:
    raise MissingDependencyError(error.name, "not installed, expected pip install 'terarec[tensorflow]'") from error

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["Init", "LookupLayer", "SparseLookupLayer"]

_COMBINERS = ("sum", "mean", "sqrtn")
_files: list[str] = []  # of `Init`, the last one counts


def Init(*, ps_config_file: str, global_batch_size: int = 1, **_: object) -> str:  # noqa: N802 - HugeCTR's name
    """Load the parameter server that layers without a file of their own use, and return "OK".

    Args:
        ps_config_file: Path of the ``ps.json``.
        global_batch_size: No effect: the server answers any number of keys.

    Raises:
        WrongInputError: A configuration that does not fit together.
        FileCannotOpenError: A file does not exist.
    """
    shared_hps(ps_config_file)
    _files.append(ps_config_file)
    return "OK"


def _wrong(field: str, problem: str) -> WrongInputError:
    return WrongInputError("hierarchical_parameter_server", field, problem, field=field)


def _looked_up(table: Any, keys: NDArray[np.int64]) -> NDArray[np.float32]:
    """Return the rows float32[..., D] of keys [...] of a table, JSON of [file, model, number, D]."""
    file, model, number, width = json.loads(np.asarray(table).item())
    file = file or (_files[-1] if _files else "")
    if not file:
        raise _wrong("ps_config_file", "got none, expected one in the layer or a call of Init before")
    rows = shared_hps(file).rows(torch.from_numpy(np.ascontiguousarray(keys).reshape(-1)), model, number)
    if rows.shape[1] != width:
        raise _wrong("emb_vec_size", f"got {width}, expected {rows.shape[1]}, the width of table {number} of {model!r}")
    return np.asarray(rows.cpu().numpy()).reshape(*np.shape(keys), width)


# `tf.numpy_function` would draw a new name, which another process does not know, or has for another function. There is
# no public way to choose it; the extra "tensorflow" ends before the first release that has not been tried.
_OPERATION = "terarec.hugectr.hps_tf.lookup"
script_ops._py_funcs._funcs[_OPERATION] = _looked_up


class _ServedTable(tf.keras.layers.Layer):
    """A layer that looks up in one table of a parameter server."""

    def __init__(
        self,
        model_name: str,
        table_id: int,
        emb_vec_size: int,
        emb_vec_dtype: Any = tf.float32,
        ps_config_file: str = "",
        global_batch_size: int = 1,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.supports_jit = False  # XLA does not know the parameter server
        try:
            is_float32 = tf.as_dtype(emb_vec_dtype) == tf.float32
        except (TypeError, ValueError):
            is_float32 = False
        if not is_float32:
            raise _wrong("emb_vec_dtype", f"got {emb_vec_dtype!r}, expected tf.float32")
        for field, text in (("model_name", model_name), ("ps_config_file", ps_config_file)):
            if not isinstance(text, str):
                raise _wrong(field, f"got {quoted(text)}, expected a text")
        for field, number, least in (("table_id", table_id, 0), ("emb_vec_size", emb_vec_size, 1)):
            if isinstance(number, bool) or not isinstance(number, Integral) or number < least:
                raise _wrong(field, f"got {quoted(number)}, expected an integer >= {least}")
        # JSON, in which graphs and files have them, knows no numbers of NumPy.
        self.model_name, self.table_id, self.emb_vec_size = model_name, int(table_id), int(emb_vec_size)
        self.ps_config_file, self.global_batch_size = ps_config_file, global_batch_size

    def rows(self, ids: Any) -> Any:
        """Return the rows float32[..., D] of integers [...]."""
        keys = tf.convert_to_tensor(ids)
        if keys.dtype not in (tf.int32, tf.int64, tf.uint32):
            raise _wrong("ids", f"got {keys.dtype.name}, expected int32 or int64")
        table = json.dumps([self.ps_config_file, self.model_name, self.table_id, self.emb_vec_size])
        keys = tf.cast(keys, tf.int64)
        if tf.executing_eagerly():
            return tf.constant(_looked_up(table, keys.numpy()))
        (rows,) = tf.raw_ops.PyFuncStateless(input=[table, keys], token=_OPERATION, Tout=[tf.float32])
        rows.set_shape([*keys.shape, self.emb_vec_size])
        return rows

    def get_config(self) -> dict[str, Any]:
        """Return the arguments."""
        names = ("model_name", "table_id", "emb_vec_size", "ps_config_file", "global_batch_size")
        return {**super().get_config(), "emb_vec_dtype": "float32", **{name: getattr(self, name) for name in names}}


@tf.keras.utils.register_keras_serializable(package="hierarchical_parameter_server")
class LookupLayer(_ServedTable):
    """A layer that returns the rows of ids, without gradients.

    Args:
        model_name: Name of the model in the ``ps.json``.
        table_id: Number of the table.
        emb_vec_size: Width D of the table.
        emb_vec_dtype: tf.float32.
        ps_config_file: Path of the ``ps.json``; "" for that of `Init`, which may be called after a graph is made.
        global_batch_size: No effect.

    Raises:
        WrongInputError: Another dtype, a name that is no text, or a number that is none.
    """

    def call(self, ids: Any, max_norm: float | None = None) -> Any:
        """Return float32[..., D] for ids [...]; longer rows than `max_norm` are scaled to it."""
        rows = self.rows(ids)
        return rows if max_norm is None else tf.clip_by_norm(rows, max_norm, axes=[-1])


@tf.keras.utils.register_keras_serializable(package="hierarchical_parameter_server")
class SparseLookupLayer(_ServedTable):
    """A layer that combines the rows of each sample's ids, without gradients. Arguments are those of `LookupLayer`."""

    def call(
        self,
        sp_ids: Any,
        sp_weights: Any = None,
        name: str | None = None,
        combiner: str | None = None,
        max_norm: float | None = None,
    ) -> Any:
        """Return the combined rows, those that `tf.nn.embedding_lookup_sparse` computes of the whole table.

        Args:
            sp_ids: Ids [B, any], sparse or ragged.
            sp_weights: Weights of the ids, of the same rows; None for none.
            name: Name of the operation.
            combiner: "sum", "mean" or "sqrtn"; None for "mean".
            max_norm: Norm that longer rows are scaled to first; None for no limit.

        Returns:
            float32[B, D]; zeros for a sample without ids.

        Raises:
            WrongInputError: Another combiner, or ids of another kind.
        """
        pooling = combiner or "mean"
        if pooling not in _COMBINERS:
            raise _wrong("combiner", f"got {combiner!r}, expected {', '.join(map(repr, _COMBINERS))}")
        if not isinstance(sp_ids, tf.SparseTensor | tf.RaggedTensor):
            raise _wrong("sp_ids", f"got {type(sp_ids).__name__}, expected tf.SparseTensor or tf.RaggedTensor")
        wanted, places = tf.unique(sp_ids.values)
        combined = tf.nn.embedding_lookup_sparse(
            self.rows(wanted), sp_ids.with_values(places), sp_weights, combiner=pooling, max_norm=max_norm, name=name
        )
        # TensorFlow ends with the last sample that has ids.
        samples = sp_ids.nrows(tf.int32) if isinstance(sp_ids, tf.RaggedTensor) else tf.shape(sp_ids)[0]
        combined = tf.pad(combined, [[0, samples - tf.shape(combined)[0]], [0, 0]])
        return tf.ensure_shape(combined, [sp_ids.shape[0], self.emb_vec_size])
