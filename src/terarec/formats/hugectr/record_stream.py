"""What the writers of files of records share: a file that grows by records and appears when it is closed."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from terarec.io import AtomicFile


class RecordStream:
    """A file under construction. As a context manager it removes the file unless `close` was called inside.

    Args:
        path: where the file appears when the stream is closed.
    """

    def __init__(self, path: Path) -> None:
        self._file = AtomicFile(path)
        self._num_records = 0
        with self._file.guard():
            self._stream = self._file.partial.open("wb")
            self._stream.write(self._header(0))

    def close(self) -> int:
        """Finish the file and rename it into place; returns its number of records.

        Raises:
            StorageError: the disk is full; the partial file is gone.
        """
        with self._file.guard():
            self._stream.seek(0)
            self._stream.write(self._header(self._num_records))
            self._stream.close()
        self._file.commit()
        return self._num_records

    def abort(self) -> None:
        """Give an unfinished file up: nothing is left of it."""
        if not self._stream.closed:
            self._stream.close()
            self._file.abort()

    def _header(self, num_records: int) -> bytes:
        """What stands before the records; as long for any number of them."""
        return b""

    def _append(self, content: NDArray[np.uint8], num_records: int) -> None:
        with self._file.guard():
            self._stream.write(content.data)
        self._num_records += num_records

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.abort()
