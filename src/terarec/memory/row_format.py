# SPDX-License-Identifier: Apache-2.0
"""Row files and their rows as bytes: descriptions that are stored with the files, and options of use, which are not."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from terarec.errors import ConfigError, FormatError
from terarec.io.files import read_versioned_json, write_versioned_json
from terarec.memory.row_store import KEY_BYTES, check_row_bytes
from terarec.ops.row_update import are_finite
from terarec.spec import checks
from terarec.spec.checks import FieldError, quoted

BLOCK_BYTES = 4096
"""Bytes of which a page has a multiple, for direct access."""
PAGE_HEADER_BYTES = 32
"""Bytes of a page before its keys."""
MOST_PAGE_BYTES = 64 * 1024
"""Bytes of the largest page."""
_LEAST_SPACE_RATIO = 1.4
_ALIGNMENT = 4
_FEWEST_BYTES = 16  # of a row in a row store
_WEIGHTS = "weights"
_LEAST_PAGE_USE = 0.85
DESCRIPTION_FILE = "row_file.json"
_SUM = "sha256"
FORMAT = "terarec.row_file"
VERSION = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class RowColumn:
    """A part of a row: columns follow each other from the row's first byte on.

    Attributes:
        name: Name, such as "weights" or "state.exp_avg".
        dtype: NumPy's name of its element type, such as "float32"; "bfloat16" has 2 bytes.
        shape: Its shape in one row; empty for one element.
    """

    name: str
    dtype: str
    shape: tuple[int, ...] = ()

    @property
    def num_bytes(self) -> int:
        """Bytes of the column in a row."""
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
        segment_pages: Maximum number of pages of a segment.
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
        open_files: Maximum number of files that stay open, of all row files, and of half of what the system allows.
        space_ratio: Compaction in the background keeps files below this multiple of live bytes, and 1 MiB: writers
            wait for it. 0 for none in the background.
        is_working: Whether the files are working memory, of which nothing is to outlive the process: those that
            compaction has emptied are removed at once, though the last commit lists them.
    """

    io: Literal["auto", "io_uring", "threads"] = "auto"
    io_threads: int = 16
    direct: bool = False
    queue_bytes: int = 16 * 2**20
    run_bytes: int = 32 * 2**10
    open_files: int = 4096
    space_ratio: float = 1.5
    is_working: bool = False

    def __post_init__(self) -> None:
        if self.io not in ("auto", "io_uring", "threads"):
            raise FieldError("", "io", f"got {self.io!r}, expected 'auto', 'io_uring' or 'threads'")
        for name, least, most in (
            ("io_threads", 1, checks.MOST_THREADS),
            ("queue_bytes", 1, checks.MOST),
            ("run_bytes", 4096, checks.MOST),
            ("open_files", 8, checks.MOST),
        ):
            checks.argument(name, getattr(self, name), checks.integer(least, most))
        if self.space_ratio != 0 and not self.space_ratio >= _LEAST_SPACE_RATIO:
            raise FieldError("", "space_ratio", f"got {self.space_ratio}, expected 0, or {_LEAST_SPACE_RATIO} or more")


def write_description(directory: Path, layout: RowFileLayout) -> None:
    """Write ``row_file.json`` with a checksum: a changed column would give rows of other numbers.

    It is not forced to the disk: the directory of a new row file is, as a whole.
    """
    content = asdict(layout)
    described = {**content, _SUM: _sha256(content)}
    write_versioned_json(directory / DESCRIPTION_FILE, FORMAT, VERSION, described, flushes=False)


