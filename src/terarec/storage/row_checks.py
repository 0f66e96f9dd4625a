"""Checks of rows that come into a store; each error names the table."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from terarec.errors import StorageError
from terarec.storage.protocol import Rows


def check_import(table: str, rows: Rows, weights: Tensor, state: Mapping[str, Tensor]) -> None:
    """Raise `StorageError` unless `rows` fit arena tensors ``weights [V, D]`` and ``state [V, ...]``.

    No state at all fits, too.
    """
    if rows.state and set(rows.state) != set(state):
        raise StorageError(f"table {table!r}: got optimizer states {sorted(rows.state)}, expected {sorted(state)}")
    held = {"weights": weights, **state}
    for what, values in {"weights": rows.weights, **rows.state}.items():
        expected = (rows.keys.numel(), *held[what].shape[1:])
        if tuple(values.shape) != expected or values.dtype != held[what].dtype:
            raise StorageError(
                f"table {table!r}: got {what} {values.dtype}{list(values.shape)}, "
                f"expected {held[what].dtype}{list(expected)}"
            )
