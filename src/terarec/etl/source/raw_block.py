"""A piece of a file before and after it is parsed, and what a format's reader does with it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from terarec.etl.columns import Block, Column
from terarec.etl.source.bad_input import InputFault, Place
from terarec.etl.source.files import SourceFile
from terarec.spec import BadInputPolicy


@dataclass(frozen=True, slots=True)
class RawPart:
    """Some rows of a file, as they are stored or little more.

    Attributes:
        path: the file.
        before: lines of the file before these, or rows in a file without lines.
        num_rows: rows.
        read_bytes: bytes of the file that were read for them.
        content: what the format's reader parses.
        text_end: where they end in the text of the file; 0 in files that are no text.
    """

    path: str
    before: int
    num_rows: int
    read_bytes: int
    content: Any
    text_end: int = 0


@dataclass(frozen=True, slots=True)
class RawBlock:
    """Some rows of the sources, not parsed yet.

    Attributes:
        file: position of their file among the sources.
        first_row: row id of the first.
        part: the rows.
    """

    file: int
    first_row: int
    part: RawPart

    @property
    def num_rows(self) -> int:
        """Rows, those included that turn out to be bad."""
        return self.part.num_rows

    @property
    def read_bytes(self) -> int:
        """Bytes of the file, as it is stored, that were read for it."""
        return self.part.read_bytes


@dataclass(frozen=True, slots=True)
class FieldFaults:
    """Fields of one column that are no value of its type; they are missing in the column.

    Attributes:
        column: its name; None for faults of whole rows.
        kind: of the faults.
        expected: what is accepted.
        rows: int64[k], positions of their rows, rising.
        got: what stands there, of the first ones.
    """

    column: str | None
    kind: str
    expected: str
    rows: NDArray[np.int64]
    got: Sequence[str]


@dataclass(frozen=True, slots=True)
class ParsedPart:
    """The n rows of a part that were kept.

    Attributes:
        columns: name -> column of n rows.
        kept: int64[n], their positions in the part; None for all.
        counts: faults of each kind that occurred.
        faults: the first ones, in order. With the policy "raise" any is to be raised.
    """

    columns: Mapping[str, Column]
    kept: NDArray[np.int64] | None = None
    counts: Mapping[str, int] = field(default_factory=dict)
    faults: Sequence[InputFault] = ()

    def block(self, raw: RawBlock) -> Block:
        """The rows with their ids."""
        positions = np.arange(raw.num_rows) if self.kept is None else self.kept
        return Block(self.columns, raw.first_row + positions)


class FormatReader(Protocol):
    """Reads the files of one format. `parse` is called by several threads.

    Attributes:
        is_text: whether the rows of a file cannot be counted but by reading it.
        place: what its rows stand in.
    """

    is_text: bool
    place: Place

    def parts(self, file: SourceFile, after: RawPart | None = None) -> Iterator[RawPart]:
        """The rows of `file` in order, or those behind a part that was given before.

        Raises:
            ConfigError, FormatError: a file that does not fit the spec.
        """
        ...

    def parse(self, part: RawPart, policy: BadInputPolicy) -> ParsedPart:
        """The rows of a part."""
        ...

    def numbers(self, part: RawPart, positions: NDArray[np.int64]) -> list[int]:
        """The lines or rows of a file, from 1, in which the rows at some positions of a part stand."""
        ...

    def count_rows(self, file: SourceFile, threads: int) -> int:
        """Rows of `file`, bad ones included; so many `threads` may share the work."""
        ...

    def text_bytes(self, file: SourceFile) -> int:
        """About the bytes of the values in `file` as text."""
        ...
