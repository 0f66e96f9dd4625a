# SPDX-License-Identifier: Apache-2.0
"""Layouts and rows for tests of HugeCTR's files, and their bytes packed by hand."""

import itertools
import struct

import numpy as np
from hypothesis import strategies as st

from terarec.formats.block import ColumnBlock
from terarec.ragged import Ragged
from terarec.spec import RecordLayout, SparseInput


def make_layout(*, labels=1, dense=2, slots=((1, True), (3, False)), key_bytes=4, sizes=()) -> RecordLayout:
    """One sparse input for each of `slots`, (most keys, fixed)."""
    inputs = tuple(
        SparseInput(name=f"in{i}", nnz_per_slot=(most,), is_fixed_length=fixed) for i, (most, fixed) in enumerate(slots)
    )
    return RecordLayout(label_dim=labels, dense_dim=dense, inputs=inputs, key_bytes=key_bytes, slot_sizes=sizes)


def make_rows(layout: RecordLayout, num_rows: int, seed: int = 0, *, high: int = 1000):
    """(label, dense, keys) whose first label counts the rows; integers where a format may want integers."""
    rng = np.random.default_rng(seed)
    label = rng.integers(0, 2, (num_rows, layout.label_dim)).astype(np.float32)
    label[:, 0] = np.arange(num_rows)
    dense = rng.integers(0, 100, (num_rows, layout.dense_dim)).astype(np.float32)
    keys = []
    for sparse in layout.inputs:
        for most in sparse.nnz_per_slot:
            least = most if sparse.is_fixed_length else 0
            offsets = np.concatenate([[0], np.cumsum(rng.integers(least, most + 1, num_rows))]).astype(np.int64)
            keys.append(Ragged(rng.integers(0, high, offsets[-1]), offsets))
    return label, dense, keys


def key_code(layout: RecordLayout) -> str:
    return "I" if layout.key_bytes == 4 else "q"


def norm_payloads(layout: RecordLayout, label, dense, keys) -> list[bytes]:
    """The records' bytes, by the document."""
    payloads = []
    for row in range(len(label)):
        payload = struct.pack(f"<{layout.label_dim}f", *label[row]) + struct.pack(f"<{layout.dense_dim}f", *dense[row])
        for values, offsets in keys:
            bag = values[offsets[row] : offsets[row + 1]].tolist()
            payload += struct.pack(f"<i{len(bag)}{key_code(layout)}", len(bag), *bag)
        payloads.append(payload)
    return payloads


def framed(payload: bytes) -> bytes:
    return struct.pack("<i", len(payload)) + payload + bytes([sum(payload) & 255])


def norm_bytes(layout: RecordLayout, label, dense, keys, *, checksum: bool) -> bytes:
    header = struct.pack("<8q", checksum, len(label), layout.label_dim, layout.dense_dim, layout.num_slots, 0, 0, 0)
    records = [header, *norm_payloads(layout, label, dense, keys)]
    return b"".join(framed(record) if checksum else record for record in records)


def bags(column) -> list[list[int]]:
    """One list of keys a row, whichever form the column has."""
    if not isinstance(column, tuple):
        return [[key] for key in column.tolist()]
    values, offsets = column
    return [values[start:stop].tolist() for start, stop in itertools.pairwise(offsets)]


def assert_same_rows(found: ColumnBlock, label, dense, keys) -> None:
    np.testing.assert_array_equal(found.label, label)
    np.testing.assert_array_equal(found.dense, dense)
    assert found.label.dtype == found.dense.dtype == np.float32
    assert [bags(column) for column in found.keys] == [bags(column) for column in keys]


@st.composite
def layouts(draw, *, one_hot=False, fixed=False):
    slot = st.just((1, True)) if one_hot else st.tuples(st.integers(1, 4), st.just(True) if fixed else st.booleans())
    return make_layout(
        labels=draw(st.integers(1, 3)),
        dense=draw(st.integers(0, 3)),
        slots=tuple(draw(st.lists(slot, max_size=4))),
        key_bytes=4 if one_hot else draw(st.sampled_from([4, 8])),
    )
