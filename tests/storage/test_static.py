# SPDX-License-Identifier: Apache-2.0

import copy
import math
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Literal

import pytest
import torch

from terarec.errors import ConfigError, StorageError
from terarec.kernels import memory
from terarec.spec import TableSpec
from terarec.spec.tables import Initializer
from terarec.storage import Arena
from terarec.storage.static import static_tables
from tests.errors import at

SPECS = [TableSpec(name="a", rows=50, width=8), TableSpec(name="b", rows=200, width=8)]


def weights_of(arena: Arena, name: str) -> torch.Tensor:
    return next(table.weights for table in static_tables(arena) if table.name == name)


def test_tables_lie_one_after_the_other() -> None:
    arena = Arena(SPECS)
    assert (arena.table_names, arena.table_base, arena.table_rows) == (("a", "b"), (0, 50), (50, 200))
    assert arena.weights.shape == (250, 8)
    assert weights_of(arena, "b").data_ptr() == arena.weights[50].data_ptr()
    assert arena.memory_bytes == 250 * 8 * 4


def test_first_weights_depend_on_name_row_and_seed_only() -> None:
    together, alone = Arena(SPECS, seed=5), Arena(SPECS[1:], seed=5)
    assert torch.equal(weights_of(together, "b"), weights_of(alone, "b"))
    longer = Arena([TableSpec(name="a", rows=80, width=8, init_scale=1 / math.sqrt(50))], seed=5)
    assert torch.equal(weights_of(together, "a"), longer.weights[:50])
    assert not torch.equal(weights_of(Arena(SPECS, seed=6), "b"), weights_of(alone, "b"))
    assert not torch.equal(weights_of(together, "a"), weights_of(together, "b")[:50])


def test_first_weights_do_not_depend_on_threads(set_threads: Callable[[int], None]) -> None:
    weights = []
    for count in (1, 2):
        set_threads(count)
        weights.append(Arena([TableSpec(name="a", rows=30011, width=8)], seed=2).weights)
    assert torch.equal(*weights)


def test_the_initialisers_have_the_stated_distribution() -> None:
    rows = 4000
    uniform = Arena([TableSpec(name="u", rows=rows, width=16)]).weights
    assert uniform.abs().max() <= 1 / math.sqrt(rows)
    assert uniform.std().item() == pytest.approx(1 / math.sqrt(3 * rows), rel=0.02)
    normal = Arena([TableSpec(name="n", rows=rows, width=16, initializer="normal", init_scale=0.3)]).weights
    assert normal.mean().item() == pytest.approx(0.0, abs=0.01)
    assert normal.std().item() == pytest.approx(0.3, rel=0.02)
    assert Arena([TableSpec(name="z", rows=5, width=4, initializer="zeros")]).weights.abs().sum() == 0


def test_state_is_filled_and_replaced() -> None:
    arena = Arena(SPECS)
    arena.attach_state((("sum", (250,)),), fills={"sum": 0.25})
    assert torch.equal(arena.state["sum"], torch.full((250,), 0.25))
    assert arena.memory_bytes == 250 * 8 * 4 + 250 * 4
    arena.attach_state((("exp_avg", (250, 8)),))
    assert list(arena.state) == ["exp_avg"]


def test_memory_that_is_not_there_is_rejected_with_the_tables_named(monkeypatch: pytest.MonkeyPatch) -> None:
    huge = TableSpec(name="users", rows=2**40, width=128)
    with pytest.raises(StorageError, check=at("weights float32[1099511627776, 128] of table 'users'")):
        Arena([huge])
    arena = Arena(SPECS)
    monkeypatch.setattr(memory, "available_bytes", lambda: 1000)
    with pytest.raises(StorageError, check=at("optimizer state 'sum' float32[250, 8] of tables 'a', 'b'")):
        arena.attach_state((("sum", (250, 8)),))


def test_available_memory_is_read_on_linux() -> None:
    if not sys.platform.startswith("linux"):
        pytest.skip("only Linux tells")
    available = memory.available_bytes()
    assert available is not None
    assert 2**20 < available < 2**50


def test_tables_of_two_widths_or_types_are_rejected() -> None:
    for other in (TableSpec(name="c", rows=3, width=4), TableSpec(name="c", rows=3, width=8, dtype="float16")):
        with pytest.raises(ConfigError, check=at("arena", f"({other.width}, '{other.dtype}')")):
            Arena([SPECS[0], other])
    with pytest.raises(ConfigError, check=at("arena", "of the optimizers ['default', 'wide']")):
        Arena([SPECS[0], replace(SPECS[0], name="c", optimizer="wide")])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("initializer", ["uniform", "normal", "zeros"])
def test_narrow_rows_start_as_rounded_float32(dtype: Literal["bfloat16", "float16"], initializer: Initializer) -> None:
    specs = [replace(spec, rows=spec.rows * 701, width=9, initializer=initializer) for spec in SPECS]
    wide = Arena(specs, seed=3)
    narrow = Arena([replace(spec, dtype=dtype) for spec in specs], seed=3)
    assert narrow.weights.dtype == narrow.dtype == getattr(torch, dtype)
    assert torch.equal(narrow.weights, wide.weights.to(narrow.dtype))
    assert narrow.memory_bytes * 2 == wide.memory_bytes
    narrow.attach_state((("sum", (narrow.num_rows,)),))
    assert narrow.state["sum"].dtype == torch.float32


def test_a_copy_is_independent() -> None:
    arena = Arena(SPECS)
    twin = copy.deepcopy(arena)
    twin.weights.zero_()
    assert arena.weights.abs().sum() > 0


def test_a_device_without_memory_is_rejected() -> None:
    with pytest.raises(ConfigError, check=at("arena", "meta")):
        Arena(SPECS).move(torch.device("meta"))
