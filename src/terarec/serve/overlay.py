# SPDX-License-Identifier: Apache-2.0
"""Changed rows in memory over those of the tiers, so that all of a delta is seen at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from terarec.embedding.lookups import RowLookup
from terarec.kernels.hash_index import new_hash_index
from terarec.ps import DefaultRows
from terarec.ps.server import TableChange


class TableOverlay:
    """The changed rows of a table. They take their own memory once, and some 24 bytes a key.

    Attributes:
        changes: The changes, in their order.

    Args:
        changes: As above.
        width: Length D of a vector.
        default: Vectors of keys that lose their rows.
    """

    def __init__(self, changes: Sequence[TableChange], width: int, default: DefaultRows) -> None:
        self._default = default
        rows = [torch.empty(0, width), *(change.rows for change in changes)]
        self._rows = torch.cat(rows)
        self._index = new_hash_index()
        self.changes: list[TableChange] = []
        begin, gone = 0, self._rows.shape[0]  # the number behind the last row stands for none
        for removed, keys, _ in changes:
            end = begin + keys.numel()
            self._index.assign(removed, torch.full_like(removed, gone))
            self._index.assign(keys, torch.arange(begin, end))
            # Views of the rows here: those that were read are given up.
            self.changes.append(TableChange(removed, keys, self._rows[begin:end]))
            begin = end

    def over(self, rows: RowLookup, keys: Tensor) -> Tensor:
        """Return the rows float32[n, D] of ``keys int64[n]``: those that changed, and those of `rows` for others."""
        found = rows(keys)
        mine = keys.cpu()
        places = self._index.find(mine)
        is_changed = places >= 0
        if not bool(is_changed.any()):
            return found
        at, places, mine = is_changed.nonzero()[:, 0], places[is_changed], mine[is_changed]
        changed = torch.empty(at.numel(), self._rows.shape[1])
        has_row = places < self._rows.shape[0]
        changed[has_row] = self._rows[places[has_row]]
        if not bool(has_row.all()):
            changed[~has_row] = self._default(mine[~has_row])
        return found.index_copy(0, at.to(found.device), changed.to(found.device))


def overlaid(rows: Mapping[str, RowLookup], overlays: Mapping[str, TableOverlay]) -> Mapping[str, RowLookup]:
    """Return lookups that find the changed rows of tables before those of the tiers."""
    return {name: partial(overlays[name].over, lookup) for name, lookup in rows.items()}
