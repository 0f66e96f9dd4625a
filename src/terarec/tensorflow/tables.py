# SPDX-License-Identifier: Apache-2.0
"""Tables of the compiled core: memory of rows and of an optimizer's state of them, apart from TensorFlow's."""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from terarec.errors import ConfigError
from terarec.kernels.environment import forced_cpu

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from terarec.kernels.cpu import _tensorflow as core

_log = logging.getLogger(__name__)


def _load() -> tuple[Any, str]:
    """Return TensorFlow's functions of the ops, None where it cannot load the library, and the reason of that.

    Raises:
        KernelError: ``TERAREC_CPU`` is not a set of instructions.
    """
    spec = importlib.util.find_spec("terarec.kernels.cpu._tensorflow")
    if spec is None or spec.origin is None:
        raise ConfigError("terarec.tensorflow", "the compiled core has no tables, expected an installed terarec")
    try:
        # Before Python imports it: TensorFlow takes the ops that the first loading of a library registers.
        functions, problem = tf.load_op_library(spec.origin), ""
        if not hasattr(functions, "terarec_lookup"):
            functions, problem = None, "it was loaded before TensorFlow"
    except (tf.errors.OpError, RuntimeError) as error:
        functions, problem = None, str(error)
    return functions, problem


OPS, _problem = _load()
"""The ops, or None; then NumPy functions take their place."""
if OPS is None:
    _log.warning("the op library cannot be loaded, NumPy functions take its place: %s", _problem)

if not TYPE_CHECKING:
    from terarec.kernels.cpu import _tensorflow as core

if (_forced := forced_cpu()) is not None:
    core.select(_forced)
core.set_threads(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)

NUMBERS: tuple[str, ...] = tuple(core.number_names())
"""Names of the numbers of an update rule, in the core's order."""


@dataclass(frozen=True, kw_only=True, slots=True)
class InitialRows:
    """Initial values of the rows of new keys.

    Attributes:
        offset: Number that is added to all.
        scale: Half-width of the uniform, standard deviation of the normal distribution; 0 for neither.
        is_normal: Whether the distribution is the normal one.
        seed: With the name of the table and the key it determines a row.
    """

    offset: float = 0.0
    scale: float = 0.0
    is_normal: bool = False
    seed: str = ""


class Absent(IntEnum):
    """What a lookup does with ids that a growing table lacks: zeros, new rows, or new rows for some by chance."""

    ZEROS = 0
    INSERT = 1
    ADMIT = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Growth:
    """The growth of a table of ids of any value.

    Attributes:
        initial: Initial values of rows of new ids.
        capacity: The most ids; None for what memory holds.
        forgets: Whether new ids get the rows of those that did not come for longest when it is full, and the table
            knows when ids came last.
        is_narrow: Whether ids have to fit in 32 bits.
        admitted: Chance of a new id in a lookup with `Absent.ADMIT`.
    """

    initial: InitialRows = InitialRows()
    capacity: int | None = None
    forgets: bool = False
    is_narrow: bool = False
    admitted: float = 1.0


