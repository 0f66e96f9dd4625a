# SPDX-License-Identifier: Apache-2.0
"""Further promises of the compiled hash index: threads, memory, and speed that churn does not reduce."""

import threading
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from terarec.errors import StorageError
from terarec.kernels.cpu import _embedding
from terarec.kernels.cpu.hash_index import HashIndex
from tests.errors import at
from tests.ops.hosts import on_every_host

NO_ROWS = torch.empty(0, dtype=torch.int64)
BYTES_A_KEY = 24
# Each index draws its seed, and with some seeds 40 KiB are exceeded by 96 bytes.
FIXED_BYTES = 64 << 10
POOL_BYTES = 4 << 20  # pages that may be free


def draw(count, keys, seed=0):
    return torch.randint(-keys // 2, keys // 2, (count,), generator=torch.Generator().manual_seed(seed)) * 0x123456789


def test_threads_change_nothing(set_threads):
    def run(number):
        set_threads(number)
        index, results, held = HashIndex(), [], 0
        for step in range(6):
            keys = draw(30_011, 60_000, step)
            rows, new_keys = index.insert(keys, torch.arange(10_000_000, 10_000_100), held)
            held += max(0, new_keys.numel() - 100)
            results += [rows, new_keys, index.count(keys[::3]), index.erase(keys[::5]), index.find(keys)]
            index.assign(keys[:7000], torch.arange(7000))
        keys, rows, _ = index.items()
        order = keys.argsort()
        return [*results, keys[order], rows[order]]

    for one, four in zip(run(1), run(4), strict=True):
        assert torch.equal(one, four)


def test_every_instruction_set_finds_the_same():
    """Held keys, erased ones, those that never came, and those beyond full buckets; rows of 36 bits."""
    index, keys = HashIndex(), torch.arange(60_000) * -7919
    expected = torch.arange(60_000) + 2**35
    index.insert(keys[:50_000], NO_ROWS, 2**35)
    index.erase(keys[:50_000:3])
    expected[:50_000:3] = expected[50_000:] = -1
    for found in on_every_host(lambda: index.find(keys), threads=[2]):
        assert torch.equal(found, expected)


def test_large_calls_take_new_keys_in_their_order(set_threads):
    """Most of the keys are new, most are held, and many are repeated: the paths that only large calls take."""
    set_threads(3)
    index, model = HashIndex(), {}
    for step, span in enumerate((10**6, 10**6, 30_000, 4000, 10**9)):
        keys = draw(50_021, span, step)
        rows, new_keys = index.insert(keys, NO_ROWS, len(model))
        expected = [key for key in dict.fromkeys(keys.tolist()) if key not in model]
        model.update(zip(expected, range(len(model), len(model) + len(expected)), strict=True))
        assert new_keys.tolist() == expected
        assert rows.tolist() == [model[key] for key in keys.tolist()]
    assert len(index) == len(model)


def test_a_large_call_that_runs_out_of_rows_changes_nothing():
    index = HashIndex()
    keys = draw(20_000, 10**6)
    index.insert(keys[:5000], NO_ROWS, 0)
    before = index.items()
    with pytest.raises(StorageError, check=at("next_row")):
        index.insert(keys, NO_ROWS, 2**36 - 100)
    assert len(index) == before[0].numel()
    order, expected = index.items()[0].argsort(), before[0].argsort()
    assert torch.equal(index.items()[0][order], before[0][expected])
    assert torch.equal(index.items()[1][order], before[1][expected])
    assert torch.equal(index.find(keys) < 0, ~torch.isin(keys, before[0]))


@pytest.mark.parametrize("batch", [97, 4001, 200_003])
def test_memory_stays_within_its_bound_at_every_size(batch):
    index = HashIndex()
    keys = torch.arange(1_500_000) * -7919
    for start in range(0, min(keys.numel(), 400 * batch), batch):
        index.insert(keys[start : start + batch], NO_ROWS, start)
        assert index.memory_bytes <= BYTES_A_KEY * len(index) + FIXED_BYTES
    held = len(index)
    while len(index):
        index.erase(keys[: held // 10])
        keys = keys[held // 10 :]
        assert index.memory_bytes <= BYTES_A_KEY * len(index) + FIXED_BYTES


def test_indexes_share_huge_pages():
    """Memory that one index frees is reused by another, and empty pages return to the system."""
    before, indexes = _embedding.HashIndex.pool_bytes(), [HashIndex(), HashIndex()]
    keys = torch.arange(2_000_000) << 20
    for start in range(0, keys.numel(), 250_000):
        for index in indexes:
            index.insert(keys[start : start + 250_000], NO_ROWS, start)
        held = sum(map(len, indexes))
        assert _embedding.HashIndex.pool_bytes() - before <= BYTES_A_KEY * held + POOL_BYTES
    del indexes[0]
    index = indexes.pop()
    assert torch.equal(index.erase(keys[::2]), torch.arange(0, keys.numel(), 2))
    assert torch.equal(index.find(keys[1::2]), torch.arange(1, keys.numel(), 2))
    assert _embedding.HashIndex.pool_bytes() - before <= BYTES_A_KEY * len(index) + POOL_BYTES
    del index
    assert _embedding.HashIndex.pool_bytes() - before <= 2 << 20


STEPS = st.tuples(st.sampled_from([0, 1]), st.booleans(), st.integers(0, 14_000), st.integers(1, 6000))


@settings(max_examples=8, deadline=None)
@given(steps=st.lists(STEPS, max_size=8))
def test_arrays_of_all_sizes_share_memory_unharmed(steps):
    """Keys of one segment, whose array so becomes large: from the heap to loose units and on to whole chunks."""
    keys = keys_of_one_segment()
    indexes, models = [HashIndex(), HashIndex()], torch.full((2, keys.numel()), -1)
    for index in indexes:
        index._core = _embedding.HashIndex(0)
    for number, erases, first, count in steps:
        part = slice(first, first + count)
        if erases:
            assert torch.equal(indexes[number].erase(keys[part]), models[number, part])
            models[number, part] = -1
        else:
            rows = torch.arange(count) + first * 7
            indexes[number].assign(keys[part], rows)
            models[number, part] = rows
        for index, model in zip(indexes, models, strict=True):
            assert torch.equal(index.find(keys), model)


@cache
def keys_of_one_segment():
    return torch.tensor([unmix(number * (2**56 // 20_000)) for number in range(20_000)])


def test_churn_reuses_memory_and_rows():
    index, held = HashIndex(), 20_000
    keys = torch.arange(600_000) * 4096
    index.insert(keys[:held], NO_ROWS, 0)
    rows = torch.arange(held)
    for start in range(0, keys.numel() - held, 1000):
        freed = index.erase(keys[start : start + 1000])
        assert torch.equal(freed, rows[:1000])
        new = index.insert(keys[start + held : start + held + 1000], freed, held)[0]
        rows = torch.cat([rows[1000:], new])
    assert len(index) == held
    assert torch.equal(index.find(keys[-held:]), rows)
    assert not (index.find(keys[:-held]) + 1).any()
    assert index.memory_bytes <= BYTES_A_KEY * held + FIXED_BYTES


def unmix(bits):
    """The key of a hash without seed: the inverse of SplitMix64's finalizer."""
    mask = 2**64 - 1
    bits ^= bits >> 31 ^ bits >> 62
    bits = bits * pow(0x94D049BB133111EB, -1, 2**64) & mask
    bits ^= bits >> 27 ^ bits >> 54
    bits = bits * pow(0xBF58476D1CE4E5B9, -1, 2**64) & mask
    bits ^= bits >> 30 ^ bits >> 60
    return bits - 2**64 if bits >> 63 else bits


@pytest.mark.parametrize("first_hash", [1, 2**56 - 4000], ids=["first bucket", "last bucket, on to the first"])
def test_keys_that_crowd_one_bucket_are_found_and_forgotten(first_hash):
    """Whoever knew the seed could do this. More keys pass a bucket than its counter holds."""
    index = HashIndex()
    index._core = _embedding.HashIndex(0)
    crowd = torch.tensor([unmix(hash_of) for hash_of in range(first_hash, first_hash + 4000)])
    others = torch.arange(4000) << 40
    for _ in range(3):
        assert torch.equal(index.insert(crowd, NO_ROWS, 0)[0], torch.arange(4000))
        index.insert(others, NO_ROWS, 4000)
        assert torch.equal(index.find(crowd), torch.arange(4000))
        assert torch.equal(index.find(others), torch.arange(4000, 8000))
        assert torch.equal(index.erase(crowd), torch.arange(4000))
        assert not (index.find(crowd) + 1).any()
        assert torch.equal(index.find(others), torch.arange(4000, 8000))
        index.erase(others)
        assert len(index) == 0
        assert index.items()[0].numel() == 0


@pytest.mark.parametrize("batch", [1, 7, 12_000])
def test_a_segment_grows_amid_a_call(batch):
    """All keys are of one segment, new, held and repeated ones mixed; its last bucket is passed by, too."""
    index, model = HashIndex(), {}
    index._core = _embedding.HashIndex(0)
    numbers = torch.randint(0, 5000, (12_000,), generator=torch.Generator().manual_seed(batch)).tolist()
    keys = [unmix(2**56 - 1 - (number % 50 + number * 2**41)) for number in numbers[: 2000 * batch]]
    for start in range(0, len(keys), batch):
        part = keys[start : start + batch]
        expected = [key for key in dict.fromkeys(part) if key not in model]
        model.update(zip(expected, range(len(model), len(model) + len(expected)), strict=True))
        rows, new_keys = index.insert(torch.tensor(part), NO_ROWS, len(model) - len(expected))
        assert new_keys.tolist() == expected
        assert rows.tolist() == [model[key] for key in part]
    assert dict(zip(*(part.tolist() for part in index.items()[:2]), strict=True)) == model


def test_finds_may_overlap():
    index = HashIndex()
    keys = draw(100_000, 10**9)
    rows = index.insert(keys, NO_ROWS, 0)[0]
    matches = []

    def search():
        matches.extend(torch.equal(index.find(keys), rows) for _ in range(5))

    searching = [threading.Thread(target=search) for _ in range(3)]
    for thread in searching:
        thread.start()
    for thread in searching:
        thread.join()
    assert matches == [True] * 15


def test_two_indexes_hash_differently():
    keys = torch.arange(1000)
    orders = []
    for _ in range(2):
        index = HashIndex()
        index.insert(keys, NO_ROWS, 0)
        orders.append(index.items()[0])
    assert not torch.equal(*orders)
    assert torch.equal(orders[0].sort().values, orders[1].sort().values)
