"""Sizes of tiles: how much one program of a kernel takes."""

from __future__ import annotations

import triton

_ELEMENTS = 4096
"""Of a tile: at four warps 32 numbers a thread, which keeps eight loads of 16 bytes in flight without spilling."""
_MOST_ROWS = 128
_MOST_COLUMNS = 256


def whole_rows(width: int) -> tuple[int, int]:
    """(rows, columns) of a tile that holds whole rows of `width` numbers."""
    columns = triton.next_power_of_2(width)
    return max(1, min(_MOST_ROWS, _ELEMENTS // columns)), columns


def parts_of_rows(width: int) -> tuple[int, int]:
    """(rows, columns) of a tile that may hold a part of the columns of rows of `width` numbers."""
    columns = min(_MOST_COLUMNS, triton.next_power_of_2(width))
    return whole_rows(columns)
