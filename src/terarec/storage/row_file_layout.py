"""Descriptions of row files, which are stored with them, and options of their use, which are not."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

from terarec.spec import FieldError
from terarec.storage.row_store import KEY_BYTES, check_row_bytes

BLOCK_BYTES = 4096
"""Bytes of which a page has a multiple, for direct access."""
PAGE_HEADER_BYTES = 32
"""Bytes of a page before its keys."""
MOST_PAGE_BYTES = 64 * 1024
"""Bytes of the largest page."""
_LEAST_SPACE_RATIO = 1.4


@dataclass(frozen=True, kw_only=True, slots=True)
class RowColumn:
    """A part of a row: columns follow each other from the row's first byte on.

    Attributes:
        name: What it is, such as "weights" or "state.exp_avg".
        dtype: NumPy's name of its element type, such as "float32"; "bfloat16" has 2 bytes.
        shape: Its shape in one row; empty for one element.
    """

    name: str
    dtype: str
    shape: tuple[int, ...] = ()

    @property
    def num_bytes(self) -> int:
        """Bytes of the column in a row.

        Raises:
            ConfigError: NumPy has no such element type.
        """
        try:
            item_bytes = 2 if self.dtype == "bfloat16" else np.dtype(self.dtype).itemsize
        except TypeError:
            raise FieldError(
                "", "columns", f"got dtype {self.dtype!r} of {self.name!r}, expected one of NumPy"
            ) from None
        return item_bytes * math.prod(self.shape)


@dataclass(frozen=True, kw_only=True, slots=True)
class RowFileLayout:
    """Description of a row file: all that a reader needs to know of its rows.

    Attributes:
        table: Name of the table, for errors and tools.
        row_bytes: Bytes of a row.
        columns: Parts of a row; bytes that they leave at its end are not used. Empty: nothing is known of them.
        page_bytes: Bytes of a page, the unit of reading and of checksums: 4,096 times a power of two.
        segment_pages: Most pages of a segment.

    Raises:
        ConfigError: Rows, columns, pages or segments of impossible sizes.
    """

    table: str
    row_bytes: int
    columns: tuple[RowColumn, ...]
    page_bytes: int
    segment_pages: int

    def __post_init__(self) -> None:
        check_row_bytes(self.row_bytes)
        if (used := sum(column.num_bytes for column in self.columns)) > self.row_bytes:
            raise FieldError("", "columns", f"got {used} bytes, expected {self.row_bytes} or less, those of a row")
        sizes = [BLOCK_BYTES << shift for shift in range(5)]
        if self.page_bytes not in sizes or self.page_bytes < self.row_bytes + KEY_BYTES + PAGE_HEADER_BYTES:
            raise FieldError("", "page_bytes", f"got {self.page_bytes}, expected one of {sizes} that holds a row")
        if not 1 <= self.segment_pages < 2**32:
            raise FieldError("", "segment_pages", f"got {self.segment_pages}, expected 1 to {2**32 - 1}")


@dataclass(frozen=True, kw_only=True, slots=True)
class RowFileOptions:
    """Options of reading and writing a row file, which are not stored.

    Attributes:
        io: "io_uring", "threads" that call pread, or "auto" for the first where the kernel lets the process use it.
        io_threads: Threads that read, where io_uring does not.
        direct: Whether pages bypass the system's page cache (O_DIRECT).
        queue_bytes: Bytes of filled pages that wait for the disk at most.
        run_bytes: Bytes of pages side by side that are read at once at most; see `PageReader`.
        open_files: Most files that stay open.
        space_ratio: Compaction in the background keeps files below this multiple of live bytes, and 1 MiB; 0 for
            none in the background.
        is_working: Whether the files are working memory, of which nothing is to outlive the process: those that
            compaction has emptied are removed at once, though the last commit lists them.

    Raises:
        ConfigError: A value out of range.
    """

    io: Literal["auto", "io_uring", "threads"] = "auto"
    io_threads: int = 16
    direct: bool = False
    queue_bytes: int = 16 * 2**20
    run_bytes: int = 32 * 2**10
    open_files: int = 512
    space_ratio: float = 1.5
    is_working: bool = False

    def __post_init__(self) -> None:
        if self.io not in ("auto", "io_uring", "threads"):
            raise FieldError("", "io", f"got {self.io!r}, expected 'auto', 'io_uring' or 'threads'")
        for name, least in (("io_threads", 1), ("queue_bytes", 1), ("run_bytes", 4096), ("open_files", 8)):
            if (value := getattr(self, name)) < least:
                raise FieldError("", name, f"got {value}, expected {least} or more")
        if self.space_ratio != 0 and not self.space_ratio >= _LEAST_SPACE_RATIO:
            raise FieldError("", "space_ratio", f"got {self.space_ratio}, expected 0, or {_LEAST_SPACE_RATIO} or more")
