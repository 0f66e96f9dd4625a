# SPDX-License-Identifier: Apache-2.0
"""The memory of tables in tiers: indexes of files count, buffers are bounded, files may bypass the page cache."""

import errno
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from terarec.batch import one_hot
from terarec.embedding import EmbeddingCollection
from terarec.errors import ConfigError, StorageError
from terarec.memory import BudgetError
from terarec.memory.budget import TierBudget
from terarec.memory.row_format import RowFileOptions
from terarec.optim import RowOptimizer
from terarec.spec import AdaGradSpec, DynamicTableSpec, FeatureSpec, TableSpec, Tiers
from tests.errors import at
from tests.processes import run_python

ROW_BYTES, SLOT_BYTES = 128, 60
TABLES = {
    "static": TableSpec(name="t", rows=20_000, width=16),
    "dynamic": DynamicTableSpec(name="t", width=16, init_scale=20_000**-0.5),
}
FEATURES = [FeatureSpec(name="f", table="t")]


def train(embedding: EmbeddingCollection, optimizer: RowOptimizer, steps: int) -> None:
    for number in range(steps):
        keys = torch.randint(0, 20_000, (1, 120), generator=torch.Generator().manual_seed(number))
        embedding(one_hot(["f"], keys)).pooled.square().sum().backward()
        optimizer.step()


@pytest.mark.parametrize("places", ["host-file", "device-host-file"])
@pytest.mark.parametrize("kind", TABLES)
def test_rows_make_room_for_the_indexes(tmp_path: Path, monkeypatch, kind: str, places: str) -> None:
    monkeypatch.setattr("terarec.memory.budget.INDEX_ALLOWANCE", 0)
    rows = 650 if kind == "static" else 1200  # a dynamic table has an index of its keys, too
    budget = rows * (ROW_BYTES + SLOT_BYTES)
    device = f"{200 * (ROW_BYTES + SLOT_BYTES)}" if places.startswith("device") else None
    tiers = Tiers(device=device, host=f"{budget}", file=str(tmp_path))
    plain, tiered = (EmbeddingCollection([replace(TABLES[kind], tiers=of)], FEATURES) for of in (None, tiers))
    for each in (plain, tiered):
        train(each, RowOptimizer(each, AdaGradSpec(lr=0.1)), 20)
    table = tiered.tables["t"]
    keys = plain.tables["t"].keys()
    assert torch.equal(table.export(keys).weights, plain.tables["t"].export(keys).weights)
    data = tiered.arenas[0].data
    memory = data.tiers.memory
    held = memory if device is None else memory.below.level
    indexes = data.index_bytes
    assert indexes > budget / 8
    assert held.capacity < rows
    assert held.capacity * ROW_BYTES + rows * SLOT_BYTES + indexes <= budget * 1.1 + len(data.sizes.key_bytes) * 40_000


