"""Memory of the process: the peak is read from the system's own count."""

from __future__ import annotations

import subprocess
import sys

from terarec.kernels import memory


def test_peak_memory_counts_what_was_touched():
    before = memory.peak_bytes()
    block = bytearray(before + 50_000_000)
    assert memory.peak_bytes() >= len(block)


def test_what_the_starting_process_holds_is_not_counted():
    block = bytearray(b"1") * 300_000_000
    code = "from terarec.kernels import memory; print(memory.peak_bytes())"
    reported = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert 0 < int(reported) < len(block)
