# SPDX-License-Identifier: Apache-2.0
"""The interface of SOK 1.x: embedding layers with one table for all slots, their optimizer scope, and the `Saver`.

Each process counts as a GPU. As in SOK, all of them make and call layers in the same order. Layers are those of
``tf.keras``: of Keras 3, or of tf_keras where ``TF_USE_LEGACY_KERAS=1``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import keras
import numpy as np
import tensorflow as tf

from terarec.errors import ConfigError, FormatError
from terarec.io.opening import open_file
from terarec.spec.checks import one_line
from terarec.tensorflow.communication import num_ranks
from terarec.tensorflow.dump_files import files_of_all, own_part, write_of_all
from terarec.tensorflow.keras import RowsWeight, layer_rows
from terarec.tensorflow.lookups import combine
from terarec.tensorflow.ops import single_ids
from terarec.tensorflow.optimizers import filter_variables
from terarec.tensorflow.session import init
from terarec.tensorflow.tables import Absent, Growth, InitialRows
from terarec.tensorflow.variables import RowsVariable, check_sizes, needed_rows, type_of, whole_numbers

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

_layers: dict[str, keras.layers.Layer] = {}
_DONE = "OK"
_VARIABLE = "EmbeddingVariable"
"""SOK's name of a layer's table, after which it names files; later ones are EmbeddingVariable_1, ..."""
_IS_LEGACY = not issubclass(tf.keras.layers.Layer, keras.layers.Layer)


def Init(*, global_batch_size: int, seed: int | None = None) -> tf.Tensor:  # noqa: N802 - SOK's name
    """Join the other processes, if there are any, and return the text "OK"; see `terarec.tensorflow.init`.

    Args:
        global_batch_size: Number of samples of a step.
        seed: Seed of the initial values that TensorFlow draws.

    Raises:
        ConfigError: A batch size that is no number > 0, or variables of the launcher that do not fit.
        CollectiveError: Processes that do not come.
    """
    check_sizes(global_batch_size=global_batch_size)
    init()
    if seed is not None:
        tf.random.set_seed(seed)
    return tf.constant(_DONE)


class _OneTable(tf.keras.layers.Layer):
    """A layer whose slots share one table."""

    def __init__(
        self,
        max_vocabulary_size_per_gpu: int,
        embedding_vec_size: int,
        slot_num: int,
        use_hashtable: bool,
        key_dtype: Any,
        embedding_initializer: Any,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.supports_jit = False  # XLA does not know the ops of tables
        self.max_vocabulary_size_per_gpu, self.embedding_vec_size = max_vocabulary_size_per_gpu, embedding_vec_size
        self.slot_num, self.use_hashtable = slot_num, use_hashtable
        self.key_dtype = type_of("key_dtype", key_dtype, tf.int64, tf.uint32)
        start = keras.initializers.get("random_uniform" if embedding_initializer is None else embedding_initializer)
        sizes = ("max_vocabulary_size_per_gpu", "embedding_vec_size", "slot_num")
        check_sizes(**{name: getattr(self, name) for name in sizes})
        shape = (max_vocabulary_size_per_gpu * num_ranks(), embedding_vec_size)
        growth = Growth(initial=_new_rows(start), capacity=max_vocabulary_size_per_gpu) if use_hashtable else None
        with tf.init_scope():
            if _IS_LEGACY:  # tf_keras takes the variable itself for a weight
                self.embeddings = layer_rows(_VARIABLE, start, shape, growth)
            else:
                self.embeddings = RowsWeight(
                    start, shape=shape, dtype="float32", name="embeddings", growth=growth, rows_name=_VARIABLE
                )

    @property
    def embedding_variable(self) -> RowsVariable:
        """The table."""
        return needed_rows("embeddings", self.embeddings)


class All2AllDenseEmbedding(_OneTable):
    """Rows of ids [batch, slot_num, nnz_per_slot], not combined; all slots share one table, in which no ids collide.

    Args:
        max_vocabulary_size_per_gpu: Number of rows of each rank.
        embedding_vec_size: Width D of the rows.
        slot_num: Number of slots.
        nnz_per_slot: Number of ids in each slot.
        dynamic_input: Whether inputs are ids [n] instead.
        use_hashtable: Whether ids have any value, and get a row when they first come in training; else they are below
            the number of rows.
        key_dtype: int64 or uint32; None for int64.
        embedding_initializer: Name or object of Keras; None for "random_uniform".

    Raises:
        ConfigError: Another value.
    """

    def __init__(
        self,
        max_vocabulary_size_per_gpu: int,
        embedding_vec_size: int,
        slot_num: int,
        nnz_per_slot: int,
        dynamic_input: bool = False,
        use_hashtable: bool = True,
        key_dtype: Any = None,
        embedding_initializer: Any = None,
        **kwargs: Any,
    ) -> None:
        sizes = (max_vocabulary_size_per_gpu, embedding_vec_size, slot_num)
        super().__init__(*sizes, use_hashtable, key_dtype, embedding_initializer, **kwargs)
        self.nnz_per_slot, self.dynamic_input = nnz_per_slot, dynamic_input

    def call(self, inputs: Any, training: bool = True) -> Any:
        """Return the rows [batch, slot_num, nnz_per_slot, D], or [n, D] for a dynamic input.

        Raises:
            ConfigError: Inputs of another shape.
        """
        ids = whole_numbers("inputs", inputs)
        shape = [None] if self.dynamic_input else [None, self.slot_num, self.nnz_per_slot]
        if not ids.shape.is_compatible_with(shape):
            raise ConfigError("inputs", f"got shape {ids.shape}, expected {shape}")
        rows = self.embedding_variable.look_up(single_ids(tf.reshape(ids, [-1])), _absent(training))
        rows = tf.reshape(rows, [-1, *shape[1:], self.embedding_vec_size])
        return tf.cast(rows, self.compute_dtype)

    def compute_output_spec(self, inputs: Any, training: bool = True) -> Any:
        """Return the result's shape and type."""
        return keras.KerasTensor((*inputs.shape, self.embedding_vec_size), dtype=self.compute_dtype)


