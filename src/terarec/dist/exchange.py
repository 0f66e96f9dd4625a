"""The exchange of a step: keys to the ranks of their rows, vectors back, and later gradients the way of the keys.

All tables of a collection share a collective: counts and keys in the forward pass, then vectors; gradients in the
backward pass. Keys are distinct before they travel. With R ranks and T tables, what goes to rank d is in the order of
the tables, and what came from all ranks in that of the ranks; the rows of one table are those of rank 0's keys, then of
rank 1's, so that sums over ranks have one order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from terarec.batch import Jagged
from terarec.dist.bags import BagPart, SentBags, packed_size, unpacked
from terarec.dist.placement import COPIES, PlacedTable
from terarec.dist.plan import Wire
from terarec.dist.ranks import Coming, Ranks
from terarec.embedding import EmbeddingCollection, FoundRows
from terarec.errors import CollectiveError

_FAILED = -1  # in the place of a count: this rank has raised an error before the exchange


class Wanted(NamedTuple):
    """The distinct keys of one table in a rank's batch.

    Attributes:
        keys: int64[U].
        counts: int64[U], the occurrences of each; None where nobody asks for them.
    """

    keys: Tensor
    counts: Tensor | None


class Routed(NamedTuple):
    """Distinct keys of one table in the order of the ranks that they go to.

    Attributes:
        keys: int64[U]: those of rank 0's rows, ..., of rank R - 1's, and of rows with copies on all ranks. By column,
            all keys go to all ranks of the table.
        counts: int64[U], the occurrences of each, or None.
        num_rows: Keys for each rank without those of copies; by column all keys for each rank of the table.
        num_copies: Keys of rows with copies.
        place: int64[U], the place of each given key in `keys`.
        bags: The bags, of a table whose bags the ranks of the rows pool.
    """

    keys: Tensor
    counts: Tensor | None
    num_rows: list[int]
    num_copies: int
    place: Tensor
    bags: SentBags | None = None


class Occurrences(NamedTuple):
    """Gradients of single occurrences of keys of one feature, in the order of its samples.

    Attributes:
        table: Number of the table.
        places: int64[n], the place of each key among the routed keys of the table.
        grad: float32[n, D].
    """

    table: int
    places: Tensor
    grad: Tensor


def route(table: PlacedTable, wanted: Wanted, num_ranks: int) -> Routed:
    """Sort keys by the ranks that they go to."""
    keys, counts = wanted
    total = keys.numel()
    if table.by_column:
        on_ranks = [total if rank in table.ranks else 0 for rank in range(num_ranks)]
        return Routed(keys, counts, on_ranks, 0, torch.arange(total))
    if table.has_copies:
        return Routed(keys, counts, [0] * num_ranks, total, torch.arange(total))
    if len(table.ranks) == 1 and not table.has_hot_rows:
        on_ranks = [total if rank == table.ranks[0] else 0 for rank in range(num_ranks)]
        return Routed(keys, counts, on_ranks, 0, torch.arange(total))
    owners = table.owners(keys)
    found = dict.fromkeys(range(num_ranks), keys[:0])
    for owner in (*table.ranks, COPIES) if table.has_hot_rows else table.ranks:
        found[owner] = (owners == owner).nonzero()[:, 0]
    order = torch.cat(list(found.values()))  # those with copies last
    place = torch.empty_like(order)
    place[order] = torch.arange(total)
    sizes = [found[rank].numel() for rank in range(num_ranks)]
    return Routed(keys[order], None if counts is None else counts[order], sizes, total - sum(sizes), place)


class Exchange:
    """Exchanges the keys, vectors and gradients of the tables of a collection.

    Attributes:
        tables: The tables.
        local: Collection of their parts on this rank.
        ranks: The ranks.
        takes_counts: Whether each table asks for the occurrences of keys, since a policy counts them.
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
        self.takes_counts = [
            getattr(table.spec, "admit", None) is not None
            or getattr(table.spec, "track_uses", False)
            or getattr(table.spec, "evict", None) is not None
            for table in tables
        ]

    def ask(self, wanted: Sequence[Routed] | None, *, is_trained: bool) -> Asked:
        """Begin to send keys to the ranks of their rows.

        Args:
            wanted: Distinct keys of each table; None tells the other ranks that this one has raised an error.
            is_trained: Whether gradients will come; dynamic tables in training mode then insert new keys.
        """
        return Asked(self, wanted, is_trained=is_trained)

    def begin(self, what: str, values: Tensor, sent: Sequence[int], received: Sequence[int]) -> Coming:
        """Begin a collective of this collection; see `Ranks.begin_all_to_all`."""
        return self.ranks.begin_all_to_all(f"{what} of {self._name}", values, sent, received)

    def failed(self, ranks: Sequence[int]) -> CollectiveError:
        """Return the error of a rank that knows that others have raised one."""
        return CollectiveError(
            f"rank {ranks[0]} ({self.ranks.hosts[ranks[0]]}) has raised an error, see its output",
            collective=f"exchange of counts of {self._name}",
            step=self.ranks.step,
            rank=ranks[0],
        )

    def begin_numbers(
        self, what: str, parts: Sequence[Sequence[Tensor]], received: Sequence[int], joined: Tensor | None = None
    ) -> Coming:
        """Begin to send float32 numbers to each rank but this, by way of the type on the wire.

        Args:
            what: Name of the collective.
            parts: Numbers [n, D] for each rank, which go one after the other; those for this rank do not go.
            received: How many numbers come from each rank; 0 from this one.
            joined: All numbers that go one after the other, if they lie so.
        """
        me = self.ranks.rank
        sent = [0 if rank == me else sum(part.numel() for part in mine) for rank, mine in enumerate(parts)]
        if joined is None:
            flat = [part.flatten() for rank, mine in enumerate(parts) if rank != me for part in mine]
            joined = torch.cat(flat) if flat else torch.empty(0)
        return self.begin(what, joined.to(self._wire), sent, received)

    def numbers(self, coming: Coming, received: Sequence[int]) -> list[Tensor]:
        """Return the float32 numbers from each rank, as soon as all have come."""
        return list(torch.split(coming.wait().to(torch.float32), list(received)))

    def rounded(self, own: Tensor) -> Tensor:
        """Return numbers that stay on this rank as they would be if they had gone: copies of a row stay equal."""
        return own if self._wire == torch.float32 else own.to(self._wire).to(torch.float32)

    def send_integers(self, what: str, numbers: Sequence[Tensor], received: Sequence[int]) -> list[Tensor]:
        """Send int64[n] to each rank and return those from each rank."""
        sizes = [held.numel() for held in numbers]
        return list(torch.split(self.begin(what, torch.cat(list(numbers)), sizes, received).wait(), list(received)))

    def arena_tables(self) -> list[list[int]]:
        """Return the numbers of the tables of each arena of `local`."""
        return self._arenas

    def find(
        self, keys: list[list[Tensor]], counts: list[list[Tensor]], received: Counts, *, is_trained: bool
    ) -> list[FoundRows]:
        """Find the rows of the keys [table][source] that came, of each table those of all ranks at once."""
        joined = [table.local_keys(torch.cat(parts)) for table, parts in zip(self.tables, keys, strict=True)]
        ends = torch.cat([torch.zeros(1, dtype=torch.int64), received.all.sum(dim=0).cumsum(0)])
        names = tuple(table.spec.name for table in self.tables)
        jagged = Jagged(names=names, keys=torch.cat(joined), offsets=ends)
        repeats = {names[number]: torch.cat(parts) for number, parts in enumerate(counts) if self.takes_counts[number]}
        return self.local.find(jagged, is_trained=is_trained, repeats=repeats)


