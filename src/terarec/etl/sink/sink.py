"""What an engine writes encoded rows to."""

from __future__ import annotations

from types import TracebackType
from typing import Protocol, Self

import numpy as np
from numpy.typing import NDArray

from terarec.formats import ColumnBlock


class Sink(Protocol):
    """Takes encoded rows and makes files of them. As a context manager it gives up what is not closed."""

    def write(self, split: str, rows: NDArray[np.int64], block: ColumnBlock) -> None:
        """Append rows to `split`.

        Args:
            split: "train", "valid" or "test".
            rows: their ids, int64[n].
            block: the rows.

        Raises:
            StorageError: the disk is full.
        """
        ...

    def close(self) -> None:
        """Finish all files, and what describes them."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None: ...
