# SPDX-License-Identifier: Apache-2.0
"""Commands over copies of the files of a newcomer, and what must hold however they end."""

import contextlib
import hashlib
import json
import shutil
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from terarec.apps.triton_models import DATASET, PROGRAM, DenseStage, LookupStage, WorkflowStage
from terarec.cli.failures import failure_of
from terarec.serve import ServedTables
from terarec.spec import ParameterServerSpec
from tests.apps.recipes.frappe import write_planted
from tests.cli.conftest import Ended, Workshop, figures, terarec
from tests.cli.test_stopping import start

SECONDS = 120
"""After which a command counts as hung."""


class Originals:
    """One file of each kind that terarec reads, made when a test first asks for it.

    Args:
        root: Where they are kept.
        workshop: The first results of a newcomer.
    """

    def __init__(self, root: Path, workshop: Workshop) -> None:
        self._root = root
        self._makers: dict[str, Callable[[Path], object]] = {
            "run": lambda out: shutil.copytree(workshop.run, out),
            "data": lambda out: shutil.copytree(workshop.data, out),
            "raw": lambda out: shutil.copytree(workshop.raw, out),
            "norm": lambda out: figures("convert", workshop.data, "--to", "norm", "--out", out, "--keysets"),
            "workflow.json": lambda out: figures("workflow", "criteo", "--out", out),
            "shop": _write_shop,
            "frappe": write_planted,
            "reproduced": lambda out: figures(*_reproduce(self.path("frappe"), out)),
            "triton": lambda out: figures("export", workshop.run, "--to", "triton", "--out", out),
        }

    def path(self, name: str) -> Path:
        path = self._root / name
        if not path.exists():
            self._makers[name](path)
        return path

    def copy(self, names: Sequence[str], root: Path) -> None:
        """Copy files to `root`; a run there names the data there."""
        root.mkdir(parents=True)
        for name in names:
            path = self.path(name)
            (shutil.copytree if path.is_dir() else shutil.copy)(path, root / name)
        if "run" in names:
            file = root / "run" / "run.json"
            described = json.loads(file.read_text())
            described["training"]["epochs"] = 2  # so that a resumed run has something to do
            file.write_text(json.dumps({**described, "data": str(root / "data")}))


def _write_shop(out: Path) -> None:
    """Write users, films and an index of them, and a model of two towers."""
    out.mkdir()
    figures("generate", "movielens", "--rows", 1_000, "--out", out / "raw", "--seed", 3)
    ratings, movies = out / "raw" / "ratings.csv", out / "raw" / "movies.csv"
    figures("prepare", "movielens", ratings, "--table", f"movies={movies}", "--out", out / "data")
    towers = ["--set", "model.user=userId", "--set", "model.item=movieId,genres"]
    shape = ["--data", out / "data", "--epochs", 1, "--width", 4, "--set", "model.hidden=4"]
    figures("train", "--model", "two_tower", *shape, *towers, "--out", out / "towers")
    pq.write_table(pa.table({"userId": [1, 2, 3], "past_movies": [[1], [], [2, 3]]}), out / "users.parquet")
    figures(*_recommend(out, out / "first.csv"))


def _recommend(shop: Path, out: Path) -> list[object]:
    files = ["--items", shop / "raw" / "movies.csv", "--key", "movieId", "--index", shop / "index"]
    return ["recommend", shop / "towers", shop / "users.parquet", *files, "--out", out]


def _reproduce(files: Path, out: Path) -> list[object]:
    return ["reproduce", "frappe_x1", "--model", "lr", "--data", files, "--out", out]


def _serve(root: Path, out: Path) -> Ended:
    """Start a server, in a process of its own, and stop it once it is ready."""
    process = start("serve", root / "run", "--port", "0", "--json")
    try:
        with contextlib.suppress(AssertionError):
            if "url" in json.loads(process.read_line(SECONDS)):
                process.send_signal(signal.SIGINT)
        ended = process.wait(SECONDS)
    finally:
        process.close()
    return Ended(ended.returncode, ended.stdout, ended.stderr)


def _triton(root: Path, out: Path) -> Ended:
    """Load the stages of a repository as Triton's processes do."""
    models = root / "triton"
    try:
        WorkflowStage(models / "terarec_workflow" / "1" / DATASET)
        LookupStage(root / "run", None, ServedTables(server=ParameterServerSpec())).served.close()
        DenseStage(models / "terarec_dense" / "1" / PROGRAM, [], [])
    except Exception as error:
        failure = failure_of(error)
        return Ended(failure.exit_code, "", f"terarec: {failure.line}")
    return Ended(0, "", "")


@dataclass(frozen=True)
class Case:
    """A command, and what it reads.

    Attributes:
        reads: Names of its files in `Originals`.
        words: Command line for the directories of its files and of its results, as `run` below takes them.
        run: What runs it.
        writes: Those of its files that it may change.
    """

    reads: Sequence[str]
    words: Callable[[Path, Path], list[object]] = lambda root, out: []
    run: Callable[[Path, Path], Ended] | None = None
    writes: Sequence[str] = ()

    def __call__(self, root: Path, out: Path) -> Ended:
        return terarec(*self.words(root, out), "--json") if self.run is None else self.run(root, out)


