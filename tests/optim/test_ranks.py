# SPDX-License-Identifier: Apache-2.0
"""A4: tables are not trained on several ranks, where each would train its own."""

import os
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch import multiprocessing, nn

from terarec.batch import Jagged
from terarec.embedding import EmbeddingCollection
from terarec.errors import ConfigError
from terarec.optim import RowOptimizer
from terarec.spec import FeatureSpec, SGDSpec, TableSpec
from tests.errors import at
from tests.processes import CONTEXT


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tables = EmbeddingCollection(
            [TableSpec(name="a", rows=9, width=4)], [FeatureSpec(name="a", table="a")], seed=1
        )
        self.dense = nn.Linear(4, 1)

    def forward(self, keys: torch.Tensor) -> torch.Tensor:
        offsets = torch.arange(keys.numel() + 1)
        return self.dense(self.tables(Jagged(names=("a",), keys=keys, offsets=offsets)).pooled)


def train_on_a_rank(rank: int, world_size: int, meeting: Path) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.distributed.init_process_group(
        "gloo",
        init_method=meeting.as_uri(),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=200),
    )
    try:
        check_a_step(rank, world_size)
    finally:
        # DistributedDataParallel is gone by now: as the group's last owner it would wait, with the interpreter's lock,
        # for a thread that needs the lock.
        torch.distributed.destroy_process_group()


def check_a_step(rank: int, world_size: int) -> None:
    model = Model()
    wrapped = nn.parallel.DistributedDataParallel(model)
    rows = RowOptimizer(model, SGDSpec(lr=0.1))
    before = model.tables.table("a").detach().clone()
    wrapped(torch.tensor([rank, 3])).sum().backward()
    if world_size == 1:
        rows.step()
        assert not torch.equal(model.tables.table("a"), before)
    else:
        with pytest.raises(ConfigError, check=at("row optimizer", f"process group of {world_size} ranks")):
            rows.step()
        assert torch.equal(model.tables.table("a"), before)


@pytest.mark.parametrize("world_size", [1, 2])
def test_a4_a_step_in_a_group_of_several_ranks_raises(world_size: int, tmp_path: Path) -> None:
    multiprocessing.start_processes(
        train_on_a_rank,
        args=(world_size, tmp_path / "meeting"),
        nprocs=world_size,
        start_method=CONTEXT.get_start_method(),
    )
