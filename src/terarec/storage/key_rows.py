"""The arena row of each key of a dynamic table: keys come by admission and go by eviction."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from terarec.errors import ConfigError, StorageError
from terarec.kernels.hash_index import HashIndex, copied_to, new_hash_index
from terarec.kernels.rows import initialise_keys, rows_at_most
from terarec.spec import DynamicTableSpec, EvictionSpec, LFUEviction, ScoreEviction, TTLEviction
from terarec.storage.admission import build_admission
from terarec.storage.dynamic_arena import DynamicArena

COUNT, LAST_STEP = "count", "last_step"
USES = {COUNT: torch.int64, LAST_STEP: torch.int32}
"""What can be noted of a row's use: how often it occurred, and the table's batch in which it last did."""


def needed_uses(policy: EvictionSpec | None) -> tuple[str, ...]:
    """Return what `policy` must know of a row's use."""
    if policy is None:
        return ()
    if isinstance(policy, ScoreEviction):
        return (COUNT, LAST_STEP)
    return (COUNT,) if isinstance(policy, LFUEviction) else (LAST_STEP,)


def keys_to_evict(
    policy: EvictionSpec, keys: Tensor, uses: Mapping[str, Tensor], clock: int, *, most: int, spared: Tensor
) -> Tensor:
    """Return the keys that go, by rising key: the lowest scores, of equal ones the lowest keys.

    Args:
        policy: what the scores are; a time to live also spares what is young.
        keys: int64[n] that are held.
        uses: of each key, as `needed_uses` lists them.
        clock: the table's batches so far.
        most: the most keys that go.
        spared: bool[n], keys that stay in any case.

    Raises:
        ConfigError: a score function that gives something else than a number for each key.
    """
    scores = _scores(policy, keys, uses)
    if isinstance(policy, TTLEviction):
        found = rows_at_most(scores, clock - policy.steps, spared)
    else:
        found = (~spared).nonzero().squeeze(1)
    if found.numel() > most:
        found = _lowest(scores, keys, found, most)
    return keys[found].sort().values


def _scores(policy: EvictionSpec, keys: Tensor, uses: Mapping[str, Tensor]) -> Tensor:
    if isinstance(policy, LFUEviction):
        return uses[COUNT]
    if not isinstance(policy, ScoreEviction):
        return uses[LAST_STEP]
    scores: Tensor = policy.score(keys, uses[COUNT], uses[LAST_STEP])
    is_ordered = isinstance(scores, Tensor) and not (scores.is_complex() or scores.dtype == torch.bool)
    if not is_ordered or scores.shape != keys.shape or bool(scores.isnan().any()):
        got = f"{scores.dtype}{list(scores.shape)}" if isinstance(scores, Tensor) else type(scores).__name__
        raise ConfigError(f"score function: got {got}, expected a tensor of {keys.numel()} numbers without NaN")
    return scores


def _lowest(scores: Tensor, keys: Tensor, found: Tensor, most: int) -> Tensor:
    """Return the `most` of the places `found` with the lowest (score, key); linear in their number."""
    if most == 0:
        return found[:0]
    mine = scores[found]
    limit = mine.kthvalue(most).values
    below, tied = found[mine < limit], found[mine == limit]
    return torch.cat([below, tied[keys[tied].argsort()[: most - below.numel()]]])