SPREAD, HERE = -1, -2
"""In place of a rank: all ranks have rows of a table; there is one process."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """The ranks that have the rows of a table.

    Attributes:
        home: The rank that has all; or `SPREAD`: id k is on rank k % size, of fixed rows as row k // size there; or
            `HERE`.
        all_rows: Number of rows on all ranks; -1 for ids of any value.
        rank: Number of this rank.
        size: Number of ranks.
    """

    home: int = HERE
    all_rows: int = -1
    rank: int = 0
    size: int = 1

    @property
    def rows(self) -> slice:
        """Which of all rows this rank has."""
        if self.home in (HERE, self.rank):
            return slice(None)
        return slice(self.rank, None, self.size) if self.home == SPREAD else slice(0)

    def owns(self, ids: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return whether ids [n] have their rows on this rank."""
        if self.home == SPREAD:
            return np.asarray(ids % self.size == self.rank)
        return np.full(len(ids), self.home in (HERE, self.rank))

    def all_ids(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the ids on all ranks of those that this rank's table has."""
        return ids * self.size + self.rank if self.home == SPREAD and self.all_rows >= 0 else ids


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """The update of rows by an optimizer; the formulas are those of the specs in `terarec.spec.optimizer`.

    Attributes:
        kind: Name of the formula.
        numbers: Its numbers but the learning rate.
        states: Names of its states, as the optimizer calls them.
        initial: Initial value of the first state.
        is_global: Whether rows without a gradient are updated, too, as with a gradient of zero.
    """

    kind: str
    numbers: dict[str, float]
    states: tuple[str, ...] = ()
    initial: float = 0.0
    is_global: bool = False

    def vector(self, learning_rate: tf.Tensor) -> tf.Tensor:
        """Return all numbers as float64[n], in the order of `NUMBERS`."""
        numbers = {**self.numbers, "updates_all_rows": float(self.is_global)}
        rest = tf.constant([numbers.get(name, 0.0) for name in NUMBERS[1:]], tf.float64)
        return tf.concat([tf.reshape(tf.cast(learning_rate, tf.float64), [1]), rest], axis=0)

    @property
    def number(self) -> int:
        """The core's number of the formula."""
        return core.rule_number(self.kind)


class RowTable:
    """A table of rows float32[D] by ids.

    Attributes:
        name: Name, which errors have.
        width: Width D of the rows.
        core: The table of the compiled core.
        number: Its number, by which ops find it.
        placement: The ranks that have the other rows.
        capacity: The most rows of a table that grows.
        is_narrow: Whether ids have to fit in 32 bits.

    Args:
        name: Name.
        width: Width D of the rows.
        rows: Number of rows of this process; or how a table of ids of any value grows, which get rows when they come.
        placement: The ranks that have the other rows.
    """

    def __init__(
        self,
        name: str,
        width: int,
        rows: int | Growth,
        *,
        placement: Placement = Placement(),
    ) -> None:
        growth = rows if isinstance(rows, Growth) else Growth()
        initial = growth.initial
        self.name, self.width = name, width
        self.placement, self.is_narrow = placement, growth.is_narrow
        self.capacity = growth.capacity if growth.capacity is not None else _memory_bytes() // (4 * width)
        # Python's own hash of a text differs in every process.
        seed = hashlib.blake2b(f"{name}\0{initial.seed}".encode(), digest_size=8).digest()
        self.core: core.Table
        self.number: int
        self.core, self.number = core.new_table(
            name,
            width,
            rows if isinstance(rows, int) else -1,
            self.capacity,
            initial.offset,
            initial.scale,
            initial.is_normal,
            int.from_bytes(seed, "little"),
            growth.forgets,
            growth.is_narrow,
            growth.admitted,
        )

    @property
    def grows(self) -> bool:
        """Whether ids of any value get rows when they come."""
        return self.core.grows

    def __len__(self) -> int:
        """Return the number of rows."""
        return self.core.size()

    def read(self) -> tuple[NDArray[np.int64], NDArray[np.float32], list[NDArray[np.float32]]]:
        """Return copies of all ids int64[n], their rows float32[n, D], and the states, which have the same shape."""
        ids, rows, states, *_ = self.core.read()
        return ids, rows, states

    def write(
        self,
        ids: NDArray[np.int64],
        rows: NDArray[np.float32],
        states: Sequence[NDArray[np.float32]] = (),
        clock: NDArray[np.int64] | None = None,
        initial: float | None = None,
    ) -> None:
        """Replace all rows and states, or change nothing; states that are not given get their initial values.

        Args:
            ids: All ids int64[n]; of fixed rows 0 to n - 1.
            rows: Their rows float32[n, D].
            states: Their states float32[n, D].
            clock: Number of lookups that admitted, and when each id of a table that forgets came, int64[1 + n] or
                int64[1]; None for now.
            initial: The first state of the rows of new ids; None for what it is.

        Raises:
            ValueError: An id outside a table of fixed rows, or rows of another shape.
            MemoryError: More ids than it has room for.
        """
        numbers = [np.ascontiguousarray(part, np.float32) for part in (rows, *states)]
        clock = np.zeros(0, np.int64) if clock is None else clock
        self.core.replace(np.ascontiguousarray(ids, np.int64), numbers[0], numbers[1:], clock, initial)

    def set_state(self, number: int, state: NDArray[np.float32]) -> None:
        """Replace a state float32[V, D] of all rows of a table of fixed ones.

        Raises:
            ValueError: Another shape.
        """
        self.core.set_state(number, np.arange(len(self)), np.ascontiguousarray(state, np.float32))

    def since(self, microseconds: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Return ids int64[n] that came or were set at or after a time since 1970, and their rows float32[n, D].

        Raises:
            ValueError: The table does not forget.
        """
        return self.core.since(microseconds)

    def have_states(self, rule: Rule) -> None:
        """Allocate the states of a rule unless the table has them; new ids get its initial values from then on."""
        self.core.have_states(len(rule.states), rule.initial)


SET, ADD, SUBTRACT = 0, 1, 2
"""Ways to change rows."""


def _memory_bytes() -> int:
    """Return the size of this machine's memory, which no table outgrows."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
