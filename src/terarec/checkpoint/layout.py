"""Names inside a checkpoint (docs/formats.md)."""

from __future__ import annotations

import re

DENSE = "dense.safetensors"
OPTIMIZER = "optimizer.safetensors"
STATE = "state.json"
KEYS = "keys"
WEIGHTS = "weights"
STATE_PREFIX = "state."
USE_PREFIX = "use."
_TABLE_FILE = re.compile(r"tables/(.+)-(\d{5,})\.safetensors")
_MEMORY_FILE = re.compile(r"memory/(.+)-(\d{5,})\.safetensors")


def table_file(table: str, index: int) -> str:
    """File of the `index`-th piece of `table`."""
    return f"tables/{table}-{index:05d}.safetensors"


def parse_table_file(file: str) -> tuple[str, int] | None:
    """The table and the piece that `file` holds, or None for other files."""
    match = _TABLE_FILE.fullmatch(file)
    return (match[1], int(match[2])) if match else None


def memory_file(table: str, index: int) -> str:
    """File of the `index`-th piece of what a dynamic `table` remembers beside its rows."""
    return f"memory/{table}-{index:05d}.safetensors"


def parse_memory_file(file: str) -> tuple[str, int] | None:
    """The table and the piece of its memory that `file` holds, or None for other files."""
    match = _MEMORY_FILE.fullmatch(file)
    return (match[1], int(match[2])) if match else None
