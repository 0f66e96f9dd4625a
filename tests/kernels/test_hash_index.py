# SPDX-License-Identifier: Apache-2.0
"""The hash index does what a dict does, whatever the implementation."""

from importlib.util import find_spec

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, rule

from terarec.errors import ConfigError, KernelError, NoSpaceError, StorageError
from terarec.kernels.hash_index import new_hash_index
from tests.errors import at

IMPLEMENTATIONS = ["cpu", "ref", "triton"]
INTERPRETED_KEYS = 200  # of many tests' thousands, at 10 ms and more for a program of 256
EXTREMES = [0, -1, 1, 2**63 - 1, -(2**63), 2**62, 2**32, -(2**32)]
NO_ROWS = torch.empty(0, dtype=torch.int64)


@pytest.fixture(params=IMPLEMENTATIONS)
def index(request):
    if request.param == "triton":
        pytest.importorskip("triton", reason="Triton is installed on Linux alone")
    return new_hash_index("cpu", request.param)


def tensor(values):
    return torch.tensor(list(values), dtype=torch.int64)


def affordable(index, keys):
    """Return how many of so many keys a test takes."""
    return min(keys, INTERPRETED_KEYS) if "triton" in type(index).__module__ else keys


def held(index, most=None):
    """Everything that items gives, in as many calls as it takes."""
    found, start = {}, 0
    while start >= 0:
        keys, rows, start = index.items(start, most)
        assert keys.shape == rows.shape
        assert most is None or keys.numel() <= most
        assert not found.keys() & set(keys.tolist())
        found.update(zip(keys.tolist(), rows.tolist(), strict=True))
    return found


def insert(index, model, keys, free_rows, next_row):
    """Insert into the index and into the dict that models it, and compare."""
    rows, new_keys = index.insert(tensor(keys), tensor(free_rows), next_row)
    expected_new = [key for key in dict.fromkeys(keys) if key not in model]
    fresh = range(next_row, next_row + max(0, len(expected_new) - len(free_rows)))
    model.update(zip(expected_new, [*free_rows[: len(expected_new)], *fresh], strict=True))
    assert new_keys.tolist() == expected_new
    assert rows.tolist() == [model[key] for key in keys]
    return fresh.stop


KEYS = st.one_of(
    st.sampled_from(EXTREMES),
    st.integers(-20, 60),
    st.integers(0, 300).map(lambda number: number << 40),
    st.integers(-(2**63), 2**63 - 1),
)
BATCHES = st.lists(KEYS, max_size=80)


def machine_of(implementation):
    """A state machine that drives an index and a dict side by side."""

    class Machine(RuleBasedStateMachine):
        batches = Bundle("batches")

        @initialize()
        def start(self):
            self.index = new_hash_index("cpu", implementation)
            self.model = {}
            self.next_row = 0
            self.free = []

        @rule(target=batches, keys=BATCHES)
        def batch(self, keys):
            return keys

        @rule(keys=batches)
        def insert(self, keys):
            unused = len(self.free)
            before = len(self.model)
            self.next_row = insert(self.index, self.model, keys, self.free, self.next_row)
            self.free = self.free[min(unused, len(self.model) - before) :]

        @rule(keys=batches)
        def find(self, keys):
            assert self.index.find(tensor(keys)).tolist() == [self.model.get(key, -1) for key in keys]

        @rule(keys=batches)
        def erase(self, keys):
            expected = [self.model.pop(key, -1) for key in keys]
            assert self.index.erase(tensor(keys)).tolist() == expected

        @rule(keys=batches, first=st.integers(0, 2**36 - 80))
        def assign(self, keys, first):
            rows = range(first, first + len(keys))
            self.index.assign(tensor(keys), tensor(rows))
            self.model.update(zip(keys, rows, strict=True))

        @rule(keys=batches)
        def count(self, keys):
            expected = []
            for key in keys:
                self.model[key] = min(self.model.get(key, 0) + 1, 2**36 - 1)
                expected.append(self.model[key])
            assert self.index.count(tensor(keys)).tolist() == expected

        @rule(most=st.one_of(st.none(), st.integers(1, 50)))
        def items(self, most):
            assert held(self.index, most) == self.model

        @invariant()
        def length_is_exact(self):
            if hasattr(self, "index"):
                assert len(self.index) == len(self.model)

    examples = 5 if implementation == "triton" else 25
    Machine.TestCase.settings = settings(max_examples=examples, stateful_step_count=25)
    return Machine.TestCase


TestCpuMachine = machine_of("cpu")
TestRefMachine = machine_of("ref")
TestTritonMachine = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is installed on Linux alone")(
    machine_of("triton")
)


