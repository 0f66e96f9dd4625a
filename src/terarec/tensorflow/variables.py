# SPDX-License-Identifier: Apache-2.0
"""`Variable` and `DynamicVariable`: variables of TensorFlow whose rows lie in the compiled core."""

from __future__ import annotations

import importlib
import itertools
import operator
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from functools import partialmethod
from typing import Any, NoReturn

import numpy as np
import tensorflow as tf
from tensorflow.python.checkpoint.tensor_callable import Callable as TensorCallable
from tensorflow.python.ops.resource_variable_ops import ResourceVariable, VariableSpec

from terarec.errors import ConfigError
from terarec.spec.checks import is_count, is_unicode, one_line, quoted
from terarec.tensorflow import ops as table_ops
from terarec.tensorflow.communication import current
from terarec.tensorflow.ops import Bags, single_ids
from terarec.tensorflow.tables import ADD, HERE, SET, SPREAD, SUBTRACT, Absent, Placement, RowTable

_live: weakref.WeakValueDictionary[str, RowsVariable] = weakref.WeakValueDictionary()
_SAVED = ("clock", "ids", "initial", "place", "rows", "state_0", "state_1")
"""What checkpoints have of a variable; see `RowTable.write`."""
_MOST = 2**63 - 1
"""Largest size that the core has room for."""
_numbers = {"sok_static_Variable": itertools.count(), "sok_dynamic_Variable": itertools.count()}


def _keras_saveable() -> Any:
    """Return Keras 3's class of what its files contain, to which no public name leads; `object` where there is none.

    Keras asks objects of this class, which are attributes of layers or in lists there, what they have to save.
    """
    try:
        layer = importlib.import_module("keras").layers.Layer  # TensorFlow has imported it already
    except ImportError:  # TensorFlow itself does without it then
        return object
    return next((kind for kind in layer.__mro__ if kind.__name__ == "KerasSaveable"), object)


