# SPDX-License-Identifier: Apache-2.0
"""Tables in tiers equal tables in memory, bit for bit."""

import collections
import copy
import gc
import itertools
import math
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from terarec.batch import Jagged, one_hot
from terarec.checkpoint import TrainState, load, save
from terarec.closer import wait_closed
from terarec.embedding import EmbeddingCollection
from terarec.errors import ConfigError, KeyOutOfRangeError, NoSpaceError, StorageError
from terarec.memory.cached_part import BudgetError
from terarec.memory.fast_tier import TierUse
from terarec.memory.row_file import RowFile
from terarec.optim import RowOptimizer
from terarec.spec import (
    AdaGradSpec,
    AdamSpec,
    DynamicTableSpec,
    FeatureSpec,
    RowOptions,
    SGDSpec,
    SparseOptimizerSpec,
    TableSpec,
    Tiers,
    counting_filter,
    freq,
    lru,
    ttl,
)
from terarec.storage import RowValues
from tests.embedding.plain import random_jagged
from tests.embedding.test_dynamic_tables import FEATURES, NAMES, OPTIMIZERS, ROWS, STATIC, dynamic_twin, step
from tests.errors import at
from tests.params import in_every_run

TIGHT = "28KiB"  # hardly more than the largest batch needs with the state of Adam
BATCHES = [random_jagged(NAMES, ROWS, (1, 13, 30)[seed % 3], seed=seed) for seed in range(21)]


def in_tiers(tables: list[TableSpec] | list[DynamicTableSpec], tiers: Tiers) -> EmbeddingCollection:
    return EmbeddingCollection([replace(table, tiers=tiers) for table in tables], FEATURES, seed=4)


def use_of(collection: EmbeddingCollection) -> TierUse:
    return next(iter(collection.arenas)).data.use  # type: ignore[union-attr]


def assert_same(plain: EmbeddingCollection, tiered: EmbeddingCollection) -> None:
    for name, table in plain.tables.items():
        keys = table.keys()
        assert torch.equal(keys, tiered.tables[name].keys())
        mine, other = table.export(keys), tiered.tables[name].export(keys)
        assert torch.equal(mine.weights, other.weights)
        for held, others in ((mine.state, other.state), (mine.uses, other.uses)):
            assert held.keys() == others.keys()
            assert all(torch.equal(held[part], others[part]) for part in held)


def assert_trains_equally(
    plain: EmbeddingCollection, tiered: EmbeddingCollection, optimizer: SparseOptimizerSpec, batches: list[Jagged]
) -> None:
    both = [(collection, RowOptimizer(collection, optimizer, seed=3)) for collection in (plain, tiered)]
    for jagged in batches:
        expected, found = (step(collection, of, jagged) for collection, of in both)
        assert all(torch.equal(one, other) for one, other in zip(expected, found, strict=True))
    assert_same(plain, tiered)


def state_of(collection: EmbeddingCollection) -> TrainState:
    rng = torch.get_rng_state()
    optimizer = {"state": {}, "param_groups": []}
    return TrainState(step=9, dense={}, tables=collection.tables, optimizer=optimizer, rng=rng, progress={})


def name_of(value: SparseOptimizerSpec | str) -> str:
    return value if isinstance(value, str) else f"{value.kind}{'-lazy' * (value.rows is not None)}"


IN_EVERY_RUN = [("static", OPTIMIZERS[0]), ("static", OPTIMIZERS[-1]), ("dynamic", OPTIMIZERS[3])]


@pytest.mark.parametrize(
    ("kind", "optimizer"), in_every_run(IN_EVERY_RUN, itertools.product(["static", "dynamic"], OPTIMIZERS)), ids=name_of
)
def test_every_optimizer(tmp_path: Path, kind: str, optimizer: SparseOptimizerSpec) -> None:
    tables = STATIC if kind == "static" else [dynamic_twin(table) for table in STATIC]
    tiered = in_tiers(tables, Tiers(host=TIGHT, file=str(tmp_path)))
    assert_trains_equally(EmbeddingCollection(tables, FEATURES, seed=4), tiered, optimizer, BATCHES)
    use = use_of(tiered)
    assert use.rows_written > use.rows_read > 0


