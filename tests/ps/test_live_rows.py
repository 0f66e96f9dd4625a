# SPDX-License-Identifier: Apache-2.0
"""Lookups beside updates: a tier never keeps a row that is older than what an update has written."""

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from terarec.kernels.slots import RowBatch
from terarec.spec import RowFileSpec
from tests.ps.tiers import Delegating, disk, host, table_of

WIDTH = 16


def rows_of(keys: Tensor, value: float) -> Tensor:
    return torch.full((keys.numel(), WIDTH), value)


class Hooked(Delegating):
    """Host memory that calls a function after each lookup, as if others ran while it waits for a disk."""

    after: Callable[[], None] = staticmethod(lambda: None)

    def read(self, batch: RowBatch, out: Tensor) -> Tensor:
        found = self.level.read(batch, out)
        self.after()
        return found


@given(
    steps=st.lists(st.sampled_from(["insert", "erase"]), min_size=1, max_size=3),
    is_kept=st.lists(st.booleans(), min_size=2, max_size=2),
)
def test_rows_that_change_while_they_are_read_are_not_kept(steps: list[str], is_kept: list[bool]) -> None:
    """Finding L1."""
    slow, keys = host(WIDTH, kind=Hooked), torch.arange(8)
    tiers = [host(WIDTH), host(WIDTH), slow]
    slow.insert(keys, rows_of(keys, 1.0))
    table = table_of(tiers, keeps_found=[*is_kept, False])
    changed, newest = torch.arange(0, 8, 2), torch.ones(8)

    def change() -> None:
        for number, step in enumerate(steps):
            if step == "insert":
                table.insert(changed, rows_of(changed, 2.0 + number))
                newest[changed] = 2.0 + number
            else:
                table.erase(changed)
                newest[changed] = 0.0

    slow.guarded.level.after = change
    table.lookup(keys)
    slow.guarded.level.after = lambda: None
    for _ in range(2):
        assert table.lookup(keys)[:, 0].tolist() == newest.tolist()


def test_a_lookup_that_begins_inside_an_update_keeps_nothing() -> None:
    fast, slow, keys = host(WIDTH), host(WIDTH), torch.arange(8)
    slow.insert(keys, rows_of(keys, 1.0))
    reads: list[Tensor] = []

    class LooksUp(Delegating):
        """Looks keys up while they are erased: the tier before it has lost them, the one behind it has them still."""

        def erase(self, batch: RowBatch) -> None:
            reads.append(table.lookup(batch.keys))

    table = table_of([fast, host(WIDTH, kind=LooksUp), slow], keeps_found=[True, False, False])
    table.erase(keys)
    assert len(reads) == 1
    assert table.lookup(keys).count_nonzero() == 0


def count_stale(folder: Path, num_keys: int, *, removes: bool) -> int:
    """Update each block of keys while another thread looks it up; return the rows that are old afterwards."""
    files = disk(RowFileSpec(path=str(folder)), folder / "t", WIDTH)
    keys = torch.arange(num_keys)
    files.insert(keys, rows_of(keys, 1.0))
    table = table_of([host(WIDTH), files], keeps_found=[True, False])
    turn = threading.Barrier(2)

    def look_up() -> None:
        for block in torch.split(keys, 100):
            turn.wait()
            table.lookup(block)

    reader = threading.Thread(target=look_up)
    reader.start()
    for block in torch.split(keys, 100):
        turn.wait()
        if removes:
            table.erase(block)
        else:
            table.insert(block, rows_of(block, 2.0))
    reader.join()
    found = table.lookup(keys)[:, 0]
    table.close()
    return int((found != (0.0 if removes else 2.0)).count_nonzero())


@pytest.mark.parametrize("removes", [False, True])
def test_no_row_is_old_after_lookups_beside_updates(tmp_path: Path, removes: bool) -> None:
    """Finding L1."""
    assert count_stale(tmp_path, 5_000, removes=removes) == 0


@pytest.mark.slow
@pytest.mark.parametrize("removes", [False, True])
def test_no_row_is_old_in_100_runs(tmp_path: Path, removes: bool) -> None:
    """Finding L1."""
    assert sum(count_stale(tmp_path / str(run), 20_000, removes=removes) for run in range(100)) == 0
