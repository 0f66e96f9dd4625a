# SPDX-License-Identifier: Apache-2.0
"""Preparations that are killed, and gone on with by the same call."""

import dataclasses
import json
import signal
from pathlib import Path
from typing import Any

import pytest

from terarec.apps.synthetic import movielens
from terarec.errors import ConfigError, FormatError, RunInterruptedError
from terarec.etl import fit, prepare
from terarec.etl.engine.phases import Progress
from terarec.etl.ready import PRESETS
from terarec.etl.sink import RECORD_STORAGES
from terarec.etl.workflow import Workflow
from terarec.formats.hugectr.split_writer import record_files
from terarec.io import directories
from terarec.spec import PrepareOptions, SplitByFraction, SplitByHash, SplitByTime
from tests.errors import at
from tests.etl.engine.contents import contents
from tests.etl.engine.logs import shop_files, shop_workflow
from tests.params import in_every_run
from tests.processes import run_python

KILLED = """
import os, signal, sys
from pathlib import Path
from terarec.etl import prepare
from terarec.spec import PrepareOptions, SplitByTime
from tests.etl.engine.logs import shop_workflow

phase, out, *log = sys.argv[1:]

def kill(progress):
    # Past the first block, so that the phase has begun to write.
    if progress.phase == phase and progress.rows > 100:
        os.kill(os.getpid(), signal.SIGKILL)

workflow = shop_workflow(SplitByTime(column="time", valid=0.1))
workflow = workflow.with_sample_columns(weight="time", metadata=("user", "price", "item"))
prepare(workflow, [Path(path) for path in log], Path(out), PrepareOptions(shuffle=True), kill)
"""
PHASES = ("split", "group", "fit 1", "fit 2", "write")


def killed_in(phase: str, out: Path, log: list[Path]) -> None:
    """Run a preparation in a process of its own, which is killed in `phase`."""
    assert run_python(KILLED, phase, out, *log).returncode == -signal.SIGKILL


@pytest.mark.parametrize("phase", in_every_run(["group", "fit 2", "write"], PHASES))
def test_a_killed_run_is_resumed(tmp_path: Path, phase: str) -> None:
    log = shop_files(tmp_path / "raw")
    workflow = shop_workflow(SplitByTime(column="time", valid=0.1))
    workflow = workflow.with_sample_columns(weight="time", metadata=("user", "price", "item"))
    prepare(workflow, log, tmp_path / "whole", PrepareOptions(shuffle=True))
    killed_in(phase, tmp_path / "out", log)
    assert not (tmp_path / "out").exists()
    assert (tmp_path / "out.partial").is_dir()
    report = prepare(workflow, log, tmp_path / "out", PrepareOptions(shuffle=True, threads=1))
    resumed = [step.name for step in report.phases if step.resumed]
    assert resumed == list(PHASES[: PHASES.index(phase)])
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    assert not (tmp_path / "out.partial").exists()