SUBSETS = {
    "host": {"host": "1MiB"},
    "file": {},
    "host-file": {"host": "40KiB"},
    "device-file": {"device": TIGHT},
    "device-host": {"device": TIGHT, "host": "1MiB"},
    "device-host-file": {"device": TIGHT, "host": "6KiB"},
}


@pytest.mark.parametrize(
    ("kind", "subset"),
    in_every_run(
        [("static", "host"), ("static", "host-file"), ("dynamic", "device-host-file")],
        itertools.product(["static", "dynamic"], SUBSETS),
    ),
)
def test_every_subset_of_tiers(tmp_path: Path, kind: str, subset: str) -> None:
    tables = STATIC if kind == "static" else [dynamic_twin(table) for table in STATIC]
    file = str(tmp_path) if "file" in subset else None
    tiered = in_tiers(tables, Tiers(**SUBSETS[subset], file=file))
    assert_trains_equally(EmbeddingCollection(tables, FEATURES, seed=4), tiered, AdamSpec(lr=0.05), BATCHES)


SERIES = {"static": (80, 40, 20, 10, 6), "dynamic": (80, 40, 20, 10, 8)}
"""KiB from that of all rows down to hardly more than one batch takes."""


@pytest.mark.parametrize(
    ("kind", "kib"),
    in_every_run(
        [("static", 80), ("static", 6), ("dynamic", 20), ("dynamic", 8)],
        [(kind, kib) for kind, series in SERIES.items() for kib in series],
    ),
)
def test_budgets_from_all_rows_down_to_one_batch(tmp_path: Path, kind: str, kib: int) -> None:
    tables = STATIC if kind == "static" else [dynamic_twin(table) for table in STATIC]
    tiered = in_tiers(tables, Tiers(host=f"{kib}KiB", file=str(tmp_path / "rows")))
    batches = [random_jagged(NAMES, ROWS, 6, seed=seed) for seed in range(24)]
    assert_trains_equally(EmbeddingCollection(tables, FEATURES, seed=4), tiered, AdamSpec(lr=0.05), batches)
    largest, *_, least = SERIES[kind]
    assert (use_of(tiered).rows_read == 0) is (kib == largest)
    if kib == least:
        smaller = in_tiers(tables, Tiers(host=f"{kib - 1}KiB", file=str(tmp_path / "smaller")))
        optimizer = RowOptimizer(smaller, AdamSpec(lr=0.05))
        with pytest.raises(BudgetError):
            collections.deque(step(smaller, optimizer, jagged) for jagged in batches)


@pytest.mark.parametrize(
    ("kind", "dtype"),
    in_every_run([("dynamic", "bfloat16")], itertools.product(["static", "dynamic"], ["bfloat16", "float16"])),
)
def test_narrow_rows_are_rounded_alike(tmp_path: Path, kind: str, dtype: str) -> None:
    tables = STATIC if kind == "static" else [dynamic_twin(table) for table in STATIC]
    tables = [replace(table, dtype=dtype) for table in tables]
    tiered = in_tiers(tables, Tiers(host=TIGHT, file=str(tmp_path)))
    assert_trains_equally(EmbeddingCollection(tables, FEATURES, seed=4), tiered, AdaGradSpec(lr=0.1), BATCHES)