class DistributedEmbedding(_OneTable):
    """Combined rows [batch, slot_num, D] of sparse ids [batch * slot_num, max_nnz]; all slots share one table.

    Args:
        combiner: "sum" or "mean", in any case.
        max_vocabulary_size_per_gpu: Number of rows of each rank.
        embedding_vec_size: Width D of the rows.
        slot_num: Number of slots.
        max_nnz: The most ids of a slot.
        max_feature_num: No effect.
        use_hashtable: See `All2AllDenseEmbedding`.
        key_dtype: See `All2AllDenseEmbedding`.
        embedding_initializer: See `All2AllDenseEmbedding`.

    Raises:
        ConfigError: Another value.
    """

    def __init__(
        self,
        combiner: str,
        max_vocabulary_size_per_gpu: int,
        embedding_vec_size: int,
        slot_num: int,
        max_nnz: int,
        max_feature_num: int = 1,
        use_hashtable: bool = True,
        key_dtype: Any = None,
        embedding_initializer: Any = None,
        **kwargs: Any,
    ) -> None:
        if str(combiner).lower() not in ("sum", "mean"):
            raise ConfigError("combiner", f"got {combiner!r}, expected 'sum' or 'mean'")
        sizes = (max_vocabulary_size_per_gpu, embedding_vec_size, slot_num)
        super().__init__(*sizes, use_hashtable, key_dtype, embedding_initializer, **kwargs)
        self.combiner, self.max_nnz = combiner.lower(), max_nnz

    def call(self, inputs: Any, training: bool = True) -> Any:
        """Return the combined rows [batch, slot_num, D].

        Raises:
            ConfigError: Inputs that are no sparse tensor of rank 2.
        """
        if not isinstance(inputs, tf.SparseTensor) or inputs.shape.rank != 2:
            raise ConfigError(
                "inputs", f"got {type(inputs).__name__}, expected tf.SparseTensor [batch * slots, max_nnz]"
            )
        vectors = combine(self.embedding_variable, inputs, None, self.combiner, absent=_absent(training))
        rows = tf.reshape(vectors, [-1, self.slot_num, self.embedding_vec_size])
        return tf.cast(rows, self.compute_dtype)


def get_embedding(name: str, constructor: Callable[..., Any] | None = None, **kwargs: Any) -> Any:
    """Return the layer of a name; one that is missing is made by ``constructor(name=name, **kwargs)``.

    Raises:
        ConfigError: It is missing, and there is no constructor.
    """
    layer = _layers.get(name)
    if layer is None:
        if constructor is None:
            raise ConfigError("name", f"got {name!r}, which no layer has, expected a constructor")
        layer = _layers[name] = constructor(name=name, **kwargs)
    return layer