class Asked:
    """Distinct keys of a batch on their way to the ranks of their rows.

    Rows are not looked at before `fetch`, so that the keys of a batch may travel while the one before it trains.

    Args:
        exchange: The exchange.
        wanted: Distinct keys of each table; None if this rank has raised an error.
        is_trained: Whether gradients will come.
    """

    def __init__(self, exchange: Exchange, wanted: Sequence[Routed] | None, *, is_trained: bool) -> None:
        self._exchange, self._learns = exchange, is_trained
        self._wanted: Sequence[Routed] = wanted or ()
        size, me, num_tables = exchange.ranks.size, exchange.ranks.rank, len(exchange.tables)
        bags = torch.zeros(size, len(exchange.pooled), 3, dtype=torch.int64)
        if wanted is None:
            rows = copies = torch.full((size, num_tables), _FAILED)
        else:
            for index, number in enumerate(exchange.pooled):
                held = wanted[number].bags
                assert held is not None, "a table that the ranks of the rows pool has bags"
                bags[:, index] = torch.tensor([part.numbers for part in held.parts])
            rows = torch.tensor([table.num_rows for table in wanted]).T.contiguous()
            copies = torch.tensor([table.num_copies for table in wanted]).expand(size, -1).clone()
            if not is_trained:  # nobody else needs to know them
                copies[[rank for rank in range(size) if rank != me]] = 0
        self._sent = Counts(rows, copies, bags)
        numbers = torch.cat([rows, copies, bags.flatten(1)], dim=1)
        each = [numbers.shape[1]] * size
        self._counts = exchange.begin("exchange of counts", numbers.flatten(), each, each)
        self._received: Counts | None = None
        self._keys: Coming | None = None
        self._failed: list[int] = []

    def send_keys(self) -> None:
        """Send the keys, as soon as all ranks have said how many come; nothing if one of them has raised an error.

        Raises:
            CollectiveError: Another rank does not join.
        """
        if self._received is not None or self._failed:
            return
        exchange, num_tables = self._exchange, len(self._exchange.tables)
        got = self._counts.wait().view(exchange.ranks.size, -1)
        self._failed = (got == _FAILED).any(dim=1).nonzero()[:, 0].tolist()
        if self._failed:
            return
        bags = got[:, 2 * num_tables :].view(exchange.ranks.size, len(exchange.pooled), 3)
        self._received = Counts(got[:, :num_tables], got[:, num_tables : 2 * num_tables], bags)
        whole: list[Tensor] = []
        for rank in range(exchange.ranks.size):
            mine = [
                part
                for number, table in enumerate(self._wanted)
                for held in (table.keys, table.counts)
                if held is not None
                for part in _segments(table, held, rank, int(self._sent.copies[rank, number]))
            ]
            mine += [
                held.parts[rank].packed()
                for held in (self._wanted[n].bags for n in exchange.pooled)
                if held is not None
            ]
            whole.append(torch.cat(mine) if mine else torch.empty(0, dtype=torch.int64))
        sizes = [held.numel() for held in whole]
        self._keys = exchange.begin("exchange of keys", torch.cat(whole), sizes, self._sizes(self._received))

    def fetch(self) -> Fetched:
        """Find the rows that other ranks have asked for, and send their vectors.

        Raises:
            CollectiveError: Another rank has raised an error, or does not join.
            StorageError: Memory or a dynamic table is full on this rank.
        """
        self.send_keys()
        if self._failed:
            raise self._exchange.failed(self._failed)
        received = self._received
        assert received is not None, "keys were sent"
        assert self._keys is not None, "keys were sent"
        takes_counts = self._exchange.takes_counts
        keys: list[list[Tensor]] = [[] for _ in self._wanted]
        counts: list[list[Tensor]] = [[] for _ in self._wanted]
        every = received.all.tolist()
        bags: dict[int, list[BagPart]] = {number: [] for number in self._exchange.pooled}
        of_bags = received.bags.tolist()
        for source, of_source in enumerate(torch.split(self._keys.wait(), self._sizes(received))):
            first = 0
            for number in range(len(self._wanted)):
                size = every[source][number]
                keys[number].append(of_source[first : first + size])
                first += size
                if takes_counts[number]:
                    counts[number].append(of_source[first : first + size])
                    first += size
            for index, number in enumerate(self._exchange.pooled):
                size = packed_size(of_bags[source][index])
                bags[number].append(unpacked(of_source[first : first + size], of_bags[source][index]))
                first += size
        found = self._exchange.find(keys, counts, received, is_trained=self._learns)
        fetched = Fetched(self._exchange, self._wanted, found, self._sent, received, bags)
        fetched.send()
        return fetched

    def _sizes(self, received: Counts) -> list[int]:
        """Return how many integers come from each rank: keys, occurrences where a policy asks for them, and bags."""
        times = torch.tensor([1 + takes for takes in self._exchange.takes_counts])
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
        """Return how many vectors travel for ``keys int64[R, T]``: one for each, or for each bag of pooled tables."""
        if not pooled:
            return keys
        found = keys.clone()
        found[:, list(pooled)] = self.bags[:, :, 0]
        return found


