"""Keysets: the distinct keys of a data set, one after the other. See docs/hugectr-formats.md."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from terarec.errors import FormatError
from terarec.formats.hugectr.key_types import check_key_range, key_dtype
from terarec.io import locate, write_bytes


def read_keyset(path: str | Path, key_bytes: int) -> NDArray[np.int64]:
    """The keys int64[n] of a keyset, in the order of the file.

    Raises:
        DataNotFoundError: no such file.
        FormatError: the size is no multiple of `key_bytes`.
    """
    file = locate(path)
    if file.size % key_bytes:
        raise FormatError(f"{path}: holds {file.size} bytes, expected a multiple of {key_bytes} bytes a key")
    return file.read(0, file.size).view(key_dtype(key_bytes)).astype(np.int64)


def write_keyset(path: Path, keys: NDArray[Any], key_bytes: int) -> None:
    """Write ``keys[n]``, atomically.

    Raises:
        FormatError: a key that `key_bytes` bytes cannot hold.
        StorageError: the disk is full.
    """
    check_key_range(keys, key_bytes, str(path))
    write_bytes(path, keys.astype(key_dtype(key_bytes)).tobytes())