def test_nothing_in_nothing_out(index):
    assert len(index) == 0
    assert index.find(NO_ROWS).shape == (0,)
    assert index.find(tensor(EXTREMES)).tolist() == [-1] * len(EXTREMES)
    assert index.erase(tensor(EXTREMES)).tolist() == [-1] * len(EXTREMES)
    assert [part.shape for part in index.insert(NO_ROWS, NO_ROWS, 5)] == [(0,), (0,)]
    assert index.count(NO_ROWS).shape == (0,)
    index.assign(NO_ROWS, NO_ROWS)
    assert [part.numel() for part in index.items()[:2]] == [0, 0]
    assert index.items()[2] == -1


def test_every_int64_is_a_key(index):
    model = {}
    insert(index, model, EXTREMES, [], 2**36 - len(EXTREMES))
    assert index.find(tensor(EXTREMES)).tolist() == list(range(2**36 - len(EXTREMES), 2**36))
    assert held(index) == model
    assert index.erase(tensor(EXTREMES[3:5])).tolist() == [model[key] for key in EXTREMES[3:5]]
    assert index.find(tensor(EXTREMES)).tolist() == [-1 if key in EXTREMES[3:5] else model[key] for key in EXTREMES]


def test_new_keys_take_the_free_rows_first(index):
    rows, new_keys = index.insert(tensor([7, 9, 7, -3, 9, 5]), tensor([40, 2]), 100)
    assert rows.tolist() == [40, 2, 40, 100, 2, 101]
    assert new_keys.tolist() == [7, 9, -3, 5]
    rows, new_keys = index.insert(tensor([5, 6]), tensor([8, 3, 1]), 102)
    assert rows.tolist() == [101, 8]
    assert new_keys.tolist() == [6]


def test_the_largest_rows_are_rows_like_others(index):
    model, first = {}, 15 << 32
    keys = list(range(affordable(index, 3000)))
    insert(index, model, keys[::2], [], first)
    insert(index, model, [*keys[::3], *keys, *keys[::5]], [], first + len(keys))
    assert held(index) == model


def test_of_a_repeated_key_the_last_row_counts(index):
    index.assign(tensor([4, 5, 4]), tensor([1, 2, 3]))
    assert index.find(tensor([4, 5])).tolist() == [3, 2]
    index.assign(tensor([5]), tensor([2**36 - 1]))
    assert index.find(tensor([4, 5])).tolist() == [3, 2**36 - 1]
    assert len(index) == 2


def test_counts_stop_at_the_largest_row(index):
    index.assign(tensor([4]), tensor([2**36 - 2]))
    assert index.count(tensor([4, 6, 4, 6])).tolist() == [2**36 - 1, 1, 2**36 - 1, 2]


@pytest.mark.parametrize(
    "missing", ["full", *(pytest.param(name, marks=pytest.mark.slow) for name in ("arange", "cat"))]
)
def test_an_index_on_a_device_without_memory_stays_as_it_was(missing, monkeypatch):
    """Where new slots are made, after slots were claimed, and before rows are written."""
    pytest.importorskip("triton", reason="Triton is installed on Linux alone")
    index, model = new_hash_index("cpu", "triton"), {}
    insert(index, model, [*range(100), *EXTREMES], [], 0)
    keys, function = [*range(90, 290), -(2**63), 95], getattr(torch, missing)
    calls = [lambda: index.insert(tensor(keys), NO_ROWS, 200)]
    if missing == "arange":  # the others are as above, or insert alone comes to them
        calls += [lambda: index.assign(tensor(keys), tensor(range(len(keys)))), lambda: index.count(tensor(keys))]

    def without_memory(*arguments, **options):
        raise torch.OutOfMemoryError("Tried to allocate 2.00 GiB")

    for call in calls:
        monkeypatch.setattr(torch, missing, without_memory)
        with pytest.raises(NoSpaceError) as caught:
            call()
        assert caught.value.where == f"hash index of {len(model)} keys in {index.memory_bytes:,} bytes"
        monkeypatch.setattr(torch, missing, function)
        assert (held(index), len(index)) == (model, len(model))
        assert index.find(tensor([5, 200, -(2**63)])).tolist() == [5, -1, model[-(2**63)]]
    insert(index, model, keys, [150], 200)
    assert held(index) == model


