# SPDX-License-Identifier: Apache-2.0
"""Tensor containers: safetensors files, streamed and checksummed in one pass. Described in docs/formats.md.

The safetensors library is not used for tables of GBs: its NumPy writer copies every tensor first, and neither its
writer nor its reader exposes the bytes, so a checksum would have to read everything again.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from terarec.errors import FormatError
from terarec.io.files import atomic_file
from terarec.io.opening import open_file
from terarec.spec.checks import quoted
from terarec.spec.codec import parse_json

BFLOAT16 = np.dtype([("bfloat16", "<u2")])
"""Element type of an array of bfloat16 bits; ``array.view(np.int16)`` are the bits themselves."""


def widen_bfloat16(array: NDArray[Any]) -> NDArray[Any]:
    """Return an array of `BFLOAT16` as float32; any other unchanged."""
    if array.dtype != BFLOAT16:
        return array
    return (array.view(np.uint16).astype(np.uint32) << 16).view(np.float32)


MAX_HEADER_BYTES = 100_000_000
METADATA = "__metadata__"
_PIECE_BYTES = 16 * 2**20
_MOST_DIMENSIONS = 32  # of an array, in every release of NumPy
_MOST_ELEMENTS = 2**59  # of 8 bytes, as many as an address reaches
_DTYPES: dict[str, str | np.dtype[Any]] = {
    "BF16": BFLOAT16,
    "F16": "<f2",
    "F32": "<f4",
    "F64": "<f8",
    "I8": "|i1",
    "I16": "<i2",
    "I32": "<i4",
    "I64": "<i8",
    "U8": "|u1",
    "U16": "<u2",
    "U32": "<u4",
    "U64": "<u8",
    "BOOL": "|b1",
}
_NAMES = {np.dtype(dtype): name for name, dtype in _DTYPES.items()}


@dataclass(frozen=True, slots=True)
class _Entry:
    """Location of a tensor: element type, shape, and its first and last byte after the header."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    start: int
    stop: int


