# SPDX-License-Identifier: Apache-2.0
"""One behaviour suite for every store; a new kind of store adds a factory and its name."""

import math
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from terarec.errors import ConfigError, KeyOutOfRangeError, StorageError
from terarec.memory import RowBatch
from terarec.memory.tiered_rows import TieredRows
from terarec.spec import DynamicTableSpec, TableSpec, Tiers
from terarec.spec.tables import RowType
from terarec.storage import Arena, RowValues, Store
from terarec.storage.dynamic import DynamicTable, dynamic_tables
from terarec.storage.dynamic_arena import DynamicArena
from terarec.storage.static import static_tables
from terarec.storage.tiered import TieredArena, tiered_tables
from tests.errors import at
from tests.params import examples
from tests.storage.indexes import FAST_INDEXES, INDEXES

Factory = Callable[[list[TableSpec]], list[Store]]


def static(specs: list[TableSpec], *, dtype: RowType = "float32") -> list[Store]:
    arena = Arena([replace(spec, dtype=dtype) for spec in specs], seed=3)
    return list(static_tables(arena))


def dynamic(specs: list[TableSpec], *, implementation: str, dtype: RowType = "float32") -> list[Store]:
    """Dynamic tables that hold the keys of static ones."""
    like = [
        DynamicTableSpec(name=spec.name, width=spec.width, init_scale=1 / math.sqrt(spec.rows), dtype=dtype)
        for spec in specs
    ]
    tables = dynamic_tables(DynamicArena(like, seed=3), implementation)
    for table, spec in zip(tables, specs, strict=True):
        table.rows(torch.arange(spec.rows), train=True)
    return list(tables)


def static_in_tiers(specs: list[TableSpec]) -> list[Store]:
    """Static tables with room for few of their rows; those that tests touch are in files."""
    tiers = Tiers(host="1KiB", file=str(Path(tempfile.mkdtemp(dir=DIRECTORY.name))))
    return list(tiered_tables(TieredArena([replace(spec, tiers=tiers) for spec in specs], seed=3)))


def dynamic_in_tiers(specs: list[TableSpec]) -> list[Store]:
    tiers = Tiers(device="1KiB", host="2KiB", file=str(Path(tempfile.mkdtemp(dir=DIRECTORY.name))))
    like = [
        DynamicTableSpec(name=spec.name, width=spec.width, init_scale=1 / math.sqrt(spec.rows), tiers=tiers)
        for spec in specs
    ]
    tables = dynamic_tables(DynamicArena(like, seed=3))
    for table, spec in zip(tables, specs, strict=True):
        table.rows(torch.arange(spec.rows), train=True)
    return list(tables)


DIRECTORY = tempfile.TemporaryDirectory()
IN_TIERS: dict[str, Factory] = {"static-tiers": static_in_tiers, "dynamic-tiers": dynamic_in_tiers}
FACTORIES: dict[str, Factory] = {"static": static, **IN_TIERS}
FACTORIES |= {f"dynamic-{name}": partial(dynamic, implementation=name) for name in INDEXES}
NARROW: list[RowType] = ["bfloat16", "float16"]  # which play no part in an index: one of them is enough
for narrow in NARROW:
    FACTORIES[f"static-{narrow}"] = partial(static, dtype=narrow)
    FACTORIES[f"dynamic-{narrow}"] = partial(dynamic, implementation="auto", dtype=narrow)


@pytest.fixture(params=FACTORIES.values(), ids=FACTORIES.keys())
def make(request: pytest.FixtureRequest) -> Factory:
    factory: Factory = request.param
    return factory


def specs(*rows: int, width: int = 4) -> list[TableSpec]:
    return [TableSpec(name=f"t{index}", rows=count, width=width) for index, count in enumerate(rows)]


def is_in_tiers(store: Store) -> bool:
    return isinstance(getattr(store.arena, "data", None), TieredRows)  # type: ignore[attr-defined]


def row_type(store: Store) -> torch.dtype:
    return store.arena.dtype  # type: ignore[attr-defined,no-any-return]


