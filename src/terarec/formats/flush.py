"""Forcing what was written to the disk, so that no rename outlives the bytes that it promises."""

from __future__ import annotations

import os
from pathlib import Path


def flush(path: Path) -> None:
    """Force a file, or the names in a directory, to the disk."""
    if os.name != "posix" and path.is_dir():
        return  # only POSIX opens directories
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def flush_tree(directory: Path) -> None:
    """Force `directory` and all below it to the disk."""
    for path in directory.rglob("*"):
        flush(path)
    flush(directory)
