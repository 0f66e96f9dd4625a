"""What the process took is told from the system's own count."""

from __future__ import annotations

from terarec.kernels import memory


def test_peak_memory_counts_what_was_touched():
    before = memory.peak_bytes()
    block = bytearray(before + 50_000_000)
    assert memory.peak_bytes() >= len(block)
