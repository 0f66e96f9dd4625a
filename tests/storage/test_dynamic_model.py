# SPDX-License-Identifier: Apache-2.0
"""Random histories of a dynamic table against a plain dict."""

from dataclasses import dataclass

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from terarec.errors import StorageError
from terarec.spec import DynamicTableSpec, EvictionSpec, by_score, freq, lfu, lru, ttl
from terarec.storage import RowValues
from terarec.storage.dynamic import dynamic_tables
from terarec.storage.dynamic_arena import DynamicArena
from tests.errors import at
from tests.params import examples
from tests.storage.indexes import FAST_INDEXES

MAX_ROWS = 6
KEYS = st.sampled_from([-(2**63), -3, -1, 0, 1, 2, 3, 2**40, 2**63 - 1])
BATCHES = st.lists(KEYS, max_size=8)
POLICIES = [
    lru(share=0.2),
    lfu(share=0.5),
    ttl(3, share=1.0),
    by_score(lambda keys, counts, steps: counts * 100 + steps, share=0.4),
]
SCORES = {
    "lru": lambda held: held.last_step,
    "ttl": lambda held: held.last_step,
    "lfu": lambda held: held.count,
    "score": lambda held: held.count * 100 + held.last_step,
}


@dataclass
class Held:
    """What the model knows of a key with a row."""

    value: float
    count: int = 0
    last_step: int = 0


