# SPDX-License-Identifier: Apache-2.0
"""Run all benchmarks one after the other, so that none slows another down: `make bench`."""

import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
SCRIPTS = (
    "embedding.py",
    "hash_index.py",
    "call_overhead.py",
    "startup.py",
    "memory.py",
    "dlrm_step.py",
    "reader.py",
    "hugectr_reader.py",
    "fit.py",
    "retrieval.py",
    "source.py",
    "prepare.py",
)

if __name__ == "__main__":
    for script in SCRIPTS:
        print(f"== {script}", flush=True)
        subprocess.run([sys.executable, str(HERE / script)], check=True)