class RowsVariable(ResourceVariable, _keras_saveable()):  # type: ignore[misc]
    """A variable of TensorFlow that stands for a table; its own tensor is empty.

    Gradients, `tf.nn.embedding_lookup`, `tf.gather`, `scatter_add`, checkpoints and optimizers of Keras 3 work as with
    another variable. Reading all of it, as ``variable + 0`` does, copies the table.

    Attributes:
        table: The rows.
        is_of_layer: Whether it is the weight of a layer, whose rows Keras takes for all.
        legacy_optimizer: The last of tf_keras's legacy optimizers that made states of it without a wrapper, or None.

    Args:
        table: The rows.
        trainable: Whether gradient tapes watch it by themselves.
    """

    is_of_layer = False

    def __init__(self, table: RowTable, *, trainable: bool) -> None:
        check_no_strategy()
        self.table = table
        self.legacy_optimizer: weakref.ref[Any] | None = None
        self._resource: tf.Tensor | None = None
        # The ops run on the CPU, and TensorFlow runs an op where the resource is.
        with tf.init_scope(), tf.device("CPU:0"):
            super().__init__(
                initial_value=tf.zeros([0, table.width]),
                trainable=trainable,
                name=table.name,
                dtype=tf.float32,
                # A branch of `tf.cond` that reads no row has the gradient of this shape: none of any row.
                shape=tf.TensorShape([0, table.width]),
            )
        _live[table.name] = self

    @property
    def handle(self) -> tf.Tensor:
        """The resource that gradients and the order of ops follow."""
        return self._resource

    # TensorFlow's fast path in C reads a variable by this attribute without asking the variable. Where it is not a
    # tensor, the variable is converted as others are, by `value`.
    @property
    def _handle(self) -> None:
        return None

    @_handle.setter
    def _handle(self, resource: tf.Tensor) -> None:
        self._resource = resource

    def __tf_tracing_type__(self, signature_context: Any) -> VariableSpec:
        # Ops have the number of the table, so a function is traced for each; TensorFlow's own numbers, those of the
        # arguments of one call, would be the same for other variables.
        number = 2**40 + self.table.number
        signature_context.add_placeholder(number, self)
        return VariableSpec(shape=self.shape, dtype=self.dtype, trainable=self.trainable, alias_id=number)

    def is_initialized(self, name: str | None = None) -> tf.Tensor:
        """Return True: rows have values from the first."""
        return tf.constant(True)

    @property
    def shape(self) -> tf.TensorShape:
        """[V, D], or [None, D] for a table that grows."""
        return tf.TensorShape([None if self.table.grows else len(self.table), self.table.width])

    # Also what Keras writes into files, without the ids.
    def numpy(self) -> np.ndarray:
        """Return all rows float32[V, D] of this rank.

        Raises:
            ConfigError: They have ids of any value, or are a rank's part of those of a layer, or Keras asks for them.
        """
        return self._whole(keras_call())

    def _whole(self, by_keras: str) -> np.ndarray:
        self.check_whole(by_keras)
        return super().numpy()

    def check_whole(self, by_keras: str = "") -> None:
        """Raise `ConfigError` if its rows alone do not say which they are.

        Args:
            by_keras: Keras's function that asks for them, which takes a variable's part for the whole; "" if none does.
        """
        name = f"variable {self.table.name!r}"
        if self.table.grows:
            raise ConfigError(
                name,
                "its rows have ids of any value, expected sok.export, sok.dump, sok.Saver or "
                "tf.train.Checkpoint, which have the ids",
            )
        if self.is_of_layer or by_keras:
            self._check_all_here()
        is_trained = self.legacy_optimizer is not None and self.legacy_optimizer() is not None
        if is_trained and by_keras == "save_own_variables":
            raise ConfigError(
                name,
                "tf_keras's .keras and .weights.h5 files have no states of legacy optimizers, expected model.save to "
                ".h5 or tf.train.Checkpoint, which have them, or save_weights to another .h5",
            )

    def _check_all_here(self) -> None:
        if (ranks := current().size) > 1:
            raise ConfigError(
                f"variable {self.table.name!r}",
                f"its rows are on {ranks} ranks, expected sok.export, sok.dump or sok.Saver",
            )

    def __array__(self, dtype: np.dtype[Any] | None = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self._whole(keras_call()), dtype)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.table.name!r} shape={self.shape}>"

    @property
    def target_gpu(self) -> int:
        """The rank that has all rows; -1 if each has some."""
        return 0 if self.table.placement.home == HERE else self.table.placement.home

    @property
    def num_gpus(self) -> int:
        """Number of ranks."""
        return current().size

    @property
    def global_gpu_id(self) -> int:
        """Number of this rank."""
        return current().rank

    @property
    def size(self) -> tf.Tensor:
        """Number of rows and their width, int64[2]."""
        return table_ops.ops.size(self.table, self)

    def look_up(self, bags: Bags, absent: Absent = Absent.INSERT) -> tf.Tensor:
        """Return the vectors float32[B, D] of bags, or float32[N, D] without pooling; ids are those of all ranks."""
        return self.look_up_and_evict(bags, absent)[0]

    def look_up_and_evict(self, bags: Bags, absent: Absent, home: int | None = None) -> list[tf.Tensor]:
        """Return the vectors, and the ids int64[n] and rows float32[n, D] that made room for new ids.

        Args:
            bags: Ids of all ranks.
            absent: What it does with those that a growing table lacks.
            home: `HERE` to ask no other rank; None for the variable's.
        """
        home = self.table.placement.home if home is None else home
        vectors, ids, rows = table_ops.ops.lookup(self.table, self, bags, absent, home)
        for one in (vectors, rows):
            one.set_shape([None, self.table.width])
        return [vectors, ids, rows]

    def rows_of(self, indices: tf.Tensor, name: str | None = None, home: int | None = None) -> tf.Tensor:
        """Return the rows float32[..., D] of ids [...] of all ranks; `home` as of `look_up_and_evict`."""
        ids = whole_numbers("indices", indices)
        with tf.name_scope(name or "Gather"):
            vectors = self.look_up_and_evict(single_ids(tf.reshape(ids, [-1])), Absent.INSERT, home)[0]
            vectors = tf.reshape(vectors, tf.concat([tf.shape(ids), [self.table.width]], axis=0))
            vectors.set_shape(ids.shape.concatenate(self.table.width))
            return vectors

    # What TensorFlow's own lookups call. In scripts of SOK the rank that has all rows alone does.
    def sparse_read(self, indices: tf.Tensor, name: str | None = None) -> tf.Tensor:
        """Return the rows float32[..., D] of ids [...]; of a localized variable without the other ranks.

        Raises:
            ConfigError: Its rows are on another rank.
        """
        placement = self.table.placement
        if placement.home in (HERE, SPREAD):
            return self.rows_of(indices, name)
        if placement.home != placement.rank:
            raise ConfigError(
                f"variable {self.table.name!r}",
                f"its rows are on rank {placement.home} and this is rank {placement.rank}, expected sok.lookup_sparse "
                "or sok.embedding_lookup, which ask that rank",
            )
        return self.rows_of(indices, name, HERE)

    def gather_nd(self, indices: tf.Tensor, name: str | None = None) -> tf.Tensor:
        """Return rows of a table of fixed ones by ids [..., 1]."""
        return tf.gather_nd(self.read_value(), indices, name=name)

    def _read_variable_op(self, no_copy: bool = False) -> tf.Tensor:
        if self.table.grows:
            self.check_whole()
        _, rows = table_ops.ops.read(self.table, self)
        rows.set_shape(self.shape)
        return rows

    def assign(
        self, value: tf.Tensor, use_locking: bool | None = None, name: str | None = None, read_value: bool = True
    ) -> RowsVariable:
        """Set all rows to `value` [V, D]."""
        return self._change_all(SET, value)

    def assign_add(
        self, delta: tf.Tensor, use_locking: bool | None = None, name: str | None = None, read_value: bool = True
    ) -> RowsVariable:
        """Add `delta` [V, D]."""
        return self._change_all(ADD, delta)

    def assign_sub(
        self, delta: tf.Tensor, use_locking: bool | None = None, name: str | None = None, read_value: bool = True
    ) -> RowsVariable:
        """Subtract `delta` [V, D]."""
        return self._change_all(SUBTRACT, delta)

    def change(
        self, change: int, sparse_delta: tf.IndexedSlices, use_locking: bool = False, name: str | None = None
    ) -> RowsVariable:
        """Change rows in the way `change`, one of those of `terarec.tensorflow.tables`; an id may repeat.

        Setting rows gives a growing table the ids that it lacks.
        """
        check_no_strategy()
        table_ops.ops.change(self.table, self, change, slices_of("sparse_delta", sparse_delta, self.table.width))
        return self

    scatter_add = partialmethod(change, ADD)
    scatter_sub = partialmethod(change, SUBTRACT)
    scatter_update = partialmethod(change, SET)

    def own_slices(self, ids: tf.Tensor, rows: tf.Tensor) -> tf.IndexedSlices:
        """Return those rows [n, D] of ids [n] of all ranks that this rank has, as its part of the variable has them."""
        placement = self.table.placement
        if placement.size > 1:
            owns = ids % placement.size == placement.rank
            if placement.home != SPREAD:
                owns = tf.fill(tf.shape(ids), placement.home == placement.rank)
            ids, rows = tf.boolean_mask(ids, owns), tf.boolean_mask(rows, owns)
        return tf.IndexedSlices(rows, self.key_map(ids))

    def key_map(self, indices: tf.Tensor) -> tf.Tensor:
        """Return the names that ids have on the ranks that have their rows."""
        placement = self.table.placement
        return indices // placement.size if placement.home == SPREAD and placement.all_rows >= 0 else indices

    def _change_all(self, change: int, value: tf.Tensor) -> RowsVariable:
        if self.table.grows:
            raise ConfigError(
                "assign", f"{self.table.name!r} has ids of any value, expected sok.assign or sok.OptimizerWrapper"
            )
        value = tf.cast(tf.convert_to_tensor(value), tf.float32)
        if not value.shape.is_compatible_with(self.shape):
            raise ConfigError("value", f"got shape {value.shape}, expected {self.shape}")
        return self.change(change, tf.IndexedSlices(value, tf.range(self.shape[0], dtype=tf.int64)))

    def _not_for_rows(self, *_: object, **__: object) -> None:
        raise ConfigError(
            f"variable {self.table.name!r}",
            "does not do this, expected scatter_add, scatter_sub, scatter_update or assign",
        )

    scatter_max = scatter_min = scatter_mul = scatter_div = batch_scatter_update = _not_for_rows
    scatter_nd_add = scatter_nd_sub = scatter_nd_update = scatter_nd_max = scatter_nd_min = _not_for_rows
    _strided_slice_assign = count_up_to = _not_for_rows

    # By TensorFlow's own way a copy would be an ordinary variable.
    def _no_copy(self, *_: object, **__: object) -> NoReturn:
        raise ConfigError(
            f"variable {self.table.name!r}",
            "cannot be copied or pickled, expected tf.train.Checkpoint or sok.dump, or numpy() for its rows",
        )

    __copy__ = __deepcopy__ = __reduce__ = _no_copy

    # What `tf.train.Checkpoint` saves and restores: all of the table on this rank.
    def _serialize_to_tensors(self) -> dict[str, TensorCallable]:
        contents: list[np.ndarray] = []

        def part(number: int) -> tf.Tensor:
            if number == 0 or not contents:  # they are read one after the other, of one state of the table
                contents[:] = self._contents()
            return tf.constant(contents[number])

        types = [tf.int64 if name in ("clock", "ids", "place") else tf.float32 for name in _SAVED]
        return {
            name: TensorCallable(lambda number=number: part(number), dtype, self.device)
            for number, (name, dtype) in enumerate(zip(_SAVED, types, strict=True))
        }

    def _contents(self) -> list[np.ndarray]:
        """Return what files have of the table, in the order of `_SAVED`."""
        ids, rows, states, clock, initial = self.table.core.read()
        states += [np.zeros((0, self.table.width), np.float32)] * (2 - len(states))
        return [clock, ids, np.array([initial], np.float32), self._place(), rows, *states]

    def _copy_trackable_to_cpu(self, object_map: Any) -> None:
        raise ConfigError(
            f"variable {self.table.name!r}", "cannot be in an asynchronous checkpoint, expected enable_async=False"
        )

    def _restore_from_tensors(self, restored_tensors: dict[str, tf.Tensor]) -> tf.Operation:
        self._restore(restored_tensors[name].numpy() for name in _SAVED)
        return tf.no_op()

    def _restore(self, contents: Iterable[np.ndarray]) -> None:
        clock, ids, initial, place, rows, *states = contents
        if not np.array_equal(place, own := self._place()):
            raise ConfigError(
                f"variable {self.table.name!r}",
                f"got a checkpoint of rank {place[0]} of {place[1]}, expected one of rank {own[0]} of {own[1]}: "
                "sok.dump writes files for any number of ranks",
            )
        states = [state for state in states if len(state)]
        self.check_saved(ids, rows)
        self.table.write(ids, rows, states, clock, float(initial[0]) if states else None)

    # What Keras 3 calls for a variable that is an attribute of a layer or a model, or in a list or dict there.
    def _obj_type(self) -> str:
        return "Layer"  # one of those that Keras knows, whose own attributes it does not follow

    def save_own_variables(self, store: MutableMapping[str, np.ndarray]) -> None:
        """Write all of the table into a file of Keras 3; the rows of a layer's weight are written by the layer.

        Raises:
            ConfigError: Its rows are on several ranks.
        """
        if self.is_of_layer:
            return
        self._check_all_here()
        for name, content in zip(_SAVED, self._contents(), strict=True):
            store[name] = content

    def load_own_variables(self, store: Mapping[str, np.ndarray]) -> None:
        """Read what `save_own_variables` has written.

        Raises:
            ConfigError: The file has nothing of this variable, or what does not fit; nothing was changed then.
        """
        if self.is_of_layer:
            return
        names = set(store.keys())  # stores of Keras before 3.10 do not know `in`
        if absent := [name for name in _SAVED if name not in names]:
            raise ConfigError(
                f"variable {self.table.name!r}",
                f"the file has no {absent[0]!r} of it, expected one of a model with this embedding variable",
            )
        self._restore(np.asarray(store[name]) for name in _SAVED)

    def _place(self) -> np.ndarray:
        """Return this rank and the number of ranks, int64[2]."""
        return np.array([self.table.placement.rank, self.table.placement.size], np.int64)

    def check_saved(self, ids: np.ndarray, rows: np.ndarray) -> None:
        """Raise `ConfigError` if saved ids [n] and rows [n, D] cannot be those of the table.

        Those of a growing table may be of all ranks, which all raise if one has no place for its own.
        """
        table, name = self.table, f"variable {self.table.name!r}"
        expected = f"{'n' if table.grows else len(table)} x {table.width}"
        if rows.ndim != 2 or rows.shape[1] != table.width or not (table.grows or len(ids) == len(table)):
            raise ConfigError(name, f"got saved rows {' x '.join(map(str, rows.shape))}, expected {expected}")
        if not table.grows or not len(ids):
            return
        placement = table.placement
        most = np.bincount(ids % placement.size).max() if placement.home == SPREAD else len(ids)
        if most > table.capacity:
            raise ConfigError(name, f"got {most} saved rows, expected at most {table.capacity}")
        if table.is_narrow and not -(2**31) <= ids.min() <= ids.max() < 2**31:
            raise ConfigError(name, f"got saved ids {ids.min()} to {ids.max()}, expected those of int32")

    def _export_to_saved_model_graph(self, *_: object, **__: object) -> list[tf.Tensor]:
        raise ConfigError(
            f"variable {self.table.name!r}",
            "a SavedModel cannot hold its rows, expected that of sok.keras.plain(model), or tf.train.Checkpoint",
        )