def test_an_index_without_memory_to_grow_takes_the_keys_that_it_has_room_for(monkeypatch):
    pytest.importorskip("triton", reason="Triton is installed on Linux alone")
    index, model = new_hash_index("cpu", "triton"), {}
    insert(index, model, range(100), [], 0)

    def without_memory(*arguments, **options):
        raise torch.OutOfMemoryError("Tried to allocate 2.00 GiB")

    monkeypatch.setattr(torch, "full", without_memory)
    for call in (
        lambda: index.insert(torch.arange(1000, 3000), NO_ROWS, 100),
        lambda: index.assign(torch.arange(3000), torch.arange(3000)),
        lambda: index.count(torch.arange(3000)),
    ):
        with pytest.raises(NoSpaceError):
            call()
    insert(index, model, [*range(90, 200)], [], 100)
    for missing, call in (
        ("empty_like", lambda: index.insert(tensor([7, 900]), NO_ROWS, 200)),
        ("sort", lambda: index.erase(tensor([7]))),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(torch, missing, without_memory)
            with pytest.raises(NoSpaceError):
                call()
    assert (held(index), len(index)) == (model, 200)


def patterns():
    """Keys that lie badly for weak hashes: sequences, multiples of powers of two, few bits that vary."""
    count = 6000
    numbers = np.arange(count, dtype=np.int64)
    random = np.random.default_rng(0)
    yield "sequence", numbers
    yield "negative", -numbers
    for shift in (12, 32, 50):
        yield f"multiples of 2^{shift}", (numbers.astype(np.uint64) << np.uint64(shift)).astype(np.int64)
    yield "strides", numbers * 0x1000001
    yield "two halves", (numbers % 77) << 40 | numbers // 77
    yield "random", random.integers(-(2**63), 2**63 - 1, count)


def indexes_and_patterns():
    """Each implementation with each pattern; interpreted, most of them are long."""
    for implementation in IMPLEMENTATIONS:
        for name, keys in patterns():
            is_long = implementation == "triton" and name not in ("random", "multiples of 2^50")
            yield pytest.param(implementation, keys, id=f"{implementation}, {name}", marks=[pytest.mark.slow] * is_long)


@pytest.mark.parametrize(("index", "pattern"), list(indexes_and_patterns()), indirect=["index"])
def test_growth_over_many_sizes(index, pattern):
    keys = torch.from_numpy(np.unique(pattern))
    keys = keys[torch.randperm(keys.numel(), generator=torch.Generator().manual_seed(0))]
    keys = keys[: affordable(index, keys.numel())]
    taken = 0
    while taken < keys.numel():
        batch = keys[taken : taken + max(1, taken // 2)]
        _, new_keys = index.insert(batch, NO_ROWS, taken)
        assert torch.equal(new_keys, batch)
        taken += batch.numel()
        assert len(index) == taken
        assert torch.equal(index.find(keys[:taken]), torch.arange(taken))
        assert not (index.find(keys[taken:]) + 1).any()
    assert held(index, 1000) == dict(zip(keys.tolist(), range(taken), strict=True))


def test_erased_keys_leave_the_others_unharmed(index):
    count = affordable(index, 20_000)
    keys = torch.arange(count) * 3
    index.insert(keys, NO_ROWS, 0)
    assert torch.equal(index.erase(keys[::3]), torch.arange(0, count, 3))
    expected = torch.arange(count)
    expected[::3] = -1
    assert torch.equal(index.find(keys), expected)
    assert index.erase(keys[:5]).tolist() == [-1, 1, 2, -1, 4]


def test_wrong_arguments_are_rejected_and_change_nothing(index):
    index.insert(tensor([1, 2, 3]), NO_ROWS, 10)
    before = held(index)
    with pytest.raises(ConfigError, check=at("keys", "got torch.int32[2] on cpu")):
        index.find(torch.zeros(2, dtype=torch.int32))
    with pytest.raises(ConfigError, check=at("keys", "got torch.int64[1, 2]")):
        index.erase(torch.zeros(1, 2, dtype=torch.int64))
    with pytest.raises(ConfigError, check=at("keys", "got torch.int64[2] on meta")):
        index.count(torch.zeros(2, dtype=torch.int64, device="meta"))
    with pytest.raises(ConfigError, check=at("rows", "got torch.int64[2] on cpu")):
        index.assign(tensor([5]), tensor([1, 2]))
    with pytest.raises(ConfigError, check=at("rows", "got 68719476736 to 68719476736")):
        index.assign(tensor([5]), tensor([2**36]))
    with pytest.raises(ConfigError, check=at("free_rows")):
        index.insert(tensor([5, 6]), tensor([4, -1]), 0)
    with pytest.raises(ConfigError, check=at("next_row")):
        index.insert(tensor([5, 6]), NO_ROWS, -1)
    with pytest.raises(StorageError, check=at("next_row")):
        index.insert(tensor([5, 1, 6, 5]), NO_ROWS, 2**36 - 1)
    with pytest.raises(ConfigError, check=at("items", "got start -1")):
        index.items(-1)
    with pytest.raises(ConfigError, check=at("items", "got start 0 and most 0")):
        index.items(0, 0)
    assert held(index) == before
    assert index.insert(tensor([5, 1]), NO_ROWS, 2**36 - 1)[0].tolist() == [2**36 - 1, 10]


def test_an_index_is_made_by_device_and_name():
    assert new_hash_index().device == torch.device("cpu")
    with pytest.raises(KernelError, check=at("HashIndex")):
        new_hash_index("meta", "cpu")
