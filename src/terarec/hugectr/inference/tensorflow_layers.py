# SPDX-License-Identifier: Apache-2.0
"""`Init`, `LookupLayer` and `SparseLookupLayer`: lookups in a parameter server for models of Keras on TensorFlow."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import keras
import numpy as np
import tensorflow as tf
import torch

from terarec.hugectr.errors import WrongInputError
from terarec.hugectr.inference.hps import HPS, shared_hps

if TYPE_CHECKING:
    from numpy.typing import NDArray

_COMBINERS = ("sum", "mean", "sqrtn")
_files: list[str] = []  # of `Init`, the last one counts


def Init(*, ps_config_file: str, global_batch_size: int = 16384, **_: object) -> str:  # noqa: N802 - HugeCTR's name
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


class _ServedTable(keras.layers.Layer):
    """A layer that looks up in one table of a parameter server."""

    def __init__(
        self,
        model_name: str,
        table_id: int,
        emb_vec_size: int,
        emb_vec_dtype: Any = tf.float32,
        ps_config_file: str = "",
        global_batch_size: int = 16384,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.supports_jit = False  # XLA does not know the parameter server
        if tf.as_dtype(emb_vec_dtype) != tf.float32:
            raise self._wrong("emb_vec_dtype", f"got {emb_vec_dtype!r}, expected tf.float32")
        self.model_name, self.table_id, self.emb_vec_size = model_name, table_id, emb_vec_size
        self.ps_config_file, self.global_batch_size = ps_config_file, global_batch_size

    def _wrong(self, field: str, problem: str) -> WrongInputError:
        return WrongInputError(type(self).__name__, field, problem, field=field)

    def rows(self, ids: Any) -> Any:
        """Return the rows float32[..., D] of integers [...]."""
        keys = tf.convert_to_tensor(ids)
        if keys.dtype not in (tf.int32, tf.int64, tf.uint32):
            raise self._wrong("ids", f"got {keys.dtype.name}, expected int32 or int64")
        file = self.ps_config_file or (_files[-1] if _files else "")
        if not file:
            raise self._wrong("ps_config_file", "got none, expected one here or a call of Init before")
        server = shared_hps(file)
        rows = tf.numpy_function(
            lambda wanted: self._looked_up(server, wanted), [tf.cast(keys, tf.int64)], tf.float32, stateful=False
        )
        rows.set_shape([*keys.shape, self.emb_vec_size])
        return rows

    def _looked_up(self, server: HPS, keys: NDArray[np.int64]) -> NDArray[np.float32]:
        rows = server.rows(torch.from_numpy(np.ascontiguousarray(keys).reshape(-1)), self.model_name, self.table_id)
        if rows.shape[1] != self.emb_vec_size:
            table = f"table {self.table_id} of {self.model_name!r}"
            raise self._wrong(
                "emb_vec_size", f"got {self.emb_vec_size}, expected {rows.shape[1]}, the width of {table}"
            )
        return np.asarray(rows.cpu().numpy()).reshape(*keys.shape, self.emb_vec_size)

    def get_config(self) -> dict[str, Any]:
        """Return the arguments."""
        names = ("model_name", "table_id", "emb_vec_size", "ps_config_file", "global_batch_size")
        return {**super().get_config(), "emb_vec_dtype": "float32", **{name: getattr(self, name) for name in names}}


@keras.saving.register_keras_serializable(package="hierarchical_parameter_server")
class LookupLayer(_ServedTable):
    """A layer that returns the rows of ids, without gradients.

    Args:
        model_name: Name of the model in the ``ps.json``.
        table_id: Number of the table.
        emb_vec_size: Width D of the table.
        emb_vec_dtype: tf.float32.
        ps_config_file: Path of the ``ps.json``; "" for that of `Init`.
        global_batch_size: No effect.

    Raises:
        WrongInputError: Another dtype, or no file.
    """

    def call(self, ids: Any, max_norm: float | None = None) -> Any:
        """Return float32[..., D] for ids [...]; longer rows than `max_norm` are scaled to it."""
        rows = self.rows(ids)
        return rows if max_norm is None else tf.clip_by_norm(rows, max_norm, axes=[-1])

    def compute_output_spec(self, ids: Any, max_norm: float | None = None) -> Any:
        """Return the result's shape and type."""
        return keras.KerasTensor((*ids.shape, self.emb_vec_size), dtype="float32")


@keras.saving.register_keras_serializable(package="hierarchical_parameter_server")
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
        """Return the combined rows, as `tf.nn.embedding_lookup_sparse` does.

        Args:
            sp_ids: Ids [B, ...], sparse or ragged.
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
            raise self._wrong("combiner", f"got {combiner!r}, expected {', '.join(map(repr, _COMBINERS))}")
        values, places, samples = self._parts(sp_ids)
        rows = self.rows(values)
        if max_norm is not None:
            rows = tf.clip_by_norm(rows, max_norm, axes=[-1])
        weights = tf.ones_like(values, tf.float32) if sp_weights is None else tf.cast(sp_weights.values, tf.float32)
        total = tf.math.unsorted_segment_sum(rows * weights[:, None], places, samples)
        if pooling == "sum":
            return total
        sizes = tf.math.unsorted_segment_sum(weights if pooling == "mean" else weights**2, places, samples)[:, None]
        return tf.math.divide_no_nan(total, sizes if pooling == "mean" else tf.sqrt(sizes), name=name)

    def _parts(self, sp_ids: Any) -> tuple[Any, Any, Any]:
        """Return ids [N], the sample of each, and the number of samples."""
        if isinstance(sp_ids, tf.SparseTensor):
            return sp_ids.values, sp_ids.indices[:, 0], sp_ids.dense_shape[0]
        if isinstance(sp_ids, tf.RaggedTensor):
            return sp_ids.values, sp_ids.value_rowids(), sp_ids.nrows()
        raise self._wrong("sp_ids", f"got {type(sp_ids).__name__}, expected tf.SparseTensor or tf.RaggedTensor")
