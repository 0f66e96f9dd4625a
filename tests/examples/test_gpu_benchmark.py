"""The benchmark for GPUs runs where there is none, at a tiny size on Triton's interpreter."""

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is installed on Linux alone")

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "gpu.py"


@pytest.mark.slow
def test_every_part_runs_interpreted():
    result = subprocess.run([sys.executable, SCRIPT, "--interpret"], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-2000:]
    assert result.stdout.count("right ") == 3
