"""`BatchReader`: what training, evaluation and prediction need of a reader."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Protocol

from terarec.batch import Batch


class BatchReader(Protocol):
    """Batches of a split, epoch by epoch or as an endless stream, from any position that was saved.

    `terarec.data.Reader` and `terarec.data.records.RecordReader` are such readers; `terarec.data.open_reader` opens the
    right one.

    Attributes:
        repeat: Whether one iteration goes on for ever, from each epoch to the next. Then every batch is full, and a
            batch may hold the end of one epoch and the begin of the next.
    """

    repeat: bool

    def __iter__(self) -> Iterator[Batch]:
        """Iterate over the current epoch, or from it on without an end if the reader repeats.

        After `load_state_dict`, the iteration continues after the batch at which the state was taken. Otherwise it
        starts with the first batch of the current epoch, which is the next one once an epoch is exhausted.
        """
        ...

    def __len__(self) -> int:
        """Return the number of batches in an epoch, before records with a wrong checksum are left out.

        An epoch of damaged files has fewer: no batch has less than `batch_size` samples but the last.
        """
        ...

    def state_dict(self) -> dict[str, int | bool]:
        """Return the position after the last batch that was given, and the options that it depends on, as JSON data."""
        ...

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Continue at the next ``iter()`` exactly after the batch at which `state` was taken.

        The numbers of threads and of prefetched batches may differ.

        Raises:
            ConfigError: The state is no state, or one of other data or other options.
        """
        ...

    def close(self) -> None:
        """Stop the running iteration and its threads."""
        ...