class KeyRows:
    """The rows of one table's keys.

    Attributes:
        spec: the table.
        arena: where the rows live.
        noted: what is noted of a row's use, names of `terarec.storage.key_rows.USES`.
        clock: training batches seen.
        num_evicted: rows that went so far.
        evicted: the evicted keys that were not reported yet, if the table reports them.
        index: key -> arena row.
        admission: which unseen keys get a row; None admits every key.
    """

    def __init__(self, spec: DynamicTableSpec, arena: DynamicArena, implementation: str) -> None:
        self.spec = spec
        self.arena = arena
        self.noted = tuple(USES) if spec.track_uses else needed_uses(spec.evict)
        for name in self.noted:
            arena.track(name, USES[name])
        self._implementation = implementation
        self._start()

    def _start(self) -> None:
        device = self.arena.device
        self.index: HashIndex = new_hash_index(device, self._implementation)
        self.admission = build_admission(self.spec, self.arena.seed, device, self._implementation)
        self.clock = self.num_evicted = 0
        self.evicted = torch.empty(0, dtype=torch.int64, device=device)

    def clear(self) -> None:
        """Forget every key and everything that was noted."""
        self.arena.free_rows(self.items()[1])
        self._start()

    def check_room(self, wanted: int) -> None:
        """Have memory for `wanted` rows in the place of all that are held.

        Raises:
            StorageError: memory or table is full; the rows are as they were.
        """
        held = len(self.index)
        purpose = f"table {self.spec.name!r}: holds {held:,} rows, {wanted:,} in their place requested"
        if self.spec.max_rows is not None and wanted > self.spec.max_rows:
            raise StorageError(f"{purpose}, at most {self.spec.max_rows:,} allowed")
        self.arena.make_room(wanted, freed=held, purpose=purpose)

    def items(self) -> tuple[Tensor, Tensor]:
        """Return all keys and their rows, int64[n] each."""
        keys, rows, _ = self.index.items()
        return keys, rows

    def find(self, keys: Tensor) -> Tensor:
        """Return the rows int64[n] of ``keys int64[n]``, -1 where a key has none."""
        return self.index.find(keys)

    def find_or_insert(self, keys: Tensor) -> Tensor:
        """As `find`, after the keys of a training batch were given rows as far as ``spec.admit`` lets them.

        Part of the arena's `transaction`, which can roll it back.

        Raises:
            StorageError: memory or table is full.
        """
        self._evict_expired(keys)
        if self.admission is None:
            return self._insert(keys, keys)
        rows = self.index.find(keys)
        unseen = keys[rows < 0]
        if unseen.numel():
            transaction = self.arena.transaction
            admitted = self.admission.admit(unseen, self.clock, transaction)
            if admitted.numel():
                self._insert(admitted, keys)
                self.admission.forget(admitted, transaction)
                rows = self.index.find(keys)
        return rows

    def note_use(self, rows: Tensor) -> None:
        """A training batch used ``rows int64[n]``, each as often as it is there."""
        self.clock += 1
        for name in self.noted:
            if name == LAST_STEP:
                self.arena.uses[name].index_fill_(0, rows, self.clock)
            else:
                self.arena.uses[name].index_add_(0, rows, torch.ones_like(rows))

    def insert(self, keys: Tensor) -> Tensor:
        """Return the rows int64[n] of ``keys int64[n]``, given to all that have none; nothing is evicted for them.

        Part of the arena's `transaction`, which can roll it back.

        Raises:
            StorageError: memory or table is full.
        """
        return self._insert(keys, None)

    def evict(self, policy: EvictionSpec, *, keep: int, spared: Tensor | None = None) -> Tensor:
        """Take rows away by `policy` until `keep` are left, but not those of the keys `spared`; see `keys_to_evict`."""
        gone = self._choose(policy, keep, spared)
        self._remove(gone)
        return gone

    def size_after_eviction(self, policy: EvictionSpec) -> int:
        """To how many rows a full table evicts.

        Raises:
            ConfigError: the table has no largest size.
        """
        most = self.spec.max_rows
        if most is None:
            raise ConfigError(f"table {self.spec.name!r}: evict: expected keep_at_least, as the table has no max_rows")
        return most - max(1, math.floor(most * policy.share))

    def move(self) -> None:
        """Follow the arena to its device."""
        device = self.arena.device
        self.index = copied_to(self.index, device, self._implementation)
        self.evicted = self.evicted.to(device)
        if self.admission is not None:
            self.admission.move(device)

    def _insert(self, keys: Tensor, batch: Tensor | None) -> Tensor:
        """`insert`, but making room for keys of the batch, if there is one, by eviction."""
        arena, spec = self.arena, self.spec
        rows, new_keys = self.index.insert(keys, arena.recycled, arena.next_row)
        wanted = new_keys.numel()
        if not wanted:
            return rows
        if spec.max_rows is not None and len(self.index) > spec.max_rows:
            self.index.erase(new_keys)
            self._make_room(wanted, spec.max_rows, batch)
            rows, new_keys = self.index.insert(keys, arena.recycled, arena.next_row)
        arena.transaction.on_rollback(lambda: self.index.erase(new_keys))
        new_rows = arena.allocate_rows(wanted, self._demand(wanted, held=len(self.index) - wanted))
        initialise_keys(
            arena.weights,
            new_rows,
            new_keys,
            table=spec.name,
            seed=arena.seed,
            initializer=spec.initializer,
            scale=spec.init_scale,
        )
        return rows

    def _make_room(self, wanted: int, most: int, batch: Tensor | None) -> None:
        """Evict so that `wanted` keys fit among `most`; what the batch uses stays."""
        policy, held = self.spec.evict, len(self.index)
        full = f"{self._demand(wanted, held=held)}, at most {most:,} allowed"
        if policy is None or batch is None:
            raise StorageError(f"{full}; expected a larger max_rows" + " or an eviction policy" * (batch is not None))
        fitting = most - wanted
        gone = self._choose(policy, max(0, min(fitting, self.size_after_eviction(policy))), batch)
        if held - gone.numel() > fitting:
            why = "too young or " if isinstance(policy, TTLEviction) else ""
            raise StorageError(f"{full}; all but {gone.numel():,} are {why}in the batch, expected a larger max_rows")
        self._remove(gone)

    def _evict_expired(self, batch: Tensor) -> None:
        policy = self.spec.evict
        if isinstance(policy, TTLEviction) and self.clock % math.ceil(policy.steps * policy.share) == 0 and self.clock:
            self.evict(policy, keep=0, spared=batch)

    def _choose(self, policy: EvictionSpec, keep: int, spared: Tensor | None) -> Tensor:
        """Return the keys that `evict` takes away."""
        missing = set(needed_uses(policy)) - set(self.noted)
        if missing:
            raise ConfigError(
                f"table {self.spec.name!r}: evict: got {policy.kind!r}, which needs each row's "
                f"{' and '.join(sorted(missing))}; expected a table with track_uses=True"
            )
        keys, rows = self.items()
        stays = torch.zeros(self.arena.num_rows, dtype=torch.bool, device=rows.device)
        if spared is not None:
            found = self.index.find(spared)
            stays[found[found >= 0]] = True
        uses = {name: self.arena.uses[name][rows] for name in self.noted}
        most = max(0, len(self.index) - keep)
        return keys_to_evict(policy, keys, uses, self.clock, most=most, spared=stays[rows])

    def _remove(self, keys: Tensor) -> None:
        rows, num_evicted, evicted = self.index.erase(keys), self.num_evicted, self.evicted
        self.arena.transaction.on_rollback(lambda: self._restore(keys, rows, num_evicted, evicted))
        self.arena.free_rows(rows)
        self.num_evicted += keys.numel()
        if self.spec.report_evicted:
            self.evicted = torch.cat([self.evicted, keys])

    def _restore(self, keys: Tensor, rows: Tensor, num_evicted: int, evicted: Tensor) -> None:
        self.index.assign(keys, rows)
        self.num_evicted, self.evicted = num_evicted, evicted

    def _demand(self, wanted: int, *, held: int) -> str:
        return f"table {self.spec.name!r}: holds {held:,} rows, {wanted:,} more requested"

    def __deepcopy__(self, memo: dict[int, Any]) -> KeyRows:
        twin = copy.copy(self)
        memo[id(self)] = twin
        memo[id(self.index)] = copied_to(self.index, self.arena.device, self._implementation)
        for name, value in vars(self).items():
            setattr(twin, name, copy.deepcopy(value, memo))
        return twin


class FrozenKeys:
    """Finds rows that lie in the order of their keys.

    Args:
        keys: int64[n], distinct.
        first_row: row of the first key; the others follow.
        default_row: row of all other keys.
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