def _sha256(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def read_description(directory: Path) -> RowFileLayout:
    """Return the layout of a row file.

    Raises:
        FormatError: No row file, another version, another checksum, or a description that makes no sense.
    """
    path = directory / DESCRIPTION_FILE
    content = read_versioned_json(path, FORMAT, VERSION)
    names = {field.name for field in fields(RowFileLayout)}
    if unknown := content.keys() - names - {_SUM}:
        raise FormatError(path, f"has the unknown field {quoted(min(unknown))}, expected the layout of a row file")
    if content.pop(_SUM, None) != _sha256(content):
        raise FormatError(path, "damaged: its SHA-256 is not the one in it")
    try:
        columns = tuple(
            RowColumn(name=str(column["name"]), dtype=str(column["dtype"]), shape=tuple(map(int, column["shape"])))
            for column in content["columns"]
        )
        sizes = {name: int(content[name]) for name in ("row_bytes", "page_bytes", "segment_pages")}
        return RowFileLayout(table=str(content["table"]), columns=columns, **sizes)
    except (KeyError, TypeError, ValueError, ConfigError) as error:
        raise FormatError(path, f"{error}, expected the layout of a row file") from error


def page_bytes_of(row_bytes: int) -> int:
    """Return the smallest page of which rows use 85 %, for a row read takes a page; else the largest."""
    page_bytes = BLOCK_BYTES
    while page_bytes < MOST_PAGE_BYTES:
        slot_bytes = row_bytes + KEY_BYTES
        if (page_bytes - PAGE_HEADER_BYTES) // slot_bytes * slot_bytes >= _LEAST_PAGE_USE * page_bytes:
            break
        page_bytes *= 2
    return page_bytes


class RowFormat:
    """A row as bytes: its weights, then its states, each from a multiple of 4 bytes on.

    Attributes:
        width: Length D of a vector.
        dtype: Element type of the weights.
        states: Name -> element type and shape of a row's state.
        num_bytes: Bytes of a row, at least 16.
        offsets: Offsets of the weights and of each state in a row.
    """

    def __init__(
        self,
        width: int,
        dtype: torch.dtype,
        states: Mapping[str, tuple[torch.dtype, tuple[int, ...]]] | None = None,
    ) -> None:
        self.width = width
        self.dtype = dtype
        self.states = dict(states or {})
        self._parts: list[tuple[str, torch.dtype, tuple[int, ...], int, int]] = []
        end = 0
        for name, (of_part, shape) in {"": (dtype, (width,)), **self.states}.items():
            size = math.prod(shape) * of_part.itemsize
            self._parts.append((name, of_part, shape, end, size))
            # `Tensor.view` to a wider type needs such an offset: states have 4 bytes an element, weights before them
            # may have 2.
            end += -(-size // _ALIGNMENT) * _ALIGNMENT
        self.num_bytes = max(end, _FEWEST_BYTES)
        self.offsets = tuple(begin for *_, begin, _ in self._parts)
        self._is_dense = sum(size for *_, size in self._parts) == self.num_bytes
        self._is_float32 = self._is_dense and all(of_part is torch.float32 for _, of_part, *_ in self._parts)

    @classmethod
    def of_columns(cls, columns: Sequence[RowColumn]) -> RowFormat:
        """Return the format whose `columns` these are."""
        shapes = [column.shape for column in columns]
        if not columns or columns[0].name != _WEIGHTS or len(shapes[0]) != 1 or any(len(shape) > 1 for shape in shapes):
            names = ", ".join(f"{column.name} {list(column.shape)}" for column in columns)
            raise FormatError("columns", f"got {names or 'none'}, expected weights [D] and optimizer states")
        types = [getattr(torch, column.dtype) for column in columns]
        states = {column.name: (of, column.shape) for column, of in zip(columns[1:], types[1:], strict=True)}
        return cls(shapes[0][0], types[0], states)

    @property
    def state_names(self) -> tuple[str, ...]:
        """Names of the optimizer states."""
        return tuple(self.states)

    def columns(self) -> tuple[RowColumn, ...]:
        """Return the parts of a row, in the order of its bytes."""
        return tuple(
            RowColumn(name=name or _WEIGHTS, dtype=str(of).removeprefix("torch."), shape=shape)
            for name, of, shape, *_ in self._parts
        )

    def new_rows(self, rows: int) -> Tensor:
        """Return uint8[rows, num_bytes] in host memory; bytes between the parts of a row are 0."""
        # Gaps go to the disk, too: zeros keep old memory out of files.
        make = torch.empty if self._is_dense else torch.zeros
        return make(rows, self.num_bytes, dtype=torch.uint8)

    def pack(self, weights: Tensor, state: Mapping[str, Tensor]) -> Tensor:
        """Return rows as uint8[n, num_bytes] in host memory.

        Args:
            weights: [n, D] in host memory.
            state: Name -> state [n, ...] in host memory.
        """
        values = self.new_rows(weights.shape[0])
        for (name, *_), part in zip(self._parts, self._views(values), strict=True):
            part.copy_(state[name] if name else weights)
        return values

    def unpack(self, values: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the weights [n, D] and states of ``values uint8[n, num_bytes]``, which share its memory."""
        weights, *states = self._views(values)
        return weights, dict(zip(self.states, states, strict=True))

    def empty(self, rows: int, device: torch.device) -> tuple[Tensor, dict[str, Tensor]]:
        """Return weights [rows, D] and states of any values."""
        weights = torch.empty(rows, self.width, dtype=self.dtype, device=device)
        return weights, {
            name: torch.empty(rows, *shape, dtype=dtype, device=device) for name, (dtype, shape) in self.states.items()
        }

    def are_finite(self, values: Tensor) -> bool:
        """Return whether weights and states of ``values uint8[n, num_bytes]`` are float32 and all of them finite.

        Rows in one piece are read two to three times as fast as their weights alone, which lie apart.
        """
        return self._is_float32 and are_finite(values.view(torch.float32))

    def _views(self, values: Tensor) -> list[Tensor]:
        rows = values.shape[0]
        return [
            values[:, begin : begin + size].view(dtype).view(rows, *shape)
            for _, dtype, shape, begin, size in self._parts
        ]
