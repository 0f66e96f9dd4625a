# SPDX-License-Identifier: Apache-2.0
"""Ranks as processes of this machine: what torchrun or mpirun would start."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.addresses import own_address
from tests.processes import Ended, Python

ROOT = Path(__file__).parents[2]


def run_ranks(
    size: int, words: Sequence[object], *, is_mpi: bool = False, timeout: float = 300, counted: int | None = None
) -> list[Ended]:
    """Run ``python WORDS`` in `size` processes, and return how each ended.

    A program behind ``-c`` runs in a `Python` process, which cannot load the ops of TensorFlow.

    Args:
        size: Number of processes.
        words: What follows ``python``.
        is_mpi: Whether they get the variables of Open MPI in place of torchrun's.
        timeout: Seconds after which they are ended.
        counted: Number of processes that they are told; None for `size`.
    """
    host, port = own_address()
    told = str(size if counted is None else counted)
    processes: list[Python | subprocess.Popen[str]] = []
    for rank in range(size):
        variables = {"RANK": str(rank), "WORLD_SIZE": told, "MASTER_ADDR": host, "MASTER_PORT": str(port)}
        if is_mpi:
            names = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
            values = (str(rank), told, str(rank), told)
            variables = {f"OMPI_COMM_WORLD_{name}": value for name, value in zip(names, values, strict=True)}
        if words[0] == "-c":
            processes.append(Python(str(words[1]), *words[2:], environment=variables, cwd=ROOT))
            continue
        processes.append(
            subprocess.Popen(
                [sys.executable, *map(str, words)],
                env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", **variables},
                cwd=ROOT,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    ended = []
    for process in processes:
        if isinstance(process, Python):
            with contextlib.closing(process):
                ended.append(process.wait(timeout))
            continue
        try:
            output = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            output = process.communicate()
        ended.append(Ended(process.returncode, *output))
    return ended