@pytest.mark.parametrize(
    "rows",
    [
        RowOptions(l1=0.01, l2=0.02, clip_value=0.5, clip_norm=0.9),
        RowOptions(clip_global_norm=2.0, frozen=("c",), table_lr={"a": 0.5}),
        RowOptions(mode="global"),  # which moves no other rows with SGD
    ],
    ids=["regularised", "clipped", "global"],
)
def test_options_of_rows(tmp_path: Path, rows: RowOptions) -> None:
    tiered = in_tiers(STATIC, Tiers(host=TIGHT, file=str(tmp_path)))
    assert_trains_equally(EmbeddingCollection(STATIC, FEATURES, seed=4), tiered, SGDSpec(lr=0.05, rows=rows), BATCHES)
    assert tiered.tables["c"].num_changed == (0 if rows.frozen else 5)


POLICIES = {
    "lru": {"max_rows": 300, "evict": lru(share=0.3)},
    "ttl": {"max_rows": 500, "evict": ttl(3, share=0.5), "track_uses": True},
    "freq": {"admit": freq(2)},
    "filter": {"admit": counting_filter(2, num_bytes=256)},
}


@pytest.mark.parametrize("policy", in_every_run(["lru", "freq"], POLICIES))
def test_admission_and_eviction(tmp_path: Path, policy: str) -> None:
    tables = [replace(dynamic_twin(table), default=0.25, **POLICIES[policy]) for table in STATIC]
    tiered = in_tiers(tables, Tiers(host=TIGHT, file=str(tmp_path)))
    assert_trains_equally(EmbeddingCollection(tables, FEATURES, seed=4), tiered, AdaGradSpec(lr=0.1), BATCHES)


@pytest.mark.parametrize("kind", in_every_run(["dynamic"], ["static", "dynamic"]))
def test_poolings_key_weights_and_accumulated_gradients(tmp_path: Path, kind: str) -> None:
    features = [
        FeatureSpec(name="f0", table="a", pooling="max", max_keys=2),
        FeatureSpec(name="f2", table="a", pooling="sqrtn"),
        FeatureSpec(name="f4", table="b", pooling="mean"),
    ]
    tables = STATIC[:2] if kind == "static" else [dynamic_twin(table) for table in STATIC[:2]]
    tiers = Tiers(host="40KiB", file=str(tmp_path))
    plain = EmbeddingCollection(tables, features, seed=4)
    tiered = EmbeddingCollection([replace(table, tiers=tiers) for table in tables], features, seed=4)
    optimizers = [RowOptimizer(collection, AdamSpec(lr=0.05)) for collection in (plain, tiered)]
    for index, jagged in enumerate(BATCHES):
        jagged = replace(jagged, weights=torch.rand(len(jagged.keys), generator=torch.Generator().manual_seed(index)))
        gradients = []
        for collection, optimizer in zip((plain, tiered), optimizers, strict=True):
            weights = jagged.weights.clone().requires_grad_()
            out = collection(replace(jagged, weights=weights)).pooled
            (out * out.detach().sin()).sum().backward()
            with torch.no_grad():
                gradients.append((out.detach(), weights.grad, collection(BATCHES[index - 1]).pooled))
            if index % 2:  # two batches a step, with a lookup that does not learn between them
                optimizer.step()
        assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))
    assert_same(plain, tiered)


@pytest.mark.parametrize("pieces", [False, True])
@pytest.mark.parametrize("kind", in_every_run(["dynamic"], ["static", "dynamic"]))
def test_rows_that_are_read_ahead(tmp_path: Path, monkeypatch, kind: str, pieces: bool) -> None:
    if pieces:  # buffers of a few rows
        monkeypatch.setattr("terarec.memory.lookahead.STAGED_BYTES", 1000)
        monkeypatch.setattr("terarec.memory.fast_tier.MOVED_BYTES", 500)
    tables = STATIC if kind == "static" else [dynamic_twin(table) for table in STATIC]
    plain, tiered = (
        EmbeddingCollection(tables, FEATURES, seed=4),
        in_tiers(tables, Tiers(host=TIGHT, file=str(tmp_path))),
    )
    both = [(collection, RowOptimizer(collection, AdamSpec(lr=0.05))) for collection in (plain, tiered)]
    for index, jagged in enumerate(BATCHES):
        for number, coming in enumerate(BATCHES[index + 1 : index + 3], start=2):
            tiered.prefetch(coming, number)  # the second time rows of the next but one are there already
        expected, found = (step(collection, of, jagged) for collection, of in both)
        assert all(torch.equal(one, other) for one, other in zip(expected, found, strict=True))
    assert_same(plain, tiered)
    assert 0 < use_of(tiered).staged <= use_of(tiered).rows_read


