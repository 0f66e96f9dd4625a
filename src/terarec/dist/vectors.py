# SPDX-License-Identifier: Apache-2.0
"""The exchange of vectors of a step's distinct keys with the ranks of the samples, and of their gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from terarec.dist.exchange import KeyRequest, segments
from terarec.dist.placement import PlacedTable
from terarec.dist.ranks import PendingResult


class FetchedVectors:
    """The vectors of a step's distinct keys, and the way back of their gradients.

    Attributes:
        vectors: For each table parts of float32[U, D] one after the other, in the order of its routed keys. Of a table
            that the ranks of the rows pool, parts of bags float32[b, D] from each rank, or by column of all together.

    Args:
        request: Keys on their way; what all ranks have requested is found and sent.

    Raises:
        CollectiveError: Another rank has raised an error, or does not join.
        StorageError: Memory or a dynamic table is full on this rank.
    """

    def __init__(self, request: KeyRequest) -> None:
        self._exchange, self._wanted, self._sent = request.exchange, tuple(request.wanted), request.sent
        self._occurrences = request.occurrences
        self._lookups, self._received, self._bags = request.find()
        self.vectors: list[list[Tensor]] = []
        self._pieces: list[list[Tensor]] = []
        self._copied: dict[int, Tensor] = {}
        self._pending = self._send()

    def release(self) -> None:
        """Unpin the rows: no gradients will come."""
        for lookup in self._lookups:
            lookup.release()

    def _send(self) -> PendingResult:
        """Begin to send the vectors that other ranks requested."""
        exchange, arenas, received = self._exchange, self._exchange.arena_tables(), self._received
        size, me, device = exchange.ranks.size, exchange.ranks.rank, exchange.device
        others = [rank for rank in range(size) if rank != me]
        replies: list[list[Tensor]] = [[] for _ in range(size)]
        joined: list[Tensor] = []
        pieces: list[list[Tensor]] = [[torch.empty(0, device=device)] * size for _ in self._wanted]
        copied: dict[int, Tensor] = {}
        for lookup, tables, chosen in zip(self._lookups, arenas, exchange.tables_on_device(), strict=True):
            starts, requested, copies = self._starts(chosen), received.rows[:, chosen], received.copies[me, chosen]
            requested_here, copies_here = received.host.rows[:, tables], received.host.copies[me, tables].tolist()
            # Those of other ranks first, so that they lie as they go.
            firsts = [_others(starts, me), starts[me], starts[me] + requested[me]]
            lengths = [_others(requested, me), requested[me], copies]
            total = int(requested_here.sum()) + sum(copies_here)
            looked_up = lookup.vectors(_spans(torch.cat(firsts), torch.cat(lengths), total))
            # Replies of pooled tables are cut by rank and table, since bags are pooled table by table; others by rank
            # alone.
            is_pooled = not self._bags.keys().isdisjoint(tables)
            for_others = (requested_here[others].flatten() if is_pooled else requested_here[others].sum(dim=1)).tolist()
            sizes = [*for_others, *requested_here[me].tolist(), *copies_here]
            parts = torch.split(looked_up, sizes)
            if is_pooled:
                for index, part in enumerate(parts[: len(for_others)]):
                    rank, number = others[index // len(tables)], tables[index % len(tables)]
                    replies[rank].append(self._bags[number][rank].pool(part) if number in self._bags else part)
            else:
                for rank, part in zip(others, parts, strict=False):
                    replies[rank].append(part)
                joined.append(looked_up[: sum(for_others)])
            for number, own, of_copies in zip(
                tables, parts[len(for_others) :], parts[len(for_others) + len(tables) :], strict=False
            ):
                pieces[number][me] = exchange.rounded(self._bags[number][me].pool(own) if number in self._bags else own)
                copied[number] = of_copies
        self._pieces, self._copied = pieces, copied
        return exchange.begin_numbers(
            "exchange of vectors",
            replies,
            self._expected(self._sent.host.vectors(self._sent.host.rows, exchange.pooled)),
            # With one arena the vectors for the others lie as they go, and are not copied once more.
            joined[0].flatten() if len(joined) == len(arenas) == 1 else None,
        )

    def receive(self) -> None:
        """Set `vectors`, as soon as those of all ranks have come."""
        exchange, arenas = self._exchange, self._exchange.arena_tables()
        expected = self._sent.host.vectors(self._sent.host.rows, exchange.pooled)
        # Waits: what ran since `_send` needed no vectors, such as the layers before the tables.
        came = exchange.numbers(self._pending, self._expected(expected))
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
            gradients: Gradients float32[U, D] for each table: of each key, the sum over its occurrences on this rank.
            of_bags: Table that the ranks of the rows pool -> for each rank the gradients float32[b, D] of its bags.

        Returns:
            Function that keeps those that came for the row optimizer, as soon as all have come.
        """
        exchange, arenas = self._exchange, self._exchange.arena_tables()
        size = exchange.ranks.size
        by_table = [
            {
                number: [
                    # By column every rank of the table gets the gradient of all keys, of its columns alone.
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
        parts = [[segment for segments in of_rank.values() for segment in segments] for of_rank in by_table]
        expected = self._received.host.vectors(self._received.host.all, exchange.pooled)
        pending = exchange.begin_numbers("exchange of gradients", parts, self._expected(expected))
        return partial(self._keep_sums, pending, by_table[exchange.ranks.rank])

    def _keep_sums(self, pending: PendingResult, own: Mapping[int, Sequence[Tensor]]) -> None:
        exchange, arenas = self._exchange, self._exchange.arena_tables()
        size, me = exchange.ranks.size, exchange.ranks.rank
        expected = self._received.host.vectors(self._received.host.all, exchange.pooled)
        came = exchange.numbers(pending, self._expected(expected))
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
                blocks[source][number] = [part.gradient(grad, int(self._received.host.rows[source, number]))]
        for lookup, tables, chosen in zip(self._lookups, arenas, exchange.tables_on_device(), strict=True):
            # Rows are by tables first, those of a table in the order of the ranks: one order of sums on every run.
            mine = [block for number in tables for of_rank in blocks for block in of_rank[number] if block.shape[0]]
            counts, here = self._received.all[:, chosen].sum(dim=0), self._received.host.all[:, tables].sum(dim=0)
            width = exchange.tables[tables[0]].width
            # Also where none came: a row optimizer counts only steps with gradients, and all ranks have to count alike.
            grad = torch.cat(mine) if mine else torch.empty(0, width, device=exchange.device)
            lookup.keep(None, counts, here.tolist(), grad)

    def return_occurrences(self, gradients: Sequence[Tensor]) -> None:
        """Send the gradient of every occurrence of a key, which are summed in the order of the whole batch's samples.

        Args:
            gradients: float32[n, D] of the occurrences of each feature, in the order of its samples and of the
                `occurrences` of the request.
        """
        exchange, size = self._exchange, self._exchange.ranks.size
        sent, received = self._sent.host.occurrences, self._received.host.occurrences.sum(dim=1)
        of_ranks = torch.cat([sent[:, 0], sent[:1, 1]]).T.tolist()
        positions: list[list[Tensor]] = [[] for _ in range(size)]
        numbers: list[list[Tensor]] = [[] for _ in range(size)]
        for occurrences, grad, counts in zip(self._occurrences, gradients, of_ranks, strict=True):
            number = occurrences.table
            for rank in range(size):
                chosen, position = occurrences.part(rank, counts, self._wanted[number].num_rows[rank])
                positions[rank].append(position)
                numbers[rank].append(grad[chosen][:, exchange.tables[number].columns(rank)])
        of_table = [occurrences.table for occurrences in self._occurrences]
        widths = torch.tensor([exchange.tables[number].width for number in of_table])
        came = exchange.send_integers(
            "exchange of places of gradients", [torch.cat(parts) for parts in positions], received.sum(dim=1).tolist()
        )
        expected = (received * widths).sum(dim=1).tolist()
        me = exchange.ranks.rank
        own = exchange.rounded(_joined([part.flatten() for part in numbers[me]], exchange.device))
        expected[me] = 0  # its own gradients stay, rounded as if they had gone
        grads = exchange.numbers(exchange.begin_numbers("exchange of gradients", numbers, expected), expected)
        grads[me] = own
        self._keep_occurrences(of_table, received, came, grads)

    def _keep_occurrences(
        self, of_table: list[int], received: Tensor, positions: list[Tensor], grads: list[Tensor]
    ) -> None:
        """Keep the gradients that came: of a row first those of the first feature, of one feature those of rank 0."""
        exchange, arenas, sizes = self._exchange, self._exchange.arena_tables(), received.tolist()
        cut = [torch.split(places, sizes[source]) for source, places in enumerate(positions)]
        firsts, index = [0] * len(grads), 0
        for lookup, tables, chosen in zip(self._lookups, arenas, exchange.tables_on_device(), strict=True):
            width = exchange.tables[tables[0]].width
            starts = self._starts(chosen)
            order: list[Tensor] = []
            blocks: list[Tensor] = []
            totals = []
            for column, number in enumerate(tables):
                total = 0
                while index < len(of_table) and of_table[index] == number:
                    # Ranks have consecutive spans of the batch, so that rank by rank is the order of its samples.
                    for source in range(len(grads)):
                        count, first = sizes[source][index], firsts[source]
                        order.append(cut[source][index] + starts[source, column])
                        blocks.append(grads[source][first : first + count * width].view(count, width))
                        firsts[source] += count * width
                        total += count
                    index += 1
                totals.append(total)
            if order:
                # Made on the device, which a copy would make wait.
                counts = torch.cat([torch.full((1,), total, device=exchange.device) for total in totals])
                lookup.keep(torch.cat(order), counts, totals, torch.cat(blocks))

    def _assembled(self, number: int, pieces: list[Tensor], copied: Tensor) -> list[Tensor]:
        """Return the vectors of a table in parts, without empty parts."""
        table = self._exchange.tables[number]
        if number in self._bags and not table.by_column:
            return pieces
        if table.by_column:
            return [torch.cat([pieces[rank] for rank in table.ranks], dim=1)]
        return [piece for piece in (*pieces, copied) if piece.shape[0]]

    def _segments_for(self, rank: int, number: int, values: Tensor) -> list[Tensor]:
        return segments(self._wanted[number], values, rank, int(self._sent.host.copies[rank, number]))

    def _expected(self, counts: Tensor) -> list[int]:
        """Return how many numbers the vectors of ``counts int64[R, T]`` keys have from each rank but this."""
        widths = torch.tensor([table.width for table in self._exchange.tables])
        expected: list[int] = (counts * widths).sum(dim=1).tolist()
        expected[self._exchange.ranks.rank] = 0
        return expected

    def _starts(self, tables: Tensor) -> Tensor:
        """Return the first position int64[R, T] of each rank's keys of each table among all keys of an arena."""
        counts = self._received.all[:, tables]
        return _exclusive(counts.T.flatten()).view(counts.T.shape).T


def _blocks(
    numbers: Tensor, counts: Sequence[int], arenas: Sequence[Sequence[int]], tables: Sequence[PlacedTable]
) -> list[Tensor]:
    """Return the vectors of each table in the data from a rank, arena by arena: ``[counts[t], columns]`` for t."""
    order = [number for of_arena in arenas for number in of_arena]
    parts = torch.split(numbers, [counts[number] * tables[number].width for number in order])
    return [part.view(-1, tables[number].width) for number, part in zip(order, parts, strict=True)]


def _joined(parts: Sequence[Tensor], device: torch.device) -> Tensor:
    if len(parts) == 1:
        return parts[0]
    return torch.cat(list(parts)) if parts else torch.empty(0, device=device)


def _others(values: Tensor, me: int) -> Tensor:
    """Return the rows of ``values [R, T]`` of all ranks but one, flat."""
    return torch.cat([values[:me], values[me + 1 :]]).flatten()


def _exclusive(counts: Tensor) -> Tensor:
    """Return the sum of the counts before each."""
    return counts.cumsum(0) - counts


def _spans(starts: Tensor, lengths: Tensor, total: int) -> Tensor:
    """Return the positions ``start, start + 1, ...`` of each span, `total` in all, one after the other."""
    firsts = (starts - _exclusive(lengths)).repeat_interleave(lengths, output_size=total)
    return firsts + torch.arange(total, device=starts.device)
