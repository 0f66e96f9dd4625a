"""`HostMemoryTier`: rows in the memory of this process, by the hash index and the lookups of training."""

from __future__ import annotations

import time

import torch
from torch import Tensor

from terarec.errors import StorageError
from terarec.kernels import memory
from terarec.kernels.hash_index import new_hash_index
from terarec.kernels.slots import RowPart, scatter_rows
from terarec.ops import BagLayout, bag_lookup
from terarec.ops.layout import single_layout
from terarec.parallel import FairLock
from terarec.ps.tier import (
    UPDATE_ROWS,
    Found,
    TierStatistics,
    by_partition,
    check_key_tensor,
    check_row_tensors,
    last_rows,
)
from terarec.spec import HostMemorySpec, LFUEviction, LRUEviction, OverflowSpec
from terarec.storage.growing_rows import GrowingTensor
from terarec.storage.key_rows import COUNT, LAST_STEP, USES, keys_to_evict

_PIECE_ROWS = 4_096  # larger ones are sorted by torch's threads, which lookups need
# With a pause after 1,024 rows, 99 % of lookups during a delta took at most 2.8 to 4.2 ms, without one 4.2 to 4.3 ms;
# 1 M rows took 0.1 to 0.3 s longer (three turns on two busy Zen 4 cores).
_PAUSE_SECONDS = 50e-6
_FEWEST_BYTES = 1 << 20  # at a time, so that a small table does not grow with every piece
_GROWTH = 8  # an eighth more at a time: only address space until rows are written
_CPU = torch.device("cpu")


class HostMemoryTier:
    """Rows of a table in host memory. Implements `terarec.ps.Tier`.

    Args:
        table: Name of the table, for errors.
        width: Length D of a vector.
        spec: Partitions and their bound.
    """

    name = "host"
    is_writable = True

    def __init__(self, table: str, width: int, spec: HostMemorySpec | None = None) -> None:
        self.width = width
        spec = spec or HostMemorySpec()
        self._partitions = [_Partition(table, width, spec.overflow) for _ in range(spec.num_partitions)]

    @property
    def memory_bytes(self) -> int:
        """Bytes of rows and indexes."""
        return sum(partition.memory_bytes for partition in self._partitions)

    def count(self) -> int:
        """Return the number of rows."""
        return sum(len(partition) for partition in self._partitions)

    def lookup(self, keys: Tensor) -> Found:
        """Look up keys; see `Tier.lookup`."""
        keys = check_key_tensor(keys)
        if len(self._partitions) == 1:
            return self._partitions[0].lookup(keys)
        found = Found(torch.empty(keys.numel(), self.width), torch.empty(keys.numel(), dtype=torch.bool))
        for number, places in by_partition(keys, len(self._partitions)):
            part = self._partitions[number].lookup(keys[places])
            found.rows[places], found.mask[places] = part
        return found

    def insert(self, keys: Tensor, rows: Tensor) -> None:
        """Set rows; see `Tier.insert`; a partition with more rows than its bound evicts some."""
        keys, rows = check_row_tensors(keys, rows, self.width)
        looked_up = self._num_looked_up()
        for begin in range(0, keys.numel(), _PIECE_ROWS):
            part = slice(begin, begin + _PIECE_ROWS)
            some, their_rows = last_rows(keys[part], rows[part])
            for number, places in by_partition(some, len(self._partitions)):
                self._partitions[number].insert(some[places], their_rows[places])
            if looked_up != (looked_up := self._num_looked_up()):
                # A core shared with lookups goes back to them now, not at the scheduler's next tick (up to 4 ms).
                time.sleep(_PAUSE_SECONDS)

    def erase(self, keys: Tensor) -> None:
        """Remove rows; see `Tier.erase`."""
        for some in torch.split(check_key_tensor(keys), UPDATE_ROWS):
            for number, places in by_partition(some, len(self._partitions)):
                self._partitions[number].erase(some[places])

    def clear(self) -> None:
        """Remove all rows and give their memory back."""
        for partition in self._partitions:
            partition.clear()

    def flush(self) -> None:
        """Do nothing: memory is never durable."""

    def refresh(self) -> bool:
        """Return False: no other process writes here."""
        return False

    def statistics(self) -> TierStatistics:
        """Return the counters of the tier."""
        parts = [partition.statistics() for partition in self._partitions]
        return TierStatistics(
            keys=sum(part.keys for part in parts),
            hits=sum(part.hits for part in parts),
            inserted=sum(part.inserted for part in parts),
            evicted=sum(part.evicted for part in parts),
        )

    def close(self) -> None:
        """Remove all rows."""
        self.clear()

    def _num_looked_up(self) -> int:
        return sum(partition.num_looked_up for partition in self._partitions)


