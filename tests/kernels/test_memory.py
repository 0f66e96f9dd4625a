"""Memory of the process: the peak is read from the system's own count."""

from __future__ import annotations

from terarec.kernels import memory
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
