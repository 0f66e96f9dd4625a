"""What every store of rows can do; checkpoints and the parameter server know no more of a table than this."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from torch import Tensor

from terarec.spec import EvictionSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class Rows:
    """Keys with what a table holds for them: the form in which rows leave a store and come back.

    Attributes:
        keys: int64[n], distinct.
        weights: [n, D] of the table's element type.
        state: name of an optimizer state ("sum", "exp_avg", ...) -> float32[n, D] or float32[n].
        uses: what a dynamic table notes of a row's use: "count" int64[n], "last_step" int32[n].
    """

    keys: Tensor
    weights: Tensor
    state: Mapping[str, Tensor] = field(default_factory=dict)
    uses: Mapping[str, Tensor] = field(default_factory=dict)


@runtime_checkable
class Store(Protocol):
    """A table that turns keys into rows of an arena."""

    @property
    def name(self) -> str:
        """Name of the table."""

    @property
    def width(self) -> int:
        """Length D of a vector."""

    @property
    def state_names(self) -> tuple[str, ...]:
        """The optimizer states beside the weights; empty until an optimizer is attached."""

    @property
    def memory_bytes(self) -> int:
        """Bytes of weights, optimizer state and index."""

    @property
    def is_dynamic(self) -> bool:
        """Whether keys come and go; else all keys ``0 <= key < len`` are held for good."""

    def __len__(self) -> int:
        """Number of keys held."""

    def keys(self) -> Tensor:
        """The keys held, int64[n], rising."""

    def rows(self, keys: Tensor, *, train: bool) -> Tensor:
        """Arena rows int64[n] of ``keys int64[n]``; with `train`, a store that grows may take up unseen keys.

        Raises:
            KeyOutOfRangeError: a key that this store can never hold.
        """

    def export(self, keys: Tensor) -> Rows:
        """Copies of what is held for ``keys int64[n]``.

        Raises:
            KeyOutOfRangeError: a key that is not held.
        """

    def export_chunks(self, chunk_rows: int) -> Iterator[Rows]:
        """Everything held, at most `chunk_rows` rows at a time; a chunk may share memory with the table.

        At least one chunk, which is empty if nothing is held.
        """

    def import_(self, rows: Rows) -> None:
        """Overwrite what is held for ``rows.keys``, all of it or nothing.

        Empty ``rows.state`` leaves the optimizer state as it is.

        Raises:
            KeyOutOfRangeError: a key that this store can never hold.
            StorageError: weights or state of another shape, or other state names than ``state_names``.
        """

    def evict(self, by: EvictionSpec | None = None, *, keep_at_least: int | None = None) -> Tensor:
        """Take rows away, the least worthy first, and return their keys int64[n]; see `DynamicTable.evict`.

        Raises:
            StorageError: a table whose keys are held for good.
        """

    def take_evicted(self) -> Tensor:
        """The keys int64[n] that were evicted since the last call and have no row now."""

    def clear(self) -> None:
        """Forget every key that is not held for good, and all that was noted of keys."""

    def export_memory(self, chunk_keys: int) -> Iterator[Mapping[str, Tensor]]:
        """What is remembered beside the rows, as named tensors, at most `chunk_keys` keys at a time."""

    def import_memory(self, piece: Mapping[str, Tensor]) -> None:
        """Take over a piece that `export_memory` gave.

        Raises:
            StorageError: a piece of a table that remembers other things.
        """