def with_state(stores: list[Store]) -> list[Store]:
    arena = stores[0].arena  # type: ignore[attr-defined]
    arena.attach_state(
        (("exp_avg", (arena.num_rows, arena.width)), ("sum", (arena.num_rows,))), fills={"exp_avg": 0.5, "sum": 0.5}
    )
    return stores


def test_it_is_a_store(make: Factory) -> None:
    (store,) = make(specs(7))
    assert isinstance(store, Store)
    assert (store.name, store.width, len(store), store.state_names) == ("t0", 4, 7, ())
    assert store.row_bytes == max(16, 4 * row_type(store).itemsize) or not is_in_tiers(store)
    if is_in_tiers(store):
        return
    index_bytes = store.index_bytes if isinstance(store, DynamicTable) else 0
    number_bytes = 8 if isinstance(store, DynamicTable) and row_type(store).itemsize < 4 else 0
    assert store.row_bytes == 4 * row_type(store).itemsize + number_bytes
    assert store.memory_bytes == 7 * store.row_bytes + index_bytes


def test_initial_values_depend_on_table_key_and_seed_alone(make: Factory) -> None:
    for mine, other in zip(make(specs(7, 11)), static(specs(7, 11)), strict=True):
        keys = torch.arange(len(other))
        assert torch.equal(mine.export(keys).weights, other.export(keys).weights.to(row_type(mine)))


def test_rows_are_those_of_the_arena(make: Factory) -> None:
    _, store = make(specs(5, 9))
    keys = torch.tensor([3, 0, 3, 8])
    rows = store.rows(keys, train=False)
    if is_in_tiers(store):
        data = store.arena.data  # type: ignore[attr-defined]
        batch = RowBatch(rows, keys, torch.full_like(keys, store.number))  # type: ignore[attr-defined]
        assert torch.equal(data.weights[data.placement.place(batch, purpose="test").slots], store.export(keys).weights)
        return
    assert torch.equal(store.arena.weights[rows], store.export(keys).weights)  # type: ignore[attr-defined]
    assert torch.equal(store.rows(keys, train=True), rows)


def test_import_then_export_gives_the_same_rows(make: Factory) -> None:
    first, second = with_state(make(specs(5, 9)))
    before = first.export(torch.arange(5))
    keys = torch.tensor([8, 0, 3])
    weights = torch.randn(3, 4).to(row_type(second))
    given_rows = RowValues(keys=keys, weights=weights, state={"exp_avg": torch.randn(3, 4), "sum": torch.randn(3)})
    second.import_(given_rows)
    held = second.export(keys)
    assert torch.equal(held.weights, given_rows.weights)
    assert held.state.keys() == given_rows.state.keys()
    assert all(torch.equal(held.state[name], given_rows.state[name]) for name in held.state)
    assert torch.equal(first.export(torch.arange(5)).weights, before.weights), "the neighbour in the arena moved"


def test_export_is_a_copy(make: Factory) -> None:
    (store,) = make(specs(5))
    held = store.export(torch.tensor([2]))
    held.weights.zero_()
    assert store.export(torch.tensor([2])).weights.abs().sum() > 0


@pytest.mark.parametrize("chunk_rows", [1, 3, 11, 100])
def test_chunks_hold_every_key_once(make: Factory, chunk_rows: int) -> None:
    _, store = with_state(make(specs(2, 11)))
    chunks = list(store.export_chunks(chunk_rows))
    assert all(0 < chunk.keys.numel() <= chunk_rows for chunk in chunks)
    keys = torch.cat([chunk.keys for chunk in chunks])
    assert sorted(keys.tolist()) == list(range(11))
    assert torch.equal(torch.cat([chunk.weights for chunk in chunks]), store.export(keys).weights)
    assert torch.equal(torch.cat([chunk.state["sum"] for chunk in chunks]), store.export(keys).state["sum"])


def test_chunks_of_one_store_fill_another(make: Factory) -> None:
    source = with_state(make(specs(6, 13)))[1]
    target = with_state(make(specs(13)))[0]
    for chunk in source.export_chunks(4):
        target.import_(chunk)
    assert torch.equal(target.export(torch.arange(13)).weights, source.export(torch.arange(13)).weights)


