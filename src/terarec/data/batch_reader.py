"""`BatchReader`: what training and evaluation need of a reader, whatever files it reads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from terarec.batch import Batch


class BatchReader(Protocol):
    """Batches of samples in an order that can be replayed.

    Attributes:
        repeat: whether ``iter()`` gives an endless stream of epochs; otherwise it gives one epoch.
    """

    repeat: bool

    def __iter__(self) -> Iterator[Batch]:
        """The batches of an epoch, or with `repeat` of all epochs; after `load_state_dict` those that follow."""
        ...

    def __len__(self) -> int:
        """Number of batches in an epoch."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """The position after the last batch that was given, as JSON data."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from such a position at the next ``iter()``."""
        ...

    def close(self) -> None:
        """End the running iteration and its threads."""
        ...