class Variable(RowsVariable):
    """An embedding table of a fixed number of rows.

    On several ranks each has a part, of which it is the variable: `shape`, `numpy`, `assign`, `scatter_add` and
    gradients are of this part alone, and lookups take the ids of all rows.

    Attributes:
        global_shape: [V, D] of all ranks.

    Args:
        initial_value: Rows [V, D], or one row [D]; a tensor, an array, lists or a function without arguments.
        trainable: Whether gradient tapes watch it by themselves; None: yes.
        validate_shape: As for `tf.Variable`; no effect.
        caching_device: As for `tf.Variable`; no effect.
        name: Name; None for ``sok_static_Variable_<n>``.
        dtype: float32.
        constraint: None.
        shape: [V, D], with `initializer`.
        initializer: Function of shape and dtype, which makes the rows of this rank.
        mode: None or "distributed": row r is on rank r % N. "localized:k": all rows are on rank k.

    Raises:
        ConfigError: Another shape, dtype or mode, or a name that another variable has.
    """

    def __init__(
        self,
        initial_value: object = None,
        trainable: bool | None = None,
        validate_shape: bool = True,
        caching_device: object = None,
        name: str | None = None,
        dtype: object = None,
        constraint: None = None,
        shape: Sequence[int] | None = None,
        initializer: Callable[..., tf.Tensor] | None = None,
        mode: str | None = None,
    ) -> None:
        check_plain(dtype, constraint)
        if (initial_value is None) == (initializer is None):
            raise ConfigError("initial_value", "expected it, or shape and initializer")
        own_name, own = new_name(name, "sok_static_Variable"), placement_of(mode).rows
        if initializer is not None:
            all_rows, width = _whole_shape(shape)
            part = (len(range(all_rows)[own]), width)
            with tf.init_scope():  # a function's own operations would have no values here
                rows = numbers_of("initializer", initializer(shape=part, dtype=tf.float32))
            if rows.shape != part:
                raise ConfigError("initializer", f"has returned shape {list(rows.shape)}, expected {list(part)}")
        else:
            with tf.init_scope():
                value = initial_value() if callable(initial_value) else initial_value
            every = np.atleast_2d(numbers_of("initial_value", value))
            all_rows, rows = len(every), every[own]
        if rows.ndim != 2 or not rows.shape[1]:
            raise ConfigError("initial_value", f"got shape {list(rows.shape)}, expected [rows, dimension]")
        self.global_shape = tf.TensorShape([all_rows, rows.shape[1]])
        table = RowTable(own_name, rows.shape[1], len(rows), placement=placement_of(mode, all_rows))
        table.write(np.arange(len(rows)), rows)
        super().__init__(table, trainable=trainable is not False)


