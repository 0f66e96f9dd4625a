# SPDX-License-Identifier: Apache-2.0
"""Dynamic tables in a collection: equal to static ones on a closed vocabulary, and open beyond it."""

import copy
import math
import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from multiprocessing.reduction import ForkingPickler
from typing import Any

import pytest
import torch

from terarec.batch import Jagged, one_hot
from terarec.embedding import EmbeddingCollection
from terarec.errors import ConfigError, KeyOutOfRangeError, StorageError
from terarec.kernels import memory
from terarec.optim import RowOptimizer
from terarec.spec import (
    AdaGradSpec,
    AdamSpec,
    AdamWSpec,
    AdmissionSpec,
    DynamicTableSpec,
    EvictionSpec,
    FeatureSpec,
    FTRLSpec,
    MomentumSpec,
    NesterovSpec,
    RMSPropSpec,
    RowOptions,
    RowWiseAdaGradSpec,
    SGDSpec,
    SparseOptimizerSpec,
    TableSpec,
    counting_filter,
    freq,
    lru,
    prob,
    ttl,
)
from terarec.spec.tables import RowType
from terarec.storage import RowValues
from terarec.storage.dynamic_arena import DynamicArena
from tests.embedding.plain import random_jagged
from tests.errors import at

NAMES, ROWS = ("f0", "f1", "f2", "f3", "f4", "f5"), (700, 11, 700, 5, 11, 13)
STATIC = [
    TableSpec(name="a", rows=700, width=4),
    TableSpec(name="b", rows=11, width=6),
    TableSpec(name="c", rows=5, width=4, initializer="normal"),
    TableSpec(name="d", rows=13, width=4),
]
FEATURES = [
    FeatureSpec(name="f0", table="a"),
    FeatureSpec(name="f1", table="b", pooling="mean"),
    FeatureSpec(name="f2", table="a", pooling="none"),
    FeatureSpec(name="f3", table="c", pooling="mean"),
    FeatureSpec(name="f4", table="b"),
    FeatureSpec(name="f5", table="d"),
]
OPTIMIZERS = [
    SGDSpec(lr=0.02),
    AdaGradSpec(lr=0.1, initial_accumulator=0.2),
    RowWiseAdaGradSpec(lr=0.1, initial_accumulator=0.2),
    AdamSpec(lr=0.05),
    MomentumSpec(lr=0.02),
    NesterovSpec(lr=0.02),
    RMSPropSpec(lr=0.02),
    AdamWSpec(lr=0.02),
    FTRLSpec(lr=0.1, initial_accumulator=0.1),
    AdamSpec(lr=0.05, rows=RowOptions(mode="lazy_global", clip_global_norm=3.0)),
]


def dynamic_twin(table: TableSpec) -> DynamicTableSpec:
    scale = 1 / math.sqrt(table.rows)
    return DynamicTableSpec(name=table.name, width=table.width, initializer=table.initializer, init_scale=scale)


def step(collection: EmbeddingCollection, optimizer: RowOptimizer | None, jagged: Jagged) -> list[torch.Tensor]:
    """One training step on a loss that weighs every column differently; what the lookup gave."""
    out = collection(jagged)
    given = [out.pooled, *(sequence.values for sequence in out.sequences.values())]
    for vectors in given:
        (vectors * torch.arange(1, vectors.numel() + 1).view_as(vectors).sin()).sum().backward()
    if optimizer is not None:
        optimizer.step()
    return [vectors.detach() for vectors in given]


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda spec: f"{spec.kind}{'-lazy' * (spec.rows is not None)}")
@pytest.mark.parametrize("dynamic", ["abcd", "a", "bd"])
def test_equals_static_tables_bit_for_bit_on_a_closed_vocabulary(dynamic: str, optimizer: SparseOptimizerSpec) -> None:
    static = EmbeddingCollection(STATIC, FEATURES, seed=4)
    tables = [dynamic_twin(table) if table.name in dynamic else table for table in STATIC]
    mixed = EmbeddingCollection(tables, FEATURES, seed=4)
    both = [(collection, RowOptimizer(collection, optimizer)) for collection in (static, mixed)]
    for seed in range(6):
        jagged = random_jagged(NAMES, ROWS, (1, 13, 40)[seed % 3], seed=seed)
        ours, theirs = (step(collection, rows, jagged) for collection, rows in both)
        assert all(map(torch.equal, ours, theirs))
    for name, table in mixed.tables.items():
        for chunk in table.export_chunks(100):
            expected = static.tables[name].export(chunk.keys)
            assert torch.equal(chunk.weights, expected.weights)
            assert all(torch.equal(chunk.state[key], expected.state[key]) for key in expected.state)


