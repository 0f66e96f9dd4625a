# SPDX-License-Identifier: Apache-2.0
"""Stores whose rows are on a device do what those in host memory do, whichever side the keys come from."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from terarec.errors import ConfigError, KeyOutOfRangeError, StorageError
from terarec.spec import (
    AdmissionSpec,
    DynamicTableSpec,
    EvictionSpec,
    TableSpec,
    Tiers,
    by_score,
    counting_filter,
    freq,
    lfu,
    lru,
    prob,
    ttl,
)
from terarec.storage import Arena, RowValues
from terarec.storage.dynamic import DynamicTable, dynamic_tables
from terarec.storage.dynamic_arena import DynamicArena
from terarec.storage.kinds import AnyTable
from terarec.storage.static import static_tables
from terarec.storage.tiered import TieredArena, tiered_tables
from tests.errors import at
from tests.on_device import CPU, Case, assert_equal, assert_near, assert_on, keep_in

WIDTH, KEYS = 4, 40
FILLS = {"exp_avg": 0.5, "sum": 0.25}
CASES: dict[str, Case] = {}
case = keep_in(CASES)


@contextmanager
def stores(kind: str, device: torch.device, **options: Any) -> Iterator[AnyTable]:
    """Give a table with optimizer state on `device`; a dynamic one with policies is empty, others have 40 rows."""
    with tempfile.TemporaryDirectory() as directory:
        tiers = Tiers(device="2KiB", host="2KiB", file=directory) if kind.endswith("in tiers") else None
        made: list[Any]
        if kind.startswith("static"):
            spec = TableSpec(name="t", rows=KEYS, width=WIDTH, tiers=tiers, **options)
            arena: Any = TieredArena([spec], seed=3) if tiers else Arena([spec], seed=3)
            made = list(tiered_tables(arena) if tiers else static_tables(arena))
        else:
            arena = DynamicArena([DynamicTableSpec(name="t", width=WIDTH, tiers=tiers, **options)], seed=3)
            made = list(dynamic_tables(arena))
        shapes = (("exp_avg", (arena.num_rows, WIDTH)), ("sum", (arena.num_rows,)))
        arena.attach_state(shapes, fills=FILLS)
        (held,) = made
        move(held, device)
        if held.is_dynamic and not {"admit", "evict", "max_rows"} & options.keys():
            held.rows(torch.arange(KEYS, device=device), train=True)
        try:
            yield held
        finally:
            if tiers:
                arena.data.close()


def move(held: AnyTable, device: torch.device) -> None:
    """Take a table to `device`, as its module does."""
    held.arena.move(device)
    if isinstance(held, DynamicTable):
        held.follow_arena()


def contents(held: AnyTable) -> dict[str, Tensor]:
    """Return everything of a table, by rising key, on the CPU."""
    rows = held.export(held.keys())
    found = {"keys": rows.keys, "weights": rows.weights, **rows.state, **rows.uses}
    assert_on(held.arena.device, *found.values())
    return {name: value.cpu() for name, value in found.items()}


def some_rows(keys: list[int], held: AnyTable, device: torch.device) -> RowValues:
    generator = torch.Generator().manual_seed(len(keys))
    count, dtype = len(keys), held.arena.dtype
    state = {"exp_avg": torch.randn(count, WIDTH, generator=generator), "sum": torch.rand(count, generator=generator)}
    weights = torch.randn(count, WIDTH, generator=generator).to(dtype)
    rows = RowValues(keys=torch.tensor(keys, dtype=torch.int64), weights=weights, state=state)
    return RowValues(
        keys=rows.keys.to(device),
        weights=rows.weights.to(device),
        state={name: value.to(device) for name, value in rows.state.items()},
    )


def imports(kind: str, options: dict[str, Any], device: torch.device) -> None:
    """Rows that are imported from either side are exported, noted as changed, and moved."""
    # Logarithms of doubles differ in their last bits between processors.
    assert_same = partial(assert_near, rtol=1e-6, atol=1e-7) if kind == "dynamic normal" else assert_equal
    with stores(kind, CPU, **options) as plain, stores(kind, device, **options) as held:
        assert_same(contents(held), contents(plain))
        for step, keys in enumerate(([3, 0, 17], [5, 6, 7], [39], [])):
            for side in (CPU, device):
                for each in (plain, held):
                    each.follow_changes(f"c{step}")
                    each.import_(some_rows(keys, each, CPU if each is plain else side))
                    changed = [chunk.keys.cpu() for chunk in each.export_since(2)]
                    assert sorted(int(key) for part in changed for key in part) == sorted(keys)
                    assert each.keyed is None or each.keyed.removed_since().numel() == 0
                assert_same(contents(held), contents(plain))
        looked_up = held.export(torch.tensor([5, 0]))  # keys of the host, as a user writes them
        assert torch.equal(looked_up.weights.cpu(), plain.export(torch.tensor([5, 0])).weights)  # imported ones
        for keys_at in (CPU, device):
            absent = torch.tensor([1, 77], device=keys_at)
            with pytest.raises(KeyOutOfRangeError, check=at("table 't'", "got key 77")):
                held.export(absent)
        weights_alone = RowValues(keys=torch.tensor([9]), weights=torch.zeros(1, WIDTH, dtype=held.arena.dtype))
        for each in (plain, held):
            each.import_(weights_alone)
        move(held, CPU)
        assert_same(contents(held), contents(plain))
        move(held, device)
        assert_same(contents(held), contents(plain))


def fills_another(kind: str, options: dict[str, Any], device: torch.device) -> None:
    """Chunks of a table on one side fill a table on the other, which then holds the same."""
    for first, second in ((device, CPU), (CPU, device)):
        with stores(kind, first, **options) as source, stores(kind, second, **options) as target:
            source.import_(some_rows([1, 9, 33], source, CPU))
            if target.keyed is not None:
                target.keyed.clear()
            for chunk in source.export_chunks(7):
                target.import_(chunk)
            for piece in () if source.keyed is None else source.keyed.export_memory(5):
                target.keyed.import_memory(piece)
            assert_equal(contents(target), contents(source))
            if source.keyed is None:
                source.restart(3)
                target.restart(3)
                assert_equal(contents(target), contents(source))


def loses_keys(kind: str, device: torch.device) -> None:
    """Keys are removed, evicted, cleared, replaced, and imported with initial values."""
    with stores(kind, CPU, track_uses=True) as plain, stores(kind, device, track_uses=True) as held:
        for each in (plain, held):
            here = each.arena.device
            each.rows(torch.tensor([1, 1, 2, 50], device=here), train=True)
            each.follow_changes("c")
            each.remove(torch.tensor([7, 100, 7]))
            each.remove(torch.tensor([8], device=here))
            assert each.removed_since().tolist() == [7, 8]
            each.rows(torch.tensor([8, 60], device=here), train=True)
            assert each.removed_since().tolist() == [7]
            assert each.evict(lfu(), keep_at_least=20).numel() == 21
            each.evict(lru(), keep_at_least=10)
        assert_equal(contents(held), contents(plain))
        assert held.take_evicted().tolist() == plain.take_evicted().tolist()
        pieces = [(keys.cpu(), {name: use.cpu() for name, use in uses.items()}) for keys, uses in held.export_keys(4)]
        for each in (plain, held):
            each.clear()
            assert len(each) == 0
            for keys, uses in pieces:
                each.import_keys(keys, uses)
        assert_equal(contents(held), contents(plain))
        for each, side in ((plain, CPU), (held, CPU), (held, device)):
            assert isinstance(each, DynamicTable)
            each.replace(some_rows([5, -3, 2], each, side))
        assert_equal(contents(held), contents(plain))


@dataclass(frozen=True)
class Policies:
    """Policies of a table.

    Attributes:
        admit: Policy of admission.
        evict: Policy of eviction.
    """

    admit: AdmissionSpec | None
    evict: EvictionSpec | None


def keeps_the_same_keys(policies: Policies, device: torch.device) -> None:
    """Batches admit and evict the same keys, also in a table that goes on from what the other side exported."""
    most = None if policies.evict is None or policies.evict.kind == "ttl" else 25
    options = {"admit": policies.admit, "evict": policies.evict, "max_rows": most, "track_uses": True}
    options |= {"report_evicted": True}
    generator = torch.Generator().manual_seed(5)
    batches = [torch.randint(-40, 40, (12,), generator=generator) for _ in range(16)]
    with (
        stores("dynamic", CPU, **options) as plain,
        stores("dynamic", device, **options) as held,
        stores("dynamic", device, **options) as from_host,
        stores("dynamic", CPU, **options) as from_device,
    ):
        for number, batch in enumerate(batches):
            if number == 9:
                for source, target in ((held, from_device), (plain, from_host)):
                    for chunk in source.export_chunks(4):
                        target.import_(chunk)
                    for piece in source.export_memory(4):
                        target.import_memory(piece)
            for each in (plain, held, *((from_host, from_device) if number >= 9 else ())):
                there = each.rows(batch.to(each.arena.device), train=True)
                assert_on(each.arena.device, there)
        expected, evicted = contents(plain), plain.take_evicted().tolist()
        for each in (held, from_host, from_device):
            assert_equal(contents(each), expected)
            assert each.take_evicted().tolist() == evicted
            assert (each.num_evicted, each.num_batches) == (plain.num_evicted, plain.num_batches)  # type: ignore[union-attr]
        seen = torch.arange(-60, 60)
        found = [each.rows(seen.to(each.arena.device), train=False).cpu() for each in (plain, held)]
        weights = [each.arena.weights.cpu()[rows] for each, rows in zip((plain, held), found, strict=True)]
        assert torch.equal(weights[0], weights[1])


@case
def a_batch_that_does_not_fit_leaves_the_table(device: torch.device) -> None:
    for admit in (None, freq(2), counting_filter(2, num_bytes=4096)):
        with stores("dynamic", device, admit=admit, evict=lru(), max_rows=KEYS) as held:
            held.rows(torch.tensor([1, 1, 2, 2], device=device), train=True)
            before = contents(held)
            many = torch.arange(100).repeat(2).to(device)
            with pytest.raises(StorageError, check=at("table 't'", "at most 40 allowed")):
                held.rows(many, train=True)
            assert_equal(contents(held), before)
            held.rows(torch.tensor([1, 3, 3], device=device), train=True)
            assert held.keys().tolist() == [1, 2, 3]


@case
def a_score_function_sees_tensors_of_the_device(device: torch.device) -> None:
    seen = set()

    def score(keys: Tensor, counts: Tensor, steps: Tensor) -> Tensor:
        seen.update({keys.device.type, counts.device.type, steps.device.type})
        return counts * 10 - keys

    with stores("dynamic", device, track_uses=True) as held:
        held.rows(torch.tensor([5, 5, 6], device=device), train=True)
        gone = held.evict(by_score(score), keep_at_least=4)
        assert held.keys().tolist() == [0, 1, 5, 6]
        assert_on(device, gone)
        with pytest.raises(ConfigError, check=at("score function")):
            held.evict(by_score(lambda keys, counts, steps: keys[:1]), keep_at_least=1)
    assert seen == {device.type}


@case
def a_table_copied_on_the_device_is_independent(device: torch.device) -> None:
    with stores("dynamic", device, admit=freq(2), evict=lru(), max_rows=10) as held:
        held.rows(torch.tensor([1, 1, 2], device=device), train=True)
        twin = copy.deepcopy(held)
        twin.rows(torch.tensor([2, 3, 3], device=device), train=True)
        assert twin.keys().tolist() == [1, 2, 3]
        assert held.keys().tolist() == [1]


@case
def a_table_grows_on_the_device(device: torch.device) -> None:
    with stores("dynamic", CPU, track_uses=True) as plain, stores("dynamic", device, track_uses=True) as held:
        for each in (plain, held):
            each.follow_changes("c")
            for first in range(0, 60_000, 20_000):
                each.rows(torch.arange(first, first + 20_000, device=each.arena.device), train=True)
        assert_equal(contents(held), contents(plain))


_KINDS: dict[str, dict[str, Any]] = {
    "static": {},
    "static bfloat16": {"dtype": "bfloat16"},
    "static normal float16": {"dtype": "float16", "initializer": "normal"},
    "static in tiers": {},
    "dynamic": {},
    "dynamic bfloat16": {"dtype": "bfloat16"},
    "dynamic normal": {"initializer": "normal"},
    "dynamic in tiers": {},
}
_POLICIES = {
    "nothing": Policies(None, None),
    "lru": Policies(None, lru(share=0.3)),
    "lfu": Policies(None, lfu(share=0.3)),
    "ttl": Policies(None, ttl(4, share=0.5)),
    "freq and lru": Policies(freq(2), lru(share=0.3)),
    "prob and lfu": Policies(prob(0.4), lfu(share=0.3)),
    "filter and ttl": Policies(counting_filter(2, num_bytes=256), ttl(4, share=0.5)),
    "score": Policies(None, by_score(lambda keys, counts, steps: counts * 100 + steps, share=0.4)),
}
CASES |= {f"rows imported into a {kind} table": partial(imports, kind, options) for kind, options in _KINDS.items()}
CASES |= {f"chunks of a {kind} table": partial(fills_another, kind, options) for kind, options in _KINDS.items()}
CASES |= {f"keys lost by a {kind} table": partial(loses_keys, kind) for kind in ("dynamic", "dynamic in tiers")}
CASES |= {f"keys kept by {name}": partial(keeps_the_same_keys, policies) for name, policies in _POLICIES.items()}
