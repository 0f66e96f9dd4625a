# SPDX-License-Identifier: Apache-2.0
"""Finding K5: on a machine with a load of 50, a prediction waited for ever while it read a file with Arrow."""

import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.cli.conftest import Workshop, figures

AT_ONCE = 50
PREDICTIONS = 100
LIMIT_SECONDS = 1200

# Arrow's threads run before the first fork; a forked process has none of them.
FORKS = """
import os, sys
import pyarrow as pa
import pyarrow.parquet as pq
from terarec.cli.app import run

run_directory, log, out, at_once, predictions = sys.argv[1], sys.argv[2], sys.argv[3], *map(int, sys.argv[4:])
table = pa.table({f"column {number}": range(100_000) for number in range(8)})
pq.write_table(table, out + "/table.parquet", row_group_size=10_000)
before = len(os.listdir("/proc/self/task"))
assert pq.read_table(out + "/table.parquet", use_threads=True).equals(table)
assert run(["predict", run_directory, log, "--out", out + "/parent.csv"]) == 0
assert len(os.listdir("/proc/self/task")) > before
for first in range(0, predictions, at_once):
    children = []
    for number in range(first, first + at_once):
        child = os.fork()
        if child == 0:
            os._exit(run(["predict", run_directory, log, "--out", f"{out}/{number}.csv"]))
        children.append(child)
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * len(children)
"""


def _fresh(run: Path, log: Path, out: Path) -> None:
    def predict(number: int) -> None:
        command = [sys.executable, "-m", "terarec", "predict", run, log, "--out", out / f"{number}.csv"]
        subprocess.run(command, check=True, capture_output=True, timeout=LIMIT_SECONDS)

    with ThreadPoolExecutor(AT_ONCE) as pool:
        list(pool.map(predict, range(PREDICTIONS)))


def _forked(run: Path, log: Path, out: Path) -> None:
    command = [sys.executable, "-c", FORKS, run, log, out, str(AT_ONCE), str(PREDICTIONS)]
    subprocess.run(command, check=True, timeout=LIMIT_SECONDS)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="threads are counted in /proc")
@pytest.mark.parametrize("start", [_fresh, _forked], ids=["fresh", "forked"])
def test_k5_a_hundred_predictions_end(
    start: Callable[[Path, Path, Path], None], workshop: Workshop, tmp_path: Path
) -> None:
    log = workshop.raw / "day_1.tsv"
    figures("predict", workshop.run, log, "--out", tmp_path / "alone.csv")
    start(workshop.run, log, tmp_path)
    expected = (tmp_path / "alone.csv").read_bytes()
    assert expected
    for number in range(PREDICTIONS):
        assert (tmp_path / f"{number}.csv").read_bytes() == expected
