# SPDX-License-Identifier: Apache-2.0
"""The preprocessing of facebookresearch/dlrm: `getCriteoAdData` of data_utils.py in a separate checkout.

The environment variable DLRM_DATA_UTILS has the path of that file. The function keeps every value, numbers the values
by first appearance, and writes the parsed rows, the dictionaries and the encoded rows as compressed NumPy files.
"""

from __future__ import annotations

import importlib.util
import os
from types import ModuleType

import numpy as np

from peer_sides.criteo_job import Counts, Job

_DAYS = 7  # number of pieces of the log, its default


class DataUtils:
    """Implements `Side`, on one thread as published."""

    version = f"facebookresearch/dlrm data_utils.py, numpy {np.__version__}"
    in_processes = False

    def __init__(self, threads: int) -> None:
        self.data_utils = _load(os.environ["DLRM_DATA_UTILS"])

    def prepare(self, job: Job) -> None:
        log = job.out / "train.txt"
        log.symlink_to(job.whole)
        self.data_utils.getCriteoAdData(
            str(log), "", days=_DAYS, criteo_kaggle=True, dataset_multiprocessing=self.in_processes
        )

    def counts(self, job: Job) -> Counts | None:
        return None


class DataUtilsInProcesses(DataUtils):
    """Run the job with its option of one process per day."""

    in_processes = True


def _load(path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location("data_utils", path)
    if spec is None or spec.loader is None:
        raise SystemExit(f"DLRM_DATA_UTILS: got {path!r}, expected the data_utils.py of facebookresearch/dlrm")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
