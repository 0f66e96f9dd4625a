# SPDX-License-Identifier: Apache-2.0
"""Damaged and hostile files of every kind under every command: one clear line, no traceback, no wrong result."""

import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow.csv
import pyarrow.parquet as pq
import pytest

from terarec.checkpoint import complete_checkpoints
from tests.cli.cases import CASES, Originals, check_end, digests, watchdog
from tests.cli.conftest import Ended, Workshop, terarec
from tests.cli.damage import damage
from tests.cli.test_stopping import files
from tests.ps.redis_processes import RedisProcess, needs_redis

pytestmark = pytest.mark.usefixtures("reports")

FIRST = ("data", "norm", "raw", "run", "workflow.json")
"""Files of the cases in every run; others take seconds to make."""


@pytest.fixture(scope="module")
def originals(workshop: Workshop, tmp_path_factory: pytest.TempPathFactory) -> Originals:
    return Originals(tmp_path_factory.mktemp("original"), workshop)


def copied(originals: Originals, name: str, tmp_path: Path) -> tuple[Path, Path]:
    """Return a copy of the files of a case, and an empty directory for its results."""
    root, out = tmp_path / "root", tmp_path / "out"
    originals.copy(CASES[name].reads, root)
    out.mkdir()
    return root, out


def damaged(root: Path, part: str, random_numbers: random.Random) -> tuple[Path, str]:
    """Damage one file of a copy and return it, and what was done."""
    paths = [path for path in sorted((root / part).rglob("*")) if path.is_file()] or [root / part]
    file = random_numbers.choice(paths)
    change = damage(file, random_numbers)
    return file, f"{change} in {file.parent.relative_to(root)}"


def is_checksummed(path: Path) -> bool:
    return path.suffix in (".safetensors", ".parquet") or path.name == "state.json"


def scores(path: Path) -> np.ndarray:
    table = pq.read_table(path) if path.suffix == ".parquet" else pyarrow.csv.read_csv(path)
    return table.column(table.column_names[-1]).to_numpy()


def last_checkpoint(root: Path) -> dict[str, bytes]:
    return files(complete_checkpoints(root / "run" / "checkpoints")[-1])


RESULTS: dict[str, Callable[[Ended, Path, Path], object]] = {
    "evaluate": lambda ended, root, out: ended.figures["auc"],
    "predict": lambda ended, root, out: scores(out / "s.csv").tolist(),
    "predict data": lambda ended, root, out: scores(out / "s.parquet").tolist(),
    "resume": lambda ended, root, out: last_checkpoint(root),
}
"""Results that a change of a file with a checksum must not change."""


def run_case(seed: int, originals: Originals, tmp_path: Path, parts: tuple[str, ...] | None) -> None:
    """Damage one file as `seed` says, run one command that reads it, and check what came of it."""
    random_numbers = random.Random(seed)
    pairs = [(name, part) for name in sorted(CASES) for part in CASES[name].reads if parts is None or part in parts]
    if parts is not None:
        pairs = [(name, part) for name, part in pairs if set(CASES[name].reads) <= set(parts)]
    name, part = random_numbers.choice(pairs)
    root, out = copied(originals, name, tmp_path / "damaged")
    file, change = damaged(root, part, random_numbers)
    what = f"seed {seed}: {change}, {name}"
    before = digests(root, CASES[name].writes)
    with watchdog():
        ended = CASES[name](root, out)
    check_end(ended, what)
    assert digests(root, CASES[name].writes) == before, what
    if ended.code:
        left = [path.name for path in out.rglob("*") if path.is_file() and not path.name.startswith(("s.", "drift"))]
        assert not left or name in ("train", "warm start", "reproduce"), f"{what}: left {left}"
    elif name in RESULTS and is_checksummed(file):
        root_of_whole, out_of_whole = copied(originals, name, tmp_path / "whole")
        unchanged = CASES[name](root_of_whole, out_of_whole)
        expected = RESULTS[name](unchanged, root_of_whole, out_of_whole)
        assert RESULTS[name](ended, root, out) == expected, what


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_the_commands_succeed_on_whole_files(name: str, originals: Originals, tmp_path: Path) -> None:
    root, out = copied(originals, name, tmp_path)
    with watchdog():
        ended = CASES[name](root, out)
    assert ended.code == 0, ended.err


def test_a_damaged_file_gives_one_line_and_no_other_result(originals: Originals, tmp_path: Path) -> None:
    """Findings Q4 to Q6: pipes hung, and damaged files of several kinds were reported as defects."""
    for seed in range(4):
        run_case(seed, originals, tmp_path / str(seed), FIRST)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 400, 4))
def test_damaged_files_of_every_kind(first: int, originals: Originals, tmp_path: Path) -> None:
    """Findings Q4 to Q6, with servers, recommendations, recipes, exports and Triton's repositories, too."""
    for seed in range(first, first + 4):
        run_case(seed, originals, tmp_path / str(seed), None)


@needs_redis
@pytest.mark.slow
def test_damaged_runs_are_not_published(originals: Originals, tmp_path: Path) -> None:
    server = RedisProcess(tmp_path / "redis")
    try:
        for seed in range(60):
            root = tmp_path / str(seed)
            originals.copy(("run",), root)
            _, change = damaged(root, "run", random.Random(seed))
            before = digests(root)
            with watchdog():
                ended = terarec(
                    "publish", root / "run", "--to", f"redis://{server.address}/s{seed}", "--once", "--json"
                )
            check_end(ended, f"seed {seed}: {change}, publish")
            assert digests(root) == before, change
    finally:
        server.kill()
