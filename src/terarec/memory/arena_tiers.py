# SPDX-License-Identifier: Apache-2.0
"""`ArenaTiers`: the fast tier of a trained arena and those below it, created, replaced and closed together."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from terarec.closer import Closer
from terarec.errors import ConfigError
from terarec.kernels.slots import SLOT_BYTES, RowBatch
from terarec.memory.budget import TierSizes, rows_of_table
from terarec.memory.cache import Cache
from terarec.memory.fast_tier import FastTier, TierUse
from terarec.memory.files import TierFiles
from terarec.memory.growing_rows import check_has_memory
from terarec.memory.initial_values import InitialValues
from terarec.memory.level import FileLevel
from terarec.memory.row_format import RowFormat
from terarec.memory.write_behind import WrittenBehind
from terarec.spec import DynamicTableSpec, TableSpec, Tiers


class ArenaTiers:
    """The tiers of an arena. They are made when they are first needed, and again for other rows or another device.

    Attributes:
        specs: The tables of the arena.
        sizes: How many rows the tiers hold; its budget is read when the tiers are made.
        device: Device of the fast tier.
        format: Bytes of a row; those of the tiers that are made next.
        first: Initial values of rows that are in no tier.
        memory: The fast tier; None before it is needed.
        num_defaults: As below.
        lock: Held by whoever uses the tiers.

    Args:
        tiers: The budgets.
        seed: Seed of the initial weights.
        num_defaults: Rows at the start of the arena that belong to no key and are always in the fast tier.
    """

    def __init__(
        self, specs: Sequence[TableSpec | DynamicTableSpec], tiers: Tiers, *, seed: int, num_defaults: int
    ) -> None:
        self.specs = tuple(specs)
        self.sizes = TierSizes(specs, tiers, num_defaults=num_defaults)
        self.device = torch.device("cpu")
        self.format = RowFormat(specs[0].width, getattr(torch, specs[0].dtype))
        self.sizes.row_bytes = self.format.num_bytes
        self.first = InitialValues(specs, seed)
        self.memory: FastTier | None = None
        self.num_defaults = num_defaults
        # Reentrant, since operations under the lock call others that take it.
        self.lock = threading.RLock()
        self._defaults: Tensor | None = None
        self._written = TierUse()
        self._files = TierFiles(tiers.file, [spec.name for spec in specs], [rows_of_table(spec) for spec in specs])
        # Files are working memory: they are removed with the tables, even without a call of `close`.
        self._closer = Closer(self, self._files.close)

    @property
    def memory_bytes(self) -> int:
        """Bytes of the slots that were used so far and of what the tiers below hold in memory."""
        memory = self.memory
        if memory is None:
            return 0
        below = 0 if memory.below is None else memory.below.memory_bytes
        return memory.slots.used_slots * (self.format.num_bytes + SLOT_BYTES) + below

    @property
    def written(self) -> TierUse:
        """Rows and bytes written to the tiers below so far."""
        return self._written if self.memory is None else self._written.plus(self.memory.written)

    def opened(self) -> FastTier:
        """Return the fast tier, which is made if it is not there.

        Raises:
            StorageError: Another process uses the files, or rows of more bytes than a tier below takes.
        """
        if self.memory is None:
            self.memory = self._new_memory()
        return self.memory

    def set_format(self, of: RowFormat, fills: dict[str, float]) -> None:
        """Let the tiers that are made next have rows of a format, and their states initial values by name."""
        self.format = of
        self.sizes.row_bytes = of.num_bytes
        self.first.fills = fills

    def check_device(self, device: torch.device) -> None:
        """Check that the fast tier can be on a device."""
        check_has_memory(device)
        if self.sizes.tiers.device is None:
            raise ConfigError(
                "tiers", f"got no device budget for tables on {device}, expected device='8GiB' or the like"
            )

    def renew(self, former: FastTier) -> None:
        """Make empty tiers of the present format on the present device in place of `former`; see `drop`."""
        if former.below is not None:
            # So that the tiers below have all rows, from which they are read into the new tiers.
            former.write_changed()
        self._written = self._written.plus(former.written)
        self.memory = self._new_memory()

    def drop(self, former: FastTier) -> None:
        """Close tiers that were replaced and remove their files."""
        if former.below is not None:
            former.below.close()
        self._files.drop_former()

    def adopt(self, table: int, directory: Path) -> bool:
        """Hold the rows of a row file in place of those of a table in files; see `TieredRows.adopt`."""
        memory = self.opened()
        if memory.below is None:
            return False
        # A write of former rows that is under way would land in the new store.
        memory.below.wait()
        store = self._files.adopt(table, directory, self.format)
        # Rows in files of another format are left to the caller to import one by one.
        if store is None:
            return False
        memory.below.take_over(table, store)
        memory.not_finite.pop(table, None)
        # Without writing back: the store has the rows that count now.
        memory.slots.release(memory.of_table(table))
        return True

    def reset_defaults(self, weights: Tensor) -> None:
        """Set the default rows to ``weights [T, D]`` and their state to its initial values."""
        self._defaults = weights
        if self.memory is not None:
            self._write_defaults(self.memory)

    def close(self) -> None:
        """Release files; rows that are not in the fast tier are lost."""
        if self.memory is not None and self.memory.below is not None:
            self.memory.below.close()
        self.memory = self.sizes.below = None
        self._closer()

    def _write_defaults(self, memory: FastTier) -> None:
        if self._defaults is not None:
            memory.weights.tensor[: self.num_defaults] = self._defaults
        for name, values in memory.state.items():
            values.tensor[: self.num_defaults] = self.first.fills[name]

    def _new_memory(self) -> FastTier:
        sizes = self.sizes
        options = sizes.budget.file_options(direct=sizes.tiers.direct)
        below: FileLevel | None = self._files.level(self.format, options)
        host = sizes.host_bytes_below
        if host is not None:
            name = f"tiers host={sizes.tiers.host!r}"
            below = Cache(sizes.row_bytes, [host // sizes.slot_bytes], below, name=name)
        behind = None if below is None else WrittenBehind(below)
        if behind is not None:
            # Stopped before the files close, into which it may be writing.
            self._files.writers.append(behind)
        sizes.below = behind
        memory = FastTier(self.format, sizes.fast_slots, self.device, behind, self.num_defaults)
        if self.num_defaults:
            first = torch.arange(self.num_defaults, device=self.device)
            memory.slots.assign(RowBatch(first, first, first))  # pinned for good
            self._write_defaults(memory)
        return memory