TRAINED = ("run", "data")
CASES = {
    "evaluate": Case(TRAINED, lambda root, out: ["evaluate", root / "run", "--data", root / "data"]),
    "calibrate": Case(TRAINED, lambda root, out: ["calibrate", root / "run", "--data", root / "data"], writes=("run",)),
    "predict": Case(
        ("run", "raw"),
        lambda root, out: ["predict", root / "run", root / "raw" / "day_1.tsv", "--out", out / "s.csv"],
    ),
    "predict data": Case(
        TRAINED, lambda root, out: ["predict", root / "run", "--data", root / "data", "--out", out / "s.parquet"]
    ),
    "inspect run": Case(("run",), lambda root, out: ["inspect", root / "run"]),
    "inspect data": Case(("data",), lambda root, out: ["inspect", root / "data"]),
    "export": Case(
        ("run",),
        lambda root, out: ["export", root / "run", "--out", out / "model", "--format", "torch", "--no-tables"],
    ),
    "export trace": Case(
        ("run",), lambda root, out: ["export", root / "run", "--out", out / "t", "--to", "torchscript", "--no-tables"]
    ),
    "export table": Case(
        ("run",), lambda root, out: ["export", root / "run", "--out", out / "rows", "--to", "parquet"]
    ),
    "export triton": Case(("run",), lambda root, out: ["export", root / "run", "--out", out / "t", "--to", "triton"]),
    "prepare": Case(
        ("run", "raw"),
        lambda root, out: ["prepare", root / "run", root / "raw" / "day_1.tsv", "--out", out / "data"],
    ),
    "dry-run": Case(
        ("workflow.json", "raw"),
        lambda root, out: [
            *("prepare", root / "workflow.json", root / "raw" / "day_0.tsv", "--dry-run", "--out", out / "data")
        ],
    ),
    "convert": Case(
        ("data",),
        lambda root, out: ["convert", root / "data", "--to", "norm", "--out", out / "norm", "--keysets"],
    ),
    "convert back": Case(
        ("norm",), lambda root, out: ["convert", root / "norm", "--to", "dataset", "--out", out / "again"]
    ),
    "drift": Case(("data",), lambda root, out: ["drift", root / "data", root / "data", "--out", out / "drift.html"]),
    "plan": Case(TRAINED, lambda root, out: ["plan", root / "run" / "run.json"]),
    "init-config": Case(("data",), lambda root, out: ["init-config", "dlrm", root / "data", "--out", out / "run.json"]),
    "train": Case(
        TRAINED,
        lambda root, out: ["train", root / "run" / "run.json", "--data", root / "data", "--out", out / "run"],
    ),
    "resume": Case(
        TRAINED,
        lambda root, out: ["train", root / "run" / "run.json", "--out", root / "run", "--resume"],
        writes=("run",),
    ),
    "warm start": Case(
        TRAINED,
        lambda root, out: [*("train", root / "run" / "run.json", "--out", out / "run", "--init-from", root / "run")],
    ),
    "serve": Case(("run",), run=_serve),
    "recommend": Case(("shop",), lambda root, out: _recommend(root / "shop", out / "s.csv"), writes=("shop/index",)),
    "reproduce": Case(("frappe",), lambda root, out: _reproduce(root / "frappe", out / "again")),
    "reproduce again": Case(
        ("frappe", "reproduced"),
        lambda root, out: [*_reproduce(root / "frappe", root / "reproduced"), "--resume"],
        writes=("reproduced",),
    ),
    "triton": Case(("triton", "run"), run=_triton),
}
"""Commands by name; `publish` needs a server and has its own test."""


def digests(root: Path, without: Sequence[str] = ()) -> dict[str, str]:
    """What the files below a directory hold; pipes and links are their kind."""
    left = [root / name for name in without]
    return {
        str(path.relative_to(root)): hashlib.sha256(path.read_bytes()).hexdigest()
        if path.is_file() and not path.is_symlink()
        else str(path.lstat().st_mode)
        for path in sorted(root.rglob("*"))
        if not any(path.is_relative_to(one) for one in left)
    }


@contextlib.contextmanager
def watchdog() -> Iterator[None]:
    """Raise in a block that lasts for longer than `SECONDS`."""

    def stop(number: int, frame: object) -> None:
        raise TimeoutError(f"hung for {SECONDS} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def check_end(ended: Ended, what: str) -> None:
    """A command ended with a conventional code, and one line if it failed."""
    lines = [line for line in ended.err.splitlines() if line.startswith("terarec: ")]
    assert "Traceback" not in ended.err, f"{what}\n{ended.err}"
    assert "a defect in terarec" not in ended.err, f"{what}\n{ended.err}"
    assert ended.code in (0, 1, 2), f"{what}: {ended.code}\n{ended.err}"
    assert len(lines) == (ended.code != 0), f"{what}\n{ended.err}"
    assert all(len(line) < 2100 for line in lines), what