@pytest.mark.parametrize("optimizer", [AdamSpec(lr=0.05), MomentumSpec(lr=0.02)], ids=lambda spec: spec.kind)
def test_equals_static_tables_when_all_rows_move_each_step(optimizer: SparseOptimizerSpec) -> None:
    optimizer = replace(optimizer, rows=RowOptions(mode="global"))
    static = EmbeddingCollection(STATIC, FEATURES, seed=4)
    dynamic = EmbeddingCollection([dynamic_twin(table) for table in STATIC], FEATURES, seed=4)
    for table in STATIC:
        dynamic.tables[table.name].rows(torch.arange(table.rows), train=True)
    both = [(collection, RowOptimizer(collection, optimizer)) for collection in (static, dynamic)]
    for seed in range(4):
        ours, theirs = (step(collection, rows, random_jagged(NAMES, ROWS, 13, seed=seed)) for collection, rows in both)
        assert all(map(torch.equal, ours, theirs))
    for name, table in static.tables.items():
        assert torch.equal(dynamic.tables[name].export(torch.arange(len(table))).weights, table.weights)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_narrow_rows_are_looked_up_as_static_ones_and_go_through_a_state_dict(dtype: RowType) -> None:
    narrow = [replace(table, dtype=dtype) for table in STATIC]
    static = EmbeddingCollection(narrow, FEATURES, seed=4)
    twins = [replace(dynamic_twin(table), dtype=dtype) for table in narrow]
    dynamic, other = (EmbeddingCollection(twins, FEATURES, seed=seed) for seed in (4, 5))
    jagged = random_jagged(NAMES, ROWS, 40)
    assert torch.equal(dynamic(jagged).pooled, static(jagged).pooled)
    assert {arena.weights.dtype for arena in dynamic.arenas} == {getattr(torch, dtype)}
    other.load_state_dict(dynamic.state_dict())
    assert torch.equal(other.eval()(jagged).pooled, dynamic.eval()(jagged).pooled)


def test_wide_and_narrow_tables_of_both_kinds_mix() -> None:
    tables = [replace(dynamic_twin(STATIC[0]), dtype="bfloat16"), STATIC[1], dynamic_twin(STATIC[2]), STATIC[3]]
    mine = EmbeddingCollection(tables, FEATURES, seed=4)
    assert len(mine.arenas) == 4
    assert mine(random_jagged(NAMES, ROWS, 13)).pooled.shape == (13, mine.output_width)
    with pytest.raises(ConfigError, check=at("arena")):
        DynamicArena([tables[0], tables[2]])


def test_gradients_of_several_lookups_survive_growth() -> None:
    static = EmbeddingCollection(STATIC[:1], FEATURES[:1], seed=4)
    dynamic = EmbeddingCollection([dynamic_twin(STATIC[0])], FEATURES[:1], seed=4)
    both = [(collection, RowOptimizer(collection, AdaGradSpec(lr=0.1))) for collection in (static, dynamic)]
    arena = dynamic.arenas[0]
    before = arena.num_rows
    for collection, rows in both:
        outs = []
        for first in (0, 350):
            outs.append(collection(one_hot(["f0"], torch.arange(first, first + 350)[None])).pooled)
            if collection is dynamic:
                arena.allocate_rows(arena.num_rows, "something else")
        (outs[1].sum() * 3).backward()
        outs[0].sum().backward()
        rows.step()
    assert arena.num_rows > 2 * before
    keys = torch.arange(700)
    assert torch.equal(dynamic.tables["a"].export(keys).weights, static.table("a"))


