# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of tables whose rows are narrower than float32, and what ``terarec inspect`` tells of them."""

from dataclasses import replace

import pytest
import torch

from terarec.checkpoint import load, save
from terarec.cli.inspect_model import describe_checkpoint, describe_table
from terarec.errors import StorageError
from terarec.spec import TableSpec
from terarec.storage import Arena
from terarec.storage.static import static_tables
from tests.checkpoint.small_state import make_state
from tests.errors import at


def make_tables(dtype, seed=1):
    arena = Arena([TableSpec(name="t", rows=21, width=5, initializer="normal", dtype=dtype)], seed=seed)
    arena.attach_state([("sum", (21, 5))], fills={"sum": 0.25})
    return {table.name: table for table in static_tables(arena)}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_rows_and_state_come_back_in_their_types(tmp_path, dtype):
    tables = make_tables(dtype)
    path = save(tmp_path, replace(make_state(1), tables=tables))
    found = make_tables(dtype, seed=2)
    found["t"].state["sum"].zero_()
    load(path).load_tables(found, with_state=True)
    assert found["t"].weights.dtype == getattr(torch, dtype)
    assert torch.equal(found["t"].weights, tables["t"].weights)
    assert torch.equal(found["t"].state["sum"], tables["t"].state["sum"])
    with pytest.raises(StorageError, check=at("table 't'")):
        load(path).load_tables(make_tables("float32"), with_state=True)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_inspect_tells_type_and_norms(tmp_path, dtype):
    tables = make_tables(dtype)
    path = save(tmp_path, replace(make_state(1), tables=tables))
    norms = tables["t"].weights.double().norm(dim=1)
    (described,) = describe_checkpoint(path)["tables"]
    assert described["dtype"] == dtype
    assert described["norm_max"] == pytest.approx(float(norms.max()))
    assert described["norm_mean"] == pytest.approx(float(norms.mean()))
    assert describe_table(path, "t", 1)["largest"][0]["row"] == int(norms.argmax())


def test_dense_parameters_may_be_bfloat16(tmp_path):
    dense = {"w": torch.randn(3, 2).bfloat16()}
    found = load(save(tmp_path, replace(make_state(1), dense=dense))).dense()
    assert found["w"].dtype == torch.bfloat16
    assert torch.equal(found["w"], dense["w"])
