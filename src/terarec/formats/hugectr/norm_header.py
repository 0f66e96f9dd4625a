"""The header of Norm files and the frames of checked ones. See docs/hugectr-formats.md."""

from __future__ import annotations

import struct

import numpy as np
from numpy.typing import NDArray

from terarec.errors import FormatError
from terarec.spec import RecordLayout

HEADER = struct.Struct("<8q")
_FIELDS = ("error_check", "number_of_records", "label_dim", "dense_dim", "slot_num")


def header_bytes(layout: RecordLayout, num_records: int, *, checksum: bool) -> bytes:
    """The header, in its frame if there is a `checksum`."""
    payload = HEADER.pack(checksum, num_records, layout.label_dim, layout.dense_dim, layout.num_slots, 0, 0, 0)
    return frame(payload) if checksum else payload


def frame(payload: bytes) -> bytes:
    """Length, `payload`, and the sum of its bytes modulo 256."""
    return struct.pack("<i", len(payload)) + payload + bytes([sum(payload) % 256])


def header_size(*, checksum: bool) -> int:
    """Bytes before the first record."""
    return HEADER.size + (5 if checksum else 0)


def parse_header(content: NDArray[np.uint8], layout: RecordLayout, where: str, *, checksum: bool) -> int:
    """The number of records of the file that begins with `content`.

    Raises:
        FormatError: too few bytes, another kind of file, a wrong checksum, or dimensions that are not the layout's;
            the message starts with `where` and names the byte.
    """
    size = header_size(checksum=checksum)
    if len(content) < size:
        raise FormatError(f"{where}: ends at byte {len(content)}, expected a header of {size} bytes")
    first = HEADER.size if not checksum else _framed_payload(content, where)
    found = HEADER.unpack(content[first - HEADER.size : first].tobytes())
    expected = (int(checksum), found[1], layout.label_dim, layout.dense_dim, layout.num_slots)
    for index, (field, value, right) in enumerate(zip(_FIELDS, found, expected, strict=False)):
        byte = first - HEADER.size + 8 * index
        if value != right:
            raise FormatError(f"{where}: byte {byte}: {field} is {value}, expected {right}")
        if value < 0:
            raise FormatError(f"{where}: byte {byte}: {field} is {value}, expected 0 or more")
    return int(found[1])


def _framed_payload(content: NDArray[np.uint8], where: str) -> int:
    """The byte after the header's payload."""
    (length,) = struct.unpack_from("<i", content.data)
    if length != HEADER.size:
        raise FormatError(
            f"{where}: byte 0: the header's length is {length}, expected {HEADER.size} (a file with checksums)"
        )
    end = 4 + HEADER.size
    total, found = int(content[4:end].sum()) % 256, int(content[end])
    if total != found:
        raise FormatError(f"{where}: byte {end}: the header's checksum is {found}, its bytes sum to {total}")
    return end