def test_indexes_that_fill_the_budget_are_named(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("terarec.memory.budget.INDEX_ALLOWANCE", 0)
    tiers = Tiers(host=f"{200 * (ROW_BYTES + SLOT_BYTES)}", file=str(tmp_path))
    embedding = EmbeddingCollection([replace(TABLES["static"], tiers=tiers)], FEATURES)
    with pytest.raises(BudgetError) as caught:
        train(embedding, RowOptimizer(embedding, AdaGradSpec(lr=0.1)), 60)
    assert caught.value.capacity < 200 <= caught.value.needed_bytes


MEASURED = """
import sys
from pathlib import Path
import torch
from terarec.batch import one_hot
from terarec.embedding import EmbeddingCollection
from terarec.optim import RowOptimizer
from terarec.spec import FeatureSpec, SGDSpec, TableSpec, Tiers
from terarec.storage import RowValues

def held():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

torch.set_num_threads(1)
tiers = Tiers(host="64MiB", file=sys.argv[1])
table = TableSpec(name="t", rows=5_000_000, width=4, tiers=tiers)
embedding = EmbeddingCollection([table], [FeatureSpec(name="f", table="t")])
optimizer = RowOptimizer(embedding, SGDSpec(lr=0.1))

def train(first):
    embedding(one_hot(["f"], torch.arange(first, first + 50_000)[None])).pooled.square().sum().backward()
    optimizer.step()

train(0)
before = held()
for first in range(0, 3_000_000, 100_000):
    keys = torch.arange(first, first + 100_000)
    embedding.tables["t"].import_(RowValues(keys=keys, weights=torch.ones(100_000, 4)))
for first in range(0, 1_500_000, 50_000):
    train(first)
data = embedding.arenas[0].data
print(held() - before, data.index_bytes, data.tiers.memory.slots.used_slots)
"""


LARGE_BATCHES = """
import sys
from pathlib import Path
import torch
from terarec.batch import one_hot
from terarec.embedding import EmbeddingCollection
from terarec.optim import RowOptimizer
from terarec.spec import AdaGradSpec, FeatureSpec, TableSpec, Tiers

def held():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

torch.set_num_threads(1)
rows, batch = 600_000, 200_000
tiers = Tiers(host="160MiB", file=sys.argv[1])
table = TableSpec(name="t", rows=rows, width=64, tiers=tiers)
embedding = EmbeddingCollection([table], [FeatureSpec(name="f", table="t")])
optimizer = RowOptimizer(embedding, AdaGradSpec(lr=0.1))
batches = [one_hot(["f"], torch.arange(first, first + batch)[None] % rows) for first in range(0, 10 * batch, batch)]
most, before = 0, held()
for jagged, coming, later in zip(batches, batches[1:], batches[2:]):
    embedding.prefetch(coming, 2)
    embedding.prefetch(later, 3)
    pooled = embedding(jagged).pooled
    most = max(most, held())
    pooled.backward(torch.ones_like(pooled))
    del pooled
    most = max(most, held())
    optimizer.step()
print(most - before)
"""


@pytest.mark.slow
def test_large_batches_stay_within_the_budget(tmp_path: Path) -> None:
    ended = run_python(LARGE_BATCHES, tmp_path)
    assert not ended.returncode, ended.stderr
    of_batch = 200_000 * (2 * 256 + 8 * 24)  # outputs and gradients of the model, and what finds its rows
    assert int(ended.stdout) < (160 << 20) + of_batch + (256 << 20)


@pytest.mark.slow
def test_the_process_stays_within_its_budget(tmp_path: Path) -> None:
    ended = run_python(MEASURED, tmp_path)
    assert not ended.returncode, ended.stderr
    grown, index, slots = map(int, ended.stdout.split())
    assert index > 40 << 20
    assert slots * (16 + SLOT_BYTES) > 30 << 20
    assert grown < (64 + 64 + 40) << 20  # the budget, what indexes may take in addition, and buffers


class Member:
    """Tables that share a budget."""

    def __init__(self, num_tables: int = 1, *, full_bytes: float = 1.0, index_bytes: float = 0) -> None:
        self.num_tables = self.bytes_of_a_row_each = num_tables
        self.full_bytes = full_bytes
        self.index_bytes = index_bytes


def test_tables_that_do_not_fit_give_up_room_for_all_indexes() -> None:
    budget, mib = TierBudget(), 2**20
    small = Member(full_bytes=10 * mib, index_bytes=4 * mib)
    large, larger = (Member(full_bytes=1e12, index_bytes=each * mib) for each in (40, 120))
    for member in (small, large, larger):
        budget.add(member)
    assert [budget.given_up(each, 1024 * mib) // mib for each in (small, large, larger)] == [0, 25, 75]
    larger.index_bytes = 0
    assert [budget.given_up(each, 1024 * mib) for each in (small, large, larger)] == [0, 0, 0]


def test_buffers_of_many_tables_are_bounded() -> None:
    for tables, arenas, queued, run in (
        (1, 1, 16 << 20, 32 << 10),
        (26, 1, (32 << 20) // 26, 32 << 10),  # which share what reads their pages
        (1, 8, 4 << 20, 8 << 10),
        (50, 20, 1 << 20, 4 << 10),
    ):
        budget, members = TierBudget(), [Member(tables) for _ in range(arenas)]
        for member in members:
            budget.add(member)
        assert budget.file_options(direct=False) == RowFileOptions(queue_bytes=queued, run_bytes=run)


def test_files_may_bypass_the_page_cache(tmp_path: Path, monkeypatch) -> None:
    tiers = Tiers(host=f"{150 * (ROW_BYTES + SLOT_BYTES)}", file=str(tmp_path), direct=True)
    assert Tiers.parse(f"host={tiers.host},file={tmp_path},direct=true") == tiers
    plain, tiered = (EmbeddingCollection([replace(TABLES["static"], tiers=of)], FEATURES) for of in (None, tiers))
    try:
        for each in (plain, tiered):
            train(each, RowOptimizer(each, AdaGradSpec(lr=0.1)), 10)
    except StorageError as error:
        pytest.skip(f"no direct access here: {error}")
    keys = plain.tables["t"].keys()
    assert torch.equal(tiered.tables["t"].export(keys).weights, plain.tables["t"].export(keys).weights)


def test_a_file_system_without_direct_access_is_named(tmp_path: Path, monkeypatch) -> None:
    opened = os.open

    def refuse(path, flags, *arguments, **named):
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), str(path))
        return opened(path, flags, *arguments, **named)

    monkeypatch.setattr(os, "open", refuse)
    embedding = EmbeddingCollection(
        [replace(TABLES["static"], tiers=Tiers(file=str(tmp_path / "files"), direct=True))], FEATURES
    )
    with pytest.raises(StorageError, check=at(f"tiers direct: {tmp_path}/files", "Invalid argument")):
        train(embedding, RowOptimizer(embedding, AdaGradSpec(lr=0.1)), 1)


@pytest.mark.parametrize("wrong", [{"host": "1GiB", "direct": True}, {"file": "a", "direct": "yes"}])
def test_direct_access_that_makes_no_sense(wrong) -> None:
    with pytest.raises(ConfigError, check=at("Tiers.direct")):
        Tiers(**wrong)
