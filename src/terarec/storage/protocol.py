"""What every store of rows can do; checkpoints and the parameter server know no more of a table than this."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Rows:
    """Keys with what a table holds for them: the form in which rows leave a store and come back.

    Attributes:
        keys: int64[n], distinct.
        weights: float32[n, D].
        state: name of an optimizer state ("sum", "exp_avg", ...) -> float32[n, D] or float32[n].
    """

    keys: Tensor
    weights: Tensor
    state: Mapping[str, Tensor] = field(default_factory=dict)


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

    def __len__(self) -> int:
        """Number of keys held."""

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
        """Everything held, at most `chunk_rows` rows at a time; a chunk may share memory with the table."""

    def import_(self, rows: Rows) -> None:
        """Overwrite what is held for ``rows.keys``, all of it or nothing.

        Empty ``rows.state`` leaves the optimizer state as it is.

        Raises:
            KeyOutOfRangeError: a key that this store can never hold.
            StorageError: weights or state of another shape, or other state names than ``state_names``.
        """
