"""The tables of a collection in a module's ``state_dict``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from terarec.storage import DynamicTable, Rows, StaticTable

AnyTable = StaticTable | DynamicTable


def entry_names(table: AnyTable, prefix: str) -> tuple[str, ...]:
    """The entries of ``state_dict`` that hold `table`."""
    name = f"{prefix}tables.{table.name}"
    return (f"{name}.keys", f"{name}.weights") if table.is_dynamic else (name,)


def entries(table: AnyTable, prefix: str) -> dict[str, Tensor]:
    """What ``state_dict`` holds of `table`: its weights, shared, or copies of its rising keys and their weights."""
    if isinstance(table, StaticTable):
        values: tuple[Tensor, ...] = (table.weights,)
    else:
        pieces = list(table.export_chunks(max(1, len(table))))
        # An index lists keys in an order of its own, which differs from process to process.
        keys, order = torch.cat([piece.keys for piece in pieces]).sort()
        values = (keys, torch.cat([piece.weights for piece in pieces])[order])
    return dict(zip(entry_names(table, prefix), values, strict=True))


def load_entries(table: AnyTable, prefix: str, state: Mapping[str, Any]) -> tuple[list[str], str | None]:
    """Take `table` from its entries in `state`.

    Returns:
        The entries that are missing, and what is wrong with the others; with either, `table` is as it was.
    """
    names = entry_names(table, prefix)
    missing = [name for name in names if name not in state]
    if missing:
        return missing, None
    keys, weights = state[names[0]], state[names[-1]]
    if not (isinstance(keys, Tensor) and isinstance(weights, Tensor)):
        return [], f"{names[0]}: got {type(keys).__name__} and {type(weights).__name__}, expected tensors"
    if isinstance(table, StaticTable):
        expected, what = list(table.weights.shape), "(rows, width)"
    else:
        expected, what = [keys.numel(), table.width], "(keys, width)"
        if keys.dtype != torch.int64 or keys.dim() != 1:
            return [], f"{names[0]}: got {keys.dtype}{list(keys.shape)}, expected torch.int64[n]"
    if list(weights.shape) != expected:
        return [], f"{names[-1]}: got shape {list(weights.shape)}, expected {expected} {what}"
    if isinstance(table, StaticTable):
        table.weights.copy_(weights)
    else:
        rows = Rows(keys=keys.to(table.arena.device), weights=weights.to(table.arena.dtype))
        if torch.equal(rows.keys.sort().values, table.keys()):
            table.import_(rows)  # as with a static table, the optimizer state stays
        else:
            table.replace(rows)
    return [], None