def test_features_that_a_batch_does_not_have_are_not_read_ahead(tmp_path: Path) -> None:
    """A model may give a feature another column, of which the collection does not know: its training ended."""
    tiered = in_tiers(STATIC, Tiers(host=TIGHT, file=str(tmp_path)))
    for number in (1, len(NAMES)):
        tiered.prefetch(replace(BATCHES[1], names=(*map(str, range(number)), *NAMES[number:])))
    assert tiered(BATCHES[1]).pooled.shape[0] == BATCHES[1].batch_size


def test_rows_of_columns_with_other_names_are_read_ahead(tmp_path: Path) -> None:
    """They were read when a step looked them up."""
    renamed = {name: f"column {number}" for number, name in enumerate(NAMES)}
    cases: list[dict[str, str]] = [{}, renamed, {NAMES[0]: "column 0"}]
    staged = []
    for number, columns in enumerate(cases):
        tiered = in_tiers(STATIC, Tiers(host=TIGHT, file=str(tmp_path / str(number))))
        tiered.columns = columns
        optimizer = RowOptimizer(tiered, AdamSpec(lr=0.05))
        for jagged in BATCHES:
            tiered.prefetch(replace(jagged, names=tuple(columns.get(name, name) for name in jagged.names)))
            step(tiered, optimizer, jagged)
        staged.append(use_of(tiered).staged)
    assert staged[0] == staged[1] == staged[2] > 0


def test_former_tiers_give_their_memory_back() -> None:
    """The host tier of rows without optimizer state stayed beside the one with it."""
    table = TableSpec(name="t", rows=1000, width=8, tiers=Tiers(device="64KiB", host="1MiB"))
    tiered = EmbeddingCollection([table], [FeatureSpec(name="t", table="t")])
    tiered.tables["t"].import_(RowValues(keys=torch.arange(1000), weights=torch.ones(1000, 8)))
    former = weakref.ref(tiered.arenas[0].data.tiers.memory.below)  # type: ignore[union-attr]
    RowOptimizer(tiered, AdamSpec())
    gc.collect()
    assert former() is None
    assert torch.equal(tiered.tables["t"].export(torch.arange(1000)).weights, torch.ones(1000, 8))


@pytest.mark.parametrize(
    ("into", "kind"),
    in_every_run(
        [("memory", "dynamic"), ("tiers", "static")], itertools.product(["memory", "tiers"], ["static", "dynamic"])
    ),
)
def test_checkpoints_go_into_any_tier(tmp_path: Path, kind: str, into: str) -> None:
    tables = STATIC if kind == "static" else [dynamic_twin(table) for table in STATIC]
    plain, tiered = (
        EmbeddingCollection(tables, FEATURES, seed=4),
        in_tiers(tables, Tiers(host=TIGHT, file=str(tmp_path / "a"))),
    )
    assert_trains_equally(plain, tiered, AdamSpec(lr=0.05), BATCHES[:9])
    opened = load(save(tmp_path / "saved", state_of(tiered)))
    other = in_tiers(tables, Tiers(host=TIGHT, file=str(tmp_path / "b"))) if into == "tiers" else None
    other = other or EmbeddingCollection(tables, FEATURES, seed=77)  # whose untouched rows get those of seed 4
    optimizer = RowOptimizer(other, AdamSpec(lr=0.05))
    step(other, optimizer, BATCHES[20])  # rows that loading has to take back
    opened.load_tables(other.tables, with_state=True)
    assert_same(plain, other)
    assert_same(tiered, other)


