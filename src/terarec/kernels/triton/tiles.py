"""Sizes of tiles: how much one program of a kernel takes."""

from __future__ import annotations

import triton

_LOOKUP_ELEMENTS = 4096
"""At four warps 32 numbers a thread, which keeps eight loads of 16 bytes in flight; 126 registers on sm_90."""
_UPDATE_ELEMENTS = 2048
"""Weights, two states and the gradient: at 4096 ptxas gives Adam 255 registers and spills some (sm_90)."""
_MOST_ROWS = 128
_MOST_COLUMNS = 256


def whole_rows(width: int) -> tuple[int, int]:
    """(rows, columns) of a tile that holds whole rows of `width` numbers."""
    columns = triton.next_power_of_2(width)
    return max(1, min(_MOST_ROWS, _UPDATE_ELEMENTS // columns)), columns


def parts_of_rows(width: int) -> tuple[int, int]:
    """(rows, columns) of a tile that may hold a part of the columns of rows of `width` numbers."""
    columns = min(_MOST_COLUMNS, triton.next_power_of_2(width))
    return min(_MOST_ROWS, _LOOKUP_ELEMENTS // columns), columns