class TableMachine(RuleBasedStateMachine):
    implementation = "ref"

    @initialize(policy=st.sampled_from(POLICIES), needed=st.sampled_from([1, 2, 3]))
    def start(self, policy: EvictionSpec, needed: int) -> None:
        admit = freq(needed) if needed > 1 else None
        spec = DynamicTableSpec(name="t", width=1, admit=admit, evict=policy, max_rows=MAX_ROWS, track_uses=True)
        neighbour = DynamicTableSpec(name="n", width=1, initializer="normal")
        self.arena = DynamicArena([spec, neighbour], seed=2)
        self.table, self.neighbour = dynamic_tables(self.arena, self.implementation)
        self.policy, self.needed = policy, needed
        self.held: dict[int, Held] = {}
        self.seen: dict[int, int] = {}
        self.gone: set[int] = set()
        self.clock = self.evictions = 0
        self.next_value = 1.0

    @rule(batch=BATCHES)
    def train(self, batch: list[int]) -> None:
        before = dict(self.held), dict(self.seen), set(self.gone), self.evictions
        self._expire(batch)
        admitted = self._admit(batch)
        rejected = not self._make_room(admitted, batch)
        if rejected:
            with pytest.raises(StorageError, check=at("table 't'", "holds")):
                self.table.rows(torch.tensor(batch, dtype=torch.int64), train=True)
            self.held, self.seen, self.gone, self.evictions = before
            return
        rows = self.table.rows(torch.tensor(batch, dtype=torch.int64), train=True)
        for key in admitted:
            self.seen.pop(key, None)
            self.held[key] = Held(value=self.next_value)
            self.next_value += 1.0
        self.clock += 1
        for key, row in zip(batch, rows.tolist(), strict=True):
            assert (row != 0) == (key in self.held)
            if key in self.held:
                self.held[key].count += 1
                self.held[key].last_step = self.clock
        for key in admitted:
            self._write(key)

    @rule(batch=BATCHES)
    def evaluate(self, batch: list[int]) -> None:
        rows = self.table.rows(torch.tensor(batch, dtype=torch.int64), train=False)
        expected = [self.held[key].value if key in self.held else 0.0 for key in batch]
        assert self.arena.weights[rows, 0].tolist() == expected

    @rule(batch=BATCHES)
    def train_the_neighbour(self, batch: list[int]) -> None:
        rows = self.neighbour.rows(torch.tensor(batch, dtype=torch.int64), train=True)
        assert len(set(rows.tolist())) == len(set(batch))

    @rule(policy=st.sampled_from(POLICIES), keep=st.integers(0, MAX_ROWS))
    def evict(self, policy: EvictionSpec, keep: int) -> None:
        expected = self._worst(policy, len(self.held) - keep, set())
        assert self.table.evict(policy, keep_at_least=keep).tolist() == sorted(expected)
        self._forget(expected)

    @rule()
    def take_evicted(self) -> None:
        assert self.table.take_evicted().tolist() == sorted(self.gone - self.held.keys())
        self.gone.clear()

    @rule()
    def move_to_a_new_table(self) -> None:
        chunks, pieces = list(self.table.export_chunks(2)), list(self.table.export_memory(2))
        self.table.clear()
        assert len(self.table) == 0
        for chunk in chunks:
            self.table.import_(chunk)
        for piece in pieces:
            self.table.import_memory(piece)

    @invariant()
    def holds_what_the_model_holds(self) -> None:
        chunks = list(self.table.export_chunks(3))
        keys = [key for chunk in chunks for key in chunk.keys.tolist()]
        values = [value for chunk in chunks for value in chunk.weights[:, 0].tolist()]
        assert dict(zip(keys, values, strict=True)) == {key: held.value for key, held in self.held.items()}
        assert len(self.table) == len(keys) == len(self.held)
        assert self.table.num_evicted == self.evictions
        rows = self.table.rows(torch.tensor(keys, dtype=torch.int64), train=False).tolist()
        others = [key for chunk in self.neighbour.export_chunks(9) for key in chunk.keys.tolist()]
        rows += self.neighbour.rows(torch.tensor(others, dtype=torch.int64), train=False).tolist()
        assert len(set(rows) | set(self.arena.recycled.tolist())) == self.arena.next_row - 2, "each row is used or free"

    def _write(self, key: int) -> None:
        self.table.import_(RowValues(keys=torch.tensor([key]), weights=torch.tensor([[self.held[key].value]])))

    def _expire(self, batch: list[int]) -> None:
        if self.policy.kind == "ttl" and self.clock and self.clock % self.policy.steps == 0:
            self._forget(self._worst(self.policy, len(self.held), set(batch)))

    def _admit(self, batch: list[int]) -> list[int]:
        unseen = [key for key in batch if key not in self.held]
        if self.needed == 1:
            return list(dict.fromkeys(unseen))
        for key in unseen:
            self.seen[key] = self.seen.get(key, 0) + 1
        return [key for key in dict.fromkeys(unseen) if self.seen[key] >= self.needed]

    def _make_room(self, admitted: list[int], batch: list[int]) -> bool:
        if len(self.held) + len(admitted) <= MAX_ROWS:
            return True
        fitting = MAX_ROWS - len(admitted)
        keep = max(0, min(fitting, MAX_ROWS - max(1, int(MAX_ROWS * self.policy.share))))
        worst = self._worst(self.policy, len(self.held) - keep, set(batch))
        if len(self.held) - len(worst) > fitting:
            return False
        self._forget(worst)
        return True

    def _worst(self, policy: EvictionSpec, most: int, spared: set[int]) -> list[int]:
        score = SCORES[policy.kind]
        candidates = [key for key in self.held if key not in spared]
        if policy.kind == "ttl":
            candidates = [key for key in candidates if self.held[key].last_step <= self.clock - policy.steps]
        return sorted(candidates, key=lambda key: (score(self.held[key]), key))[: max(0, most)]

    def _forget(self, keys: list[int]) -> None:
        self.evictions += len(keys)
        self.gone.update(keys)
        for key in keys:
            del self.held[key]


@pytest.mark.parametrize("implementation", FAST_INDEXES)
def test_a_table_is_a_dict_with_eviction(implementation: str) -> None:
    machine = type("Machine", (TableMachine,), {"implementation": implementation})
    run_state_machine_as_test(machine, settings=settings(max_examples=examples(60), stateful_step_count=25))