def test_state_dict_goes_from_memory_to_tiers_and_back(tmp_path: Path) -> None:
    for tables in (STATIC, [dynamic_twin(table) for table in STATIC]):
        plain = EmbeddingCollection(tables, FEATURES, seed=4)
        tiered = in_tiers(tables, Tiers(host=TIGHT, file=str(tmp_path)))
        optimizers = [RowOptimizer(collection, AdamSpec(lr=0.05)) for collection in (plain, tiered)]
        step(plain, optimizers[0], BATCHES[2])
        tiered.load_state_dict(plain.state_dict())
        optimizers[1].load_state_dict(optimizers[0].state_dict())
        assert_same(plain, tiered)
        step(tiered, optimizers[1], BATCHES[5])
        plain.load_state_dict(tiered.state_dict())
        optimizers[0].load_state_dict(optimizers[1].state_dict())
        assert_same(plain, tiered)
        tiered.arenas[0].data.close()  # type: ignore[union-attr]
        tiered.arenas[1].data.close()  # type: ignore[union-attr]


def test_codes_of_8_bits(tmp_path: Path) -> None:
    for tables in (STATIC, [dynamic_twin(table) for table in STATIC]):
        plain, tiered = EmbeddingCollection(tables, FEATURES, seed=4), in_tiers(tables, Tiers(host="1MiB"))
        assert_trains_equally(plain, tiered, SGDSpec(lr=0.1), BATCHES[:3])
        quantized = [collection.quantized()(BATCHES[4]).pooled for collection in (plain, tiered)]
        assert torch.equal(*quantized)


def test_lookups_that_do_not_learn_leave_nothing_behind(tmp_path: Path) -> None:
    tiered = in_tiers(STATIC, Tiers(host=TIGHT, file=str(tmp_path)))
    plain = EmbeddingCollection(STATIC, FEATURES, seed=4)
    RowOptimizer(tiered, SGDSpec(lr=0.1))
    with torch.no_grad():
        for jagged in BATCHES:
            assert torch.equal(tiered(jagged).pooled, plain(jagged).pooled)
    for jagged in BATCHES:  # with gradients that nobody requests
        assert torch.equal(tiered(jagged).pooled, plain(jagged).pooled)
    assert all(table.num_changed == 0 for table in tiered.tables.values())
    assert use_of(tiered).rows_written == 0


def test_a_budget_too_small_for_a_batch(tmp_path: Path) -> None:
    tiered = in_tiers(STATIC, Tiers(host="8KiB", file=str(tmp_path)))
    optimizer = RowOptimizer(tiered, AdamSpec(lr=0.05))
    step(tiered, optimizer, BATCHES[0])
    before = tiered.tables["a"].export(torch.arange(700)).weights
    with pytest.raises(BudgetError, check=at("tiers host='8KiB': tables 'a', 'c', 'd'")) as caught:
        step(tiered, optimizer, BATCHES[2])
    assert caught.value.needed > caught.value.capacity > 0
    assert torch.equal(tiered.tables["a"].export(torch.arange(700)).weights, before)
    step(tiered, optimizer, BATCHES[0])
    enough = Tiers(host=f"{caught.value.needed_bytes}", file=str(tmp_path / "b"))
    larger = in_tiers(STATIC, enough)
    step(larger, RowOptimizer(larger, AdamSpec(lr=0.05)), BATCHES[2])


def test_host_memory_without_a_file_is_a_limit() -> None:
    tiered = in_tiers(STATIC, Tiers(host="20KiB"))
    optimizer = RowOptimizer(tiered, AdamSpec(lr=0.05))
    step(tiered, optimizer, BATCHES[2])
    step(tiered, optimizer, BATCHES[0])
    with pytest.raises(BudgetError, check=at("tiers host='20KiB': tables 'a', 'c', 'd'")):
        step(tiered, optimizer, BATCHES[5])


