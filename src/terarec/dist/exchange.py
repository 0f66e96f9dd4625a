# SPDX-License-Identifier: Apache-2.0
"""The exchange of a step's keys with the ranks of their rows, and the collectives of a collection.

All tables of a collection share a collective: counts and keys in the forward pass, then vectors; gradients in the
backward pass (`terarec.dist.vectors`). Keys are distinct before they travel. With R ranks and T tables, what goes to
rank d is in the order of the tables, and what came from all ranks in that of the ranks; the rows of one table are those
of rank 0's keys, then of rank 1's, so that sums over ranks have one order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from terarec.batch import Jagged
from terarec.dist.occurrences import Occurrences
from terarec.dist.placement import PlacedTable
from terarec.dist.plan import Wire
from terarec.dist.ranks import PendingResult, Ranks
from terarec.dist.routing import BagPart, Routed, StepKeys, packed_size, unpacked
from terarec.dist.streams import KeyStream
from terarec.embedding import EmbeddingCollection
from terarec.embedding.lookups import FoundRows
from terarec.errors import CollectiveError, NoSpaceError
from terarec.spec.checks import one_line

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
        self._places: dict[torch.device, list[Tensor]] = {}
        # Fields of dynamic tables alone. A count is as many bytes as its key, so it goes only where it is read.
        self.takes_counts = [
            getattr(table.spec, "admit", None) is not None
            or getattr(table.spec, "track_uses", False)
            or getattr(table.spec, "evict", None) is not None
            for table in tables
        ]

    @property
    def device(self) -> torch.device:
        """Device of the rows, on which keys, vectors and gradients lie."""
        return self.local.arenas[0].device

    def begin(
        self, what: str, values: Tensor, sent: Sequence[int], received: Sequence[int], stream: KeyStream | None = None
    ) -> PendingResult:
        """Begin a collective of this collection, that of a stream in its order; see `Ranks.begin_all_to_all`."""
        ranks = self.ranks if stream is None else stream.ranks
        return ranks.begin_all_to_all(f"{what} of {self._name}", values, sent, received)

    @contextmanager
    def named_memory(self) -> Iterator[None]:
        """Raise the error of a device without memory with this rank and its largest table.

        Raises:
            NoSpaceError: The device is out of memory.
        """
        try:
            yield
        except torch.OutOfMemoryError as error:
            raise self.no_memory(error, f"lookups of {self._name}") from None

    def no_memory(self, error: torch.OutOfMemoryError, purpose: str) -> NoSpaceError:
        """Return the error of a device without memory, with this rank and its largest table."""
        ranks, tables = self.ranks, self.local.tables
        largest = max(tables, key=lambda name: tables[name].memory_bytes)
        return NoSpaceError(
            f"rank {ranks.rank} ({ranks.hosts[ranks.rank]}), step {ranks.step}",
            f"no memory left on its device for {purpose} ({one_line(str(error))}), the largest table here is "
            f"{largest!r} with {tables[largest].memory_bytes:,} bytes, expected smaller batches, tables or parts of "
            "them",
        )

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
            joined = torch.cat(flat) if flat else torch.empty(0, device=self.device)
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

    def tables_on_device(self) -> list[Tensor]:
        """Return `arena_tables` as int64[t] on the device, which a copy in each step would make wait."""
        device = self.device
        if device not in self._places:
            self._places[device] = [torch.tensor(tables, device=device) for tables in self._arenas]
        return self._places[device]

    def find(
        self, keys: list[list[Tensor]], counts: list[list[Tensor]], received: Counts, *, is_trained: bool
    ) -> list[FoundRows]:
        """Find the rows of the received keys [table][source], for all ranks at once in each table."""
        # One lookup for the keys of all ranks: a dynamic table then inserts, counts and evicts as for one batch.
        joined = [table.local_keys(torch.cat(parts)) for table, parts in zip(self.tables, keys, strict=True)]
        offsets = torch.cat([received.all.new_zeros(1), received.all.sum(dim=0).cumsum(0)])
        names = tuple(table.spec.name for table in self.tables)
        ends = (0, *accumulate(of_table.numel() for of_table in joined))
        jagged = Jagged(names=names, keys=torch.cat(joined), offsets=offsets, ends=ends)
        repeats = {names[number]: torch.cat(parts) for number, parts in enumerate(counts) if self.takes_counts[number]}
        return self.local.find(jagged, is_trained=is_trained, repeats=repeats)


class ReceivedKeys(NamedTuple):
    """Keys that all ranks request from this one.

    Attributes:
        rows: The rows of their keys, for each arena.
        counts: Numbers of keys that came from each rank.
        bags: Bags that came from each rank, by the number of the table.
    """

    rows: list[FoundRows]
    counts: Counts
    bags: dict[int, list[BagPart]]


class KeyRequest:
    """Distinct keys of a batch that are sent to the ranks of their rows.

    Rows are not read before `find`, so that the keys of a batch can be sent during the step of the previous batch.

    Attributes:
        exchange: The exchange.
        wanted: Distinct keys of each table, once `send_keys` knows their numbers.
        sent: Numbers of keys that go to each rank.
        occurrences: Occurrences of keys of each feature, where their gradients will be sent one by one.

    Args:
        exchange: The exchange.
        wanted: Distinct keys of each table; None to report to the other ranks that this one has raised an error.
        is_trained: Whether gradients will come; dynamic tables in training mode then insert new keys.
        is_valid: bool[], whether the keys are valid, if a device has not told; the others are told if not.
        occurrences: Occurrences of keys of each feature, or None for each if this rank has raised an error.
        stream: Stream of the keys and of this call; None for that of the step.
    """

    def __init__(
        self,
        exchange: Exchange,
        wanted: StepKeys | None,
        *,
        is_trained: bool,
        is_valid: Tensor | None = None,
        occurrences: Sequence[Occurrences | None] = (),
        stream: KeyStream | None = None,
    ) -> None:
        self.exchange, self._is_trained, self._stream = exchange, is_trained, stream
        self.occurrences = [each for each in occurrences if each is not None]
        self._num_occurring = len(occurrences)
        self.wanted: Sequence[Routed] = ()
        self._keys_of_step = wanted
        size, me, num_tables = exchange.ranks.size, exchange.ranks.rank, len(exchange.tables)
        # An error travels in place of counts, which go first in every step: no collective of its own is needed.
        if wanted is None:
            bags = torch.zeros(size, len(exchange.pooled), 3, dtype=torch.int64, device=exchange.device)
            rows = copies = torch.full((size, num_tables), _FAILED, device=exchange.device)
        else:
            rows, bags = wanted.rows, wanted.bags
            # Gradients of rows with copies go to all ranks, each of which updates its own copy.
            copies = wanted.copies.expand(size, -1).clone()
            if not is_trained:  # only this rank needs them
                copies[:me] = 0
                copies[me + 1 :] = 0
        # int64[R, 2, F]; those of copies go to all ranks.
        times = rows.new_zeros(size, 2, self._num_occurring)
        if self.occurrences:
            of_ranks = torch.stack([each.counts for each in self.occurrences], dim=1)
            times = torch.stack([of_ranks[:-1], of_ranks[-1:].expand(size, -1)], dim=1)
        # int64[R, 2 T + 3 P + 2 F]
        numbers = torch.cat([rows, copies, bags.flatten(1), times.flatten(1)], dim=1)
        if is_valid is not None:
            numbers = torch.where(is_valid, numbers, _FAILED)
        self._numbers = numbers
        self.sent = self._counts_of(numbers)
        each = [numbers.shape[1]] * size
        self._counts = exchange.begin("exchange of counts", numbers.flatten(), each, each, stream)
        self._received: Counts | None = None
        self._keys: PendingResult | None = None
        self._failed: list[int] = []

    @property
    def is_rejected(self) -> bool:
        """Whether `send_keys` has read that the keys of this rank are not valid."""
        return self.exchange.ranks.rank in self._failed

    def send_keys(self) -> None:
        """Send the keys after the counts of all ranks have arrived; send nothing if a rank has raised an error.

        Raises:
            CollectiveError: Another rank does not join.
        """
        # The lookup of the batch before calls it for a batch that was announced, and `find` for any other.
        if self._received is None and not self._failed:
            with self._on_stream():
                self._send_keys()

    def _on_stream(self) -> AbstractContextManager[None]:
        return nullcontext() if self._stream is None else self._stream.again()

    def _send_keys(self) -> None:
        exchange, size = self.exchange, self.exchange.ranks.size
        got = self._counts.wait().view(size, -1)
        self.sent, received = self._read(got)
        self._failed = (received.host.rows == _FAILED).any(dim=1).nonzero()[:, 0].tolist()
        if self._failed:
            return  # `find` raises; here it would be the error of the batch before
        self._received, host, me = received, self.sent.host, exchange.ranks.rank
        assert self._keys_of_step is not None, "this rank has raised an error"
        self.wanted, self._keys_of_step = self._keys_of_step.cut(host.rows, host.copies[me], host.bags), None
        whole: list[Tensor] = []
        num_copies = host.copies.tolist()
        for rank in range(size):
            mine = [
                part
                for number, table in enumerate(self.wanted)
                for values in (table.keys, table.counts)
                if values is not None
                for part in segments(table, values, rank, num_copies[rank][number])
            ]
            mine += [
                bags_of_table.parts[rank].packed()
                for bags_of_table in (self.wanted[n].bags for n in exchange.pooled)
                if bags_of_table is not None
            ]
            whole.append(torch.cat(mine) if mine else torch.empty(0, dtype=torch.int64, device=exchange.device))
        sizes = [tensor.numel() for tensor in whole]
        self._keys = exchange.begin(
            "exchange of keys", torch.cat(whole), sizes, self._sizes(received.host), self._stream
        )

    def _read(self, got: Tensor) -> tuple[Counts, Counts]:
        """Return the numbers of keys that go and that come, with copies of both in host memory."""
        sent, came = self._counts_of(self._numbers), self._counts_of(got)
        if not got.is_cpu:
            # The one time in a step that the host waits for the device, in `Trainer` for the stream of the keys alone.
            sent_here, came_here = torch.stack([self._numbers, got]).cpu().unbind()
            sent.host, came.host = self._counts_of(sent_here), self._counts_of(came_here)
        return sent, came

    def _counts_of(self, numbers: Tensor) -> Counts:
        """Return the counts of ``numbers int64[R, 2 T + 3 P + 2 F]``."""
        size, tables, pooled = len(numbers), len(self.exchange.tables), len(self.exchange.pooled)
        features = self._num_occurring
        rows, copies, bags, times = torch.split(numbers, [tables, tables, 3 * pooled, 2 * features], dim=1)
        return Counts(rows, copies, bags.reshape(size, pooled, 3), times.reshape(size, 2, features))

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
        # Waited for on the stream that owns the memory of what was sent.
        with self._on_stream():
            of_sources = torch.split(self._keys.wait(), self._sizes(received.host))
        if self._stream is not None:
            self._stream.join()
        takes_counts = self.exchange.takes_counts
        keys: list[list[Tensor]] = [[] for _ in self.wanted]
        counts: list[list[Tensor]] = [[] for _ in self.wanted]
        every = received.host.all.tolist()
        bags: dict[int, list[BagPart]] = {number: [] for number in self.exchange.pooled}
        of_bags = received.host.bags.tolist()
        # As `send_keys` has put them: the keys and occurrences of each table, then the bags.
        for source, of_source in enumerate(of_sources):
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
        """Return the number of integers from each rank: keys, occurrences if a policy counts them, and bags.

        Args:
            received: Numbers in host memory.
        """
        times = torch.tensor([1 + takes for takes in self.exchange.takes_counts])
        sizes: list[int] = (received.all * times).sum(dim=1).tolist()
        return [size + sum(map(packed_size, bags)) for size, bags in zip(sizes, received.bags.tolist(), strict=True)]


class Counts:
    """Numbers of keys that go to, or came from, each rank.

    Attributes:
        rows: int64[R, T], keys whose row one rank has.
        copies: int64[R, T], keys whose row all ranks have.
        bags: int64[R, P, 3], bags, their keys, and whether these have weights, of tables that the ranks of rows pool.
        occurrences: int64[R, 2, F], occurrences of keys of each feature whose row one rank has, or all ranks have,
            where their gradients are sent one by one.
        all: int64[R, T], keys of rows and of copies.
        host: The same numbers in host memory.
    """

    def __init__(self, rows: Tensor, copies: Tensor, bags: Tensor, occurrences: Tensor) -> None:
        self.rows = rows
        self.copies = copies
        self.bags = bags
        self.occurrences = occurrences
        self.all = rows + copies
        self.host = self

    def vectors(self, keys: Tensor, pooled: Sequence[int]) -> Tensor:
        """Return the number of vectors for ``keys int64[R, T]``: one per key, or one per bag of pooled tables."""
        if not pooled:
            return keys
        vectors_of_copies = keys.clone()
        vectors_of_copies[:, list(pooled)] = self.bags[:, :, 0]
        return vectors_of_copies


def segments(table: Routed, values: Tensor, rank: int, num_copies: int) -> list[Tensor]:
    """Return the parts of ``values [U, ...]``, a value for each key, that go to a rank."""
    copies = [values[values.shape[0] - table.num_copies :]] if num_copies else []
    if not table.num_rows[rank]:
        return copies
    if table.num_rows[rank] == values.shape[0] and not table.num_copies:
        return [values]
    first = sum(table.num_rows[:rank])
    return [values[first : first + table.num_rows[rank]], *copies]