def write_tensors(
    path: Path,
    tensors: Mapping[str, NDArray[Any]],
    metadata: Mapping[str, str] | None = None,
    *,
    flushes: bool = True,
) -> str:
    """Write `tensors` atomically, without copying them.

    Args:
        path: Path of the file.
        tensors: Name -> array, written in this order; one that is not contiguous is copied alone.
        metadata: Texts to keep in the header.
        flushes: See `terarec.io.files.AtomicFile`.

    Returns:
        SHA-256 of the complete file, in hexadecimal.

    Raises:
        FormatError: An element type that safetensors, or NumPy, does not have.
        StorageError: The disk is full; nothing is left behind.
    """
    digest = hashlib.sha256()
    # Unbuffered: a buffer would copy what is written in pieces of 16 MiB anyway.
    with atomic_file(path, flushes=flushes) as partial, partial.open("wb", buffering=0) as stream:
        _write(stream, digest, memoryview(_header(path, tensors, metadata or {})))
        for array in tensors.values():
            # safetensors is little-endian on every machine.
            little = array.astype(array.dtype.newbyteorder("<"), order="C", copy=False)
            # `reshape(-1)`, since an array without dimensions cannot be viewed as bytes.
            _write(stream, digest, np.ascontiguousarray(little).reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


def read_tensors(path: Path, *, sha256: str | None = None) -> tuple[dict[str, NDArray[Any]], dict[str, str]]:
    """Read a container.

    Args:
        path: Path of the file.
        sha256: Expected checksum, from `write_tensors`; None for no comparison.

    Returns:
        The arrays by name, in file order and writable, and the metadata.

    Raises:
        DataNotFoundError: No such file.
        FormatError: A damaged header, a file of another size than the header says, or another checksum.
    """
    digest = hashlib.sha256()
    with open_file(path, is_buffered=False) as stream:
        entries, metadata = _read_header(stream, digest, path)
        arrays = {}
        for name, entry in entries.items():
            # Not a view of the file: the checksum needs one pass over all bytes, and callers may write to the array.
            array = np.empty(entry.shape, dtype=entry.dtype)
            _read(stream, digest, array.reshape(-1).view(np.uint8).data, path)
            arrays[name] = array
    if sha256 is not None and digest.hexdigest() != sha256:
        raise FormatError(path, f"damaged, SHA-256 is {digest.hexdigest()}, expected {sha256}")
    return arrays, metadata


def tensor_shapes(path: Path) -> tuple[dict[str, tuple[int, ...]], dict[str, str]]:
    """Return the shapes of a container's arrays by name, and its metadata; only the header is read.

    Raises:
        DataNotFoundError: No such file.
        FormatError: A damaged header, or a file of another size than the header says.
    """
    with open_file(path, is_buffered=False) as stream:
        entries, metadata = _read_header(stream, hashlib.sha256(), path)
    return {name: entry.shape for name, entry in entries.items()}, metadata


def _header(path: Path, tensors: Mapping[str, NDArray[Any]], metadata: Mapping[str, str]) -> bytes:
    """Return the length and the JSON, padded so that the tensors start at a multiple of 8."""
    header: dict[str, Any] = {METADATA: dict(metadata)} if metadata else {}
    start = 0
    for name, array in tensors.items():
        kind = _NAMES.get(array.dtype.newbyteorder("<"))
        if kind is None or name == METADATA:
            raise FormatError(path, f"tensor {name!r} of type {array.dtype}, expected one of {', '.join(_DTYPES)}")
        stop = start + array.nbytes
        header[name] = {"dtype": kind, "shape": list(array.shape), "data_offsets": [start, stop]}
        start = stop
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    # JSON may end with blanks, as safetensors itself pads: 8-byte numbers are aligned in a mapped file.
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER_BYTES:
        raise FormatError(path, f"the header takes {len(text)} bytes, expected at most {MAX_HEADER_BYTES}")
    return len(text).to_bytes(8, "little") + text


def _read_header(stream: io.FileIO, digest: Any, path: Path) -> tuple[dict[str, _Entry], dict[str, str]]:
    size = os.fstat(stream.fileno()).st_size
    if size < 8:
        raise FormatError(path, f"holds {size} bytes, expected a header length of 8 bytes first")
    prefix = bytearray(8)
    _read(stream, digest, memoryview(prefix), path)
    length = int.from_bytes(prefix, "little")
    # Before memory is allocated: a damaged length may be any 64-bit number.
    if length > min(MAX_HEADER_BYTES, size - 8):
        raise FormatError(path, f"header of {length} bytes in a file of {size}, expected one that fits")
    text = bytearray(length)
    _read(stream, digest, memoryview(text), path)
    try:
        header = parse_json(text)
    except ValueError as error:
        raise FormatError(path, f"the header is not JSON ({error})") from None
    metadata = header.pop(METADATA, {}) if isinstance(header, dict) else None
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise FormatError(path, f"the header is not an object, or its {METADATA} holds something else than strings")
    entries = {name: _entry(path, name, described) for name, described in header.items()}
    # By place, since the names of a header may be in any order; empty tensors share theirs with the next one.
    ordered = dict(sorted(entries.items(), key=lambda item: (item[1].start, item[1].stop)))
    end = 0
    for name, entry in ordered.items():
        if entry.start != end:
            raise FormatError(path, f"tensor {name!r} starts at byte {entry.start}, expected {end}: hole or overlap")
        end = entry.stop
    if 8 + length + end != size:
        raise FormatError(path, f"holds {size} bytes, expected {8 + length + end} by its header")
    return ordered, metadata


def _entry(path: Path, name: str, described: Any) -> _Entry:
    try:
        dtype = np.dtype(_DTYPES[described["dtype"]])
        shape = tuple(described["shape"])
        start, stop = described["data_offsets"]
        # Not isinstance: true and false of JSON are integers in Python.
        is_valid = all(type(number) is int and number >= 0 for number in (*shape, start, stop))
    except (KeyError, TypeError, ValueError):
        is_valid = False
    if is_valid and stop - start != math.prod(shape) * dtype.itemsize:
        raise FormatError(path, f"tensor {name!r} has bytes {start} to {stop}, expected {list(shape)} of {dtype}")
    # NumPy rejects an array without elements, too, if no memory could hold its other dimensions.
    if not is_valid or len(shape) > _MOST_DIMENSIONS or math.prod(filter(None, shape)) > _MOST_ELEMENTS:
        raise FormatError(
            path, f"tensor {name!r} is described by {quoted(described)}, expected dtype, shape, data_offsets"
        )
    return _Entry(dtype, shape, start, stop)


def _write(stream: io.FileIO, digest: Any, view: memoryview) -> None:
    for start in range(0, len(view), _PIECE_BYTES):
        # Hashed just before it is written, while it is in the cache of the processor.
        piece = view[start : start + _PIECE_BYTES]
        digest.update(piece)
        # An unbuffered write may take less: Linux stops at 2 GiB, signals and full disks earlier.
        while piece:
            piece = piece[stream.write(piece) :]


def _read(stream: io.FileIO, digest: Any, view: memoryview, path: Path) -> None:
    done = 0
    while done < len(view):
        count = stream.readinto(view[done : done + _PIECE_BYTES])
        if not count:
            raise FormatError(path, f"ended {len(view) - done} bytes early")
        digest.update(view[done : done + count])
        done += count