def keras_call() -> str:
    """Return the name of the function that has called the caller, if it is one of Keras or tf_keras; "" if not.

    tf_keras takes a variable itself for a weight, from attributes, lists and modules, and reads it to save it; nothing
    else tells that apart from a script, for which the variable is its rank's part.
    """
    caller = sys._getframe(2)
    package = caller.f_globals.get("__name__", "").partition(".")[0]
    return caller.f_code.co_name if package in ("keras", "tf_keras") else ""


def rows_of(variable: object) -> RowsVariable | None:
    """Return the embedding variable that a variable is, or that a Keras layer's weight has; None for others."""
    of_keras = getattr(variable, "_value", None)
    value = of_keras if isinstance(of_keras, RowsVariable) else variable
    return value if isinstance(value, RowsVariable) else None


def needed_rows(argument: str, variable: object) -> RowsVariable:
    """Return the embedding variable that a variable is or has, as `rows_of`.

    Raises:
        ConfigError: It is or has none; names the argument.
    """
    rows = rows_of(variable)
    if rows is None:
        raise ConfigError(argument, f"got {type(variable).__name__}, expected an embedding variable")
    return rows


def whole_numbers(argument: str, ids: object) -> tf.Tensor:
    """Return ids as int64.

    Raises:
        ConfigError: They are no integers; names the argument.
    """
    tensor = tf.convert_to_tensor(ids)
    if not tensor.dtype.is_integer:
        raise ConfigError(argument, f"got {tensor.dtype.name}, expected int32 or int64")
    return tf.cast(tensor, tf.int64)