def test_a_batch_that_fails_leaves_no_rows_behind(tmp_path: Path) -> None:
    """Rows of its keys stayed in files: a checkpoint with more rows than keys was not readable."""
    tables = [DynamicTableSpec(name="a", width=4), DynamicTableSpec(name="b", width=8, max_rows=3)]
    features = [FeatureSpec(name=f"f{table.name}", table=table.name) for table in tables]
    tiers = Tiers(host="1MiB", file=str(tmp_path / "rows"))
    plain, tiered = (
        EmbeddingCollection([replace(table, tiers=of) for table in tables], features) for of in (None, tiers)
    )
    for collection in (plain, tiered):
        optimizer = RowOptimizer(collection, AdamSpec(lr=0.05))
        step(collection, optimizer, one_hot(["fa", "fb"], torch.tensor([[1, 2, 3, 4], [1, 1, 2, 2]])))
        with pytest.raises(StorageError, check=at("table 'b'")):
            step(collection, optimizer, one_hot(["fa", "fb"], torch.tensor([[11, 12, 13, 14], [3, 4, 5, 6]])))
        step(collection, optimizer, one_hot(["fa", "fb"], torch.tensor([[13] * 4, [1, 1, 2, 2]])))
    assert_same(plain, tiered)
    assert [arena.tiers.count(0) for arena in tiered.arenas] == [5, 2]  # type: ignore[union-attr]
    again = EmbeddingCollection(tables, features)
    RowOptimizer(again, AdamSpec(lr=0.05))
    load(save(tmp_path / "saved", state_of(tiered))).load_tables(again.tables, with_state=True)
    assert_same(plain, again)


@pytest.mark.parametrize("budget", [{"host": "1MiB"}, {"device": TIGHT, "host": "1MiB"}], ids=["file", "host-file"])
def test_keys_that_are_evicted_on_a_full_disk_start_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, budget: dict[str, str]
) -> None:
    """Their rows stayed in the file, and came back with the keys."""
    erase = RowFile.erase
    refused: list[np.ndarray] = []

    def full(self: RowFile, keys: np.ndarray) -> None:
        if not refused:
            refused.append(keys)
            raise NoSpaceError("disk", "full")
        erase(self, keys)

    table = DynamicTableSpec(name="t", width=4, max_rows=8, evict=lru(share=0.5))
    plain, tiered = (
        EmbeddingCollection([replace(table, tiers=of)], [FeatureSpec(name="f", table="t")])
        for of in (None, Tiers(**budget, file=str(tmp_path)))
    )
    (rows,) = (arena.tiers for arena in tiered.arenas)
    assert rows is not None
    optimizers = [RowOptimizer(collection, AdamSpec(lr=0.05)) for collection in (plain, tiered)]
    for first in (0, 4, 8, 0, 12, 4):
        for collection, optimizer in zip((plain, tiered), optimizers, strict=True):
            step(collection, optimizer, one_hot(["f"], torch.arange(first, first + 4)[None]))
        rows.snapshot(0, tmp_path / f"all-{first}-{len(refused)}")  # so that all are in the file
        if first == 4:
            monkeypatch.setattr(RowFile, "erase", full)
    assert len(refused) == 1
    assert_same(plain, tiered)


@pytest.mark.parametrize("file", [True, False])
def test_rows_that_are_removed_before_their_update_are_not_written(tmp_path: Path, file: bool) -> None:
    """A smaller budget wrote them to the file, and without one their slots were lost."""
    tables = [DynamicTableSpec(name="t", width=4, tiers=Tiers(host="1MiB", file=str(tmp_path) if file else None))]
    collection = EmbeddingCollection(tables, [FeatureSpec(name="f", table="t")])
    optimizer = RowOptimizer(collection, SGDSpec(lr=0.1))
    pooled = collection(one_hot(["f"], torch.arange(6)[None])).pooled
    collection.tables["t"].remove(torch.arange(4))  # type: ignore[union-attr]
    pooled.sum().backward()
    optimizer.step()
    del pooled
    (rows,) = (arena.tiers for arena in collection.arenas)
    assert rows is not None
    memory = rows.tiers.opened()
    free = memory.victims(memory.capacity, 0, keeps_dirty=True)
    assert free.numel() == 4  # those of the removed rows
    if file:
        memory.lower(1)
    assert rows.count(0) == 2


