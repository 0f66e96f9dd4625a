# SPDX-License-Identifier: Apache-2.0
"""The arena row of each key of a dynamic table: admission inserts keys, eviction removes them."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from terarec.errors import ConfigError, NoSpaceError
from terarec.kernels.hash_index import HashIndex, copy_to, new_hash_index
from terarec.kernels.rows import rows_at_most
from terarec.spec import DynamicTableSpec, EvictionSpec
from terarec.spec.tables import LFUEviction, ScoreEviction, TTLEviction
from terarec.storage.admission import build_admission
from terarec.storage.changes import changes_since, discard_changes, mark_changes
from terarec.storage.dynamic_arena import DynamicArena

COUNT, LAST_STEP = "count", "last_step"
USES = {COUNT: torch.int64, LAST_STEP: torch.int32}
"""Tracked uses of a row: its occurrences, and the last training batch that used it."""


def needed_uses(policy: EvictionSpec | None) -> tuple[str, ...]:
    """Return the names of `USES` that `policy` needs."""
    if policy is None:
        return ()
    # A score function may look at either; which one is not known before it is called.
    if isinstance(policy, ScoreEviction):
        return (COUNT, LAST_STEP)
    return (COUNT,) if isinstance(policy, LFUEviction) else (LAST_STEP,)


def keys_to_evict(
    policy: EvictionSpec, keys: Tensor, uses: Mapping[str, Tensor], clock: int, *, most: int, spared: Tensor
) -> Tensor:
    """Return the keys to evict, in ascending order: those of the lowest scores, of equal ones the lowest keys.

    Args:
        policy: Policy, which defines the scores; a time to live also keeps younger rows.
        keys: int64[n] that are held.
        uses: Uses of each key; has the names of `needed_uses`.
        clock: Number of training batches so far.
        most: Largest number of keys to evict.
        spared: bool[n], keys that are not evicted.
    """
    scores = _scores(policy, keys, uses)
    # A time to live has a limit of its own; other policies rank all rows that are not spared.
    if isinstance(policy, TTLEviction):
        places = rows_at_most(scores, clock - policy.steps, spared)
    else:
        places = (~spared).nonzero().squeeze(1)
    if places.numel() > most:
        places = _lowest(scores, keys, places, most)
    # Sorted, since the order in an index differs between processes and devices, and results must not.
    return keys[places].sort().values


def _scores(policy: EvictionSpec, keys: Tensor, uses: Mapping[str, Tensor]) -> Tensor:
    if isinstance(policy, LFUEviction):
        return uses[COUNT]
    if not isinstance(policy, ScoreEviction):
        return uses[LAST_STEP]
    scores: Tensor = policy.score(keys, uses[COUNT], uses[LAST_STEP])
    # From a function of users: NaN has no rank, and neither have complex numbers.
    is_ordered = isinstance(scores, Tensor) and not (scores.is_complex() or scores.dtype == torch.bool)
    if not is_ordered or scores.shape != keys.shape or bool(scores.isnan().any()):
        got = f"{scores.dtype}{list(scores.shape)}" if isinstance(scores, Tensor) else type(scores).__name__
        raise ConfigError("score function", f"got {got}, expected a tensor of {keys.numel()} numbers without NaN")
    return scores


def _lowest(scores: Tensor, keys: Tensor, places: Tensor, most: int) -> Tensor:
    """Return the `most` of `places` with the lowest (score, key), in linear time."""
    if most == 0:
        return places[:0]
    mine = scores[places]
    # `kthvalue` and one comparison are linear; only those tied at the limit are sorted.
    limit = mine.kthvalue(most).values
    below, tied = places[mine < limit], places[mine == limit]
    return torch.cat([below, tied[keys[tied].argsort()[: most - below.numel()]]])


class KeyRows:
    """The rows of one table's keys.

    Attributes:
        spec: The table.
        arena: Arena of the rows.
        number: Number of the table in its arena.
        tracked: Names of `terarec.storage.key_rows.USES` that are tracked.
        clock: Number of training batches so far.
        num_evicted: Number of rows evicted so far.
        evicted: Evicted keys that were not reported yet, if the table reports them.
        removed: Keys that were removed since the checkpoint that the arena's changes follow.
        index: Key -> arena row.
        admission: Policy for which new keys get a row; None admits every key.
        hot: Keys int64[h], rising, of whose rows other processes have copies; none is evicted, as each would choose by
            the other keys that it has.
        most_imported: Number of rows up to which imports insert keys; None for any number.
    """

    def __init__(self, spec: DynamicTableSpec, arena: DynamicArena, implementation: str) -> None:
        self.spec = spec
        self.arena = arena
        self.number = arena.table_names.index(spec.name)
        self.tracked = tuple(USES) if spec.track_uses else needed_uses(spec.evict)
        for name in self.tracked:
            arena.track(name, USES[name])
        self._implementation = implementation
        self.hot = torch.empty(0, dtype=torch.int64, device=arena.device)
        self.most_imported = spec.max_rows
        self._start()

    def _start(self) -> None:
        device = self.arena.device
        self.index: HashIndex = new_hash_index(device, self._implementation)
        self.admission = build_admission(self.spec, self.arena.seed, device, self._implementation, self.hot)
        self.clock = self.num_evicted = 0
        self.evicted = torch.empty(0, dtype=torch.int64, device=device)
        self.removed: list[Tensor] = []

    def begin_part(self, hot: Tensor, most_imported: int | None) -> None:
        """Set `hot` and `most_imported` of an empty table, the part of one on this rank."""
        self.hot, self.most_imported = hot.to(self.arena.device), most_imported
        self._start()

    def clear(self) -> None:
        """Remove all keys, uses and admission counts."""
        # A delta has no word for all keys, so the next checkpoint is a complete one.
        discard_changes(self.arena)
        keys, rows = self.items()
        self.arena.free_rows(self.number, rows, keys)
        self._start()

    def check_room(self, wanted: int) -> None:
        """Allocate memory for `wanted` rows in place of all present ones.

        Raises:
            StorageError: Memory or table is full; no row has changed.
        """
        num_rows = len(self.index)
        where, demand = f"table {self.spec.name!r}", f"holds {num_rows:,} rows, {wanted:,} in their place requested"
        if self.most_imported is not None and wanted > self.most_imported:
            raise NoSpaceError(where, f"{demand}, at most {self.most_imported:,} allowed")
        self.arena.make_room(wanted, freed=num_rows, purpose=f"{where}: {demand}")

    def items(self) -> tuple[Tensor, Tensor]:
        """Return all keys and their rows, int64[n] each."""
        keys, rows, _ = self.index.items()
        return keys, rows

    def find(self, keys: Tensor) -> Tensor:
        """Return the rows int64[n] of ``keys int64[n]``, -1 where a key has none."""
        return self.index.find(keys)

    def find_or_insert(self, keys: Tensor) -> Tensor:
        """Insert the keys of a training batch that ``spec.admit`` admits, then `find` all.

        Part of the arena's `transaction`, which can roll it back.
        """
        # Before insertion, so that rows that go make room for new keys.
        self._evict_expired(keys)
        # All keys are inserted: one pass over the index does that and finds them.
        if self.admission is None:
            return self._insert(keys, keys)
        rows = self.index.find(keys)
        unseen = keys[rows < 0]
        if unseen.numel():
            transaction = self.arena.transaction
            admitted = self.admission.admit(unseen, self.clock, transaction)
            if admitted.numel():
                self._insert(admitted, keys)
                # A key with a row is not counted until it is evicted and comes again.
                self.admission.forget(admitted, transaction)
                rows = self.index.find(keys)
        return rows

    def note_use(self, rows: Tensor) -> None:
        """Record that a training batch used ``rows int64[n]``; a repeated row counts as often as it occurs."""
        # Their uses change here, and their weights by the update that follows.
        mark_changes(self.arena, rows)
        self.clock += 1
        for name in self.tracked:
            if name == LAST_STEP:
                self.arena.uses[name].index_fill_(0, rows, self.clock)
            else:
                # Not an assignment, which would count a repeated row once.
                self.arena.uses[name].index_add_(0, rows, torch.ones_like(rows))

    def insert(self, keys: Tensor) -> Tensor:
        """Insert the keys that have no row, without eviction; return the rows int64[n] of ``keys int64[n]``.

        Part of the arena's `transaction`, which can roll it back.
        """
        return self._insert(keys, None)

    def evict(self, policy: EvictionSpec, *, keep: int, spared: Tensor | None = None) -> Tensor:
        """Evict rows by `policy` until `keep` are left, except those of the keys `spared`; see `keys_to_evict`."""
        keys = self._choose(policy, keep, spared)
        self._remove(keys)
        return keys

    def size_after_eviction(self, policy: EvictionSpec) -> int:
        """Return the number of rows that a full table evicts down to."""
        most = self.spec.max_rows
        if most is None:
            raise ConfigError(
                f"table {self.spec.name!r}: evict", "expected keep_at_least, as the table has no max_rows"
            )
        # Of the rows that may go; at least one: the share of a small table rounds down to none.
        others, hot = most - self.hot.numel(), int((self.index.find(self.hot) >= 0).count_nonzero())
        return hot + others - max(1, math.floor(others * policy.share))

    def move(self) -> None:
        """Move the index to the device of the arena."""
        device = self.arena.device
        self.index = copy_to(self.index, device, self._implementation)
        self.evicted, self.hot = self.evicted.to(device), self.hot.to(device)
        self.removed = [keys.to(device) for keys in self.removed]
        if self.admission is not None:
            self.admission.move(device)

    def _insert(self, keys: Tensor, batch: Tensor | None) -> Tensor:
        """See `insert`; with a batch, a full table evicts rows that the batch does not use."""
        arena, spec = self.arena, self.spec
        # The index numbers rows as `allocate_rows` does below. Only the insertion tells how many keys are new, so it is
        # undone where they are too many.
        rows, new_keys = self.index.insert(keys, arena.recycled, arena.next_row)
        wanted = new_keys.numel()
        if not wanted:
            return rows
        most = self.most_imported if batch is None else self._most_rows()
        if most is not None and len(self.index) > most:
            self.index.erase(new_keys)
            self._make_room(wanted, most, batch)
            rows, new_keys = self.index.insert(keys, arena.recycled, arena.next_row)
        # Registered before rows are allocated: if there is no memory for them, the keys leave the index again.
        arena.transaction.on_rollback(lambda: self.index.erase(new_keys))
        demand = self._demand(wanted, num_rows=len(self.index) - wanted)
        new_rows = arena.allocate_rows(wanted, f"table {spec.name!r}: {demand}")
        arena.data.begin(self.number, new_rows, new_keys)
        arena.number_rows(self.number, new_rows, new_keys)
        # A batch that fails later may have brought them into tiers, which would keep rows without a key.
        arena.transaction.on_rollback(lambda: arena.data.forget(self.number, new_rows, new_keys))
        mark_changes(arena, new_rows)
        return rows

    def _most_rows(self) -> int | None:
        """Return the number of rows that training fills: hot keys without a row have room of their own."""
        most, hot = self.spec.max_rows, self.hot.numel()
        if most is None or not hot or len(self.index) <= most - hot:
            return most
        return most - int((self.index.find(self.hot) < 0).count_nonzero())

    def _make_room(self, wanted: int, most: int, batch: Tensor | None) -> None:
        """Evict rows until `wanted` more fit within `most`; rows that the batch uses stay."""
        policy, num_rows, where = self.spec.evict, len(self.index), f"table {self.spec.name!r}"
        full = f"{self._demand(wanted, num_rows=num_rows)}, at most {most:,} allowed"
        if policy is None or batch is None:
            raise NoSpaceError(
                where, f"{full}; expected a larger max_rows" + " or an eviction policy" * (batch is not None)
            )
        fitting = most - wanted
        # Down to the size of the policy and not to what fits alone, so that the next batches evict nothing.
        chosen = self._choose(policy, max(0, min(fitting, self.size_after_eviction(policy))), batch)
        # Rows of the batch stay, and young ones under a time to live: there may be too few others.
        if num_rows - chosen.numel() > fitting:
            why = "too young or " if isinstance(policy, TTLEviction) else ""
            raise NoSpaceError(
                where, f"{full}; all but {chosen.numel():,} are {why}in the batch, expected a larger max_rows"
            )
        self._remove(chosen)

    def _evict_expired(self, batch: Tensor) -> None:
        policy, most = self.spec.evict, self.spec.max_rows
        # Only after an import of the rows of other ranks: training fills no more than `max_rows`.
        if policy is not None and most is not None and most < len(self.index):
            self.evict(policy, keep=self.size_after_eviction(policy), spared=batch)
        # Not in every batch, since finding expired rows passes over all of them.
        if isinstance(policy, TTLEviction) and self.clock % math.ceil(policy.steps * policy.share) == 0 and self.clock:
            self.evict(policy, keep=0, spared=batch)

    def _choose(self, policy: EvictionSpec, keep: int, spared: Tensor | None) -> Tensor:
        """Return the keys to evict."""
        missing = set(needed_uses(policy)) - set(self.tracked)
        if missing:
            raise ConfigError(
                f"table {self.spec.name!r}: evict",
                f"got {policy.kind!r}, which needs each row's "
                f"{' and '.join(sorted(missing))}; expected a table with track_uses=True",
            )
        keys, rows = self.items()
        # By row, so that whether a key is spared is a look at its row and no search among keys.
        stays = torch.zeros(self.arena.num_rows, dtype=torch.bool, device=rows.device)
        for kept in (self.hot, spared):
            if kept is not None and kept.numel():
                places = self.index.find(kept)
                stays[places[places >= 0]] = True
        uses = {name: self.arena.uses[name][rows] for name in self.tracked}
        most = max(0, len(self.index) - keep)
        return keys_to_evict(policy, keys, uses, self.clock, most=most, spared=stays[rows])

    def remove(self, keys: Tensor) -> None:
        """Remove those of ``keys int64[n]`` that are held, which are not counted as evicted."""
        # The index erases keys that it holds, each once.
        keys = torch.unique(keys)
        keys = keys[self.index.find(keys) >= 0]
        with self.arena.transaction:
            self.arena.free_rows(self.number, self.index.erase(keys), keys)
            self._note_removed(keys)

    def _note_removed(self, keys: Tensor) -> None:
        if changes_since(self.arena) is not None:
            self.removed.append(keys)  # a key that comes back is left out by `removed_since`

    def _remove(self, keys: Tensor) -> None:
        rows, num_evicted, evicted = self.index.erase(keys), self.num_evicted, self.evicted
        # With what was there before the changes below.
        self.arena.transaction.on_rollback(lambda: self._restore(keys, rows, num_evicted, evicted))
        self.arena.free_rows(self.number, rows, keys)
        self._note_removed(keys)
        self.num_evicted += keys.numel()
        # Only where somebody asks for them: they are kept until `take_evicted`.
        if self.spec.report_evicted:
            self.evicted = torch.cat([self.evicted, keys])

    def _restore(self, keys: Tensor, rows: Tensor, num_evicted: int, evicted: Tensor) -> None:
        self.index.assign(keys, rows)
        self.num_evicted, self.evicted = num_evicted, evicted

    def _demand(self, wanted: int, *, num_rows: int) -> str:
        return f"holds {num_rows:,} rows, {wanted:,} more requested"

    def __deepcopy__(self, memo: dict[int, Any]) -> KeyRows:
        twin = copy.copy(self)
        memo[id(self)] = twin
        # An index lies in the core or on a device, where `deepcopy` cannot copy it.
        memo[id(self.index)] = copy_to(self.index, self.arena.device, self._implementation)
        for name, value in vars(self).items():
            setattr(twin, name, copy.deepcopy(value, memo))
        return twin


class FrozenKeys:
    """Maps keys to rows that are in the order of `keys`.

    Args:
        keys: int64[n], distinct.
        first_row: Row of the first key; the rows of the others follow.
        default_row: Row of all other keys.
    """

    def __init__(self, keys: Tensor, *, first_row: int, default_row: int) -> None:
        self._default_row = default_row
        self._index = new_hash_index(keys.device)
        self._index.assign(keys, torch.arange(first_row, first_row + keys.numel(), device=keys.device))

    @property
    def memory_bytes(self) -> int:
        """Bytes of the index."""
        return self._index.memory_bytes

    def rows(self, keys: Tensor, *, train: bool) -> Tensor:
        """Return the rows int64[n] of ``keys int64[n]``; `train` changes nothing."""
        rows = self._index.find(keys)
        return rows.masked_fill_(rows < 0, self._default_row)
