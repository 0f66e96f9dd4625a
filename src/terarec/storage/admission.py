# SPDX-License-Identifier: Apache-2.0
"""Admission: the policies for which new keys get a row, and their counts."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from terarec.errors import StorageError
from terarec.kernels.hash_index import copy_to, new_hash_index
from terarec.spec import DynamicTableSpec
from terarec.spec.tables import MOST_FILTER_COUNT, FilterAdmission, FrequencyAdmission, ProbabilityAdmission
from terarec.storage.dynamic_arena import Transaction

_FILTER_ROWS = 4  # cells of a key in a counting filter; its count is the smallest of them


class Admission(Protocol):
    """Decides which new keys get a row."""

    names: frozenset[str]
    """Names of the tensors of a piece of `export_chunks`."""

    @property
    def memory_bytes(self) -> int:
        """Bytes of the counts."""

    def admit(self, keys: Tensor, clock: int, transaction: Transaction) -> Tensor:
        """Count the keys int64[n] of one batch that have no row; return those to insert, possibly repeated.

        The result does not depend on the order of the keys.
        """

    def forget(self, keys: Tensor, transaction: Transaction) -> None:
        """Remove the counts of ``keys int64[n]``, possibly repeated, which have rows now."""

    def move(self, device: torch.device) -> None:
        """Move the counts to `device`."""

    def export_chunks(self, chunk_keys: int) -> Iterator[dict[str, Tensor]]:
        """Return the counts as named tensors, in pieces of at most `chunk_keys` keys."""

    def import_(self, piece: Mapping[str, Tensor]) -> None:
        """Import a piece that `export_chunks` of the same class returned.

        Raises:
            StorageError: A filter of another size; nothing has changed.
        """


class CountAdmission:
    """`FrequencyAdmission`: exact counts of the keys without rows."""

    names = frozenset({"admission_keys", "admission_counts"})

    def __init__(self, spec: FrequencyAdmission, device: torch.device, implementation: str) -> None:
        self.spec = spec
        self._implementation = implementation
        self._counts = new_hash_index(device, implementation)

    @property
    def memory_bytes(self) -> int:
        """Bytes of the index of counts."""
        return self._counts.memory_bytes

    def admit(self, keys: Tensor, clock: int, transaction: Transaction) -> Tensor:
        """Return the keys that occurred often enough."""
        counts = self._counts.count(keys)
        transaction.on_rollback(lambda: self._uncount(keys))
        return keys[counts >= self.spec.count]

    def forget(self, keys: Tensor, transaction: Transaction) -> None:
        """Remove the counts of `keys`."""
        counts = self._counts.erase(keys)
        transaction.on_rollback(lambda: self._counts.assign(keys[counts >= 0], counts[counts >= 0]))

    def _uncount(self, keys: Tensor) -> None:
        distinct, occurrences = torch.unique(keys, return_counts=True)
        counts = self._counts.find(distinct) - occurrences
        self._counts.assign(distinct, counts)
        # A key that only this batch had leaves no count of 0 behind, so that the index is as before.
        self._counts.erase(distinct[counts == 0])

    def move(self, device: torch.device) -> None:
        """Move the counts to `device`."""
        self._counts = copy_to(self._counts, device, self._implementation)

    def __deepcopy__(self, memo: dict[int, Any]) -> CountAdmission:
        twin = copy.copy(self)
        memo[id(self)] = twin
        twin._counts = copy_to(self._counts, self._counts.device, self._implementation)
        return twin

    def export_chunks(self, chunk_keys: int) -> Iterator[dict[str, Tensor]]:
        """Return keys with their counts."""
        start = 0
        while start >= 0:
            keys, counts, start = self._counts.items(start, chunk_keys)
            if keys.numel():
                yield {"admission_keys": keys, "admission_counts": counts}

    def import_(self, piece: Mapping[str, Tensor]) -> None:
        """Set counts."""
        device = self._counts.device
        self._counts.assign(piece["admission_keys"].to(device), piece["admission_counts"].to(device))


class ChanceAdmission:
    """`ProbabilityAdmission`: a random number drawn from (table, seed, batch, key)."""

    names: frozenset[str] = frozenset()
    memory_bytes = 0

    def __init__(self, spec: ProbabilityAdmission, seed: int) -> None:
        # Compared as integers of 53 bits, those of a float64: every device then draws the same.
        self._limit = int(spec.probability * 2**53)
        self._seed = seed

    def admit(self, keys: Tensor, clock: int, transaction: Transaction) -> Tensor:
        """Return the keys whose draw is below the probability."""
        # Drawn by batch and key instead of from a generator: a resumed training draws the same, whatever the order of
        # keys.
        drawn = mix(mix(keys ^ self._seed) + clock) & (2**53 - 1)
        return keys[drawn < self._limit]

    def forget(self, keys: Tensor, transaction: Transaction) -> None:
        """Do nothing: this policy has no counts."""

    def move(self, device: torch.device) -> None:
        """Do nothing: this policy has no counts."""

    def export_chunks(self, chunk_keys: int) -> Iterator[dict[str, Tensor]]:
        """Do nothing: this policy has no counts."""
        return iter(())

    def import_(self, piece: Mapping[str, Tensor]) -> None:
        """Do nothing: this policy has no counts."""


class CountingFilter:
    """`FilterAdmission`: a count-min sketch with conservative update (Estan & Varghese 2002) in saturating bytes.

    A key has a cell in each of four rows; its count is the smallest of the four. Counting raises only cells below the
    new count, so a count is never too low, and too high only where each of the four cells is shared.

    The cells of a key depend on a seed, which is exported and imported together with them.

    Args:
        spec: Count and bytes.
        table: Name of the table, for errors.
        seed: As above.
        device: Device of the cells.
        hot: Keys int64[h], rising, that other processes count, too: they have counts of their own, which do not depend
            on the other keys of a process.
    """

    names = frozenset({"admission_filter", "admission_seed"})

    def __init__(self, spec: FilterAdmission, table: str, seed: int, device: torch.device, hot: Tensor) -> None:
        self.spec = spec
        self._table = table
        self._seed = seed
        # Bytes that saturate: all that is asked is whether a small count was reached.
        self._cells = torch.zeros(_FILTER_ROWS, spec.num_bytes // _FILTER_ROWS, dtype=torch.uint8, device=device)
        self._hot, self._hot_counts = hot, torch.zeros_like(hot)

    @property
    def memory_bytes(self) -> int:
        """Bytes of the cells."""
        return self._cells.numel()

    def admit(self, keys: Tensor, clock: int, transaction: Transaction) -> Tensor:
        """Return the keys that occurred often enough."""
        distinct, occurrences = torch.unique(keys, return_counts=True)
        places = self._places(distinct)
        before = self._cells.gather(1, places)
        counts = before.amin(0).to(torch.int64) + occurrences
        if self._hot.numel():
            counts = self._counted_hot(distinct, occurrences, counts, transaction)
        raised = counts.clamp(max=MOST_FILTER_COUNT).to(torch.uint8)
        # Keys of a batch may share a cell. The largest count wins, so that the order of the keys does not matter.
        self._cells.scatter_reduce_(1, places, raised.expand_as(places), "amax")
        # Cells that several keys share had one value before, so it does not matter which key writes last.
        transaction.on_rollback(lambda: self._cells.scatter_(1, places, before))
        admitted: Tensor = distinct[counts >= self.spec.count]
        return admitted

    def _counted_hot(self, keys: Tensor, occurrences: Tensor, counts: Tensor, transaction: Transaction) -> Tensor:
        """Count the hot ones of distinct keys; return ``counts int64[n]`` with theirs."""
        places = torch.searchsorted(self._hot, keys).clamp_(max=self._hot.numel() - 1)
        is_hot, before = self._hot[places] == keys, self._hot_counts.clone()
        transaction.on_rollback(lambda: self._hot_counts.copy_(before))
        self._hot_counts.index_add_(0, places, occurrences * is_hot)
        return torch.where(is_hot, self._hot_counts[places], counts)

    def forget(self, keys: Tensor, transaction: Transaction) -> None:
        """Do nothing: a filter cannot remove keys, since keys share cells."""

    def move(self, device: torch.device) -> None:
        """Move the cells to `device`."""
        self._cells = self._cells.to(device)
        self._hot, self._hot_counts = self._hot.to(device), self._hot_counts.to(device)

    def export_chunks(self, chunk_keys: int) -> Iterator[dict[str, Tensor]]:
        """Return the cells and their seed."""
        yield {"admission_filter": self._cells, "admission_seed": torch.tensor([self._seed])}

    def import_(self, piece: Mapping[str, Tensor]) -> None:
        """Import the cells and their seed."""
        cells, seed = piece["admission_filter"], piece["admission_seed"]
        if cells.shape != self._cells.shape or cells.dtype != self._cells.dtype:
            got, expected = f"{cells.numel():,} cells of {cells.dtype}", f"{self._cells.numel():,} of torch.uint8"
            raise StorageError(
                f"table {self._table!r}", f"got a counting filter of {got}, expected {expected} (the same num_bytes)"
            )
        if seed.shape != (1,) or seed.dtype != torch.int64:
            got = f"{seed.dtype}{list(seed.shape)}"
            raise StorageError(f"table {self._table!r}", f"got a counting filter's seed {got}, expected torch.int64[1]")
        self._cells.copy_(cells)
        # With another seed, keys would have other cells.
        self._seed = int(seed)
        self._hot_counts = self._cells.gather(1, self._places(self._hot)).amin(0).to(torch.int64)

    def _places(self, keys: Tensor) -> Tensor:
        """Return the cells int64[4, n] of each key."""
        first = mix(keys ^ self._seed)
        rows = torch.arange(_FILTER_ROWS, device=keys.device)[:, None]
        return (mix(first + rows) & (2**63 - 1)) % self._cells.shape[1]


def build_admission(
    table: DynamicTableSpec, seed: int, device: torch.device, implementation: str, hot: Tensor
) -> Admission | None:
    """Return the admission of ``table.admit``; None inserts every key.

    Args:
        table: The table.
        seed: Seed of the arena.
        device: Device of the counts.
        implementation: That of the index of counts.
        hot: Keys int64[h], rising, that other processes count, too.
    """
    spec = table.admit
    if spec is None:
        return None
    if isinstance(spec, FrequencyAdmission):
        return CountAdmission(spec, device, implementation)
    # A seed for each table: equal keys of two tables are drawn independently. Python's `hash` differs between
    # processes.
    digest = hashlib.blake2b(f"{seed}/{table.name}/admission".encode(), digest_size=8).digest()
    own_seed = int.from_bytes(digest, "little", signed=True)
    if isinstance(spec, ProbabilityAdmission):
        return ChanceAdmission(spec, own_seed)
    return CountingFilter(spec, table.name, own_seed, device, hot)


def mix(bits: Tensor) -> Tensor:
    """Return SplitMix64's finalizer of int64[n]: products wrap, shifts insert zeros."""
    # SplitMix64's factors 0xBF58476D1CE4E5B9 and 0x94D049BB133111EB as signed numbers: torch has no products of uint64.
    bits = (bits ^ _shifted(bits, 30)) * -0x40A7B892E31B1A47
    bits = (bits ^ _shifted(bits, 27)) * -0x6B2FB644ECCEEE15
    return bits ^ _shifted(bits, 31)


def _shifted(bits: Tensor, places: int) -> Tensor:
    # torch shifts copies of the sign in from the left; the mask removes them.
    return (bits >> places) & ((1 << (64 - places)) - 1)