def test_weights_alone_leave_the_state(make: Factory) -> None:
    (store,) = with_state(make(specs(3)))
    store.import_(RowValues(keys=torch.tensor([1]), weights=torch.zeros(1, 4, dtype=row_type(store))))
    assert store.export(torch.tensor([1])).state["sum"].item() == 0.5


@pytest.mark.parametrize("key", [-1, 5, 2**40, -(2**63)])
def test_a_key_outside_a_static_table_names_table_key_and_rows(key: int) -> None:
    store, _ = static(specs(5, 5))
    with pytest.raises(KeyOutOfRangeError, check=at("table 't0'", f"got key {key}, expected 0 <= key < 5")):
        store.rows(torch.tensor([0, key]), train=False)


@pytest.mark.parametrize("key", [-1, 5, 2**40, -(2**63), 2**63 - 1])
def test_a_key_that_is_not_held_cannot_be_exported(make: Factory, key: int) -> None:
    store, _ = make(specs(5, 5))
    with pytest.raises(KeyOutOfRangeError, check=at("table 't0'", f"got key {key}")):
        store.export(torch.tensor([0, key]))


def test_eviction_is_for_dynamic_tables(make: Factory) -> None:
    store, _ = make(specs(5, 5))
    assert (store.keyed is not None) == store.is_dynamic
    if store.keyed is not None:
        assert store.keyed.take_evicted().numel() == 0
        with pytest.raises(ConfigError, check=at("table 't0': evict")):
            store.keyed.evict()
    assert len(store) == 5


def test_state_besides_rows_is_copied_between_stores(make: Factory) -> None:
    (source,), (target,) = make(specs(5)), make(specs(5))
    source.rows(torch.arange(5), train=True)  # one batch more than the other
    if source.keyed is None or target.keyed is None:
        return
    for piece in source.keyed.export_memory(2):
        target.keyed.import_memory(piece)
    assert list(target.keyed.export_memory(2)) == list(source.keyed.export_memory(2))
    with pytest.raises(StorageError, check=at("table 't0'")):
        target.keyed.import_memory({"strange": torch.zeros(1)})


@pytest.mark.parametrize(
    ("weights", "state", "problem"),
    [
        (torch.ones(2, 5), {}, "[2, 5]"),
        (torch.ones(2, 4, dtype=torch.float64), {}, "got weights torch.float64"),
        (torch.ones(2, 4), {"sum": torch.ones(2)}, "got optimizer states ['sum'], expected ['exp_avg', 'sum']"),
        (torch.ones(2, 4), {"sum": torch.ones(2, 1), "exp_avg": torch.ones(2, 4)}, "[2, 1]"),
    ],
)
def test_a_wrong_import_changes_nothing(
    make: Factory, weights: torch.Tensor, state: dict[str, torch.Tensor], problem: str
) -> None:
    (store,) = with_state(make(specs(5)))
    before = store.export(torch.arange(5))
    weights = weights if weights.dtype == torch.float64 else weights.to(row_type(store))
    with pytest.raises(StorageError, check=at("table 't0'", problem)):
        store.import_(RowValues(keys=torch.tensor([0, 1]), weights=weights, state=state))
    after = store.export(torch.arange(5))
    assert torch.equal(after.weights, before.weights)
    assert torch.equal(after.state["sum"], before.state["sum"])


@settings(max_examples=examples(40))
@given(
    rows=st.integers(1, 40),
    keys=st.sets(st.integers(0, 39), max_size=40),
    name=st.sampled_from(["static", *IN_TIERS, *(f"dynamic-{name}" for name in FAST_INDEXES)]),
)
def test_any_set_of_keys_round_trips(rows: int, keys: set[int], name: str) -> None:
    (store,) = FACTORIES[name](specs(rows))
    inside = torch.tensor([key for key in keys if key < rows], dtype=torch.int64)
    expected = store.export(torch.arange(rows)).weights
    expected[inside] = torch.full((inside.numel(), 4), 7.0)
    store.import_(RowValues(keys=inside, weights=torch.full((inside.numel(), 4), 7.0)))
    assert torch.equal(store.export(torch.arange(rows)).weights, expected)