def test_files_are_for_one_model_and_go_with_it(tmp_path: Path) -> None:
    tiers = Tiers(host=TIGHT, file=str(tmp_path))
    tiered = in_tiers(STATIC, tiers)
    step(tiered, RowOptimizer(tiered, SGDSpec(lr=0.1)), BATCHES[2])
    other = in_tiers(STATIC, tiers)
    with pytest.raises(StorageError, check=at(f"{tmp_path}/a.rows")):
        other(BATCHES[2])
    del tiered, other
    gc.collect()
    wait_closed()
    assert not list(tmp_path.iterdir())


def test_what_rows_in_tiers_cannot_do(tmp_path: Path) -> None:
    tiered = in_tiers(STATIC, Tiers(host=TIGHT, file=str(tmp_path)))
    with pytest.raises(ConfigError, check=at("row optimizer: rows.mode")):
        RowOptimizer(tiered, AdamSpec(rows=RowOptions(mode="global")))
    with pytest.raises(ConfigError, check=at("table")):
        tiered.table("a")
    with pytest.raises(ConfigError, check=at("tables 'a', 'c', 'd'")):
        copy.deepcopy(tiered)
    bad = replace(BATCHES[1], keys=BATCHES[1].keys.clone())
    bad.keys[0] = 700
    with pytest.raises(KeyOutOfRangeError) as mine:
        tiered(bad)
    with pytest.raises(KeyOutOfRangeError) as theirs:
        EmbeddingCollection(STATIC, FEATURES, seed=4)(bad)
    assert str(mine.value) == str(theirs.value)
    wide = TableSpec(name="a", rows=700, width=2000, tiers=Tiers(file=str(tmp_path / "wide")))
    collection = EmbeddingCollection([wide], [FeatureSpec(name="f0", table="a")])
    with pytest.raises(StorageError, check=at("tiers file: tables a")):
        collection(BATCHES[1])


def test_equal_tiers_share_their_budget(tmp_path: Path) -> None:
    small, large = TableSpec(name="small", rows=10, width=4), TableSpec(name="large", rows=10**9, width=8)
    tiers = Tiers(host="1MiB", file=str(tmp_path))
    features = [FeatureSpec(name="f0", table="small"), FeatureSpec(name="f1", table="large")]
    collection = EmbeddingCollection([replace(small, tiers=tiers), replace(large, tiers=tiers)], features)
    RowOptimizer(collection, AdaGradSpec())
    slots = [arena.weights.shape[0] for arena in collection.arenas]
    assert slots[0] == 10
    assert math.isclose(slots[1], 2**20 / (64 + 60), rel_tol=0.01)


def test_preload_brings_as_many_rows_as_fit_and_drops_no_change(tmp_path, monkeypatch):
    monkeypatch.setattr("terarec.embedding.row_loading._KEYS_AT_ONCE", 30)
    tiers = Tiers(host=f"{100 * (16 + 60)}", file=str(tmp_path))  # 100 rows of 4 weights
    tables = [TableSpec(name="t", rows=1000, width=4, tiers=tiers)]
    features = [FeatureSpec(name="f", table="t", max_keys=2), FeatureSpec(name="g", table="t")]
    embedding = EmbeddingCollection(tables, features, seed=1)
    optimizer = RowOptimizer(embedding, SGDSpec(lr=0.5))

    def train(first, count=40):
        keys = one_hot(["f", "g"], torch.stack([torch.arange(first, first + count)] * 2))
        embedding(keys).pooled.square().sum().backward()
        optimizer.step()

    train(0)
    trained = embedding.tables["t"].export(torch.arange(40)).weights
    embedding.preload({"f": torch.arange(500, 580), "g": torch.tensor([580, 5000, -1]), "other": torch.arange(9)})
    before = embedding.tier_use()
    assert before.rows_written == 40
    train(540)
    assert embedding.tier_use().minus(before).hits == 40
    embedding.preload({"g": torch.arange(1000)})  # ten times the room
    before = embedding.tier_use()
    train(540)
    assert embedding.tier_use().minus(before).hits == 40
    assert embedding.tables["t"].export(torch.arange(40)).weights.equal(trained)
    train(700, 100)  # nothing stays pinned