def slices_of(argument: str, delta: object, width: int) -> tf.IndexedSlices:
    """Return rows and their ids, float32[n, D] and int64[n].

    Raises:
        ConfigError: They are no `tf.IndexedSlices`, or have another width; names the argument.
    """
    if not isinstance(delta, tf.IndexedSlices):
        raise ConfigError(argument, f"got {type(delta).__name__}, expected tf.IndexedSlices")
    rows = tf.cast(tf.convert_to_tensor(delta.values), tf.float32)
    if not rows.shape.is_compatible_with([None, width]):
        raise ConfigError(argument, f"got values of shape {rows.shape}, expected [n, {width}]")
    return tf.IndexedSlices(rows, whole_numbers(argument, delta.indices), delta.dense_shape)


def _whole_shape(shape: object) -> tuple[int, int]:
    """Return the sizes of the shape [rows, dimension].

    Raises:
        ConfigError: It is another one.
    """
    try:
        rows, width = map(operator.index, shape) if isinstance(shape, Iterable) else (0, 0)
    except (TypeError, ValueError):  # also of an unknown rank or size
        rows = width = 0
    if not 0 < min(rows, width) <= max(rows, width) <= _MOST:
        raise ConfigError("shape", f"got {quoted(shape)}, expected [rows, dimension] with an initializer")
    return rows, width


