# SPDX-License-Identifier: Apache-2.0
"""Memory of the process: the peak is read from the system's own count; zeros that take none before they are written."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from terarec.errors import NoSpaceError
from terarec.kernels import memory
from terarec.kernels.pages import untouched_zeros
from tests.processes import run_new_python


def peak_bytes_of(statement: str) -> int:
    """The peak that a new process reports after a statement: this one's may be gigabytes that other tests took."""
    code = f"from terarec.kernels import memory; {statement}; print(memory.peak_bytes())"
    ended = run_new_python(code)
    assert ended.returncode == 0, ended.stderr
    return int(ended.stdout)


def test_peak_memory_counts_what_was_touched():
    assert 200_000_000 <= peak_bytes_of("bytearray(b'1') * 200_000_000") < 400_000_000


def test_what_the_starting_process_holds_is_not_counted():
    block = bytearray(b"1") * 300_000_000
    assert memory.peak_bytes() >= len(block)
    assert 0 < peak_bytes_of("pass") < len(block)


ZEROS = """
import resource, torch
from pathlib import Path
from terarec.kernels import memory
from terarec.kernels.pages import untouched_zeros
from terarec.kernels.slots import new_slot_map
from terarec.storage.changes import ChangedRows
from terarec.train.devices import keep_freed_memory

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

keep_freed_memory()
cpu = torch.device("cpu")
new_slot_map(1, cpu, "cpu")  # loads modules
blocks = [torch.empty(60 << 20, dtype=torch.uint8) for _ in range(10)]
wall = torch.ones(1 << 20)  # behind the blocks, so that the allocator keeps them
del blocks
before = resident()
kept = [
    untouched_zeros(50_000_000, torch.int32, "a test"),
    untouched_zeros(50_000_000, torch.int32, "a test", huge_pages=False),
    new_slot_map(20_000_000, cpu, "cpu"),
    new_slot_map(20_000_000, cpu, "cpu", is_sparse=True),
    ChangedRows(400_000_000, cpu),
]
print(resident() - before)
assert not kept[0].any() and not kept[1][::1000].any()
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="the system does not tell")
def test_zeros_take_no_memory_where_freed_blocks_are_kept() -> None:
    ended = run_new_python(ZEROS)
    assert ended.returncode == 0, ended.stderr
    assert int(ended.stdout) < 30_000_000


def test_few_zeros_and_none() -> None:
    for count in (0, 1, 1 << 18, 1 << 19):
        zeros = untouched_zeros(count, torch.int16, "a test")
        assert (zeros.shape, zeros.dtype) == ((count,), torch.int16)
        assert not zeros.any()
        zeros += 1
        assert int(zeros.sum()) == count


def test_more_than_the_address_space_is_rejected() -> None:
    with pytest.raises(NoSpaceError, match=r"a test: .*of address space requested"):
        untouched_zeros(1 << 60, torch.int8, "a test")
