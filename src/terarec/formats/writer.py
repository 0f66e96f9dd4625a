"""Base of the writers of all shard formats: checks, counting, and atomic writing."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pyarrow as pa
from numpy.typing import NDArray

from terarec.formats.block import ColumnBlock, Keys, check_rows
from terarec.io import AtomicFile
from terarec.spec import DatasetSpec, ShardSpec


class ShardWriter(ABC):
    """Writer of a shard of a split. As a context manager it removes the file unless `close` was called inside.

    Args:
        path: ``<data set>/<split>/<file>``; the file appears when the writer is closed.
        spec: Columns of the data set.
    """

    def __init__(self, path: Path, spec: DatasetSpec) -> None:
        self._spec = spec
        self._file = AtomicFile(path)
        self._num_rows = 0
        self._open = True

    def write(
        self,
        label: NDArray[Any],
        dense: NDArray[Any],
        keys: Sequence[Keys],
        weight: NDArray[Any] | None = None,
        metadata: Sequence[pa.Array] = (),
    ) -> None:
        """Append n rows. The NumPy arrays are copied and may be used again.

        Args:
            label: float32[n, L].
            dense: float32[n, F]; any strides.
            keys: For each categorical column integers[n], or n lists of them where hotness > 1.
            weight: float32[n], where the data set has a weight column.
            metadata: For each metadata column an Arrow array of n int64, double or large_string.

        Raises:
            FormatError: A wrong shape, a key outside its column's rows, or a weight that is negative or not finite;
                nothing was appended.
            StorageError: The disk is full; the partial file is gone.
        """
        self.write_block(
            ColumnBlock(label=label, dense=dense, keys=tuple(keys), weight=weight, metadata=tuple(metadata))
        )

    def write_block(self, block: ColumnBlock) -> None:
        """Append the rows of `block`; see `write`.

        Raises:
            FormatError, StorageError: As `write`.
        """
        where = str(self._file.path)
        weight, metadata = block.weight, block.metadata
        num_rows = check_rows(self._spec, block.label, block.dense, block.keys, where, weight=weight, metadata=metadata)
        self._append(block)
        self._num_rows += num_rows

    def close(self) -> ShardSpec:
        """Finish the file and rename it into place.

        Returns:
            The shard's entry for ``DatasetSpec.splits``.

        Raises:
            StorageError: The disk is full; the partial file is gone.
        """
        self._finish()
        self._file.commit()
        self._open = False
        path = self._file.path
        return ShardSpec(file=f"{path.parent.name}/{path.name}", rows=self._num_rows)

    def abort(self) -> None:
        """Remove the unfinished file."""
        if self._open:
            self._open = False
            self._discard()
            self._file.abort()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.abort()

    @abstractmethod
    def _append(self, rows: ColumnBlock) -> None:
        """Write or buffer checked rows."""

    @abstractmethod
    def _finish(self) -> None:
        """Write buffered rows and close the partial file."""

    @abstractmethod
    def _discard(self) -> None:
        """Close the partial file, which is about to be removed."""