class _Partition:
    """An index of keys and an arena of their rows, under one lock. Row 0 is that of keys that are not there.

    Attributes:
        num_looked_up: Keys that were looked up so far.
    """

    def __init__(self, table: str, width: int, overflow: OverflowSpec) -> None:
        self._table = table
        self._width = width
        self._overflow = overflow
        # A lookup of n keys has one bag of all of them; the number of rows is in the layout.
        self._layouts: dict[int, BagLayout] = {}
        self._lock = FairLock()
        self.num_looked_up = self._hits = self._inserted = self._evicted = self._clock = 0
        self._start()

    def _start(self) -> None:
        # New objects, also in `clear`: an insertion that writes rows without the lock continues with the former ones.
        self._index = new_hash_index(_CPU)
        self._weights = GrowingTensor((self._width,), torch.float32, _CPU)
        tracked = {"random": (), "lru": (LAST_STEP,), "lfu": (COUNT,)}[self._overflow.evict]
        if self._overflow.max_rows is None:
            tracked = ()
        self._uses = {name: GrowingTensor((), USES[name], _CPU) for name in tracked}
        self._free: list[Tensor] = []
        self._next = 1
        self._grow(1)

    def __len__(self) -> int:
        with self._lock:
            return len(self._index)

    @property
    def memory_bytes(self) -> int:
        with self._lock:
            blocks = [self._weights, *self._uses.values()]
            return self._index.memory_bytes + sum(held.tensor.numel() * held.tensor.element_size() for held in blocks)

    def lookup(self, keys: Tensor) -> Found:
        with self._lock:
            rows = self._index.find(keys)
            mask = rows >= 0
            rows.clamp_(min=0)  # row 0 is that of missing keys, so that the kernel needs no mask
            # Rows are copied under the lock: once it is released, an insertion may give them to other keys.
            vectors = bag_lookup(self._weights.tensor, rows, torch.tensor([0, keys.numel()]), self._layout())
            self.num_looked_up += keys.numel()
            self._hits += int(mask.count_nonzero())
            self._note_use(rows)
        return Found(vectors, mask)

    def insert(self, keys: Tensor, rows: Tensor) -> None:
        with self._lock:
            targets, arena = self._reserve(keys.numel()), self._weights
            weights = arena.tensor
        # Free rows are written without the lock, so that page faults and a thread that loses its core do not delay
        # lookups. A team of threads would wait for its slowest where cores are busy: 1 M rows then took 24 s,
        # and 3 to 7 s on one thread (14 runnable threads, two Zen 4 cores).
        scatter_rows([RowPart(weights, 0)], targets, rows.view(torch.uint8), threads=1)
        for some, to in zip(torch.split(keys, UPDATE_ROWS), torch.split(targets, UPDATE_ROWS), strict=True):
            with self._lock:
                if arena is not self._weights:  # cleared in the meantime: as if `clear` came after
                    return
                self._move(some, to)

    def erase(self, keys: Tensor) -> None:
        with self._lock:
            self._release(self._index.erase(keys))

    def clear(self) -> None:
        with self._lock:
            self._start()

    def statistics(self) -> TierStatistics:
        with self._lock:
            return TierStatistics(
                keys=self.num_looked_up, hits=self._hits, inserted=self._inserted, evicted=self._evicted
            )

    def _move(self, keys: Tensor, targets: Tensor) -> None:
        """Move keys to rows that are written; their former rows become free."""
        former = self._index.find(keys)
        self._index.assign(keys, targets)
        for held in self._uses.values():
            # A key takes its uses along; a new one has none.
            held.tensor[targets] = torch.where(former >= 0, held.tensor[former.clamp(min=0)], 0)
        self._note_use(targets)
        self._release(former)
        self._inserted += keys.numel()
        self._evict(keys)

    def _reserve(self, count: int) -> Tensor:
        """Return rows that no key has."""
        taken: list[Tensor] = []
        while self._free and count:
            part = self._free.pop()  # a list of pieces: joining them would copy all free rows for each insertion
            if part.numel() > count:
                self._free.append(part[count:])
            taken.append(part[:count])
            count -= taken[-1].numel()
        try:
            self._grow(self._next + count)
        except StorageError:
            self._free += taken
            raise
        taken.append(torch.arange(self._next, self._next + count))
        self._next += count
        return torch.cat(taken)

    def _release(self, rows: Tensor) -> None:
        """Note rows that no key has any more; -1 for none."""
        rows = rows[rows >= 0]
        if rows.numel():
            self._free.append(rows)

    def _note_use(self, rows: Tensor) -> None:
        if not self._uses:
            return
        self._clock += 1
        if LAST_STEP in self._uses:
            self._uses[LAST_STEP].tensor.index_fill_(0, rows, self._clock)
        else:
            counts = self._uses[COUNT].tensor
            counts.index_add_(0, rows, torch.ones_like(rows))

    def _evict(self, keys: Tensor) -> None:
        """Evict rows while there are more than the bound; the keys that were just inserted go last."""
        overflow, held = self._overflow, len(self._index)
        if overflow.max_rows is None or held <= overflow.max_rows:
            return
        most = held - int(overflow.max_rows * overflow.keep)
        all_keys, rows, _ = self._index.items()
        spared = torch.zeros(self._weights.tensor.shape[0], dtype=torch.bool)
        # Rows that were just inserted have the fewest uses, and would be the first to go.
        spared[self._index.find(keys)] = True
        is_new = spared[rows]
        if overflow.evict == "random":
            old = all_keys[~is_new]
            gone = old[torch.randperm(old.numel())[:most]]
        else:
            policy = LRUEviction() if overflow.evict == "lru" else LFUEviction()
            uses = {name: grown.tensor[rows] for name, grown in self._uses.items()}
            gone = keys_to_evict(policy, all_keys, uses, self._clock, most=most, spared=is_new)
        if gone.numel() < held - overflow.max_rows:  # the batch itself is larger than the bound
            gone = torch.cat([gone, keys[: held - overflow.max_rows - gone.numel()]])
        self._release(self._index.erase(gone))
        self._evicted += gone.numel()

    def _grow(self, rows: int) -> None:
        """Have memory for at least `rows` rows."""
        held = self._weights.tensor.shape[0]
        if rows <= held:
            return
        row_bytes = self._weights.row_bytes + sum(grown.row_bytes for grown in self._uses.values())
        target = max(rows, held + max(held // _GROWTH, _FEWEST_BYTES // row_bytes))
        memory.require((target - held) * row_bytes, f"table {self._table!r} in host memory")
        for grown in (*self._uses.values(), self._weights):
            grown.grow(target)

    def _layout(self) -> BagLayout:
        num_rows = self._weights.tensor.shape[0]
        if num_rows not in self._layouts:
            # Only the newest: rows grow, and a former number of them does not come back.
            self._layouts = {num_rows: single_layout(num_rows, self._width, "none")}
        return self._layouts[num_rows]
