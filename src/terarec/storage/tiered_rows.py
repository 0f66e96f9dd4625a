"""`TieredRows`: weights and optimizer state of arena rows of which only some are in the memory that kernels read."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, NoReturn

import torch
from torch import Tensor

from terarec.errors import ConfigError
from terarec.kernels.slots import RowBatch, row_set
from terarec.ops import state_dtype
from terarec.spec import DynamicTableSpec, TableSpec, Tiers
from terarec.storage.fast_tier import FastTier
from terarec.storage.first_values import FirstValues
from terarec.storage.lookahead import Lookahead
from terarec.storage.row_format import RowFormat
from terarec.storage.row_levels import CachedRows, RowLevel, WrittenBehind
from terarec.storage.row_loader import RowLoader
from terarec.storage.slots import SLOT_BYTES, Pin
from terarec.storage.store import check_has_memory
from terarec.storage.tier_files import TierFiles
from terarec.storage.tier_sizes import TierSizes, described, rows_of_table
from terarec.storage.tier_use import TierUse

_EVICTED_SHARE = 256  # a full tier frees at least this fraction of its slots at once, one in 256
_LOADED_AT_ONCE = 64 << 20  # bytes, beside the budget while they are read
_CPU = torch.device("cpu")


class PlacedRows(NamedTuple):
    """Rows that are in the fast tier and stay there.

    Attributes:
        slots: int64[n], the row of the weights that holds each.
        pin: What keeps them there.
    """

    slots: Tensor
    pin: Pin


class TieredRows:
    """Rows in a bounded fast tier, and those that were trained and do not fit in slower tiers below it.

    A row that is nowhere has its first weights, which depend on table, key and seed alone, and fresh state. Methods may
    be called by several threads.

    Attributes:
        sizes: How many rows the tiers hold; its budget is read when memory is first needed.
        device: Where the fast tier is.
        find_rows: For each table, what gives the arena rows int64[n] of ``keys int64[n]`` that it holds; set by
            whoever knows.

    Args:
        specs: The tables of the arena.
        tiers: The budgets.
        seed: Of the first weights.
        num_defaults: Rows at the start of the arena that belong to no key and are always in the fast tier.
    """

    def __init__(
        self, specs: Sequence[TableSpec | DynamicTableSpec], tiers: Tiers, *, seed: int, num_defaults: int = 0
    ) -> None:
        self.sizes = TierSizes(specs, tiers, num_defaults=num_defaults)
        self.device = torch.device("cpu")
        self.lock = threading.RLock()
        self.find_rows: dict[int, Callable[[Tensor], Tensor]] = {}
        self._ahead = Lookahead()
        self._specs = tuple(specs)
        self._num_defaults = num_defaults
        self._first = FirstValues(specs, seed)
        self._loader = RowLoader(self._first, self._ahead, keeps_first=num_defaults > 0)
        self._defaults: Tensor | None = None
        self._format = RowFormat(specs[0].width, getattr(torch, specs[0].dtype))
        self.sizes.row_bytes = self._format.num_bytes
        self._files = TierFiles(tiers.file, [spec.name for spec in specs], [rows_of_table(spec) for spec in specs])
        self._closing = weakref.finalize(self, self._files.close)
        self._memory: FastTier | None = None
        self._held: list[Pin] = []
        self._taken: list[Pin] = []
        self._batch = 0
        self._use = TierUse()

    def __reduce__(self) -> NoReturn:
        """Refuse to be copied or pickled: files belong to one object.

        Raises:
            ConfigError: Always.
        """
        raise ConfigError(
            described(self._specs),
            "in tiers, which are not copied or pickled; expected a model made anew, with "
            "load_state_dict() or a checkpoint",
        )

    @property
    def weights(self) -> Tensor:
        """[C, D], the rows of the fast tier."""
        return self._open().weights.tensor

    @property
    def state(self) -> dict[str, Tensor]:
        """Name -> optimizer state [C, D] or [C]."""
        return {name: held.tensor for name, held in self._open().state.items()}

    @property
    def state_names(self) -> tuple[str, ...]:
        """The optimizer states beside the weights."""
        return self._format.state_names

    @property
    def row_bytes(self) -> int:
        """Bytes of a row's weights and state."""
        return self._format.num_bytes

    @property
    def bytes_per_row(self) -> int:
        """0: a further row of the arena takes no memory until it is used."""
        return 0

    @property
    def memory_bytes(self) -> int:
        """Bytes of the slots that were used so far and of what the tiers below hold in memory."""
        memory = self._memory
        if memory is None:
            return 0
        below = 0 if memory.below is None else memory.below.memory_bytes
        return memory.slots.used_slots * (self._format.num_bytes + SLOT_BYTES) + below

    @property
    def capacity(self) -> int:
        """Number of rows that the fast tier has slots for at present."""
        return self._open().capacity

    @property
    def index_bytes(self) -> int:
        """Bytes of host memory that the indexes of keys, and of rows in files, take."""
        return self.sizes.index_bytes

    def first_seed(self, table: int) -> int:
        """Return the seed of the first weights of a table."""
        return self._first.seeds[table]

    @property
    def use(self) -> TierUse:
        """Counters so far."""
        return self._use if self._memory is None else self._use.plus(self._memory.written)

    def draw_by(self, table: int, keys_of: Callable[[Tensor], Tensor]) -> None:
        """Let first weights of a table be those of other keys, which `keys_of` returns for the keys int64[n] here."""
        self._first.keys_of[table] = keys_of

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
        with self.lock:
            states = {name: (state_dtype(name), tuple(shape[1:])) for name, shape in shapes}
            made = RowFormat(self._format.width, self._format.dtype, states)
            old = self._memory
            self._format = made
            self.sizes.row_bytes = made.num_bytes
            self._first.fills = {name: (fills or {}).get(name, 0.0) for name in states}
            if old is not None:
                self._take_over(old)

    def move(self, device: torch.device) -> None:
        """Take the fast tier to `device`.

        Raises:
            ConfigError: A device without memory, or tiers without a budget for it.
            StorageError: Not enough memory there.
        """
        if device == self.device:
            return
        check_has_memory(device)
        if self.sizes.tiers.device is None:
            raise ConfigError(
                "tiers", f"got no device budget for tables on {device}, expected device='8GiB' or the like"
            )
        with self.lock:
            old, self.device = self._memory, device
            if old is not None:
                self._take_over(old)

    def place(self, batch: RowBatch, *, purpose: str, is_trained: bool = True) -> PlacedRows:
        """Bring rows into the fast tier.

        Args:
            batch: Rows, which may repeat.
            purpose: What needs them, for the error.
            is_trained: Whether the batch is one of those that `ahead` counts.

        Raises:
            BudgetError: They do not fit beside the rows that pending gradients need.
        """
        with self.lock:
            memory = self._open()
            self._batch += is_trained
            slots, used, absent = memory.slots.touch(batch.rows, pins=True)
            hits = used.numel()
            if absent.numel():
                try:
                    slots[absent], new = self._bring(memory, batch.part(absent), purpose)
                except BaseException:
                    memory.slots.let_go(used)
                    raise
                used = torch.cat([used, new])
            self._count(lookups=used.numel(), hits=hits)
            return PlacedRows(slots, memory.pin(used))

    def share_pin(self, pin: Pin) -> Pin:
        """Return another pin of the same slots."""
        with self.lock:
            memory = self._open()
            memory.slots.hold(pin.slots)
            return memory.pin(pin.slots)

    def hold(self, pin: Pin) -> bool:
        """Keep rows in the fast tier until `updated`: a gradient waits for them.

        Returns:
            Whether they are still there.
        """
        with self.lock:
            if pin.is_released:
                return False
            if pin not in self._held:
                self._held.append(pin)
            return True

    def take(self) -> None:
        """Note that an update by the gradients that wait begins; `updated` or another `take` ends it."""
        with self.lock:
            self._release_taken()
            self._taken, self._held = self._held, []

    def updated(self, slots: Sequence[Tensor | None], table_lr: Tensor | None) -> None:
        """Record that an update changed rows, and release those that it pinned.

        Args:
            slots: int64[n] each.
            table_lr: float32[T], factors of the learning rate; rows of tables with 0 did not change.
        """
        with self.lock:
            memory = self._open()
            for changed in slots:
                assert changed is not None, "gradients of tiered rows have places"
                if table_lr is not None:
                    is_trained = table_lr.to(self.device)[memory.slots.owners.tables[changed].long()] != 0.0
                    changed = changed[is_trained]
                memory.slots.mark_changed(changed)
            self._release_taken()

    def ahead(self, batch: RowBatch, number: int) -> None:
        """Read rows of a coming batch that are not in the fast tier; another thread may `place` meanwhile.

        Args:
            batch: Rows, which may repeat.
            number: Of calls of `place` from now on, that which needs them: 1 for the next.
        """
        with self.lock:
            memory = self._open()
            if memory.below is None:
                return
            batch = batch.to(self.device)
            absent = memory.slots.want(batch.rows, self._batch + number)
            staged = self._ahead.reserve(batch.part(absent).to(_CPU), self._format)
            below = memory.below
        staged.fill(below)

    def stage_part(self, batch: RowBatch) -> None:
        """Read rows of the next part for which the fast tier has no room; another thread may `place` meanwhile.

        They take memory beside the budget until they are needed, or others are staged.

        Args:
            batch: Rows, which may repeat.
        """
        with self.lock:
            memory = self._open()
            if memory.below is None:
                return
            absent = (memory.slots.find(batch.rows.to(self.device)) < 0).nonzero()[:, 0].to(_CPU)
            staged = self._ahead.reserve_part(batch.to(_CPU).part(absent), self._format)
            below = memory.below
        staged.fill(below)

    def preload(self, batch: RowBatch, *, evicts: bool = True) -> tuple[Pin, bool]:
        """Bring rows into the fast tier that will be needed for a while, as many as there is room for.

        Args:
            batch: Rows, which may repeat.
            evicts: Whether rows that nothing keeps give them theirs.

        Returns:
            What keeps those there that it brought, and whether all of them had room.
        """
        with self.lock:
            memory = self._open()
            absent = memory.slots.find(batch.rows) < 0
            pin = memory.pin(torch.empty(0, dtype=torch.int64, device=self.device))
            has_room = memory.below is not None
            if has_room:
                has_room = self._load_some(memory, batch.part(absent.nonzero()[:, 0]), pin, evicts=evicts)
            return pin, has_room

    def keep(self, batch: RowBatch) -> Pin:
        """Return what keeps those rows, which may repeat, in the fast tier that are there."""
        with self.lock:
            memory = self._open()
            return memory.pin(memory.slots.touch(batch.rows, pins=True).used)

    def make_room(self, rows: int) -> None:
        """Free slots of rows that are not pinned, until there is room for a number of rows."""
        with self.lock:
            memory = self._open()
            missing = rows - memory.room
            if missing > 0 and memory.below is not None:
                self._release(memory, memory.victims(missing, self._batch))

    def _load_some(self, memory: FastTier, batch: RowBatch, pin: Pin, *, evicts: bool) -> bool:
        """Give slots to as many rows without one, which may repeat, as there is room for; `pin` keeps them.

        Returns:
            Whether these are all rows.
        """
        batch = batch.part(row_set(batch.rows).firsts)
        if evicts:
            self.make_room(batch.rows.numel())
        has_room = batch.rows.numel() <= memory.room
        batch = batch.part(slice(0, memory.room))
        at_once = max(1, _LOADED_AT_ONCE // self._format.num_bytes)
        for begin in range(0, batch.rows.numel(), at_once):
            _, new = self._bring(memory, batch.part(slice(begin, begin + at_once)), "a keyset")
            pin.slots = torch.cat([pin.slots, new])
        return has_room

    def grow(self, rows: int) -> None:
        """Do nothing: rows take memory as they are used."""

    def begin(self, table: int, rows: Tensor, keys: Tensor) -> None:
        """Let ``rows int64[n]`` be those of other keys from now on, which have their first values."""
        with self.lock:
            if self._memory is not None:  # a batch that was rolled back may have left rows of its keys
                slots = self._memory.slots.find(rows)
                self._memory.slots.release(slots[slots >= 0])
                self._ahead.drop(rows)

    def read(self, table: int, rows: Tensor, keys: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Return copies of the weights [n, D] and states of rows int64[n] of keys int64[n], wherever they are."""
        return self._read(_batch(table, rows, keys))

    def _read(self, batch: RowBatch) -> tuple[Tensor, dict[str, Tensor]]:
        with self.lock:
            memory = self._open()
            slots = memory.slots.find(batch.rows)
            weights = memory.weights.tensor[slots.clamp(min=0)]
            state = {name: held.tensor[slots.clamp(min=0)] for name, held in memory.state.items()}
            absent = (slots < 0).nonzero()[:, 0]
            if absent.numel():
                part = batch.part(absent)
                got_weights, got_state = self._loader.read(memory, part)
                weights[absent] = got_weights
                for name, values in got_state.items():
                    state[name][absent] = values
            return weights, state

    def write(self, table: int, rows: Tensor, keys: Tensor, weights: Tensor, state: Mapping[str, Tensor]) -> None:
        """Set distinct rows int64[n] of keys int64[n], wherever they are; without `state` theirs stays as it is.

        Raises:
            BudgetError: No tier has room.
        """
        self._write(_batch(table, rows, keys), weights.to(rows.device), state)

    def _write(self, batch: RowBatch, weights: Tensor, state: Mapping[str, Tensor]) -> None:
        with self.lock:
            memory = self._open()
            self._ahead.drop(batch.rows)
            if not state and self._format.state_names:
                _, state = self._read(batch)
            slots = memory.slots.find(batch.rows)
            if memory.below is None:
                absent = (slots < 0).nonzero()[:, 0]
                slots[absent], new = self._bring(memory, batch.part(absent), "an import")
                memory.slots.let_go(new)
            here = (slots >= 0).nonzero()[:, 0]
            memory.put(slots[here], weights[here], _rows_of(state, here))
            memory.slots.is_dirty[slots[here]] = True
            gone = (slots < 0).nonzero()[:, 0]
            if gone.numel() and memory.below is not None:
                memory.below.write(batch.part(gone).to(_CPU), self._packed(weights[gone], _rows_of(state, gone)))

    def forget(self, table: int, rows: Tensor, keys: Tensor) -> None:
        """Forget distinct rows int64[n] of keys int64[n]: they have their first values again."""
        batch = _batch(table, rows, keys)
        with self.lock:
            memory = self._memory
            if memory is None:
                return
            self._ahead.drop(batch.rows)
            slots = memory.slots.find(batch.rows)
            memory.slots.release(slots[slots >= 0])
            if memory.below is not None:
                memory.below.erase(batch.to(_CPU))

    def restart(self, table: int, seed: int) -> None:
        """Let rows of a table that are in no tier have the first values of `seed`; rows that never changed go."""
        with self.lock:
            self._first.seeds[table] = seed
            memory = self._memory
            if memory is not None:
                memory.slots.release(self._slots_of(memory, table))
                self._ahead.clear()

    def _slots_of(self, memory: FastTier, table: int) -> Tensor:
        owners, used = memory.slots.owners, memory.slots.used_slots
        mine = (owners.rows[:used] >= self._num_defaults) & (owners.tables[:used] == table)
        return mine.nonzero()[:, 0]

    def items(self, table: int, chunk_rows: int) -> Iterator[tuple[Tensor, Tensor, dict[str, Tensor]]]:
        """Yield keys int64[n], weights [n, D] and states of the rows of a table that were trained or written."""
        memory = self._open()
        if memory.below is not None:
            self.flush()
        yield from memory.items(table, chunk_rows)

    def count(self, table: int) -> int:
        """Return the number of rows of a table that were trained or written."""
        memory = self._memory
        if memory is None:
            return 0
        if memory.below is None:
            return memory.changed(table).numel()
        self.flush()
        return memory.below.count(table)

    def flush(self) -> None:
        """Write the changed rows of the fast tier to the tier below; they stay in both."""
        with self.lock:
            memory = self._memory
            if memory is None or memory.below is None:
                return
            memory.write_changed()

    def commit(self, metadata: Mapping[str, str]) -> None:
        """Make all rows durable, where a tier is on a disk."""
        with self.lock:
            self.flush()
            if self._memory is not None and self._memory.below is not None:
                self._memory.below.commit(metadata)

    def snapshot(self, table: int, directory: Path) -> bool:
        """Write the rows of a table that were trained or written to a new directory as a row file.

        Returns:
            Whether the rows have a tier in files; if not, nothing is written.

        Raises:
            StorageError: The disk is full or cannot be written.
        """
        with self.lock:
            below = self._open().below
            if below is None:
                return False
            self.flush()
            return below.snapshot(table, directory)

    def adopt(self, table: int, directory: Path) -> bool:
        """Hold the rows of a row file that `snapshot` wrote in place of all rows of a table, without reading them.

        Returns:
            Whether there is a tier in files and the rows have the present format; if not, nothing changes.

        Raises:
            StorageError: The file is damaged, or the disk is full.
        """
        with self.lock:
            memory = self._open()
            if memory.below is None:
                return False
            memory.below.settle()
            store = self._files.adopt(table, directory, self._format)
            if store is None:
                return False
            memory.below.take_over(table, store)
            memory.slots.release(self._slots_of(memory, table))
            self._ahead.clear()
            return True

    def close(self) -> None:
        """Release files; rows that are not in the fast tier are lost."""
        with self.lock:
            self._ahead.clear()
            if self._memory is not None and self._memory.below is not None:
                self._memory.below.close()
            self._memory = self.sizes.below = None
            self._closing()

    def reset_defaults(self, weights: Tensor) -> None:
        """Set the default rows to ``weights [T, D]`` and their state to its first values."""
        with self.lock:
            self._defaults = weights
            if self._memory is not None:
                self._write_defaults(self._memory)

    def _write_defaults(self, memory: FastTier) -> None:
        if self._defaults is not None:
            memory.weights.tensor[: self._num_defaults] = self._defaults
        for name, held in memory.state.items():
            held.tensor[: self._num_defaults] = self._first.fills[name]

    def _open(self) -> FastTier:
        if self._memory is None:
            self._memory = self._new_memory()
        return self._memory

    def _new_memory(self) -> FastTier:
        """Return empty memory of the present format, above tiers of its own."""
        sizes = self.sizes
        options = sizes.budget.file_options(direct=sizes.tiers.direct)
        below: RowLevel | None = self._files.level(self._format, options)
        host = sizes.host_bytes_below
        if host is not None:
            name = f"tiers host={sizes.tiers.host!r}"
            below = CachedRows(host, sizes.row_bytes, below, slot_bytes=SLOT_BYTES, name=name)
        behind = None if below is None else WrittenBehind(below)
        if behind is not None:
            self._files.writers.append(behind)
        sizes.below = behind
        memory = FastTier(self._format, sizes.fast_slots, self.device, behind, self._num_defaults)
        if self._num_defaults:
            first = torch.arange(self._num_defaults, device=self.device)
            memory.slots.assign(RowBatch(first, first, first))  # pinned for good
            self._write_defaults(memory)
        return memory

    def _take_over(self, old: FastTier) -> None:
        """Take the weights of a former memory into a new one, with fresh states."""
        self._ahead.clear()
        if old.below is not None:
            old.write_changed()
        self._use = self._use.plus(old.written)
        self._memory = self._new_memory()
        for table, find in self.find_rows.items():
            for keys, weights, _ in old.items(table, old.rows_at_once):
                keys = keys.to(self.device)
                _, state = self._format.empty(keys.numel(), self.device)
                for name, values in state.items():
                    values.fill_(self._first.fills[name])
                self.write(table, find(keys), keys, weights, state)
        if old.below is not None:
            old.below.close()
        self._files.drop_former()

    def _bring(self, memory: FastTier, batch: RowBatch, purpose: str) -> tuple[Tensor, Tensor]:
        """Give slots to rows without one, which may repeat; return the slots of all and, held, each new one once."""
        self.sizes.fit(memory, self.device)
        if memory.below is not None:
            memory.below.settle()  # rows that left the fast tier for the batch before may be wanted now
        arrivals = row_set(batch.rows)
        batch = batch.part(arrivals.firsts)
        if batch.rows.numel() > memory.room:
            self._make_room(memory, batch.rows.numel(), purpose)
        new = memory.slots.assign(batch)
        try:
            self._use = self._use.plus(self._loader.load(memory, new, batch))
        except BaseException:
            memory.slots.let_go(new)
            memory.slots.release(new)
            raise
        return new[arrivals.places], new

    def _make_room(self, memory: FastTier, needed: int, purpose: str) -> None:
        missing = needed - memory.room
        wanted = max(missing, memory.capacity // _EVICTED_SHARE)
        victims = memory.victims(wanted, self._batch, keeps_dirty=memory.below is None)
        if victims.numel() < missing:
            raise self.sizes.too_small(memory, needed, purpose)
        self._release(memory, victims)

    def _release(self, memory: FastTier, victims: Tensor) -> None:
        """Write the rows of ``victims int64[n]`` back where they changed, and take their slots away."""
        slots = memory.slots
        memory.write_back(victims[slots.is_dirty[victims] & slots.is_held[victims]])
        slots.release(victims)

    def _packed(self, weights: Tensor, state: Mapping[str, Tensor]) -> Tensor:
        return self._format.pack(weights.cpu(), {name: values.cpu() for name, values in state.items()})

    def _release_taken(self) -> None:
        for pin in self._taken:
            pin.release()
        self._taken = []

    def _count(self, **numbers: int) -> None:
        self._use = self._use.plus(TierUse(**numbers))


def _batch(table: int, rows: Tensor, keys: Tensor) -> RowBatch:
    return RowBatch(rows, keys, torch.full_like(rows, table))


def _rows_of(state: Mapping[str, Tensor], places: Tensor) -> dict[str, Tensor]:
    return {name: values[places] for name, values in state.items()}
