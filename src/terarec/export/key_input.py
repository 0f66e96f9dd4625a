"""How keys enter an exported model."""

from __future__ import annotations

from dataclasses import dataclass

NO_KEY = -(2**63)
"""Fills the places of a bag that has fewer keys than others; a table never finds it, and means do not count it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KeyInput:
    """An input int64[B, n, K] with the keys of n columns of the batch.

    Attributes:
        name: of the input.
        columns: features of the batch, in order.
        max_keys: K, the most keys of a bag; None leaves it open.
    """

    name: str
    columns: tuple[str, ...]
    max_keys: int | None = None
