# SPDX-License-Identifier: Apache-2.0
"""A source of tiny row groups and what tests check in batches."""

import json
import threading
from unittest import mock

import torch

from terarec.formats.block import slice_rows
from tests.formats.samples import make_block, make_spec


class TinyGroups:
    """Rows in groups of given sizes; a `SampleSource` like any other."""

    parts = ()
    keysets = None

    def __init__(self, sizes, hotness=(1, 3), **columns):
        self.spec = make_spec(hotness=hotness, **columns)
        self.group_rows = tuple(sizes)
        self.block = make_block(self.spec, sum(sizes))
        self.reads = []

    def read(self, group):
        self.reads.append(group)
        start = sum(self.group_rows[:group])
        return slice_rows(self.block, start, start + self.group_rows[group])


def reading_threads():
    """The threads of `terarec.parallel`; those of tables that other tests left may come and go meanwhile."""
    names = ("terarec_", "terarec-items", "terarec-prefetch")
    return {thread for thread in threading.enumerate() if thread.name.startswith(names)}


def first_of_workers(loader):
    """Return the first batch of a loader with worker processes, which end before this returns or raises.

    After an error in a worker, torch waits 5 s for each of them to leave by itself and then ends it.
    """
    iterator = iter(loader)
    try:
        return next(iterator)
    finally:
        with mock.patch("torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL", 0.1):
            iterator._shutdown_workers()


def row_numbers(batches):
    """The first label of `make_block` counts the rows."""
    return [int(number) for batch in batches for number in batch.label[:, 0]]


def assert_same_batches(found, expected):
    assert [batch.batch_size for batch in found] == [batch.batch_size for batch in expected]
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours.label, theirs.label)
        assert torch.equal(ours.dense, theirs.dense)
        assert ours.sparse.names == theirs.sparse.names
        assert torch.equal(ours.sparse.keys, theirs.sparse.keys)
        assert torch.equal(ours.sparse.offsets, theirs.sparse.offsets)
        assert (ours.weight is None) == (theirs.weight is None)
        assert ours.weight is None or torch.equal(ours.weight, theirs.weight)
        assert ours.metadata == theirs.metadata


def assert_replays(make_reader, epochs=2):
    """For any reader: restoring after any batch, over `epochs` epochs, gives exactly the batches that followed.

    States travel as JSON text into a new reader made by `make_reader`, as a resumed run would do it.
    """
    reader = make_reader()
    states, batches = [json.dumps(reader.state_dict())], []
    for _ in range(epochs):
        for batch in reader:
            batches.append(batch)
            states.append(json.dumps(reader.state_dict()))
    final = reader.state_dict()
    assert len(batches) == epochs * len(reader)
    for position, state in enumerate(states):
        resumed = make_reader()
        resumed.load_state_dict(json.loads(state))
        rest = []
        while resumed.state_dict()["epoch"] < epochs:
            rest += list(resumed)
        assert_same_batches(rest, batches[position:])
        assert resumed.state_dict() == final
