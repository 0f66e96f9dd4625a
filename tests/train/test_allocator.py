import subprocess
import sys

import pytest

CODE = """
import resource, torch
from terarec.train.devices import keep_freed_memory
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(4):
        torch.empty(48 << 18).fill_(1.0)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
faults()
left = faults()
kept = keep_freed_memory()
faults()
print(int(kept), left, faults())
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc only")
def test_large_blocks_are_reused_without_page_faults() -> None:
    output = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True).stdout
    kept, faults_before, faults_after = map(int, output.split())
    if not kept:
        pytest.skip("this C library does not take the setting")
    assert faults_after < faults_before / 10