def numbers_of(argument: str, value: object) -> np.ndarray:
    """Return numbers as float32.

    Raises:
        ConfigError: They are none, or known in a graph alone; names the argument.
    """
    try:
        return np.asarray(value, np.float32)
    except (TypeError, ValueError, NotImplementedError) as error:  # the last one for tensors of a graph
        raise ConfigError(
            argument, f"got {type(value).__name__}, expected numbers [rows, dimension]: {one_line(str(error))}"
        ) from None


def placement_of(mode: object, all_rows: int = -1) -> Placement:
    """Return the placement of a table.

    Args:
        mode: None or "distributed" for rows on all ranks, "localized:k" for all on rank k.
        all_rows: Number of rows on all ranks; -1 for ids of any value.

    Raises:
        ConfigError: Another mode, or a rank that there is not.
    """
    ranks, home = current(), SPREAD
    if mode not in (None, "distributed"):
        word, _, number = mode.partition(":") if isinstance(mode, str) else ("", "", "")
        home = int(number) if word == "localized" and is_count(number) else ranks.size
    if home >= ranks.size:
        raise ConfigError(
            "mode",
            f"got {quoted(mode)}, expected None, 'distributed' or 'localized:k' with a rank k below {ranks.size}",
        )
    if ranks.size == 1:
        return Placement(all_rows=all_rows)
    return Placement(home=home, all_rows=all_rows, rank=ranks.rank, size=ranks.size)


