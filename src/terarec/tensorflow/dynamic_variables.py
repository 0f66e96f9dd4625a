# SPDX-License-Identifier: Apache-2.0
"""`DynamicVariable`: an embedding variable of ids of any value."""

from __future__ import annotations

from numbers import Real
from typing import Any

import numpy as np
import tensorflow as tf

from terarec.errors import ConfigError
from terarec.spec.checks import quoted
from terarec.tensorflow import ops as table_ops
from terarec.tensorflow.tables import Growth, InitialRows, RowTable
from terarec.tensorflow.variables import RowsVariable, check_plain, check_sizes, new_name, placement_of, type_of


class DynamicVariable(RowsVariable):
    """An embedding table of ids of any value, which get rows when they are first looked up.

    Args:
        dimension: Width D of the rows.
        initializer: Initial values of rows: None, "" or "random", "normal", "uniform", "ones", "zeros", or a number as
            text. "random" is uniform in (0, 1] for "hbm" and normal for "hybrid", as SOK has it.
        var_type: "hbm", of any number of ids, or "hybrid", of at most `max_capacity`; None for "hybrid".
        name: Name; None for ``sok_dynamic_Variable_<n>``.
        constraint: None.
        trainable: Whether gradient tapes watch it by themselves.
        key_type: int64 or int32, beyond which ids raise `tf.errors.InvalidArgumentError`; None for int64.
        dtype: float32.
        mode: None or "distributed": id k is on rank k % N. "localized:k": all ids are on rank k.
        max_capacity: The most ids of "hybrid" on each rank. A new one then takes the row of the id that did not come
            for longest; more new ids in one lookup raise `tf.errors.ResourceExhaustedError`. None: what memory holds.
        options: For "hybrid" ``filter_ratio``, the chance with which a new id gets a row in a lookup with
            `use_low_frequency_filter`, and ``evict_strategy="kLru"``. SOK's other options of memory have no effect
            here: memory grows with the ids.

    Raises:
        ConfigError: Another value, or a name that another variable has.
    """

    def __init__(
        self,
        dimension: int,
        initializer: str | None = None,
        var_type: str | None = None,
        name: str | None = None,
        constraint: None = None,
        trainable: bool = True,
        key_type: object = None,
        dtype: object = None,
        mode: str | None = None,
        *,
        max_capacity: int | None = None,
        **options: Any,
    ) -> None:
        self.mode = None if mode == "distributed" else mode
        check_plain(dtype, constraint)
        self.backend_type = var_type or "hybrid"
        if self.backend_type not in ("hbm", "hybrid"):
            raise ConfigError("var_type", f"got {quoted(var_type)}, expected 'hbm' or 'hybrid'")
        self.key_type = type_of("key_type", key_type, tf.int64, tf.int32)
        unknown = sorted(set(options) - _MEMORY_OPTIONS)
        if unknown:
            raise ConfigError(unknown[0], f"is unknown, expected one of {', '.join(sorted(_MEMORY_OPTIONS))}")
        check_sizes(dimension=dimension)
        self.dimension, self.initializer_str = int(dimension), initializer or ""
        is_hybrid = self.backend_type == "hybrid"
        if max_capacity is not None:
            check_sizes(max_capacity=max_capacity)
        if (strategy := options.get("evict_strategy", "kLru")) != "kLru":
            raise ConfigError("evict_strategy", f"got {strategy!r}, expected 'kLru'")
        ratio = options.get("filter_ratio", 1.0)
        if isinstance(ratio, bool) or not isinstance(ratio, Real) or not 0 <= float(ratio) <= 1:
            raise ConfigError("filter_ratio", f"got {quoted(ratio)}, expected 0 <= ratio <= 1")
        own_name = new_name(name, "sok_dynamic_Variable")
        growth = Growth(
            initial=_initial_rows(initializer, is_hybrid=is_hybrid),
            capacity=int(max_capacity) if max_capacity is not None and is_hybrid else None,
            forgets=is_hybrid,
            is_narrow=self.key_type == tf.int32,
            admitted=float(ratio),
        )
        table = RowTable(own_name, self.dimension, growth, placement=placement_of(mode))
        super().__init__(table, trainable=trainable)

    @property
    def indices(self) -> tf.Tensor:
        """All ids of this rank, int64[n]."""
        return table_ops.ops.read(self.table, self)[0]


_MEMORY_OPTIONS = {
    "init_capacity",
    "max_hbm_for_vectors",
    "max_load_factor",
    "max_bucket_size",
    "block_size",
    "device_id",
    "io_by_cpu",
    "filter_ratio",
    "evict_strategy",
}


def _initial_rows(initializer: str | None, *, is_hybrid: bool) -> InitialRows:
    word = initializer or "random"
    if word in ("ones", "zeros"):
        return InitialRows(offset=float(word == "ones"))
    if word == "uniform" or (word == "random" and not is_hybrid):
        return InitialRows(offset=0.5, scale=0.5)
    if word in ("normal", "random"):
        return InitialRows(scale=1.0, is_normal=True)
    try:
        number = float(word)
    except (TypeError, ValueError, OverflowError):
        number = float("nan")
    if not abs(number) <= np.finfo(np.float32).max:
        raise ConfigError(
            "initializer",
            f"got {quoted(initializer)}, expected 'random', 'normal', 'uniform', 'ones', 'zeros' or a number as text",
        )
    return InitialRows(offset=number)