def test_rows_of_the_next_part_take_the_room_next_to_the_present_one(tmp_path, monkeypatch):
    monkeypatch.setattr("terarec.embedding.row_loading._BYTES_AHEAD", 30 * 16)
    monkeypatch.setattr("terarec.embedding.row_loading._BYTES_STAGED", 50 * 16)
    tiers = Tiers(host=f"{100 * (16 + 60)}", file=str(tmp_path))  # 100 rows of 4 weights
    embedding = EmbeddingCollection(
        [TableSpec(name="t", rows=1000, width=4, tiers=tiers)], [FeatureSpec(name="f", table="t")], seed=1
    )
    optimizer = RowOptimizer(embedding, SGDSpec(lr=0.5))
    first, second, third = (torch.arange(start, start + count) for start, count in ((0, 40), (30, 60), (200, 100)))

    def train(keys):
        before = embedding.tier_use()
        embedding(one_hot(["f"], keys[None])).pooled.square().sum().backward()
        optimizer.step()
        return embedding.tier_use().minus(before).hits

    def moved(load):
        before = embedding.tier_use()
        load()
        return embedding.tier_use().minus(before).rows_read

    for keys in (first, second, third):
        train(keys)
    assert moved(lambda: embedding.preload({"f": first})) == 40
    assert moved(lambda: embedding.preload_next({"f": first}, {"f": second}, lambda: False)) == 0
    assert moved(lambda: embedding.preload_next({"f": first}, {"f": second, "other": first})) == 50
    assert train(first) == 40
    assert moved(lambda: embedding.preload({"f": second})) == 0
    assert train(second) == 60
    assert moved(lambda: embedding.preload_next({"f": second}, {"f": third})) == 30  # 10 of 40 are there
    assert train(second) == 60
    before = embedding.tier_use()
    embedding.preload({"f": third})
    found = embedding.tier_use().minus(before)
    assert (found.rows_read, found.staged) == (60, 40)  # 50 keys waited, of which 10 had room
    assert train(third) == 100


@pytest.mark.parametrize("kind", in_every_run(["dynamic"], ["static", "dynamic"]))
def test_rows_that_another_thread_loads_meanwhile_are_the_same(tmp_path, kind):
    tables = STATIC
    if kind == "dynamic":  # rows change their keys all the time
        tables = [replace(dynamic_twin(table), max_rows=300, evict=lru(share=0.3)) for table in STATIC]
    plain = EmbeddingCollection(tables, FEATURES, seed=4)
    tiered = in_tiers(tables, Tiers(host="40KiB", file=str(tmp_path)))
    is_over = threading.Event()

    def keys_of(seed):
        generator = torch.Generator().manual_seed(seed)
        return {name: torch.randint(-5, 900, (200,), generator=generator) for name in NAMES}

    def load():
        for seed in itertools.count():
            tiered.preload_next(keys_of(seed), keys_of(seed + 1), lambda: not is_over.is_set())
            if is_over.is_set():
                return

    with ThreadPoolExecutor(1) as pool:
        loading = pool.submit(load)
        assert_trains_equally(plain, tiered, AdamSpec(lr=0.05), BATCHES)
        is_over.set()
        loading.result()