SPECS = [
    DynamicTableSpec(name="x", width=4, default=0.5, evict=lru(share=0.5), max_rows=4),
    DynamicTableSpec(name="y", width=4),
]
READERS = [FeatureSpec(name="fx", table="x"), FeatureSpec(name="fy", table="y", pooling="mean")]


OPEN = [replace(SPECS[0], max_rows=None, evict=None), SPECS[1]]  # no table is ever full


def bags(x: list[int], y: list[int]) -> Jagged:
    return one_hot(["fx", "fy"], torch.tensor([x, y]))


def test_only_training_with_gradients_takes_keys_up() -> None:
    mine = EmbeddingCollection(SPECS, READERS)
    with torch.no_grad():
        mine(bags([1, 2], [3, -4]))
    mine.eval()
    out = mine(bags([1, 2], [3, -4])).pooled
    assert torch.equal(out, torch.tensor([[0.5] * 4 + [0.0] * 4] * 2))
    assert [len(table) for table in mine.tables.values()] == [0, 0]
    mine.train()
    mine(bags([1, 2], [3, -4]))
    assert [len(table) for table in mine.tables.values()] == [2, 2]


def test_the_vector_of_keys_that_are_not_admitted_never_moves() -> None:
    spec = DynamicTableSpec(name="x", width=4, default=0.5, admit=freq(5))
    mine = EmbeddingCollection([spec], READERS[:1])
    optimizer = RowOptimizer(mine, AdaGradSpec(lr=1.0, initial_accumulator=0.1))
    for batch in range(4):
        out = mine(one_hot(["fx"], torch.tensor([[7, 8 + batch]]))).pooled
        assert torch.equal(out, torch.full((2, 4), 0.5))
        out.sum().backward()
        optimizer.step()
    assert torch.equal(mine.arenas[0].state["sum"][0], torch.full((4,), 0.1))
    mine(one_hot(["fx"], torch.tensor([[7, 1]])))
    assert len(mine.tables["x"]) == 1


def test_a_key_of_one_table_is_another_row_in_another() -> None:
    mine = EmbeddingCollection(SPECS, READERS)
    out = mine(bags([5, 5], [5, 5])).pooled
    assert not torch.equal(out[:, :4], out[:, 4:])


def test_rows_evicted_between_backward_and_step_lose_their_gradient_and_change_no_other_row() -> None:
    mine = EmbeddingCollection(SPECS[:1], READERS[:1])
    optimizer = RowOptimizer(mine, SGDSpec(lr=1.0))
    mine(one_hot(["fx"], torch.tensor([[1, 2, 3, 4]]))).pooled.sum().backward()
    assert mine.tables["x"].evict(lru(), keep_at_least=1).tolist() == [1, 2, 3]
    mine(one_hot(["fx"], torch.tensor([[11, 12, 13]]))).pooled.sum().backward()
    optimizer.step()
    first = EmbeddingCollection(SPECS[:1], READERS[:1])
    expected = first(one_hot(["fx"], torch.tensor([[4, 11, 12, 13]]))).pooled - 1.0
    assert torch.equal(mine.tables["x"].export(torch.tensor([4, 11, 12, 13])).weights, expected)


def test_a_backward_after_its_rows_have_other_keys_is_rejected() -> None:
    mine = EmbeddingCollection(SPECS[:1], READERS[:1])
    optimizer = RowOptimizer(mine, SGDSpec(lr=1.0))
    late = mine(one_hot(["fx"], torch.tensor([[1, 2]]))).pooled
    mine.tables["x"].evict(lru(), keep_at_least=0)
    optimizer.step()
    mine(one_hot(["fx"], torch.tensor([[3, 4]])))
    with pytest.raises(StorageError, check=at("backward")):
        late.sum().backward()


