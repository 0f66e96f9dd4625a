"""Norm files: a header, then records with any number of keys in each slot. See docs/hugectr-formats.md."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from terarec.formats.block import ColumnBlock
from terarec.formats.hugectr.norm_frames import even_spans, framed_spans, has_right_checksum, plain_spans
from terarec.formats.hugectr.norm_header import header_size, parse_header
from terarec.formats.hugectr.norm_records import decode, decode_even
from terarec.formats.location import locate
from terarec.spec import RecordLayout


class NormFile:
    """One Norm file, read as a whole from any thread.

    Args:
        path: a path or URL.
        layout: what its records hold; `slot_sizes` are not looked at, since Norm files hold the final keys.
        checksum: whether every record has a frame with a checksum.

    Attributes:
        num_records: records that its header promises.

    Raises:
        DataNotFoundError: no such file.
        FormatError: the header is cut short, damaged, or of another layout.
    """

    def __init__(self, path: str | Path, layout: RecordLayout, *, checksum: bool) -> None:
        self._file = locate(path)
        self._layout = layout
        self._checksum = checksum
        head = self._file.read(0, min(self._file.size, header_size(checksum=checksum)))
        self.num_records = parse_header(head, layout, self._file.name, checksum=checksum)

    def read(self) -> tuple[ColumnBlock, int]:
        """The records whose checksum is right, and how many were left out because theirs is not.

        Labels and dense numbers are float32; keys int64[n] where every sample holds one, (values, offsets) elsewhere.

        Raises:
            FormatError: the file is cut short or goes on after its records, or a record does not hold what its
                length or the layout promises.
        """
        content = self._file.read(0, self._file.size)
        where = self._file.name
        first = header_size(checksum=self._checksum)
        if not self._checksum:
            return self._read_plain(content, first), 0
        spans = framed_spans(content, first, self.num_records, where)
        good = has_right_checksum(content, spans)
        block = decode(content, spans.keep(good), self._layout, where)
        return block, len(good) - int(good.sum())

    def _read_plain(self, content: NDArray[np.uint8], first: int) -> ColumnBlock:
        """Records without frames; where their sizes divide evenly they may all be alike, which is soon seen."""
        where = self._file.name
        stride, rest = divmod(len(content) - first, max(self.num_records, 1))
        if self.num_records and not rest:
            block = decode_even(content, even_spans(first, stride, stride, self.num_records), self._layout, where)
            if block is not None:
                return block
        spans = plain_spans(content, first, self.num_records, self._layout, where)
        return decode(content, spans, self._layout, where)
