# SPDX-License-Identifier: Apache-2.0
"""A state saved after any batch replays the rest exactly: every configuration of the reader, every position."""

import itertools
import json

import pytest
import torch

from terarec.data import InMemorySource, Reader
from terarec.errors import ConfigError
from tests.data.sources import TinyGroups, assert_replays, assert_same_batches
from tests.errors import at
from tests.formats.samples import METADATA, make_block, make_spec, write_split
from tests.params import in_every_run

GROUPS = (7, 3, 0, 5, 8, 1, 6, 4)


@pytest.mark.parametrize(
    ("shuffle", "drop_last", "batch_size"),
    in_every_run(
        itertools.product([False, True], [True], [6, 34]),
        itertools.product([False, True], [False, True], [1, 6, 34, 40]),
    ),
)
def test_every_position_over_two_epochs(shuffle, drop_last, batch_size):
    source = TinyGroups(GROUPS)
    assert_replays(lambda: Reader(source, batch_size=batch_size, shuffle=shuffle, drop_last=drop_last, seed=5))


@pytest.mark.parametrize(("threads", "prefetch"), [(1, 0), (3, 0), (1, 5), (4, 3)])
def test_every_number_of_threads(threads, prefetch):
    source = TinyGroups(GROUPS)
    assert_replays(lambda: Reader(source, batch_size=5, shuffle=True, threads=threads, prefetch=prefetch))


@pytest.mark.parametrize("storage", ["parquet", "raw"])
@pytest.mark.parametrize("shuffle", [False, True])
def test_data_sets_on_disk(tmp_path, storage, shuffle):
    spec = make_spec(storage)
    write_split(tmp_path, spec, make_block(spec, 23), cuts=(9, 9), rows_per_group=4)
    assert_replays(lambda: Reader(tmp_path, batch_size=4, shuffle=shuffle))


def test_arrays_in_memory():
    spec = make_spec()
    block = make_block(spec, 11)
    source = InMemorySource(spec, block.label, block.dense, block.keys)
    assert_replays(lambda: Reader(source, batch_size=4, shuffle=True))


def test_a_state_taken_under_other_threads_and_prefetch_fits():
    source = TinyGroups(GROUPS)
    whole = list(Reader(source, batch_size=5, shuffle=True, seed=3))
    ahead = Reader(source, batch_size=5, shuffle=True, seed=3, threads=4, prefetch=4)
    iterator = iter(ahead)
    next(iterator)
    next(iterator)
    plain = Reader(source, batch_size=5, shuffle=True, prefetch=0)
    plain.load_state_dict(ahead.state_dict())
    assert_same_batches(list(plain), whole[2:])


def test_a_reader_can_go_back_to_its_own_state():
    reader = Reader(TinyGroups(GROUPS), batch_size=5, shuffle=True)
    iterator = iter(reader)
    next(iterator)
    state = reader.state_dict()
    rest = list(iterator)
    reader.load_state_dict(state)
    assert_same_batches(list(reader), rest)


def test_an_epoch_left_early_starts_over():
    reader = Reader(TinyGroups(GROUPS), batch_size=5, shuffle=True)
    first = next(iter(reader))
    batches = list(reader)
    assert_same_batches([first], batches[:1])
    assert len(batches) == len(reader)
    assert reader.state_dict()["epoch"] == 1


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_repeating_reader_gives_full_batches_across_epochs_and_replays_them(shuffle):
    source = TinyGroups(GROUPS, weight="w", metadata=METADATA)

    def make(repeat):
        return Reader(source, batch_size=6, shuffle=shuffle, repeat=repeat, seed=5)

    epochs = make(repeat=False)
    rows = torch.cat([batch.dense for _ in range(3) for batch in epochs])
    reader = make(repeat=True)
    assert (reader.repeat, len(reader)) == (True, len(epochs))
    states, batches = [json.dumps(reader.state_dict())], []
    for batch in itertools.islice(reader, len(rows) // 6):
        batches.append(batch)
        states.append(json.dumps(reader.state_dict()))
    assert {batch.batch_size for batch in batches} == {6}
    assert torch.equal(torch.cat([batch.dense for batch in batches]), rows[: len(batches) * 6])
    for position, state in enumerate(states):
        resumed = make(repeat=True)
        resumed.load_state_dict(json.loads(state))
        rest = itertools.islice(resumed, len(batches) - position)
        assert_same_batches(list(rest), batches[position:])
        assert json.dumps(resumed.state_dict()) == states[-1]


def test_resuming_reads_only_the_rest():
    source = TinyGroups((10,) * 8)
    reader = Reader(source, batch_size=10)
    reader.load_state_dict({**reader.state_dict(), "rows_read": 60})
    assert len(list(reader)) == 2
    assert source.reads == [6, 7]


WRONG = {
    "rows": ({"rows": 35}, ("reader state", "rows is 35")),
    "batch_size": ({"batch_size": 6}, ("reader state", "batch_size is 6")),
    "shuffle": ({"shuffle": True}, ("reader state", "shuffle is True")),
    "drop_last": ({"drop_last": None}, ("reader state", "drop_last is None")),
    "too far": ({"rows_read": 35}, ("reader state", "rows_read is 35")),
    "repeat": ({"repeat": True}, ("reader state", "repeat is True")),
    "negative": ({"epoch": -1}, ("state['epoch']",)),
    "mistyped": ({"seed": "0"}, ("state['seed']",)),
}


@pytest.mark.parametrize("case", WRONG)
def test_states_that_do_not_fit(case):
    change, place = WRONG[case]
    reader = Reader(TinyGroups(GROUPS), batch_size=5)
    before = reader.state_dict()
    with pytest.raises(ConfigError, check=at(*place)):
        reader.load_state_dict({**before, **change})
    assert reader.state_dict() == before
    with pytest.raises(ConfigError, check=at("reader state", "shuffle is None")):
        reader.load_state_dict({})