def test_state_dict_holds_keys_and_weights_and_fills_an_empty_collection() -> None:
    mine = EmbeddingCollection([*SPECS, STATIC[1]], [*READERS, FeatureSpec(name="f1", table="b")], seed=1)
    other = EmbeddingCollection([*SPECS, STATIC[1]], [*READERS, FeatureSpec(name="f1", table="b")], seed=2)
    jagged = one_hot(["fx", "fy", "f1"], torch.tensor([[-1, 2**63 - 1], [7, 7], [3, 4]]))
    mine(jagged)
    other(one_hot(["fx", "fy", "f1"], torch.tensor([[9], [9], [1]])))
    state = mine.state_dict()
    assert list(state) == ["tables.x.keys", "tables.x.weights", "tables.y.keys", "tables.y.weights", "tables.b"]
    assert (state["tables.x.keys"].shape, state["tables.x.weights"].shape) == ((2,), (2, 4))
    other.load_state_dict(state)
    assert [len(table) for table in other.tables.values()] == [2, 1, 11]
    assert torch.equal(other.eval()(jagged).pooled, mine.eval()(jagged).pooled)


def test_a_state_dict_that_does_not_fit_changes_no_dynamic_table() -> None:
    mine = EmbeddingCollection(SPECS, READERS)
    mine(bags([1, 2], [3, 4]))
    state = dict(mine.state_dict())
    state["tables.x.weights"] = torch.zeros(2, 5)
    state["tables.y.keys"] = torch.zeros(2)
    with pytest.raises(RuntimeError, match=r"(?s)x.weights: got shape \[2, 5\].*y.keys: got torch.float32\[2\]"):
        mine.load_state_dict(state)
    state["tables.y.keys"] = "3, 4"
    with pytest.raises(RuntimeError, match=r"y.keys: got str and Tensor, expected tensors"):
        mine.load_state_dict(state)
    del state["tables.x.keys"]
    with pytest.raises(RuntimeError, match=r'Missing key.*"tables.x.keys"'):
        mine.load_state_dict(state)
    assert [len(table) for table in mine.tables.values()] == [2, 2]


def test_a_state_dict_that_a_table_cannot_hold_leaves_it(monkeypatch: pytest.MonkeyPatch) -> None:
    mine, large = (EmbeddingCollection(OPEN, READERS) for _ in range(2))
    mine(bags([1], [2]))
    large(bags(list(range(60)), list(range(60))))
    state = large.state_dict()
    for keys, weights, where in (
        (torch.arange(60) % 30, torch.ones(60, 4), "table 'x'"),
        (
            torch.arange(10**6),
            torch.ones(10**6, 4),
            "table 'x': holds 1 rows, 1,000,000 in their place requested, dynamic tables 'x', 'y'",
        ),
    ):
        if keys.numel() > 60:
            monkeypatch.setattr(memory, "available_bytes", lambda: 1000)
        with pytest.raises((ConfigError, StorageError), check=at(where)):
            mine.load_state_dict({**state, "tables.x.keys": keys, "tables.x.weights": weights})
        assert mine.tables["x"].keys().tolist() == [1]
    monkeypatch.undo()
    small = EmbeddingCollection([replace(SPECS[0], max_rows=5)], READERS[:1])
    small(one_hot(["fx"], torch.tensor([[8]])))
    with pytest.raises(StorageError, check=at("table 'x'")):
        small.load_state_dict(state, strict=False)
    assert small.tables["x"].keys().tolist() == [8]


