# SPDX-License-Identifier: Apache-2.0
"""`TieredRows`: weights and optimizer state of arena rows of which only some are in the memory that kernels read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import NoReturn

import torch
from torch import Tensor

from terarec.errors import ConfigError
from terarec.kernels.slots import RowBatch
from terarec.memory.arena_tiers import ArenaTiers
from terarec.memory.budget import TierSizes, described
from terarec.memory.fast_tier import TierUse
from terarec.memory.finite_rows import not_finite
from terarec.memory.lookahead import Lookahead
from terarec.memory.row_format import RowFormat
from terarec.memory.row_placement import ComingRows, RowLoader, RowPlacement
from terarec.ops.row_update import state_dtype
from terarec.spec import DynamicTableSpec, TableSpec, Tiers

_CPU = torch.device("cpu")


class TieredRows:
    """Rows in a bounded fast tier, and those that were trained and do not fit in slower tiers below it.

    A row that is nowhere has its initial weights, which depend on table, key and seed alone, and fresh state. Methods
    may be called by several threads.

    Attributes:
        tiers: The tiers.
        placement: Brings rows of batches into the fast tier.
        coming: Reads rows of coming batches ahead.
        find_rows: For each table, what gives the arena rows int64[n] of ``keys int64[n]`` that it holds; set by
            whoever knows.

    Args:
        specs: The tables of the arena.
        tiers: The budgets.
        seed: Seed of the initial weights.
        num_defaults: Rows at the start of the arena that belong to no key and are always in the fast tier.
    """

    def __init__(
        self, specs: Sequence[TableSpec | DynamicTableSpec], tiers: Tiers, *, seed: int, num_defaults: int = 0
    ) -> None:
        self.tiers = ArenaTiers(specs, tiers, seed=seed, num_defaults=num_defaults)
        self._ahead = Lookahead()
        self._loader = RowLoader(self.tiers.first, self._ahead, keeps_initial=num_defaults > 0)
        self.placement = RowPlacement(self.tiers, self._loader)
        self.coming = ComingRows(self.tiers, self.placement, self._ahead)
        self.find_rows: dict[int, Callable[[Tensor], Tensor]] = {}

    def __reduce__(self) -> NoReturn:
        """Refuse to be copied or pickled: files belong to one object."""
        raise ConfigError(
            described(self.tiers.specs),
            "in tiers, which are not copied or pickled; expected a model made anew, with "
            "load_state_dict() or a checkpoint",
        )

    @property
    def sizes(self) -> TierSizes:
        """How many rows the tiers hold."""
        return self.tiers.sizes

    @property
    def lock(self) -> AbstractContextManager[object]:
        """Held by whoever uses the tiers."""
        return self.tiers.lock

    @property
    def device(self) -> torch.device:
        """Device of the fast tier."""
        return self.tiers.device

    @property
    def weights(self) -> Tensor:
        """Weights [C, D] of the fast tier."""
        return self.tiers.opened().weights.tensor

    @property
    def state(self) -> dict[str, Tensor]:
        """Name -> optimizer state [C, D] or [C]."""
        return {name: values.tensor for name, values in self.tiers.opened().state.items()}

    @property
    def state_names(self) -> tuple[str, ...]:
        """Names of the optimizer states."""
        return self.tiers.format.state_names

    @property
    def row_bytes(self) -> int:
        """Bytes of a row's weights and state."""
        return self.tiers.format.num_bytes

    @property
    def bytes_per_row(self) -> int:
        """0: a further row of the arena takes no memory until it is used."""
        return 0

    @property
    def memory_bytes(self) -> int:
        """Bytes of the slots that were used so far and of what the tiers below hold in memory."""
        return self.tiers.memory_bytes

    @property
    def capacity(self) -> int:
        """Number of rows that the fast tier has slots for at present."""
        return self.tiers.opened().capacity

    @property
    def index_bytes(self) -> int:
        """Bytes of host memory that the indexes of keys, and of rows in files, take."""
        return self.tiers.sizes.index_bytes

    @property
    def use(self) -> TierUse:
        """Counters so far."""
        return self.placement.use

    def initial_seed(self, table: int) -> int:
        """Return the seed of the initial weights of a table."""
        return self.tiers.first.seeds[table]

    def draw_by(self, table: int, keys_of: Callable[[Tensor], Tensor]) -> None:
        """Let initial weights of a table be those of other keys, which `keys_of` returns for the keys int64[n] here."""
        self.tiers.first.keys_of[table] = keys_of

    def draw_columns(self, table: int, width: int, first: int) -> None:
        """Let initial weights of a table be some columns of those of a table of `width` columns, from `first` on."""
        self.tiers.first.columns[table] = (width, first)

    def attach_state(
        self, shapes: Sequence[tuple[str, tuple[int, ...]]], *, fills: Mapping[str, float] | None = None
    ) -> None:
        """Give rows an optimizer's state, in place of any former optimizer's.

        Args:
            shapes: Name and shape [V, ...] of each state.
            fills: State -> its first value, 0 for those that are not named.

        Raises:
            StorageError: Rows of more bytes than a tier below takes, or a budget that is too small for them.
        """
        with self.tiers.lock:
            states = {name: (state_dtype(name), tuple(shape[1:])) for name, shape in shapes}
            layout = RowFormat(self.tiers.format.width, self.tiers.format.dtype, states)
            self.tiers.set_format(layout, {name: (fills or {}).get(name, 0.0) for name in states})
            self._renew(keeps_state=False)

    def move(self, device: torch.device) -> None:
        """Take the fast tier to `device`.

        Raises:
            ConfigError: A device without memory, or tiers without a budget for it.
            StorageError: Not enough memory there.
        """
        if device == self.device:
            return
        self.tiers.check_device(device)
        with self.tiers.lock:
            self.tiers.device = device
            self._renew(keeps_state=True)

    def _renew(self, *, keeps_state: bool) -> None:
        """Take the rows of tiers that are there into new ones, with their states or fresh ones."""
        former = self.tiers.memory
        # Nothing was used yet: the first use makes tiers of the new format.
        if former is None:
            return
        # Staged rows have the former format.
        self._ahead.clear()
        self.tiers.renew(former)
        for table, find in self.find_rows.items():
            for keys, weights, state in former.items(table, former.rows_at_once):
                keys = keys.to(self.device)
                if not keeps_state:
                    _, state = self.tiers.format.empty(keys.numel(), self.device)
                    for name, values in state.items():
                        values.fill_(self.tiers.first.fills[name])
                self.write(table, find(keys), keys, weights, state)
        self.tiers.drop(former)

    def grow(self, rows: int) -> None:
        """Do nothing: rows take memory when they are first used."""

    def begin(self, table: int, rows: Tensor, keys: Tensor) -> None:
        """Let ``rows int64[n]`` be those of other keys from now on, which have their initial values."""
        with self.tiers.lock:
            memory = self.tiers.memory
            if memory is not None:  # what was loaded ahead may be of keys that have lost these rows since
                slots = memory.slots.find(rows)
                memory.slots.release(slots[slots >= 0])
                self._ahead.drop(rows)

    def read(self, table: int, rows: Tensor, keys: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Return copies of the weights [n, D] and states of rows int64[n] of keys int64[n], wherever they are."""
        return self._read(_batch(table, rows, keys))

    def _read(self, batch: RowBatch) -> tuple[Tensor, dict[str, Tensor]]:
        with self.tiers.lock:
            memory = self.tiers.opened()
            slots = memory.slots.find(batch.rows)
            # Rows without a slot get those of slot 0 here, which are replaced below.
            weights = memory.weights.tensor[slots.clamp(min=0)]
            state = {name: of_state.tensor[slots.clamp(min=0)] for name, of_state in memory.state.items()}
            absent = (slots < 0).nonzero()[:, 0]
            if absent.numel():
                part = batch.part(absent)
                got_weights, got_state = self._loader.read(memory, part)
                weights[absent] = got_weights
                for name, values in got_state.items():
                    state[name][absent] = values
            return weights, state

    def write(self, table: int, rows: Tensor, keys: Tensor, weights: Tensor, state: Mapping[str, Tensor]) -> None:
        """Set distinct rows int64[n] of keys int64[n], in any tier; without `state`, their states do not change."""
        there = {name: values.to(rows.device) for name, values in state.items()}
        self._write(_batch(table, rows, keys), weights.to(rows.device), there)

    def _write(self, batch: RowBatch, weights: Tensor, state: Mapping[str, Tensor]) -> None:
        with self.tiers.lock:
            memory = self.tiers.opened()
            # Staged copies would bring the former values back when a batch takes them.
            self._ahead.drop(batch.rows)
            # A tier below takes whole rows only, so the present states are written again.
            if not state and memory.format.state_names:
                _, state = self._read(batch)
            slots = memory.slots.find(batch.rows)
            # There is no other place for them: all that is written takes slots.
            if memory.below is None:
                absent = (slots < 0).nonzero()[:, 0]
                slots[absent], new = self.placement.bring(memory, batch.part(absent), "an import")
                memory.slots.unpin(new)
            here = (slots >= 0).nonzero()[:, 0]
            memory.put(slots[here], weights[here], _rows_of(state, here))
            # The tier below has the former values of these.
            memory.slots.is_dirty[slots[here]] = True
            gone = (slots < 0).nonzero()[:, 0]
            # Past the fast tier: an import must not evict what batches need.
            if gone.numel() and memory.below is not None:
                packed = memory.format.pack(weights[gone].cpu(), _rows_of(state, gone, _CPU))
                memory.write_below(batch.part(gone).to(_CPU), packed)

    def forget(self, table: int, rows: Tensor, keys: Tensor) -> None:
        """Forget distinct rows int64[n] of keys int64[n]: they have their initial values again."""
        batch = _batch(table, rows, keys)
        with self.tiers.lock:
            memory = self.tiers.memory
            if memory is None:
                return
            self._ahead.drop(batch.rows)
            slots = memory.slots.find(batch.rows)
            # In both: a row that was brought up stays below, too.
            memory.slots.release(slots[slots >= 0])
            if memory.below is not None:
                memory.forget_not_finite(batch.to(_CPU))
                memory.below.erase(batch.to(_CPU))

    def restart(self, table: int, seed: int) -> None:
        """Let rows of a table that are in no tier have the initial values of `seed`; rows that never changed go."""
        with self.tiers.lock:
            # Rows with initial values of the former seed leave the fast tier and are drawn again when they are needed.
            self.tiers.first.seeds[table] = seed
            memory = self.tiers.memory
            if memory is not None:
                memory.slots.release(memory.of_table(table))
                self._ahead.clear()

    def items(self, table: int, chunk_rows: int) -> Iterator[tuple[Tensor, Tensor, dict[str, Tensor]]]:
        """Yield keys int64[n], weights [n, D] and states of the rows of a table that were trained or written."""
        memory = self.tiers.opened()
        if memory.below is not None:
            self.flush()
        yield from memory.items(table, chunk_rows)

    def count(self, table: int) -> int:
        """Return the number of rows of a table that were trained or written."""
        memory = self.tiers.memory
        if memory is None:
            return 0
        if memory.below is None:
            return memory.changed(table).numel()
        # New rows may be in the fast tier alone.
        self.flush()
        return memory.below.count(table)

    def flush(self) -> None:
        """Write the changed rows of the fast tier to the tier below; they stay in both."""
        with self.tiers.lock:
            memory = self.tiers.memory
            if memory is None or memory.below is None:
                return
            memory.write_changed()

    def snapshot(self, table: int, directory: Path) -> bool:
        """Write the rows of a table that were trained or written to a new directory as a row file.

        Returns:
            Whether the rows have a tier in files; if not, nothing is written.

        Raises:
            StorageError: The disk is full or cannot be written.
            TrainingError: A row has weights that are not finite.
        """
        with self.tiers.lock:
            memory = self.tiers.opened()
            if memory.below is None:
                return False
            # Files hold all rows that were trained only after this.
            self.flush()
            if table in memory.not_finite:
                raise not_finite(self.tiers.specs[table].name, memory.not_finite[table])
            return memory.below.snapshot(table, directory)

    def adopt(self, table: int, directory: Path) -> bool:
        """Hold the rows of a row file that `snapshot` wrote in place of all rows of a table, without reading them.

        Returns:
            Whether there is a tier in files and the rows have the present format; if not, nothing changes.
        """
        with self.tiers.lock:
            is_held = self.tiers.adopt(table, directory)
            if is_held:
                self._ahead.clear()
            return is_held

    def close(self) -> None:
        """Release files; rows that are not in the fast tier are lost."""
        with self.tiers.lock:
            self._ahead.clear()
            self.tiers.close()

    def reset_defaults(self, weights: Tensor) -> None:
        """Set the default rows to ``weights [T, D]`` and their state to its initial values."""
        with self.tiers.lock:
            self.tiers.reset_defaults(weights)


def _batch(table: int, rows: Tensor, keys: Tensor) -> RowBatch:
    return RowBatch(rows, keys, torch.full_like(rows, table))


def _rows_of(state: Mapping[str, Tensor], places: Tensor, device: torch.device | None = None) -> dict[str, Tensor]:
    return {name: values[places].to(device or values.device) for name, values in state.items()}