def test_control_c_while_the_data_set_is_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All phases are kept, whose temporary files are gone."""

    def press(path: Path) -> None:
        assert path == tmp_path / "out.partial"
        raise KeyboardInterrupt

    log = shop_files(tmp_path / "raw")
    prepare(shop_workflow(), log, tmp_path / "whole")
    with monkeypatch.context() as patched:
        patched.setattr(directories, "flush_tree", press)
        with pytest.raises(RunInterruptedError):
            prepare(shop_workflow(), log, tmp_path / "out")
    report = prepare(shop_workflow(), log, tmp_path / "out")
    assert all(phase.resumed for phase in report.phases)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_changed_sources_are_rejected_until_restarted(tmp_path: Path) -> None:
    log = shop_files(tmp_path / "raw")
    workflow = shop_workflow(SplitByTime(column="time", valid=0.1))
    workflow = workflow.with_sample_columns(weight="time", metadata=("user", "price", "item"))
    killed_in("write", tmp_path / "out", log)
    with pytest.raises(ConfigError, check=at("out", "with other workflow, ")):
        prepare(
            workflow.with_sample_columns(weight="time", metadata=("user",)),
            log,
            tmp_path / "out",
            PrepareOptions(shuffle=True),
        )
    with log[0].open("a") as file:
        file.write("0\t1600000000\tu1\t1\t1.0\t\n")
    with pytest.raises(ConfigError, check=at("out", "with other sources, ")):
        prepare(workflow, log, tmp_path / "out", PrepareOptions(shuffle=True))
    report = prepare(workflow, log, tmp_path / "out", PrepareOptions(shuffle=True, restart=True))
    assert report.rows == 601
    assert not any(step.resumed for step in report.phases)


def interrupt(progress: Progress) -> None:
    if progress.phase == "write":
        raise KeyboardInterrupt


def test_a_workflow_that_is_fitted_to_other_rows_is_rejected(tmp_path: Path) -> None:
    log, options = shop_files(tmp_path / "raw"), PrepareOptions(earlier_rows="none")
    one, other = (fit(shop_workflow(), [path]) for path in log)
    other.save(tmp_path / "other")
    one.save(tmp_path / "one")
    with pytest.raises(RunInterruptedError):
        prepare(one, log, tmp_path / "out", options, interrupt)
    for fitted in (other, Workflow.load(tmp_path / "other"), shop_workflow()):
        with pytest.raises(ConfigError, check=at("out", "with other workflow, ")):
            prepare(fitted, log, tmp_path / "out", options)
    prepare(Workflow.load(tmp_path / "one"), log, tmp_path / "out", options)
    prepare(one, log, tmp_path / "whole", options)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def movie_files(directory: Path) -> tuple[Path, Path, PrepareOptions]:
    """Ratings, the movies that they are joined with, and the options that name these."""
    movielens.generate(directory, rows=300, seed=1)
    movies = directory / "movies.csv"
    options = PrepareOptions(bad_input="skip", earlier_rows="none", tables={"movies": (str(movies),)})
    return directory / "ratings.csv", movies, options


def test_a_changed_side_table_is_rejected(tmp_path: Path) -> None:
    ratings, movies, options = movie_files(tmp_path / "raw")
    workflow = Workflow.of(PRESETS["movielens"](min_count=1))
    with pytest.raises(RunInterruptedError):
        prepare(workflow, [ratings], tmp_path / "out", options, interrupt)
    movies.write_text(movies.read_text().replace("Comedy", "Western"))
    with pytest.raises(ConfigError, check=at("out", "with other side tables, ")):
        prepare(workflow, [ratings], tmp_path / "out", options)
    # A fitted workflow has the table in its states, and reads no file of it.
    prepare(workflow, [ratings], tmp_path / "out", dataclasses.replace(options, restart=True))
    fitted = Workflow.load(tmp_path / "out" / "workflow")
    with pytest.raises(RunInterruptedError):
        prepare(fitted, [ratings], tmp_path / "again", options, interrupt)
    movies.unlink()
    prepare(fitted, [ratings], tmp_path / "again", options)


def test_a_side_table_that_changes_meanwhile_is_rejected(tmp_path: Path) -> None:
    ratings, movies, options = movie_files(tmp_path / "raw")

    def change(progress: Progress) -> None:
        if progress.phase == "write":
            movies.write_text(movies.read_text() + "\n")

    with pytest.raises(FormatError, check=at("side tables", "changed while")):
        prepare(Workflow.of(PRESETS["movielens"](min_count=1)), [ratings], tmp_path / "out", options, change)


def test_bad_lines_of_a_side_table_are_reported_after_an_interruption_too(tmp_path: Path) -> None:
    ratings, movies, options = movie_files(tmp_path / "raw")
    movies.write_text(movies.read_text() + "one\n")
    ratings.write_text(ratings.read_text() + "1,2,3\n1,x,4,5\n")
    workflow = Workflow.of(PRESETS["movielens"](min_count=1))
    with pytest.raises(RunInterruptedError):
        prepare(workflow, [ratings], tmp_path / "out", options, interrupt)
    report = prepare(workflow, [ratings], tmp_path / "out", options)
    assert report.phases[0].name.startswith("table")
    assert report.phases[0].resumed
    assert report.bad_input.counts == {"integer": 1, "short_line": 2}
    lines = [f"{movies}: line 202: found 1 field,", f"{ratings}: line 302: found 3", f"{ratings}: line 303, column 'm"]
    assert [line.startswith(start) for line, start in zip(report.bad_input.first, lines, strict=True)] == [True] * 3


KILLED_WRITING = """
import os, signal, sys
from pathlib import Path
from terarec.etl import shuffle as shuffling
from terarec.etl.sink import FileSink
from terarec.etl import prepare
from terarec.spec import PrepareOptions
from tests.etl.engine.test_resume import WRITE_OPTIONS, write_workflow