def test_threads_that_train_and_look_up_share_a_table() -> None:
    mine = EmbeddingCollection(OPEN, READERS)
    row = torch.arange(300)

    def train(first: int) -> None:
        for step in range(20):
            mine(bags((row + 7 * step + first).tolist(), row.tolist())).pooled.sum().backward()

    def look_up(_: int) -> None:
        with torch.no_grad():
            for step in range(40):
                mine(bags((row + step).tolist(), row.tolist()))
                assert len(mine.tables["y"]) in (0, 300), "a batch comes as a whole"

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda work: work[0](work[1]), [(train, 0), (train, 100), (look_up, 0), (look_up, 0)]))
    assert [len(table) for table in mine.tables.values()] == [300 + 7 * 19 + 100, 300]
    assert sum(float(held.grad.sum()) for held in mine.pending.gradients()[0]) == 2 * 20 * 300 * mine.output_width
    rows = torch.cat([table.rows(table.keys(), train=False) for table in mine.tables.values()])
    assert rows.unique().numel() == rows.numel()


def sent(held: EmbeddingCollection) -> EmbeddingCollection:
    """`held` as another process gets it, once more."""
    copied: EmbeddingCollection = pickle.loads(bytes(ForkingPickler.dumps(held)))
    return copied


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda held: pickle.loads(pickle.dumps(held)), sent])
def test_a_copy_is_independent(copied: Callable[[EmbeddingCollection], EmbeddingCollection]) -> None:
    mine = EmbeddingCollection(SPECS, READERS)
    jagged = bags([1, 2], [3, 4])
    mine(jagged)
    twin = copied(mine)
    assert torch.equal(twin(jagged).pooled, mine(jagged).pooled)
    twin(bags([3, 4], [7, 8]))
    assert [len(table) for table in mine.tables.values()] == [2, 2]
    assert [len(table) for table in twin.tables.values()] == [4, 4]
    arena = mine.arenas[0]
    arena.weights[2] = 7.0
    arena.allocate_rows(arena.num_rows, "more")
    assert arena.weights[2].tolist() == [7.0] * 4, "growing keeps what is there"


def test_description_memory_and_rejections() -> None:
    mine = EmbeddingCollection(SPECS, READERS)
    mine(bags([1, 2], [3, 4]))
    assert "x: 2 keys x 4 <- fx (sum)" in repr(mine)
    indexes = sum(table.index_bytes for table in mine.tables.values())  # type: ignore[union-attr]
    assert mine.memory_bytes() == indexes + 4 * (4 * 4 + 4), "four rows of four numbers, and the last use of each"
    with pytest.raises(ConfigError, check=at("table")):
        mine.table("x")
    empty = Jagged(
        names=("fx", "fy"), keys=torch.empty(0, dtype=torch.int64), offsets=torch.zeros(1, dtype=torch.int64)
    )
    assert mine(empty).pooled.shape == (0, 8)


@pytest.mark.parametrize("admit", [None, freq(2), counting_filter(2, num_bytes=64), prob(0.5)], ids=str)
@pytest.mark.parametrize("evict", [lru(share=0.5), ttl(1, share=1.0)], ids=lambda policy: policy.kind)
def test_where_one_table_is_full_none_takes_anything_of_the_batch(
    admit: AdmissionSpec | None, evict: EvictionSpec
) -> None:
    open_ = DynamicTableSpec(name="x", width=4, admit=admit, evict=evict, max_rows=5)
    specs = [open_, replace(open_, name="y", max_rows=8), DynamicTableSpec(name="z", width=8, max_rows=3)]
    features = [FeatureSpec(name=f"f{spec.name}", table=spec.name) for spec in specs]
    mine, twin = EmbeddingCollection(specs, features), EmbeddingCollection(specs, features)

    def train(collection: EmbeddingCollection, keys: list[list[int]]) -> None:
        collection(one_hot([feature.name for feature in features], torch.tensor(keys))).pooled.sum().backward()
        collection.take_gradients()

    seen = [[[1, 1, 2, 3], [1, 1, 2, 2], [1, 1, 1, 2]], [[2, 3, 3, 4], [2, 3, 4, 4], [2, 2, 2, 3]]]
    for batch in seen:
        train(mine, batch)
        train(twin, batch)
    with pytest.raises(StorageError, check=at("table 'z'")):
        train(mine, [[4, 5, 5, 6], [5, 5, 4, 6], [4, 2, 2, 2]])
    assert everything(mine) == everything(twin)
    for batch in ([[6, 6, 5, 5], [6, 5, 5, 7], [1, 2, 3, 3]], *seen):
        train(mine, batch)
        train(twin, batch)
        assert everything(mine) == everything(twin)


