# SPDX-License-Identifier: Apache-2.0
"""Run one side of prepare_peers.py once: ``python -m peer_sides.prepare_worker <side> <job as JSON>``.

It prints one JSON line: the side's version, the seconds of its work (without imports and the start of clusters), peak
memory, and the rows of each id if the job requests them.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from pathlib import Path

from json_answers import open_answers

from peer_sides.criteo_job import Job, Side
from peer_sides.tree_memory import TreeMemory

SIDES = {
    "terarec": ("prepare_own", "Terarec"),
    "polars": ("prepare_own", "Polars"),
    "polars-scan": ("prepare_own", "PolarsScan"),
    "pyarrow-scan": ("prepare_own", "PyArrowScan"),
    "bytes": ("prepare_own", "Bytes"),
    "pyspark": ("prepare_pyspark", "DataFrames"),
    "nvtabular": ("prepare_nvtabular", "DaskWorkflow"),
    "dlrm": ("prepare_dlrm", "DataUtils"),
    "dlrm-processes": ("prepare_dlrm", "DataUtilsInProcesses"),
}


def main() -> None:
    answers = open_answers()
    name, described = sys.argv[1:]
    fields = json.loads(described)
    counted, threads = fields.pop("counted"), fields.pop("threads")
    job = Job(**{key: Path(value) for key, value in fields.items()}, threads=threads)
    module, kind = SIDES[name]
    side: Side = getattr(importlib.import_module(f"peer_sides.{module}"), kind)(threads)
    with TreeMemory() as memory:
        start = time.perf_counter()
        side.prepare(job)
        seconds = time.perf_counter() - start
    counts = side.counts(job) if counted else None
    answer = {"version": side.version, "seconds": seconds, "peak_bytes": memory.peak, "counts": counts}
    answers.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main()
