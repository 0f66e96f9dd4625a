# SPDX-License-Identifier: Apache-2.0
"""Levels whose tables rest after errors, each by itself, and batches over several tables."""

import pytest
import torch
from torch import Tensor

from terarec.errors import StorageError, UnreachableError
from terarec.kernels.slots import RowBatch
from terarec.memory.batch_parts import batch_of, joined
from terarec.ps.levels import host_level
from terarec.ps.table import TableGroup
from terarec.spec import HostMemorySpec
from tests.ps.tiers import Delegating, distinct_rows

KEYS = torch.arange(-3, 5)


class Failing(Delegating):
    """A level of which some tables fail."""

    failing: frozenset[int] = frozenset()
    kind: type[StorageError] = StorageError
    num_reads = 0

    def read(self, batch: RowBatch, out: Tensor) -> Tensor:
        self.num_reads += 1
        if self.failing & set(batch.tables.tolist()):
            raise self.kind("level", "fails")
        return self.level.read(batch, out)


class Clock:
    """Seconds that a test sets."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def three_tables(clock: Clock, num_partitions: int = 1) -> tuple[TableGroup, Failing]:
    names = ["a", "b", "c"]
    level = host_level(HostMemorySpec(num_partitions=num_partitions), names, 4, clock)
    failing = Failing(level.level)
    level.level = failing  # type: ignore[assignment]
    group = TableGroup(names, 4, [level])
    for number in range(3):
        group.table(number).insert(KEYS, distinct_rows(4, KEYS, float(number)))
    return group, failing


def requested(*tables: int) -> RowBatch:
    return joined([batch_of(KEYS.flip(0).repeat(2), table) for table in tables])


def expected(*tables: int) -> Tensor:
    return torch.cat([distinct_rows(4, KEYS.flip(0).repeat(2), float(table)) for table in tables])


@pytest.mark.parametrize("num_partitions", [1, 3])
def test_a_batch_has_the_rows_of_several_tables(num_partitions: int) -> None:
    group, failing = three_tables(Clock(), num_partitions)
    for tables in ((0, 1, 2), (0, 2), (1,), ()):
        failing.num_reads = 0
        batch = requested(*tables) if tables else batch_of(KEYS[:0], 0)
        found = group.find(batch)
        assert torch.equal(found.rows, expected(*tables) if tables else torch.empty(0, 4))
        assert bool(found.mask.all())
        assert failing.num_reads == 1
    assert [group.statistics(table).keys for table in range(3)] == [32, 32, 32]


def test_one_table_rests_and_the_others_are_read() -> None:
    clock = Clock()
    group, failing = three_tables(clock)
    failing.failing = frozenset([1])
    for _ in range(2):
        found = group.find(requested(0, 1, 2))
        assert torch.equal(found.rows, expected(0, 1, 2) * torch.tensor([1.0, 0.0, 1.0]).repeat_interleave(16)[:, None])
    uses = [group.statistics(table).tiers[0] for table in range(3)]
    assert [use.errors for use in uses] == [0, 1, 0]
    assert [use.skipped for use in uses] == [0, 1, 0]
    assert [use.is_available for use in uses] == [True, False, True]
    failing.failing = frozenset()
    clock.now += 1.0
    assert torch.equal(group.find(requested(0, 1, 2)).rows, expected(0, 1, 2))
    assert group.statistics(1).tiers[0].is_available


def test_a_server_that_cannot_be_reached_is_tried_once_for_all_tables() -> None:
    group, failing = three_tables(Clock())
    failing.failing, failing.kind, failing.num_reads = frozenset([0, 1, 2]), UnreachableError, 0
    assert not bool(group.find(requested(0, 1, 2)).mask.any())
    assert failing.num_reads == 1
    assert [group.statistics(table).tiers[0].errors for table in range(3)] == [1, 1, 1]
    assert not bool(group.find(requested(0, 1, 2)).mask.any())
    assert failing.num_reads == 1
