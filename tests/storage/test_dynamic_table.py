# SPDX-License-Identifier: Apache-2.0
"""What only a dynamic table does: take up unseen keys, and forget others."""

import copy

import pytest
import torch
from torch import Tensor

from terarec.errors import ConfigError, StorageError
from terarec.kernels import memory
from terarec.spec import (
    AdmissionSpec,
    DynamicTableSpec,
    EvictionSpec,
    by_score,
    counting_filter,
    freq,
    lfu,
    lru,
    prob,
    ttl,
)
from terarec.storage import RowValues
from terarec.storage.dynamic import DynamicTable, dynamic_tables
from terarec.storage.dynamic_arena import DynamicArena
from tests.errors import at
from tests.storage.indexes import FAST_INDEXES, INDEXES

EXTREMES = [-(2**63), -1, 0, 1, 2**31, 2**62, 2**63 - 1]


@pytest.fixture(params=INDEXES)
def index(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


def table(
    index: str = "ref",
    *,
    admit: AdmissionSpec | None = None,
    evict: EvictionSpec | None = None,
    max_rows: int | None = None,
    track_uses: bool = False,
) -> DynamicTable:
    spec = DynamicTableSpec(
        name="t", width=4, default=0.25, admit=admit, evict=evict, max_rows=max_rows, track_uses=track_uses
    )
    return dynamic_tables(DynamicArena([spec], seed=1), index)[0]


def train(held: DynamicTable, *batches: list[int]) -> Tensor:
    for batch in batches:
        rows = held.rows(torch.tensor(batch, dtype=torch.int64), train=True)
    return rows


def keys_of(held: DynamicTable) -> set[int]:
    return {int(key) for chunk in held.export_chunks(3) for key in chunk.keys}


def test_any_key_gets_its_own_row_in_training(index: str) -> None:
    held = table(index)
    rows = train(held, EXTREMES + EXTREMES[::-1])
    assert torch.equal(rows[:7], rows[7:].flip(0))
    assert len(set(rows.tolist())) == len(held) == 7
    assert keys_of(held) == set(EXTREMES)


def test_no_key_gets_a_row_in_evaluation(index: str) -> None:
    held = table(index)
    train(held, [5])
    rows = held.rows(torch.tensor([7, 5, -7]), train=False)
    assert torch.equal(held.arena.weights[rows[[0, 2]]], torch.full((2, 4), 0.25))
    assert len(held) == 1
    assert held.rows(torch.tensor([], dtype=torch.int64), train=False).shape == (0,)


def test_values_do_not_depend_on_the_order_of_arrival(index: str) -> None:
    one, other = table(index), table(index)
    train(one, EXTREMES, list(range(50)))
    train(other, list(range(49, 20, -1)), EXTREMES[::-1], list(range(21)))
    keys = torch.tensor(EXTREMES + list(range(50)))
    assert torch.equal(one.export(keys).weights, other.export(keys).weights)


def test_a_full_table_without_a_policy_rejects_and_stays(index: str) -> None:
    held = table(index, max_rows=3)
    train(held, [1, 2, 3], [2, 1])
    with pytest.raises(
        StorageError, check=at("table 't'", "holds 3 rows, 2 more requested, at most 3 allowed; expected a larger")
    ):
        train(held, [2, 8, 9, 8])
    with pytest.raises(StorageError, check=at("table 't'", "holds 3 rows, 1 more")):
        held.import_(RowValues(keys=torch.tensor([1, 4]), weights=torch.ones(2, 4)))
    assert keys_of(held) == {1, 2, 3}
    assert train(held, [1, 2, 3]).unique().numel() == 3


@pytest.mark.parametrize("index", FAST_INDEXES)
def test_memory_that_is_out_names_the_table_and_leaves_it(index: str, monkeypatch: pytest.MonkeyPatch) -> None:
    held = table(index)
    train(held, [1, 2])
    wanted = list(range(held.arena.num_rows))
    monkeypatch.setattr(memory, "available_bytes", lambda: 1000)
    with pytest.raises(
        StorageError, check=at("table 't': holds 2 rows, 65,534 more requested, dynamic table 't'", "1,048,576 bytes")
    ):
        train(held, wanted)
    assert keys_of(held) == {1, 2}
    monkeypatch.undo()
    assert train(held, wanted).unique().numel() == len(wanted)


def test_lru_gives_up_the_least_recently_used(index: str) -> None:
    held = table(index, evict=lru(share=0.5), max_rows=4)
    train(held, [1, 2, 3], [4], [1, 2])
    train(held, [5])
    assert keys_of(held) == {1, 2, 5}
    assert held.take_evicted().tolist() == [3, 4]
    assert held.take_evicted().tolist() == []


def test_a_share_is_one_of_the_rows_that_may_go(index: str) -> None:
    """Hot rows counted, too: all others that the batch did not use went each time."""
    held = table(index, evict=lru(share=0.5), max_rows=10)
    held.begin_part(torch.arange(6), 20)
    train(held, [10], [11], [12], [13], [14])
    assert keys_of(held) == {12, 13, 14}, "hot rows that are not there yet have room of their own"
    train(held, [0, 1, 2, 3, 4, 5], [15], [16])
    assert keys_of(held) == {*range(6), 14, 15, 16}
    train(held, [17])
    assert held.evict().tolist() == [14, 15]


def test_lfu_gives_up_the_least_frequently_used(index: str) -> None:
    held = table(index, evict=lfu(share=0.25), max_rows=4)
    train(held, [1, 1, 1, 2], [2, 3, 4, 4, 4])
    train(held, [5, 3])
    assert keys_of(held) == {1, 3, 4, 5}, "3 is rarer than 2, but in the batch"


def test_a_time_to_live_spares_the_young(index: str) -> None:
    held = table(index, evict=ttl(3))
    train(held, [1, 2], [2], [3], [2])
    assert keys_of(held) == {1, 2, 3}
    train(held, [2])
    assert keys_of(held) == {2, 3}, "after three batches without it, 1 goes"
    train(held, [9], [9], [9], [9])
    assert keys_of(held) == {9}
    assert held.take_evicted().tolist() == [1, 2, 3]


def test_a_full_table_of_young_rows_rejects(index: str) -> None:
    held = table(index, evict=ttl(100), max_rows=2)
    train(held, [1, 2])
    with pytest.raises(StorageError, check=at("table 't'", "holds 2 rows, 1 more requested, at most 2 allowed")):
        train(held, [3])
    assert keys_of(held) == {1, 2}


def test_a_batch_larger_than_the_table_is_rejected(index: str) -> None:
    held = table(index, evict=lru(), max_rows=3)
    train(held, [1, 2])
    with pytest.raises(StorageError, check=at("table 't'", "holds 2 rows, 4 more requested, at most 3 allowed")):
        train(held, [3, 4, 5, 6])
    assert keys_of(held) == {1, 2}


@pytest.mark.parametrize("admit", [freq(2), counting_filter(2, num_bytes=4096)], ids=lambda admit: admit.kind)
def test_a_batch_that_is_rejected_was_not_seen(index: str, admit: AdmissionSpec) -> None:
    held, twin = (table(index, admit=admit, evict=ttl(2, share=0.5), max_rows=2) for _ in range(2))
    for each in (held, twin):
        train(each, [1, 1, 2, 5], [3, 3, 6], [3])
    with pytest.raises(StorageError, check=at("table 't'", "holds 1 rows, 2 more requested, at most 2 allowed")):
        train(held, [5, 6, 6, 3, 4])  # 1 went before the others requested rows
    assert held.num_evicted == 0
    assert keys_of(held) == {1, 3}
    for each in (held, twin):
        train(each, [4, 5, 3])
        assert keys_of(each) == {3, 5}, "4 occurred once, and 5 twice"
        assert each.take_evicted().tolist() == [1]


def test_evict_on_request_with_every_policy(index: str) -> None:
    def filled() -> DynamicTable:
        held = table(index, track_uses=True)
        train(held, [1, 1, 1, 2], [3, 3, 2], [4, -5])
        return held

    assert filled().evict(lru(), keep_at_least=3).tolist() == [1, 2], "last used in the batches 1 and 2; 2 before 3"
    assert filled().evict(lfu(), keep_at_least=3).tolist() == [-5, 4]
    assert filled().evict(ttl(1), keep_at_least=0).tolist() == [1, 2, 3]
    assert filled().evict(ttl(1), keep_at_least=4).tolist() == [1]
    assert filled().evict(by_score(lambda keys, counts, steps: -keys), keep_at_least=2).tolist() == [2, 3, 4]
    assert filled().evict(by_score(lambda keys, counts, steps: counts * steps), keep_at_least=4).tolist() == [-5]
    held = filled()
    assert held.evict(lru(), keep_at_least=9).tolist() == []
    assert held.evict(lru(), keep_at_least=0).tolist() == [-5, 1, 2, 3, 4]
    assert (len(held), held.num_evicted) == (0, 5)


def test_an_eviction_that_cannot_be_is_rejected() -> None:
    held = table(evict=lru(), max_rows=10)
    train(held, [1, 2])
    with pytest.raises(ConfigError, check=at("table 't': evict", "got 'lfu', which needs each row's count")):
        held.evict(lfu(), keep_at_least=1)
    with pytest.raises(ConfigError, check=at("table 't': evict", "no max_rows")):
        table(track_uses=True).evict(lru())
    tracked = table(track_uses=True)
    train(tracked, [1, 2])
    with pytest.raises(ConfigError, check=at("score function")):
        tracked.evict(by_score(lambda keys, counts, steps: counts[:1]), keep_at_least=1)
    with pytest.raises(ConfigError, check=at("score function", "without NaN")):
        tracked.evict(by_score(lambda keys, counts, steps: counts / 0 * 0), keep_at_least=1)
    with pytest.raises(ConfigError, check=at("score function", "got torch.bool[2]")):
        tracked.evict(by_score(lambda keys, counts, steps: keys > 1), keep_at_least=1)
    with pytest.raises(ConfigError, check=at("table 't': evict", "got 'lru'")):
        tracked.evict("lru", keep_at_least=1)  # type: ignore[arg-type]
    for size in (-1, 1.5):
        with pytest.raises(ConfigError, check=at("table 't': evict", f"got keep_at_least {size}")):
            tracked.evict(lru(), keep_at_least=size)  # type: ignore[arg-type]
    assert len(tracked) == 2


def test_a_key_that_returns_starts_from_initial_values_and_is_not_reported(index: str) -> None:
    held = table(index, track_uses=True)
    held.arena.attach_state((("sum", (held.arena.num_rows,)),), fills={"sum": 0.5})
    train(held, [1, 2])
    first = held.export(torch.tensor([1]))
    held.import_(RowValues(keys=torch.tensor([1]), weights=torch.ones(1, 4), state={"sum": torch.ones(1)}))
    held.evict(lru(), keep_at_least=0)
    row = int(train(held, [1]))
    again = held.export(torch.tensor([1]))
    assert row in (1, 2), "a row that was given back is used again"
    assert torch.equal(again.weights, first.weights)
    assert again.state["sum"].item() == 0.5
    assert again.uses["count"].item() == 1
    assert held.take_evicted().tolist() == [2]


def test_freq_admits_in_the_batch_of_the_nth_occurrence(index: str) -> None:
    held = table(index, admit=freq(3))
    assert train(held, [7, 7, 8]).tolist() == [0, 0, 0]
    assert len(held) == 0
    held.rows(torch.tensor([7] * 9), train=False)
    rows = train(held, [7, 8, 9, 9, 9])
    assert keys_of(held) == {7, 9}
    assert rows[1] == 0, "8 has occurred twice"
    assert rows[0] != 0
    assert (rows[2:] == rows[2]).all(), "each occurrence in the batch has the row, the earlier ones too"
    train(held, [8])
    assert keys_of(held) == {7, 8, 9}


def test_prob_admits_a_share_of_the_batches_repeatably() -> None:
    def run(seed: int) -> set[int]:
        spec = DynamicTableSpec(name="t", width=4, admit=prob(0.25))
        (held,) = dynamic_tables(DynamicArena([spec], seed=seed))
        train(held, list(range(4000)))
        return keys_of(held)

    first = run(1)
    assert 850 < len(first) < 1150
    assert run(1) == first
    assert run(2) != first
    held = table(admit=prob(0.25))
    train(held, *[[5]] * 60)
    assert keys_of(held) == {5}
    always = table(admit=prob(1.0))
    train(always, EXTREMES)
    assert keys_of(always) == set(EXTREMES)


def test_a_counting_filter_admits_never_late_and_seldom_early() -> None:
    held = table(admit=counting_filter(3, num_bytes=1 << 16))
    rare, frequent = list(range(1000)), [-key for key in range(1, 1001)]
    train(held, rare, rare + frequent, frequent + frequent)
    assert set(frequent) <= keys_of(held)
    assert len(keys_of(held) - set(frequent)) < 10
    crowded = table(admit=counting_filter(255, num_bytes=64))
    empty = crowded.index_bytes
    train(crowded, *[rare] * 2)
    assert crowded.index_bytes == empty, "whatever it sees, it takes the bytes it was given"
    many = table(admit=counting_filter(255, num_bytes=64))
    train(many, [3] * 254)
    assert len(many) == 0
    train(many, [3] * 1000)
    assert keys_of(many) == {3}


@pytest.mark.parametrize("index", FAST_INDEXES)
@pytest.mark.parametrize("admit", [None, freq(3), prob(0.3), counting_filter(3, num_bytes=256)], ids=str)
@pytest.mark.parametrize("evict", [lru(share=0.3), lfu(share=0.3), ttl(4, share=0.5)], ids=lambda policy: policy.kind)
def test_a_table_resumes_from_another_ones_export(index: str, admit: AdmissionSpec | None, evict: EvictionSpec) -> None:
    generator = torch.Generator().manual_seed(5)
    batches = [torch.randint(-40, 40, (12,), generator=generator).tolist() for _ in range(30)]
    max_rows = None if evict.kind == "ttl" else 25
    whole, first, second = (table(index, admit=admit, evict=evict, max_rows=max_rows) for _ in range(3))
    train(whole, *batches)
    train(first, *batches[:17])
    train(second, [1, 2, 3])
    second.clear()
    for chunk in first.export_chunks(4):
        second.import_(chunk)
    for piece in first.export_memory(4):
        second.import_memory(piece)
    train(second, *batches[17:])
    assert keys_of(second) == keys_of(whole)
    assert second.take_evicted().tolist() == whole.take_evicted().tolist()
    assert second.num_evicted == whole.num_evicted


def test_what_a_filter_counted_means_the_same_keys_under_another_seed_and_name() -> None:
    def filtered(name: str, seed: int) -> DynamicTable:
        spec = DynamicTableSpec(name=name, width=4, admit=counting_filter(3, num_bytes=1 << 12))
        return dynamic_tables(DynamicArena([spec], seed=seed))[0]

    first, second = filtered("t", 1), filtered("u", 2)
    seen = list(range(60))
    train(first, seen, seen)
    for piece in first.export_memory(9):
        second.import_memory(piece)
    train(second, [key - 1000 for key in seen], seen[:30])
    assert keys_of(second) == set(seen[:30]), "no key late, and none early that was never seen"
    third = filtered("t", 3)
    for piece in second.export_memory(9):
        third.import_memory(piece)
    train(third, seen[30:])
    assert keys_of(third) == set(seen[30:])


def test_what_does_not_fit_the_notes_or_the_filter_is_rejected() -> None:
    held = table(track_uses=True)
    rows = RowValues(keys=torch.tensor([1]), weights=torch.ones(1, 4), uses={"count": torch.ones(2, dtype=torch.int64)})
    with pytest.raises(StorageError, check=at("table 't'", "got count torch.int64[2]")):
        held.import_(rows)
    assert len(held) == 0
    large, small = (table(admit=counting_filter(2, num_bytes=size)) for size in (256, 64))
    *_, cells = large.export_memory(9)
    with pytest.raises(StorageError, check=at("table 't'", "got a counting filter of 256 cells of torch.uint8")):
        small.import_memory(cells)
    with pytest.raises(StorageError, check=at("table 't'", "got a counting filter's seed torch.int64[2]")):
        large.import_memory(cells | {"admission_seed": torch.zeros(2, dtype=torch.int64)})
    with pytest.raises(StorageError, check=at("table 't'", "'clock'")):
        small.import_memory({"clock": torch.tensor([3])})


def test_a_copy_is_independent(index: str) -> None:
    held = table(index, admit=freq(2), evict=lru(), max_rows=10)
    train(held, [1, 1, 2])
    twin = copy.deepcopy(held)
    train(twin, [2, 3, 3])
    assert keys_of(twin) == {1, 2, 3}
    assert keys_of(held) == {1}
    train(held, [2])
    assert keys_of(held) == {1, 2}
