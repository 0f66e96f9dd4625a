# SPDX-License-Identifier: Apache-2.0
"""Commands under limits of the system: little memory, files that may not grow, directories that may not be written."""

import sys
from pathlib import Path

import pytest

from tests.cli.cases import CASES, Originals, check_end, digests
from tests.cli.conftest import Ended, Workshop
from tests.params import in_every_run
from tests.processes import run_python

MEMORY = """
import resource
from terarec.cli import main
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + int(sys.argv.pop(1)),) * 2)
main()
"""
FILE_SIZE = """
import resource
from terarec.cli import main
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv.pop(1)),) * 2)
main()
"""
OPEN_FILES = """
import resource
from terarec.cli import main
room = int(sys.argv.pop(1))
# The limit is one of the highest number: gaps below it would give more room.
highest = max(map(int, os.listdir("/proc/self/fd")))
while (last := os.open("/dev/null", os.O_RDONLY)) <= highest:
    pass
os.close(last)
resource.setrlimit(resource.RLIMIT_NOFILE, (last + room,) * 2)
main()
"""
WITHOUT_PRIVILEGES = """
import ctypes
from terarec.cli import main
sys.argv.pop(1)
ctypes.CDLL(None).capset((ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)())  # root may write anywhere
main()
"""


def limited(program: str, limit: int, *words: object) -> Ended:
    """Run a command in a process that limits itself first."""
    ended = run_python(f"import os, signal, sys\n{program}", limit, *words, "--json")
    return Ended(ended.returncode, ended.stdout, ended.stderr)


@pytest.fixture(scope="module")
def originals(workshop: Workshop, tmp_path_factory: pytest.TempPathFactory) -> Originals:
    return Originals(tmp_path_factory.mktemp("original"), workshop)


WORDS = [name for name, case in CASES.items() if case.run is None]


@pytest.mark.parametrize("units", in_every_run([20_000], [20_000, 500_000]))
def test_layers_too_large_for_memory(units: int, workshop: Workshop, tmp_path: Path) -> None:
    """Finding Q6: they were reported as a defect."""
    shape = ["--model", "dlrm", "--top", f"{units}-{units}", "--bottom", "8-4", "--width", 4]
    ended = limited(MEMORY, 1 << 30, "train", *shape, "--data", workshop.data, "--out", tmp_path / "run")
    check_end(ended, "train")
    assert ended.figures["error"].startswith("out of memory")
    assert not list(tmp_path.rglob("manifest.json"))


@pytest.mark.parametrize(
    ("name", "megabytes"),
    in_every_run([("predict data", 64)], [(name, size) for name in WORDS for size in (16, 64, 256, 1024)]),
)
def test_little_memory(name: str, megabytes: int, originals: Originals, tmp_path: Path) -> None:
    """Finding Q6: ``ulimit -v`` was reported as a defect."""
    root, out = tmp_path / "root", tmp_path / "out"
    originals.copy(CASES[name].reads, root)
    out.mkdir()
    before = digests(root, CASES[name].writes)
    ended = limited(MEMORY, megabytes << 20, *CASES[name].words(root, out))
    check_end(ended, f"{name}, {megabytes} MiB")
    assert digests(root, CASES[name].writes) == before


@pytest.mark.slow
@pytest.mark.parametrize("num_bytes", [0, 1000, 20_000])
@pytest.mark.parametrize("name", WORDS)
def test_files_that_may_not_grow(name: str, num_bytes: int, originals: Originals, tmp_path: Path) -> None:
    """``ulimit -f``: the system ends a write as that to a full disk, since Python ignores SIGXFSZ."""
    root, out = tmp_path / "root", tmp_path / "out"
    originals.copy(CASES[name].reads, root)
    out.mkdir()
    before = digests(root, CASES[name].writes)
    ended = limited(FILE_SIZE, num_bytes, *CASES[name].words(root, out))
    check_end(ended, f"{name}, {num_bytes} bytes")
    assert digests(root, CASES[name].writes) == before
    if ended.code and name not in ("train", "warm start", "reproduce"):
        assert not digests(out), name


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="numbers of open files in /proc")
@pytest.mark.parametrize("room", [1, 4])
@pytest.mark.parametrize("name", ["prepare", "train", "export", "predict data"])
def test_few_open_files(name: str, room: int, originals: Originals, tmp_path: Path) -> None:
    """Finding Q36: ``ulimit -n`` left an empty directory of temporary files, or called a whole file damaged."""
    root, out = tmp_path / "root", tmp_path / "out"
    originals.copy(CASES[name].reads, root)
    out.mkdir()
    before = digests(root, CASES[name].writes)
    ended = limited(OPEN_FILES, room, *CASES[name].words(root, out))
    check_end(ended, f"{name}, room for {room}")
    assert "complete" not in ended.err
    assert digests(root, CASES[name].writes) == before
    if ended.code:
        assert not digests(out), name


@pytest.mark.skipif(sys.platform != "linux", reason="gives up the privileges of root by a call of Linux")
@pytest.mark.parametrize("name", in_every_run(["predict data"], WORDS))
def test_directories_that_may_not_be_written(name: str, originals: Originals, tmp_path: Path) -> None:
    root, out = tmp_path / "root", tmp_path / "out"
    originals.copy(CASES[name].reads, root)
    out.mkdir()
    before = digests(tmp_path)
    paths = [tmp_path, *tmp_path.rglob("*")]
    for path in paths:
        path.chmod(0o555 if path.is_dir() else 0o444)
    try:
        ended = limited(WITHOUT_PRIVILEGES, 0, *CASES[name].words(root, out))
    finally:
        for path in paths:
            path.chmod(0o755 if path.is_dir() else 0o644)
    check_end(ended, name)
    assert digests(tmp_path) == before
    is_reader = name in ("evaluate", "inspect run", "inspect data", "plan", "dry-run")
    assert (ended.code == 0) == is_reader, f"{name}: {ended.err}"
