# SPDX-License-Identifier: Apache-2.0
"""The exchange of a step's keys with the ranks of their rows, and the collectives of a collection.

All tables of a collection share a collective: counts and keys in the forward pass, then vectors; gradients in the
backward pass (`terarec.dist.vectors`). Keys are distinct before they travel. With R ranks and T tables, what goes to
rank d is in the order of the tables, and what came from all ranks in that of the ranks; the rows of one table are those
of rank 0's keys, then of rank 1's, so that sums over ranks have one order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from terarec.batch import Jagged
from terarec.dist.placement import PlacedTable
from terarec.dist.plan import Wire
from terarec.dist.ranks import PendingResult, Ranks
from terarec.dist.routing import BagPart, Routed, packed_size, unpacked
from terarec.embedding import EmbeddingCollection
from terarec.embedding.lookups import FoundRows
from terarec.errors import CollectiveError

_FAILED = -1  # in place of a count: this rank has raised an error before the exchange


class Exchange:
    """Exchanges the keys, vectors and gradients of the tables of a collection.

    Attributes:
        tables: The tables.
        local: Collection of their parts on this rank.
        ranks: The ranks.
        takes_counts: Whether each table needs the occurrences of keys, since a policy counts them.
        pooled: Numbers of the tables whose bags the ranks of the rows pool.

    Args:
        tables: The tables.
        local: Collection of the parts of these tables on this rank, with a feature without pooling for each.
        ranks: The ranks.
        wire: Type of numbers between ranks.
        name: Name of the collection, for errors.
        pooled: Numbers of the tables whose bags the ranks of the rows pool.
    """

    def __init__(
        self,
        tables: Sequence[PlacedTable],
        local: EmbeddingCollection,
        ranks: Ranks,
        *,
        wire: Wire,
        name: str,
        pooled: Sequence[int] = (),
    ) -> None:
        self.tables = tuple(tables)
        self.local = local
        self.ranks = ranks
        self.pooled = tuple(pooled)
        self._wire = torch.bfloat16 if wire == "bfloat16" else torch.float32
        self._name = name
        names = [table.spec.name for table in tables]
        self._arenas = [[names.index(name) for name in arena.table_names] for arena in local.arenas]
        # Fields of dynamic tables alone. A count is as many bytes as its key, so it goes only where it is read.
        self.takes_counts = [
            getattr(table.spec, "admit", None) is not None
            or getattr(table.spec, "track_uses", False)
            or getattr(table.spec, "evict", None) is not None
            for table in tables
        ]

    def request(self, wanted: Sequence[Routed] | None, *, is_trained: bool) -> KeyRequest:
        """Begin to send keys to the ranks of their rows.

        Args:
            wanted: Distinct keys of each table; None to report to the other ranks that this one has raised an error.
            is_trained: Whether gradients will come; dynamic tables in training mode then insert new keys.
        """
        return KeyRequest(self, wanted, is_trained=is_trained)

    def begin(self, what: str, values: Tensor, sent: Sequence[int], received: Sequence[int]) -> PendingResult:
        """Begin a collective of this collection; see `Ranks.begin_all_to_all`."""
        return self.ranks.begin_all_to_all(f"{what} of {self._name}", values, sent, received)

    def failed(self, ranks: Sequence[int]) -> CollectiveError:
        """Return the error for this rank after other ranks have raised one."""
        return CollectiveError(
            f"rank {ranks[0]} ({self.ranks.hosts[ranks[0]]}) has raised an error, see its output",
            collective=f"exchange of counts of {self._name}",
            step=self.ranks.step,
            rank=ranks[0],
        )

    def begin_numbers(
        self, what: str, parts: Sequence[Sequence[Tensor]], received: Sequence[int], joined: Tensor | None = None
    ) -> PendingResult:
        """Begin to send float32 numbers to each rank but this, through the type on the wire.

        Args:
            what: Name of the collective.
            parts: Numbers [n, D] for each rank, which go one after the other; those for this rank do not go.
            received: Count of the numbers from each rank; 0 from this one.
            joined: All numbers that go one after the other, if they lie so.
        """
        me = self.ranks.rank
        # What stays here would be copied into the collective's buffers and out of them again.
        sent = [0 if rank == me else sum(part.numel() for part in mine) for rank, mine in enumerate(parts)]
        if joined is None:
            flat = [part.flatten() for rank, mine in enumerate(parts) if rank != me for part in mine]
            joined = torch.cat(flat) if flat else torch.empty(0)
        return self.begin(what, joined.to(self._wire), sent, received)

    def numbers(self, pending: PendingResult, received: Sequence[int]) -> list[Tensor]:
        """Wait for the float32 numbers from all ranks and return them."""
        return list(torch.split(pending.wait().to(torch.float32), list(received)))

    def rounded(self, own: Tensor) -> Tensor:
        """Round numbers that stay on this rank as the exchange would, so that copies of a row stay equal."""
        # A sample's result must not depend on whether the row of its key is on its own rank.
        return own if self._wire == torch.float32 else own.to(self._wire).to(torch.float32)

    def send_integers(self, what: str, numbers: Sequence[Tensor], received: Sequence[int]) -> list[Tensor]:
        """Send int64[n] to each rank and return those from each rank."""
        sizes = [values.numel() for values in numbers]
        return list(torch.split(self.begin(what, torch.cat(list(numbers)), sizes, received).wait(), list(received)))

    def arena_tables(self) -> list[list[int]]:
        """Return the numbers of the tables of each arena of `local`."""
        return self._arenas

    def find(
        self, keys: list[list[Tensor]], counts: list[list[Tensor]], received: Counts, *, is_trained: bool
    ) -> list[FoundRows]:
        """Find the rows of the received keys [table][source], for all ranks at once in each table."""
        # One lookup for the keys of all ranks: a dynamic table then inserts, counts and evicts as for one batch.
        joined = [table.local_keys(torch.cat(parts)) for table, parts in zip(self.tables, keys, strict=True)]
        ends = torch.cat([torch.zeros(1, dtype=torch.int64), received.all.sum(dim=0).cumsum(0)])
        names = tuple(table.spec.name for table in self.tables)
        jagged = Jagged(names=names, keys=torch.cat(joined), offsets=ends)
        repeats = {names[number]: torch.cat(parts) for number, parts in enumerate(counts) if self.takes_counts[number]}
        return self.local.find(jagged, is_trained=is_trained, repeats=repeats)


class ReceivedKeys(NamedTuple):
    """Keys that all ranks request from this one.

    Attributes:
        found: The rows of their keys, for each arena.
        counts: Numbers of keys that came from each rank.
        bags: Bags that came from each rank, by the number of the table.
    """

    found: list[FoundRows]
    counts: Counts
    bags: dict[int, list[BagPart]]


class KeyRequest:
    """Distinct keys of a batch that are sent to the ranks of their rows.

    Rows are not read before `find`, so that the keys of a batch can be sent during the step of the previous batch.

    Attributes:
        exchange: The exchange.
        wanted: Distinct keys of each table.
        sent: Numbers of keys that go to each rank.

    Args:
        exchange: The exchange.
        wanted: Distinct keys of each table; None if this rank has raised an error.
        is_trained: Whether gradients will come.
    """

    def __init__(self, exchange: Exchange, wanted: Sequence[Routed] | None, *, is_trained: bool) -> None:
        self.exchange, self._is_trained = exchange, is_trained
        self.wanted: Sequence[Routed] = wanted or ()
        size, me, num_tables = exchange.ranks.size, exchange.ranks.rank, len(exchange.tables)
        bags = torch.zeros(size, len(exchange.pooled), 3, dtype=torch.int64)
        # An error travels in place of counts, which go first in every step: no collective of its own is needed.
        if wanted is None:
            rows = copies = torch.full((size, num_tables), _FAILED)
        else:
            for index, number in enumerate(exchange.pooled):
                bags_of_table = wanted[number].bags
                assert bags_of_table is not None, "a table that the ranks of the rows pool has bags"
                bags[:, index] = torch.tensor([part.numbers for part in bags_of_table.parts])
            # rows and copies int64[R, T]: a row for each rank.
            rows = torch.tensor([table.num_rows for table in wanted]).T.contiguous()
            # Gradients of rows with copies go to all ranks, each of which updates its own copy.
            copies = torch.tensor([table.num_copies for table in wanted]).expand(size, -1).clone()
            if not is_trained:  # only this rank needs them
                copies[[rank for rank in range(size) if rank != me]] = 0
        self.sent = Counts(rows, copies, bags)
        # int64[R, 2 T + 3 P]
        numbers = torch.cat([rows, copies, bags.flatten(1)], dim=1)
        each = [numbers.shape[1]] * size
        self._counts = exchange.begin("exchange of counts", numbers.flatten(), each, each)
        self._received: Counts | None = None
        self._keys: PendingResult | None = None
        self._failed: list[int] = []

    def send_keys(self) -> None:
        """Send the keys after the counts of all ranks have arrived; send nothing if a rank has raised an error.

        Raises:
            CollectiveError: Another rank does not join.
        """
        # The lookup of the batch before calls it for a batch that was announced, and `find` for any other.
        if self._received is not None or self._failed:
            return
        exchange, num_tables = self.exchange, len(self.exchange.tables)
        got = self._counts.wait().view(exchange.ranks.size, -1)
        self._failed = (got == _FAILED).any(dim=1).nonzero()[:, 0].tolist()
        if self._failed:
            return  # `find` raises; here it would be the error of the batch before
        bags = got[:, 2 * num_tables :].view(exchange.ranks.size, len(exchange.pooled), 3)
        self._received = Counts(got[:, :num_tables], got[:, num_tables : 2 * num_tables], bags)
        whole: list[Tensor] = []
        for rank in range(exchange.ranks.size):
            mine = [
                part
                for number, table in enumerate(self.wanted)
                for values in (table.keys, table.counts)
                if values is not None
                for part in segments(table, values, rank, int(self.sent.copies[rank, number]))
            ]
            mine += [
                bags_of_table.parts[rank].packed()
                for bags_of_table in (self.wanted[n].bags for n in exchange.pooled)
                if bags_of_table is not None
            ]
            whole.append(torch.cat(mine) if mine else torch.empty(0, dtype=torch.int64))
        sizes = [tensor.numel() for tensor in whole]
        self._keys = exchange.begin("exchange of keys", torch.cat(whole), sizes, self._sizes(self._received))

    def find(self) -> ReceivedKeys:
        """Find the rows that all ranks have requested.

        Raises:
            CollectiveError: Another rank has raised an error, or does not join.
            StorageError: Memory or a dynamic table is full on this rank.
        """
        self.send_keys()
        if self._failed:
            raise self.exchange.failed(self._failed)
        received = self._received
        assert received is not None, "keys were sent"
        assert self._keys is not None, "keys were sent"
        takes_counts = self.exchange.takes_counts
        keys: list[list[Tensor]] = [[] for _ in self.wanted]
        counts: list[list[Tensor]] = [[] for _ in self.wanted]
        every = received.all.tolist()
        bags: dict[int, list[BagPart]] = {number: [] for number in self.exchange.pooled}
        of_bags = received.bags.tolist()
        # As `send_keys` has put them: the keys and occurrences of each table, then the bags.
        for source, of_source in enumerate(torch.split(self._keys.wait(), self._sizes(received))):
            first = 0
            for number in range(len(self.wanted)):
                size = every[source][number]
                keys[number].append(of_source[first : first + size])
                first += size
                if takes_counts[number]:
                    counts[number].append(of_source[first : first + size])
                    first += size
            for index, number in enumerate(self.exchange.pooled):
                size = packed_size(of_bags[source][index])
                bags[number].append(unpacked(of_source[first : first + size], of_bags[source][index]))
                first += size
        return ReceivedKeys(self.exchange.find(keys, counts, received, is_trained=self._is_trained), received, bags)

    def _sizes(self, received: Counts) -> list[int]:
        """Return the number of integers from each rank: keys, occurrences if a policy counts them, and bags."""
        times = torch.tensor([1 + takes for takes in self.exchange.takes_counts])
        sizes: list[int] = (received.all * times).sum(dim=1).tolist()
        return [size + sum(map(packed_size, bags)) for size, bags in zip(sizes, received.bags.tolist(), strict=True)]


class Counts:
    """Numbers of keys that go to, or came from, each rank.

    Attributes:
        rows: int64[R, T], keys whose row one rank has.
        copies: int64[R, T], keys whose row all ranks have.
        bags: int64[R, P, 3], bags, their keys, and whether these have weights, of tables that the ranks of rows pool.
        all: int64[R, T], keys of rows and of copies.
    """

    def __init__(self, rows: Tensor, copies: Tensor, bags: Tensor) -> None:
        self.rows = rows
        self.copies = copies
        self.bags = bags
        self.all = rows + copies

    def vectors(self, keys: Tensor, pooled: Sequence[int]) -> Tensor:
        """Return the number of vectors for ``keys int64[R, T]``: one per key, or one per bag of pooled tables."""
        if not pooled:
            return keys
        vectors_of_copies = keys.clone()
        vectors_of_copies[:, list(pooled)] = self.bags[:, :, 0]
        return vectors_of_copies


def segments(table: Routed, values: Tensor, rank: int, num_copies: int) -> list[Tensor]:
    """Return the parts of ``held [U, ...]``, a value for each key, that go to a rank."""
    copies = [values[values.shape[0] - table.num_copies :]] if num_copies else []
    if not table.num_rows[rank]:
        return copies
    if table.num_rows[rank] == values.shape[0] and not table.num_copies:
        return [values]
    first = sum(table.num_rows[:rank])
    return [values[first : first + table.num_rows[rank]], *copies]