split, storage, shuffle, rows, out, *log = sys.argv[1:]
write, written = FileSink.write, 0

class Immediately(shuffling.ThreadPoolExecutor):
    # Commits are done when they are requested, so that the checkpoint at a row is always the same.
    def submit(self, *arguments):
        done = super().submit(*arguments)
        done.exception()
        return done

def write_or_die(self, split, ids, block):
    global written
    written += len(ids) if split == "train" else 0
    if shuffle == "merging" and written > int(rows):
        os.kill(os.getpid(), signal.SIGKILL)
    write(self, split, ids, block)

def kill(progress):
    if shuffle != "merging" and progress.phase == "write" and progress.rows > int(rows):
        os.kill(os.getpid(), signal.SIGKILL)

FileSink.write = write_or_die
shuffling._WRITTEN_ROWS = 30
shuffling.ThreadPoolExecutor = Immediately
options = PrepareOptions(**WRITE_OPTIONS, storage=storage, shuffle=bool(shuffle))
prepare(write_workflow(split, storage), [Path(path) for path in log], Path(out), options, kill)
"""
WRITE_SPLITS = {
    "fraction": SplitByFraction(valid=0.1, test=0.05),
    "time": SplitByTime(column="time", valid=0.1),
    "hash": SplitByHash(valid=0.3, test=0.01, seed=1),
}
WRITE_OPTIONS: dict[str, Any] = {"rows_per_shard": 70, "bad_input": "skip"}


def write_workflow(split: str, storage: str) -> Workflow:
    """Return the workflow of the shop, without lists where the files hold none."""
    workflow = shop_workflow(WRITE_SPLITS[split])
    if storage not in ("hugectr_raw", "hugectr_raw_async"):
        return workflow
    return Workflow.of(dataclasses.replace(workflow.spec, categorical=("user", "item")))


def killed_while_writing(
    out: Path, log: list[Path], split: str, shuffle: str, rows: int, storage: str = "parquet"
) -> dict[str, Any]:
    """Run a preparation in a process of its own that is killed after `rows` rows; returns the last checkpoint.

    Args:
        out: Data set.
        log: Sources.
        split: Name of the split in `WRITE_SPLITS`.
        shuffle: "" without a shuffle; "scattering" kills while rows are read, "merging" while they are sorted.
        rows: Number of rows.
        storage: Format of the files.
    """
    ended = run_python(KILLED_WRITING, split, storage, shuffle, rows, out, *log)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    found: dict[str, Any] = json.loads((out.with_name(f"{out.name}.partial") / "work" / "written.json").read_text())
    return found


@pytest.mark.parametrize(
    ("split", "shuffle", "rows"),
    [
        ("fraction", "", 500),
        ("time", "", 400),
        ("hash", "scattering", 500),
        pytest.param("fraction", "merging", 320, marks=pytest.mark.slow),
        pytest.param("fraction", "", 300, marks=pytest.mark.slow),
        pytest.param("hash", "", 450, marks=pytest.mark.slow),
        pytest.param("fraction", "scattering", 400, marks=pytest.mark.slow),
        pytest.param("hash", "merging", 200, marks=pytest.mark.slow),
    ],
)
def test_complete_shards_outlive_a_kill(tmp_path: Path, split: str, shuffle: str, rows: int) -> None:
    log = shop_files(tmp_path / "raw", files=12)
    for path in (log[1], log[8]):
        path.write_text(path.read_text() + "not a row\n")
    workflow, options = shop_workflow(WRITE_SPLITS[split]), PrepareOptions(**WRITE_OPTIONS, shuffle=bool(shuffle))
    whole = prepare(workflow, log, tmp_path / "whole", options)
    found = killed_while_writing(tmp_path / "out", log, split, shuffle, rows)
    closed, partial = found["closed"], tmp_path / "out.partial"
    kept = {
        shard.relative_to(partial): shard.stat().st_ino
        for name, shards in closed.items()
        for shard in sorted((partial / name).glob("*.parquet"))[: len(shards)]
    }
    if shuffle == "scattering":
        assert found["shuffle"]["spilled_rows"] > 0
    else:
        assert sum(map(len, closed.values())) >= 1
    report = prepare(workflow, log, tmp_path / "out", dataclasses.replace(options, threads=1))
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    assert {path: (tmp_path / "out" / path).stat().st_ino for path in kept} == kept
    assert (report.splits, report.inputs, report.bad_input) == (whole.splits, whole.inputs, whole.bad_input)
    if shuffle == "merging":
        assert found["is_read"]
        assert report.phases[-1].rows == 0
    elif split == "fraction":
        held = found["shuffle"]["spilled_rows"] if shuffle else sum(closed["train"])
        assert report.phases[-1].rows < whole.phases[-1].rows - held + 60


@pytest.mark.parametrize(
    ("storage", "split", "shuffle", "rows"),
    [
        ("norm", "fraction", "merging", 320),
        ("hugectr_parquet", "hash", "scattering", 500),
        pytest.param("hugectr_raw", "fraction", "merging", 320, marks=pytest.mark.slow),
        pytest.param("norm", "fraction", "", 300, marks=pytest.mark.slow),
        pytest.param("norm", "hash", "scattering", 500, marks=pytest.mark.slow),
        pytest.param("hugectr_parquet", "fraction", "merging", 200, marks=pytest.mark.slow),
        pytest.param("hugectr_raw_async", "fraction", "merging", 320, marks=pytest.mark.slow),
    ],
)
def test_files_of_hugectr_outlive_a_kill(tmp_path: Path, storage: Any, split: str, shuffle: str, rows: int) -> None:
    log = shop_files(tmp_path / "raw", files=12)
    workflow = write_workflow(split, storage)
    options = PrepareOptions(**WRITE_OPTIONS, storage=storage, shuffle=bool(shuffle))
    whole = prepare(workflow, log, tmp_path / "whole", options)
    found = killed_while_writing(tmp_path / "out", log, split, shuffle, rows, storage)
    partial = tmp_path / "out.partial"
    kept = {
        file.relative_to(partial): file.stat().st_ino
        for name, shards in found["closed"].items()
        for index in range(len(shards))
        for file in record_files(partial / name, RECORD_STORAGES[storage], index)
    }
    assert (found["shuffle"]["spilled_rows"] > 0) is bool(shuffle)
    # Shuffled rows are in files after the last one is read, and one file of the train split is complete at its end.
    is_in_parts = storage in ("norm", "hugectr_parquet") and shuffle != "scattering"
    assert any(path.parts[0] == "train" for path in kept) is is_in_parts
    report = prepare(workflow, log, tmp_path / "out", dataclasses.replace(options, threads=1))
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    # Keysets of a whole split are written again.
    again = {path: (tmp_path / "out" / path).stat().st_ino for path in kept if path.name != "_hugectr.keyset"}
    assert again == {path: node for path, node in kept.items() if path in again}
    assert report.splits == whole.splits
    if shuffle == "merging":
        assert report.phases[-1].rows == 0
    else:
        assert report.phases[-1].rows < whole.phases[-1].rows
