# SPDX-License-Identifier: Apache-2.0
"""Tables over several processes: the exchange between ranks without TensorFlow, and training with it."""

import importlib.util
import subprocess
from pathlib import Path

import numpy as np
import pytest

from tests.params import in_every_run
from tests.processes import Ended
from tests.programs import lacks, two_processes
from tests.tensorflow.ranks import ROOT, run_ranks

EXCHANGE = """
import os, socket, sys, time
import numpy as np
from terarec.errors import CollectiveError
from terarec.kernels.cpu import _tensorflow as core
from terarec.kernels.environment import launch
from terarec.tensorflow.joining import connect
place, case = launch(), sys.argv[1]
rank, size = place.rank, place.size
try:
    sockets = connect(place, float(sys.argv[2]))
except CollectiveError as error:
    print(type(error).__name__, error)
    sys.exit()
assert all(one is None or one.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) for one in sockets)
core.join(rank, [-1 if one is None else one.detach() for one in sockets], float(sys.argv[2]))
def parts(round):
    # Of different sizes, also none, and more than the system keeps of a connection.
    sizes = [(round * 7 + 3 * rank + other) % 5 * (300_000 if round == 2 else 3) for other in range(size)]
    return [np.arange(count, dtype=np.int64) * (rank + 1) + other + round for other, count in enumerate(sizes)]
def send(what, round):
    return core.exchange(what, [part.view(np.uint8) for part in parts(round)])
for round in range(4):
    found = [part.view(np.int64) for part in send(f"round {round}", round)]
    for other, part in enumerate(found):
        count = (round * 7 + 3 * other + rank) % 5 * (300_000 if round == 2 else 3)
        np.testing.assert_array_equal(part, np.arange(count) * (other + 1) + rank + round)
try:
    if case == "death" and rank == 1:
        os._exit(3)
    if case == "silence" and rank == 1:
        time.sleep(60)
        os._exit(0)
    send("other" if case == "mismatch" and rank == 1 else "last", 1)
    print("done")
except RuntimeError as error:
    print("RuntimeError", error)
    try:
        send("again", 1)
    except RuntimeError as again:
        print(str(again) == str(error))
"""


def outputs(ended: list[Ended]) -> list[str]:
    for one in ended:
        assert one.returncode == 0, one.stderr
    return [one.stdout for one in ended]


@pytest.mark.parametrize(("size", "is_mpi"), in_every_run([(3, False)], [(3, False), (2, True)]))
def test_each_rank_gets_what_every_other_sends(size: int, is_mpi: bool) -> None:
    assert outputs(run_ranks(size, ["-c", EXCHANGE, "all", 200], is_mpi=is_mpi)) == ["done\n"] * size


@pytest.mark.parametrize(
    ("case", "limit", "expected"),
    [
        ("death", 200, "rank 1 has closed its connection in 'last'"),
        pytest.param("silence", 5, "no answer of rank 1 for 5 s in 'last'", marks=pytest.mark.slow),
        ("mismatch", 200, "rank 1 is at 'other', this rank at 'last'"),
    ],
)
def test_a_rank_that_fails_ends_the_calls_of_the_others(case: str, limit: float, expected: str) -> None:
    first = run_ranks(2, ["-c", EXCHANGE, case, limit])[0]
    assert first.returncode == 0, first.stderr
    assert expected in first.stdout
    assert first.stdout.endswith("True\n")


@pytest.mark.slow
def test_a_rank_that_does_not_come_is_named() -> None:
    for text in outputs(run_ranks(2, ["-c", EXCHANGE, "all", 3], counted=3)):
        assert text.startswith("CollectiveError")
    first = outputs(run_ranks(1, ["-c", EXCHANGE, "all", 1], counted=2))[0]
    assert "rank 0 waited for rank 1" in first


PROGRAM = "tests.tensorflow.rank_program"
needs_tensorflow = pytest.mark.skipif(
    importlib.util.find_spec("tensorflow") is None, reason=lacks("tensorflow", "pip install 'terarec[tensorflow]'")
)


@pytest.mark.slow
@needs_tensorflow
@pytest.mark.parametrize("launcher", ["torchrun", "mpirun"])
def test_launchers_start_ranks_that_train_as_one_process_does(launcher: str, tmp_path: Path) -> None:
    command = [*two_processes(launcher), PROGRAM, "train", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("done") == 2


@pytest.mark.slow
@needs_tensorflow
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("case", ["train", "horovod", "keras", "faults", "graphs", "empty", "checkpoints"])
def test_training_on_ranks(size: int, case: str, tmp_path: Path) -> None:
    assert outputs(run_ranks(size, ["-m", PROGRAM, case, tmp_path], timeout=900)) == ["done\n"] * size


@pytest.mark.slow
@needs_tensorflow
def test_files_of_ranks_are_those_of_one_process(tmp_path: Path) -> None:
    for size in (1, 2, 3):
        assert (
            outputs(run_ranks(size, ["-m", PROGRAM, "write", tmp_path / str(size)], timeout=900)) == ["done\n"] * size
        )
        assert outputs(run_ranks(4 - size, ["-m", PROGRAM, "read", tmp_path / str(size)], timeout=900))
    files = sorted(path.name for path in (tmp_path / "1").iterdir())
    assert len(files) == 11
    for name in files:
        if "static" in name or "-" not in name:  # keys of others are in the order of ranks
            continue
        contents = [np.sort(np.fromfile(tmp_path / str(size) / name, np.uint8)) for size in (1, 2, 3)]
        np.testing.assert_array_equal(contents[0], contents[1])
        np.testing.assert_array_equal(contents[0], contents[2])
