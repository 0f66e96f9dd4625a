import subprocess
import sys

import pytest

CODE = """
import resource, sys, torch
from terarec.train.allocator import keep_freed_memory
kept = keep_freed_memory() if sys.argv[1] == "keep" else False
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(4):
        torch.empty(48 << 18).fill_(1.0)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
faults()
print(kept, faults())
"""


def run(mode: str) -> tuple[bool, int]:
    output = subprocess.run([sys.executable, "-c", CODE, mode], capture_output=True, text=True, check=True).stdout
    kept, faults = output.split()
    return kept == "True", int(faults)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc only")
def test_large_blocks_are_reused_without_page_faults() -> None:
    kept, faults = run("keep")
    if not kept:
        pytest.skip("this C library does not take the setting")
    assert faults < run("leave")[1] / 10
