# SPDX-License-Identifier: Apache-2.0

import copy

import pytest
import torch

from terarec.errors import ConfigError, StorageError
from terarec.kernels import memory
from terarec.spec import DynamicTableSpec
from terarec.storage.dynamic_arena import DynamicArena
from tests.errors import at

SPECS = [
    DynamicTableSpec(name="a", width=4, default=0.5),
    DynamicTableSpec(name="b", width=4, default=(1.0, 2.0, 3.0, 4.0)),
]
DEFAULTS = torch.tensor([[0.5] * 4, [1.0, 2.0, 3.0, 4.0]])


def test_the_first_rows_are_the_default_rows() -> None:
    arena = DynamicArena(SPECS)
    assert torch.equal(arena.weights[:2], DEFAULTS)
    assert (arena.table_names, arena.next_row) == (("a", "b"), 2)
    arena.attach_state((("sum", (arena.num_rows, 4)),), fills={"sum": 0.25})
    arena.weights[:2] = 7.0
    arena.state["sum"][:2] = 7.0
    arena.reset_defaults()
    assert torch.equal(arena.weights[:2], DEFAULTS)
    assert torch.equal(arena.state["sum"][:2], torch.full((2, 4), 0.25))


def test_growing_keeps_rows_and_their_address() -> None:
    arena = DynamicArena(SPECS)
    arena.attach_state((("sum", (arena.num_rows,)),), fills={"sum": 0.5})
    address, before = arena.weights.data_ptr(), arena.num_rows
    arena.weights[2] = 3.0
    view = arena.weights
    rows = arena.allocate_rows(2 * before, "test")
    arena.data.begin(0, rows, rows)
    assert rows.tolist() == list(range(2, 2 + 2 * before))
    assert arena.num_rows >= 2 + 2 * before
    assert arena.weights.shape[0] == arena.state["sum"].shape[0] == arena.num_rows
    assert arena.weights.data_ptr() == address
    view[2] = 4.0
    assert torch.equal(arena.weights[2], torch.full((4,), 4.0)), "a tensor taken before growth sees the same memory"
    assert torch.equal(arena.state["sum"][rows], torch.full((rows.numel(),), 0.5))


def test_rows_given_back_come_first_with_fresh_state() -> None:
    arena = DynamicArena(SPECS)
    arena.attach_state((("sum", (arena.num_rows,)),), fills={"sum": 0.5})
    arena.track("count", torch.int64)
    rows = arena.allocate_rows(4, "test")
    arena.state["sum"][rows] = 9.0
    arena.uses["count"][rows] = 9
    arena.free_rows(0, rows[[3, 1]], rows[[3, 1]])
    again = arena.allocate_rows(3, "test")
    arena.data.begin(0, again, again)
    assert again.tolist() == [5, 3, 6]
    assert arena.state["sum"][again].tolist() == [0.5] * 3
    assert arena.uses["count"][again].tolist() == [0] * 3


def test_rows_given_back_under_gradients_wait() -> None:
    arena = DynamicArena(SPECS)
    rows = arena.allocate_rows(2, "test")
    arena.pin()
    arena.free_rows(0, rows, rows)
    assert arena.allocate_rows(1, "test").tolist() == [4]
    assert arena.generation == 0
    arena.unpin()
    assert arena.generation == 1
    assert arena.allocate_rows(3, "test").tolist() == [2, 3, 5]
    arena.unpin()
    assert arena.generation == 1


def test_memory_that_is_not_there_is_rejected_and_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    arena = DynamicArena(SPECS)
    monkeypatch.setattr(memory, "available_bytes", lambda: 1000)
    before = (arena.num_rows, arena.next_row)
    where = "for x, dynamic tables 'a', 'b'"
    with pytest.raises(StorageError, check=at(where)):
        arena.allocate_rows(arena.num_rows, "for x")
    with pytest.raises(StorageError, check=at("optimizer state 'sum' of dynamic tables 'a', 'b'")):
        arena.attach_state((("sum", (arena.num_rows, 4)),))
    assert (arena.num_rows, arena.next_row) == before
    assert arena.state == {}
    with pytest.raises(StorageError, check=at("default rows of dynamic tables 'w'")):
        DynamicArena([DynamicTableSpec(name="w", width=2**20)])


def test_a_copy_is_independent() -> None:
    arena = DynamicArena(SPECS)
    arena.attach_state((("sum", (arena.num_rows,)),))
    twin = copy.deepcopy(arena)
    twin.weights.fill_(9.0)
    twin.allocate_rows(twin.num_rows, "test")
    assert torch.equal(arena.weights[:2], DEFAULTS)
    assert arena.next_row == 2


def test_tables_of_two_widths_and_devices_without_memory_are_rejected() -> None:
    with pytest.raises(ConfigError, check=at("arena", "widths and types")):
        DynamicArena([SPECS[0], DynamicTableSpec(name="c", width=8)])
    with pytest.raises(ConfigError, check=at("arena", "meta")):
        DynamicArena(SPECS).move(torch.device("meta"))