def everything(collection: EmbeddingCollection) -> list[Any]:
    """Return the content and the state of the tables of a collection as plain numbers, and the rows that are free."""
    held: list[Any] = []
    for table in collection.tables.values():
        rows = table.export(table.keys())
        held.append([table.rows(rows.keys, train=False).tolist(), rows.keys.tolist(), rows.weights.tolist()])
        held.append({name: values.tolist() for name, values in rows.uses.items()})
        memory: dict[str, list[Any]] = {}
        for piece in () if table.keyed is None else table.keyed.export_memory(100):
            order = piece.get("admission_keys", torch.zeros(0)).argsort()  # an index's own depends on its history
            memory |= {name: (part[order] if order.numel() else part).tolist() for name, part in piece.items()}
        held.append(memory)
    return [*held, [(arena.next_row, arena.recycled.tolist()) for arena in collection.arenas]]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("keys", "offsets", "place"),
    [
        ([7, 8, 11], [0, 1, 2, 3], ("feature 'f1'", "got key 11")),
        ([7, 8, -1], [0, 1, 2, 3], ("feature 'f1'", "got key -1")),
        ([7, 8, 1], [0, 1, 2, 1], ("offsets", "got 0 to 1")),
        ([7, 8, 1], [1, 1, 2, 3], ("offsets", "got 1 to 3")),
        (
            [7, 8, 9, 1, 1, 2],
            [0, 2, 1, 3, 3, 5, 6],
            ("offsets[2]",),
        ),
    ],
)
def test_of_a_bad_batch_no_key_is_resumed(keys: list[int], offsets: list[int], place: tuple[str, ...]) -> None:
    mine = EmbeddingCollection([*OPEN, STATIC[1]], [*READERS, FeatureSpec(name="f1", table="b")])
    mine(one_hot(["fx", "fy", "f1"], torch.tensor([[1], [2], [3]])))
    before = copy.deepcopy([dict(mine.state_dict()), mine.arenas[0].next_row])
    wrong = Jagged(names=("fx", "fy", "f1"), keys=torch.tensor(keys), offsets=torch.tensor(offsets))
    with pytest.raises((ConfigError, KeyOutOfRangeError), check=at(*place)):
        mine(wrong)
    torch.testing.assert_close([dict(mine.state_dict()), mine.arenas[0].next_row], before, rtol=0, atol=0)


def test_rows_of_16_bits_are_rounded_by_their_keys() -> None:
    """And not by their places, which differ after a checkpoint was loaded."""
    keys, found = torch.tensor([5, -3, 9, 2**62]), []
    for order in ([0, 1, 2, 3], [2, 3, 0, 1]):
        spec = DynamicTableSpec(name="t", width=8, dtype="bfloat16")
        collection = EmbeddingCollection([spec], [FeatureSpec(name="t", table="t")])
        collection.tables["t"].import_(RowValues(keys=keys[order], weights=torch.ones(4, 8, dtype=torch.bfloat16)))
        optimizer = RowOptimizer(collection, SGDSpec(lr=0.003))
        collection(one_hot(("t",), keys[None])).pooled.sum().backward()
        optimizer.step()
        found.append(collection.tables["t"].export(keys).weights)
    assert torch.equal(found[0], found[1])
    assert found[0].unique().numel() == 2
