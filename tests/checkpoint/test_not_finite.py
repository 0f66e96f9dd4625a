# SPDX-License-Identifier: Apache-2.0
"""Rows with weights that are not finite are in no checkpoint, whatever holds them."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from terarec.batch import one_hot
from terarec.checkpoint import complete_checkpoints, load, save
from terarec.embedding import EmbeddingCollection
from terarec.errors import TrainingError
from terarec.ops.row_update import are_finite
from terarec.optim import RowOptimizer
from terarec.spec import DynamicTableSpec, FeatureSpec, SGDSpec, TableSpec, Tiers
from tests.checkpoint.test_tiered_tables import state_of
from tests.errors import at

KEYS = 2000
TABLES = [TableSpec(name="other", rows=KEYS, width=4), TableSpec(name="static", rows=KEYS, width=4)]
DYNAMIC = [DynamicTableSpec(name="other", width=4), DynamicTableSpec(name="dynamic", width=4)]
TIERS = {"memory": None, "fast tier": Tiers(host="4MiB"), "files": Tiers(host="24KiB", file="files")}


def train(embedding: EmbeddingCollection, optimizer: RowOptimizer, keys: torch.Tensor, factor: float = 1.0) -> None:
    (embedding(one_hot(["f", "g"], torch.stack([keys, keys]))).pooled[:, 4:] * factor).sum().backward()
    optimizer.step()


@pytest.mark.parametrize("kind", ["full", "delta"])
@pytest.mark.parametrize("where", TIERS)
@pytest.mark.parametrize("tables", [TABLES, DYNAMIC], ids=["static", "dynamic"])
def test_a_row_that_overflows_is_not_saved_and_the_checkpoint_before_is_kept(
    tmp_path: Path,
    tables: list[TableSpec | DynamicTableSpec],
    where: str,
    kind: Literal["full", "delta"],
) -> None:
    tiers = TIERS[where]
    if tiers is not None and tiers.file is not None:
        tiers = replace(tiers, file=str(tmp_path / "files"))
    features = [FeatureSpec(name="f", table="other"), FeatureSpec(name="g", table=tables[1].name)]
    embedding = EmbeddingCollection([replace(table, tiers=tiers) for table in tables], features, seed=1)
    optimizer = RowOptimizer(embedding, SGDSpec(lr=1e20))
    every = torch.arange(KEYS)
    for keys in every.split(100):
        train(embedding, optimizer, keys, 1e-22)
    first = save(tmp_path / "run", state_of(embedding, 1), kind="full" if kind == "full" else "base")
    train(embedding, optimizer, every[700:701], 1e20)
    for keys in every.split(100):  # which the files get rows for
        train(embedding, optimizer, keys[keys != 700], 1e-22)
    with pytest.raises(TrainingError, check=at(f"table {tables[1].name!r}", "the row of key 700 got")):
        save(tmp_path / "run", state_of(embedding, 2), kind=kind)
    assert complete_checkpoints(tmp_path / "run") == [first]
    assert [path.name for path in (tmp_path / "run").iterdir()] == [first.name]
    # A row that is set again is one like any other.
    table = embedding.tables[tables[1].name]
    table.import_(replace(table.export(every[700:701]), weights=torch.ones(1, 4)))
    second = save(tmp_path / "run", state_of(embedding, 2), kind=kind)
    load(second).load_tables(embedding.tables, with_state=True)
    assert table.export(every[700:701]).weights.tolist() == [[1.0] * 4]


@given(
    st.lists(st.sampled_from([0.0, -1.5, 6e4, 3e38, -math.inf, math.inf, math.nan]), max_size=8),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)
def test_numbers_in_one_piece_or_apart(values: list[float], dtype: torch.dtype) -> None:
    made = torch.tensor(values, dtype=torch.float64).to(dtype)
    expected = all(map(math.isfinite, made.tolist()))
    assert are_finite(made) is expected
    assert are_finite(torch.stack([made, torch.full_like(made, math.nan)], dim=1)[:, 0]) is expected