def split_embedding_variable_from_others(variables: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Return the embedding variables, and the others.

    Raises:
        ConfigError: Neither a list nor a tuple.
    """
    return filter_variables(_listed("variables", variables))


@contextmanager
def OptimizerScope(trainable_variables: Sequence[Any]) -> Iterator[None]:  # noqa: N802 - SOK's name
    """Let an optimizer update embedding variables in the block; they need nothing for it here.

    Raises:
        ConfigError: Neither a list nor a tuple.
    """
    _listed("trainable_variables", trainable_variables)
    yield


class Saver:
    """Files of embedding variables in the format of SOK 1.x: plain keys, and plain float32 rows in their order."""

    def dump_to_file(self, embedding_variable: Any, filepath: str | Path) -> tf.Tensor:
        """Write all keys and rows into a directory, and return the text "OK"."""
        variable = needed_rows("embedding_variable", embedding_variable)
        ids, rows, _ = variable.table.read()
        arrays: tuple[NDArray[Any], ...] = (variable.table.placement.all_ids(ids), rows)
        files = _files(variable, filepath)
        with files_of_all(Path(filepath), [file for file in files[:1] if file.exists()]) as partial:
            for file, numbers in zip(files, arrays, strict=True):
                write_of_all(partial / file.name, b"", numbers, variable.table.width)
        return tf.constant(_DONE)

    def restore_from_file(self, embedding_variable: Any, filepath: str | Path) -> tf.Tensor:
        """Read keys and rows that SOK or `dump_to_file` has written, and return the text "OK".

        Raises:
            DataNotFoundError: A file is missing.
            FormatError: Files that do not fit each other or the variable; nothing was changed then.
            ConfigError: More rows than it has room for, or ids beyond its `key_type`; nothing was changed then.
        """
        variable = needed_rows("embedding_variable", embedding_variable)
        keys, values = (_content(file) for file in _files(variable, filepath))
        count, rest = divmod(len(values), 4 * variable.table.width)
        if rest or not count or len(keys) not in (4 * count, 8 * count):
            raise FormatError(
                filepath, f"has {len(keys)} bytes of keys and {len(values)} of rows, expected 8 or 4 for each row's key"
            )
        ids = np.frombuffer(keys, "<u4" if len(keys) == 4 * count else "<i8").astype(np.int64)
        ids, parts = own_part(variable, ids, [np.frombuffer(values, "<f4").reshape(count, -1)], variable.table.name)
        variable.table.write(ids, parts[0])
        return tf.constant(_DONE)

    def load_embedding_values(self, embedding_variable: Any, tensors: Any) -> tf.Tensor:
        """Set the rows of keys 0, 1, ..., from a tensor [n, D] or a list of them, and return the text "OK".

        Raises:
            ConfigError: Rows of another width.
        """
        variable = needed_rows("embedding_variable", embedding_variable)
        parts = tensors if isinstance(tensors, list | tuple) else [tensors]
        try:
            rows = np.concatenate([np.asarray(part, np.float32) for part in parts])
        except (TypeError, ValueError) as error:
            raise ConfigError("tensors", f"are not rows of one table: {one_line(str(error))}") from None
        if rows.ndim != 2 or rows.shape[1] != variable.table.width:
            raise ConfigError("tensors", f"got shape {list(rows.shape)}, expected [n, {variable.table.width}]")
        variable.scatter_update(variable.own_slices(tf.range(len(rows), dtype=tf.int64), tf.constant(rows)))
        return tf.constant(_DONE)


def _absent(training: bool) -> Absent:
    return Absent.INSERT if training else Absent.ZEROS


def _files(variable: RowsVariable, folder: str | Path) -> tuple[Path, Path]:
    name = variable.table.name.replace("/", "_")
    return Path(folder) / f"{name}_keys.file", Path(folder) / f"{name}_values.file"


def _content(path: Path) -> bytes:
    with open_file(path) as file:
        return file.read()


def _listed(argument: str, variables: Any) -> Iterable[Any]:
    if not isinstance(variables, list | tuple):
        raise ConfigError(argument, f"got {type(variables).__name__}, expected a list or a tuple")
    return variables


def _new_rows(initializer: Any) -> InitialRows:
    """Return the initial values of new keys, of which there is no array to draw."""
    name, config = type(initializer).__name__, initializer.get_config()
    seed = str(config.get("seed"))
    if name == "RandomUniform":
        low, high = float(config["minval"]), float(config["maxval"])
        return InitialRows(offset=(low + high) / 2, scale=(high - low) / 2, seed=seed)
    if name == "RandomNormal":
        return InitialRows(offset=float(config["mean"]), scale=float(config["stddev"]), is_normal=True, seed=seed)
    constants = {"Zeros": 0.0, "Ones": 1.0, "Constant": config.get("value", 0.0)}
    if name not in constants:
        raise ConfigError(
            "embedding_initializer",
            f"got {name}, expected RandomUniform, RandomNormal, {', '.join(constants)} with a hash table",
        )
    return InitialRows(offset=float(constants[name]))