class Fetched:
    """The vectors of a step's distinct keys, and the way back of their gradients.

    Attributes:
        vectors: For each table parts of float32[U, D] one after the other, in the order of its routed keys. Of a table
            that the ranks of the rows pool, parts of bags float32[b, D] from each rank, or by column of all together.
    """

    def __init__(
        self,
        exchange: Exchange,
        wanted: Sequence[Routed],
        found: list[FoundRows],
        sent: Counts,
        received: Counts,
        bags: Mapping[int, Sequence[BagPart]],
    ) -> None:
        self._exchange = exchange
        self._wanted = tuple(wanted)
        self._found = found
        self._sent = sent
        self._received = received
        self._bags = bags  # those that came from each rank, by the number of the table
        self.vectors: list[list[Tensor]] = []
        self._pieces: list[list[Tensor]] = []
        self._copied: dict[int, Tensor] = {}
        self._coming: Coming | None = None

    def release(self) -> None:
        """Let rows move: no gradients will come."""
        for held in self._found:
            held.release()

    def send(self) -> None:
        """Begin to send the vectors that other ranks asked for."""
        exchange, arenas = self._exchange, self._exchange.arena_tables()
        size, me = exchange.ranks.size, exchange.ranks.rank
        others = [rank for rank in range(size) if rank != me]
        replies: list[list[Tensor]] = [[] for _ in range(size)]
        joined: list[Tensor] = []
        pieces: list[list[Tensor]] = [[torch.empty(0)] * size for _ in self._wanted]
        copied: dict[int, Tensor] = {}
        for found, tables in zip(self._found, arenas, strict=True):
            starts, asked = self._starts(tables), self._received.rows[:, tables]
            # Those of other ranks first, so that they lie as they go.
            order = torch.cat(
                [
                    _spans(starts[others].flatten(), asked[others].flatten()),
                    _spans(starts[me], asked[me]),
                    _spans(starts[me] + asked[me], self._received.copies[me, tables]),
                ]
            )
            looked_up = found.vectors(order)
            is_pooled = not self._bags.keys().isdisjoint(tables)
            for_others = (asked[others].flatten() if is_pooled else asked[others].sum(dim=1)).tolist()
            sizes = [*for_others, *asked[me].tolist()]
            sizes += self._received.copies[me, tables].tolist()
            parts = torch.split(looked_up, sizes)
            if is_pooled:
                for index, part in enumerate(parts[: len(for_others)]):
                    rank, number = others[index // len(tables)], tables[index % len(tables)]
                    replies[rank].append(self._bags[number][rank].pool(part) if number in self._bags else part)
            else:
                for rank, part in zip(others, parts, strict=False):
                    replies[rank].append(part)
                joined.append(looked_up[: sum(for_others)])
            for number, own, copies in zip(
                tables, parts[len(for_others) :], parts[len(for_others) + len(tables) :], strict=False
            ):
                pieces[number][me] = exchange.rounded(self._bags[number][me].pool(own) if number in self._bags else own)
                copied[number] = copies
        self._pieces, self._copied = pieces, copied
        self._coming = exchange.begin_numbers(
            "exchange of vectors",
            replies,
            self._expected(self._sent.vectors(self._sent.rows, exchange.pooled)),
            joined[0].flatten() if len(joined) == len(arenas) == 1 else None,
        )

    def receive(self) -> None:
        """Set `vectors`, as soon as those of all ranks have come."""
        exchange, arenas = self._exchange, self._exchange.arena_tables()
        assert self._coming is not None, "vectors were sent"
        expected = self._sent.vectors(self._sent.rows, exchange.pooled)
        came = exchange.numbers(self._coming, self._expected(expected))
        pieces, copied = self._pieces, self._copied
        for rank in range(exchange.ranks.size):
            if rank == exchange.ranks.rank:
                continue
            blocks = iter(_blocks(came[rank], expected[rank].tolist(), arenas, exchange.tables))
            for tables in arenas:
                for number in tables:
                    pieces[number][rank] = next(blocks)
        self.vectors = [self._assembled(number, pieces[number], copied[number]) for number in range(len(self._wanted))]

    def return_sums(self, gradients: Sequence[Tensor], of_bags: Mapping[int, Sequence[Tensor]]) -> Callable[[], None]:
        """Begin to send gradients to the ranks of the rows.

        Args:
            gradients: float32[U, D] for each table: of each key, the sum over its occurrences on this rank.
            of_bags: Of tables that the ranks of the rows pool, for each rank float32[b, D] of its bags.

        Returns:
            Function that keeps those that came for the row optimizer, as soon as all have come.
        """
        exchange, arenas = self._exchange, self._exchange.arena_tables()
        size = exchange.ranks.size
        by_table = [
            {
                number: [
                    segment[:, exchange.tables[number].columns(rank)]
                    for segment in (
                        [of_bags[number][rank]]
                        if number in of_bags
                        else self._segments_for(rank, number, gradients[number])
                    )
                ]
                for tables in arenas
                for number in tables
            }
            for rank in range(size)
        ]
        parts = [[segment for held in of_rank.values() for segment in held] for of_rank in by_table]
        expected = self._received.vectors(self._received.all, exchange.pooled)
        coming = exchange.begin_numbers("exchange of gradients", parts, self._expected(expected))
        return partial(self._keep_sums, coming, by_table[exchange.ranks.rank])

    def _keep_sums(self, coming: Coming, own: Mapping[int, Sequence[Tensor]]) -> None:
        exchange, arenas = self._exchange, self._exchange.arena_tables()
        size, me = exchange.ranks.size, exchange.ranks.rank
        expected = self._received.vectors(self._received.all, exchange.pooled)
        came = exchange.numbers(coming, self._expected(expected))
        blocks: list[dict[int, list[Tensor]]] = []
        for source in range(size):
            if source == me:
                blocks.append({number: [exchange.rounded(part) for part in parts] for number, parts in own.items()})
                continue
            found_blocks = _blocks(came[source], expected[source].tolist(), arenas, exchange.tables)
            order = [number for tables in arenas for number in tables]
            blocks.append({number: [block] for number, block in zip(order, found_blocks, strict=True)})
        for number, parts_of_bags in self._bags.items():
            for source, part in enumerate(parts_of_bags):
                (grad,) = blocks[source][number]
                blocks[source][number] = [part.gradient(grad, int(self._received.rows[source, number]))]
        for found, tables in zip(self._found, arenas, strict=True):
            # Rows are by tables first, those of a table in the order of the ranks.
            mine = [block for number in tables for of_rank in blocks for block in of_rank[number] if block.shape[0]]
            counts = self._received.all[:, tables].sum(dim=0)
            ends = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
            width = exchange.tables[tables[0]].width
            found.keep(None, ends, torch.cat(mine) if mine else torch.empty(0, width))

    def return_occurrences(self, features: Sequence[Occurrences]) -> None:
        """Send the gradient of every occurrence of a key, which are summed in the order of the whole batch's samples.

        Args:
            features: Occurrences in the order in which one process would add them up. All ranks have the same features.
        """
        exchange, size = self._exchange, self._exchange.ranks.size
        in_order = [
            feature for tables in exchange.arena_tables() for number in tables
            for feature in features if feature.table == number
        ]  # fmt: skip
        counts = torch.zeros(size, len(in_order), dtype=torch.int64)
        positions: list[list[Tensor]] = [[] for _ in range(size)]
        numbers: list[list[Tensor]] = [[] for _ in range(size)]
        for index, (number, places, grad) in enumerate(in_order):
            for rank in range(size):
                chosen, position = self._positions(number, places, rank)
                counts[rank, index] = chosen.numel()
                positions[rank].append(position)
                numbers[rank].append(grad[chosen][:, exchange.tables[number].columns(rank)])
        each = [len(in_order)] * size
        got = exchange.send_integers("exchange of counts of gradients", list(counts), each)
        received = torch.stack(got)
        widths = torch.tensor([exchange.tables[number].width for number, _, _ in in_order])
        came = exchange.send_integers(
            "exchange of places of gradients", [torch.cat(held) for held in positions], received.sum(dim=1).tolist()
        )
        expected = (received * widths).sum(dim=1).tolist()
        me = exchange.ranks.rank
        own = exchange.rounded(_joined([part.flatten() for part in numbers[me]]))
        expected[me] = 0
        grads = exchange.numbers(exchange.begin_numbers("exchange of gradients", numbers, expected), expected)
        grads[me] = own
        self._keep_occurrences([number for number, _, _ in in_order], received, came, grads)

    def _keep_occurrences(
        self, of_table: list[int], received: Tensor, positions: list[Tensor], grads: list[Tensor]
    ) -> None:
        """Keep the gradients that came: of a row first those of the first feature, of one feature those of rank 0."""
        arenas, sizes = self._exchange.arena_tables(), received.tolist()
        cut = [torch.split(held, sizes[source]) for source, held in enumerate(positions)]
        firsts, index = [0] * len(grads), 0
        for found, tables in zip(self._found, arenas, strict=True):
            width = self._exchange.tables[tables[0]].width
            starts = self._starts(tables)
            order: list[Tensor] = []
            blocks: list[Tensor] = []
            ends = [0]
            for column, number in enumerate(tables):
                total = 0
                while index < len(of_table) and of_table[index] == number:
                    for source in range(len(grads)):
                        count, first = sizes[source][index], firsts[source]
                        order.append(cut[source][index] + starts[source, column])
                        blocks.append(grads[source][first : first + count * width].view(count, width))
                        firsts[source] += count * width
                        total += count
                    index += 1
                ends.append(ends[-1] + total)
            if order:
                found.keep(torch.cat(order), torch.tensor(ends), torch.cat(blocks))

    def _positions(self, number: int, places: Tensor, rank: int) -> tuple[Tensor, Tensor]:
        """Return the occurrences whose gradient goes to `rank`, and the positions of their keys among those there."""
        wanted = self._wanted[number]
        if self._exchange.tables[number].by_column:
            chosen = torch.arange(places.numel() if wanted.num_rows[rank] else 0)
            return chosen, places[chosen]
        first, count = sum(wanted.num_rows[:rank]), wanted.num_rows[rank]
        copies = sum(wanted.num_rows)
        is_copy = places >= copies
        chosen = (((places >= first) & (places < first + count)) | is_copy).nonzero()[:, 0]
        mine = places[chosen]
        return chosen, torch.where(mine >= copies, mine - copies + count, mine - first)

    def _assembled(self, number: int, pieces: list[Tensor], copied: Tensor) -> list[Tensor]:
        """Return the vectors of a table in parts; those that it has none of are left out."""
        table = self._exchange.tables[number]
        if number in self._bags and not table.by_column:
            return pieces
        if table.by_column:
            return [torch.cat([pieces[rank] for rank in table.ranks], dim=1)]
        return [piece for piece in (*pieces, copied) if piece.shape[0]]

    def _segments_for(self, rank: int, number: int, held: Tensor) -> list[Tensor]:
        return _segments(self._wanted[number], held, rank, int(self._sent.copies[rank, number]))

    def _expected(self, counts: Tensor) -> list[int]:
        """Return how many numbers the vectors of ``counts int64[R, T]`` keys have from each rank but this."""
        widths = torch.tensor([table.width for table in self._exchange.tables])
        expected: list[int] = (counts * widths).sum(dim=1).tolist()
        expected[self._exchange.ranks.rank] = 0
        return expected

    def _starts(self, tables: Sequence[int]) -> Tensor:
        """Return the first position int64[R, T] of each rank's keys of each table among all keys of an arena."""
        counts = self._received.all[:, list(tables)]
        return _exclusive(counts.T.flatten()).view(counts.T.shape).T


def _blocks(
    numbers: Tensor, counts: Sequence[int], arenas: Sequence[Sequence[int]], tables: Sequence[PlacedTable]
) -> list[Tensor]:
    """Return the vectors of each table in what came from a rank, arena by arena: ``[counts[t], columns]`` for t."""
    order = [number for of_arena in arenas for number in of_arena]
    parts = torch.split(numbers, [counts[number] * tables[number].width for number in order])
    return [part.view(-1, tables[number].width) for number, part in zip(order, parts, strict=True)]


def _segments(table: Routed, held: Tensor, rank: int, num_copies: int) -> list[Tensor]:
    """Return the parts of ``held [U, ...]``, a value for each key, that go to a rank."""
    copies = [held[held.shape[0] - table.num_copies :]] if num_copies else []
    if not table.num_rows[rank]:
        return copies
    if table.num_rows[rank] == held.shape[0] and not table.num_copies:
        return [held]
    first = sum(table.num_rows[:rank])
    return [held[first : first + table.num_rows[rank]], *copies]


def _joined(parts: Sequence[Tensor]) -> Tensor:
    if len(parts) == 1:
        return parts[0]
    return torch.cat(list(parts)) if parts else torch.empty(0)


def _exclusive(counts: Tensor) -> Tensor:
    """Return the sum of the counts before each."""
    return counts.cumsum(0) - counts


def _spans(starts: Tensor, lengths: Tensor) -> Tensor:
    """Return the positions ``start, start + 1, ...`` of each span, one after the other."""
    return (starts - _exclusive(lengths)).repeat_interleave(lengths) + torch.arange(int(lengths.sum()))
