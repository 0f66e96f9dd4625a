# SPDX-License-Identifier: Apache-2.0
"""A training state of a few rows, with every kind of thing that a checkpoint holds."""

import torch
from torch import nn

from terarec.checkpoint import Checkpoint, TrainState
from terarec.spec import TableSpec
from terarec.storage import Arena
from terarec.storage.static import static_tables

ROWS = {"movie": 37, "user id-00001": 5}
WIDTH = 3


def make_tables(fill=None, state_names=("exp_avg", "row_sum"), rows=ROWS):
    arena = Arena([TableSpec(name=name, rows=count, width=WIDTH) for name, count in rows.items()], seed=3)
    total = sum(rows.values())
    shapes = {"exp_avg": (total, WIDTH), "row_sum": (total,)}
    arena.attach_state([(name, shapes[name]) for name in state_names])
    if fill is not None:
        generator = torch.Generator().manual_seed(fill)
        for tensor in (arena.weights, *arena.state.values()):
            tensor.copy_(torch.randn(tensor.shape, generator=generator))
    return {table.name: table for table in static_tables(arena)}


def make_state(step: int) -> TrainState:
    torch.manual_seed(step)
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(2):
        model(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
    return TrainState(
        step=step,
        dense=model.state_dict(),
        tables=make_tables(fill=step),
        optimizer=optimizer.state_dict(),
        rng=torch.get_rng_state(),
        progress={"reader": {"epoch": 1, "batches": step}, "loss": 0.1 + 0.2, "none": None},
    )


def assert_holds(checkpoint: Checkpoint, state: TrainState) -> None:
    """`checkpoint` holds `state`, to the bit."""
    assert checkpoint.step == state.step
    assert checkpoint.progress == state.progress
    assert torch.equal(checkpoint.rng, state.rng)
    dense = checkpoint.dense()
    assert dense.keys() == state.dense.keys()
    assert all(torch.equal(dense[name], tensor) for name, tensor in state.dense.items())
    tables = make_tables()
    checkpoint.load_tables(tables, with_state=True)
    for name, table in state.tables.items():
        assert torch.equal(tables[name].weights, table.weights)
        assert all(torch.equal(tables[name].state[key], value) for key, value in table.state.items())
    loaded, saved = checkpoint.optimizer(), state.optimizer
    assert loaded["param_groups"] == saved["param_groups"]
    assert loaded["state"].keys() == saved["state"].keys()
    for index, entries in saved["state"].items():
        assert all(torch.equal(loaded["state"][index][name], value) for name, value in entries.items())