def new_name(name: str | None, prefix: str) -> str:
    """Return the name of a new variable.

    Raises:
        ConfigError: It is no text, or a living variable has it.
    """
    if name is None:
        return next(own for number in _numbers[prefix] if (own := f"{prefix}_{number}") not in _live)
    if not isinstance(name, str) or not name or not is_unicode(name) or "\0" in name:
        raise ConfigError("name", f"got {quoted(name)}, expected a text that names files")
    if name in _live:
        raise ConfigError("name", f"got {quoted(name)}, which another variable has, expected a new one")
    return name


def live_variable(name: str) -> RowsVariable | None:
    """Return the variable of a name, None if there is none."""
    return _live.get(name)


def check_sizes(**sizes: object) -> None:
    """Raise `ConfigError` for an argument that is no integer > 0, or more than 64 bits have."""
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, int | np.integer) or not 0 < size <= _MOST:
            raise ConfigError(name, f"got {quoted(size)}, expected an integer from 1 to 2^63 - 1")


def check_no_strategy() -> None:
    """Raise `ConfigError` in the scope of a strategy, each of whose replicas would change the rows by itself."""
    if tf.distribute.has_strategy():
        raise ConfigError(
            "strategy",
            f"got {type(tf.distribute.get_strategy()).__name__}, expected none: make and train embeddings outside of "
            "`strategy.scope()`, in one process, or in those that torchrun or mpirun starts",
        )


def check_plain(dtype: object, constraint: object) -> None:
    """Raise `ConfigError` for a type or a constraint that rows do not have."""
    type_of("dtype", dtype, tf.float32)
    if constraint is not None:
        raise ConfigError(
            "constraint", "expected None: rows that a step does not touch would have to be projected, too"
        )


def type_of(argument: str, dtype: object, *accepted: tf.DType) -> tf.DType:
    """Return a type; for None the first of those that are accepted.

    Raises:
        ConfigError: It is none of them; names the argument.
    """
    try:
        kind = accepted[0] if dtype is None else tf.as_dtype(dtype)
    except (TypeError, ValueError):
        kind = None
    if kind not in accepted:
        names = " or ".join(one.name for one in accepted)
        raise ConfigError(argument, f"got {quoted(dtype if kind is None else kind.name)}, expected {names}")
    return kind


def number_of(argument: str, value: object) -> float:
    """Return a number.

    Raises:
        ConfigError: It is none, or not finite; names the argument.
    """
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        number = float("nan")
    if not abs(number) < float("inf"):
        raise ConfigError(argument, f"got {quoted(value)}, expected a number")
    return number
