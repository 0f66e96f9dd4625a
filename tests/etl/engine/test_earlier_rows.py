# SPDX-License-Identifier: Apache-2.0
"""Grouped steps continue in later files from the rows that the workflow keeps."""

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from terarec.errors import ConfigError, DataNotFoundError, FormatError
from terarec.etl import fit, prepare
from terarec.etl.engine import grouped
from terarec.etl.engine.score import EncodedFiles
from terarec.etl.ops import DifferenceLag, FillMissing, HashBucket, History, Normalize
from terarec.etl.workflow import Workflow, earlier_rows, workflow_of
from terarec.formats import read_dataset
from terarec.formats.block import merge
from terarec.formats.dataset import workflow_files
from terarec.spec import LabelSpec, OneSplit, PrepareOptions, SplitByHash
from tests.errors import at
from tests.etl.engine.contents import contents, read_split
from tests.etl.engine.logs import SOURCE
from tests.etl.engine.test_prepare import equal
from tests.params import in_every_run

NONE = PrepareOptions(earlier_rows="none")


def workflow(**fields: object) -> Workflow:
    """Lists of texts, integers and ids, and differences, by users and by items."""
    return Workflow(
        [
            HashBucket(columns=("user",), outputs=("user_id",), buckets=9),
            History(columns=("item", "user_id"), group="user", order="time", max_length=3, outputs=("past", "users")),
            HashBucket(columns=("past",), buckets=50),
            History(
                columns=("user",),
                group="item",
                order="time",
                max_length=2,
                outputs=("buyers",),
                where="price",
                at_least=20.0,
            ),
            HashBucket(columns=("buyers",), buckets=50),
            DifferenceLag(columns=("price", "time"), group="user", order="time", lag=2, outputs=("rise", "gap")),
            FillMissing(columns=("price", "rise", "gap"), value=-1),
            Normalize(columns=("price",)),
        ],
        source=SOURCE,
        labels=[LabelSpec(name="bought")],
        dense=["price", "rise", "gap"],
        categorical=["user_id", "past", "users", "buyers"],
        **{"split": SplitByHash(valid=0.3), **fields},  # type: ignore[arg-type]
    )


def write_days(directory: Path, seed: int, days: int = 3) -> list[Path]:
    """Few users and items at coarse times; the next day begins with the last time, and some users miss days."""
    choose = np.random.default_rng(seed)
    paths = []
    for day in range(days):
        users, items = choose.integers(0, 2 + 3 * day, 40), choose.integers(0, 4, 40)
        times = np.concatenate([choose.integers(4 * day, 4 * day + 5, 39), [4 * day]])
        missing = choose.random((40, 3)) < 0.1
        paths.append(directory / f"day{day}.tsv")
        columns = [[row % 2 for row in range(40)], times, [f"u{user}" for user in users], items, range(40), [""] * 40]
        for column, place in ((1, 0), (2, 1), (4, 2)):
            columns[column] = np.where(missing[:, place], "", np.asarray(columns[column], dtype=str))
        paths[-1].write_text("".join("\t".join(map(str, line)) + "\n" for line in zip(*columns, strict=True)))
    return paths


@pytest.mark.parametrize("seed", in_every_run([0], range(4)))
def test_days_one_by_one_equal_all_days_at_once(tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Finding N11: lists and differences of a later day began empty."""
    monkeypatch.setattr(grouped, "_BATCH_ROWS", 3)
    monkeypatch.setattr(earlier_rows, "GROUP_ROWS", 8)
    monkeypatch.setattr("terarec.etl.engine.local.partition_count", lambda *_: 1 + 2 * seed)
    first, *later = write_days(tmp_path, seed)
    prepare(workflow(split=None), [first], tmp_path / "0")
    for number, file in enumerate(later):
        last = Workflow.load(tmp_path / str(number) / "workflow")
        report = prepare(last.with_split(OneSplit(split="train")), [file], tmp_path / str(number + 1))
        assert report.earlier_rows > 0
    fitted = Workflow.load(tmp_path / "0" / "workflow")
    prepare(fitted, [first, *later], tmp_path / "all", NONE)
    equal(merge([read_split(tmp_path / str(day), "train") for day in range(3)]), read_split(tmp_path / "all", "train"))
    kept = {name: content for name, content in contents(tmp_path / "all").items() if "earlier_rows" in name}
    # Models take data of every day: what they depend on is the same.
    assert workflow_files(read_dataset(tmp_path / "0"), tmp_path / "0") == (
        "workflow/states/07-normalize.json",
        "workflow/workflow.json",
    )
    assert kept == {name: content for name, content in contents(tmp_path / "2").items() if "earlier_rows" in name}


def test_scored_files_continue_from_earlier_ones(tmp_path: Path) -> None:
    """Finding N11: the same for raw files that are scored; a run, which keeps no rows, takes them from a data set."""
    first, second, _ = write_days(tmp_path, 5)
    prepare(workflow(split=None), [first], tmp_path / "0")
    prepare(workflow_of(tmp_path / "0").with_split(OneSplit(split="train")), [second], tmp_path / "1")
    expected = read_split(tmp_path / "1", "train").dense
    of_run = workflow_of(tmp_path / "0")
    of_run.earlier_rows = tmp_path / "run" / "workflow" / "earlier_rows"
    for chosen, options in (
        (workflow_of(tmp_path / "0"), None),
        (of_run, PrepareOptions(earlier_rows=str(tmp_path / "0"))),
    ):
        blocks = EncodedFiles(chosen, [second], options=options).blocks()
        np.testing.assert_array_equal(np.concatenate([block.records.dense for block in blocks]), expected)
    with pytest.raises(ConfigError, check=at("earlier_rows")):
        EncodedFiles(of_run, [second])


def test_late_rows_are_rejected_or_counted(tmp_path: Path) -> None:
    """Finding N11: a row between those of the earlier day has no exact list."""
    (tmp_path / "0.tsv").write_text("0\t5\tu\t1\t1\t\n0\t9\tu\t2\t1\t\n0\t9\tv\t2\t1\t\n")
    (tmp_path / "1.tsv").write_text("0\t9\tv\t3\t1\t\n0\t7\tu\t3\t1\t\n")
    prepare(workflow(split=None), [tmp_path / "0.tsv"], tmp_path / "0")
    fitted = Workflow.load(tmp_path / "0" / "workflow")
    (tmp_path / "00.tsv").write_text("0\t9\tv\t3\t1\t\n" * 3)
    # The file and line, also behind a blank one, and not the position among all rows.
    (tmp_path / "1.tsv").write_text("0\t9\tv\t3\t1\t\n\n0\t7\tu\t3\t1\t\n")
    with pytest.raises(FormatError, check=at(f"{tmp_path / '1.tsv'}: line 3")):
        prepare(fitted, [tmp_path / "00.tsv", tmp_path / "1.tsv"], tmp_path / "1")
    assert not (tmp_path / "1").exists()
    assert prepare(fitted, [tmp_path / "1.tsv"], tmp_path / "1", PrepareOptions(late_rows="allow")).late_rows == 1
    assert prepare(fitted, [tmp_path / "1.tsv"], tmp_path / "2", NONE).late_rows == 0


def test_a_workflow_without_its_earlier_rows_is_rejected(tmp_path: Path) -> None:
    """Finding N11: never silently without them."""
    first, second, _ = write_days(tmp_path, 6)
    fitted = fit(workflow(split=None), [first])
    prepare(fitted, [first], tmp_path / "0")  # it has prepared nothing yet
    fitted.save(tmp_path / "alone")
    with pytest.raises(ConfigError, check=at("earlier_rows")):
        prepare(Workflow.load(tmp_path / "alone"), [second], tmp_path / "1")
    with pytest.raises(DataNotFoundError, check=at(str(tmp_path / "nowhere"))):
        prepare(fitted, [second], tmp_path / "1", PrepareOptions(earlier_rows=str(tmp_path / "nowhere")))


def test_earlier_rows_of_another_step_are_rejected(tmp_path: Path) -> None:
    first, second, _ = write_days(tmp_path, 7)
    prepare(workflow(split=None), [first], tmp_path / "0")
    lag = DifferenceLag(columns=("price",), group="user", order="time", lag=3)
    other = Workflow(
        [FillMissing(columns=("time",), value=0), lag, FillMissing(columns=("price",), value=0)],
        source=SOURCE,
        labels=[LabelSpec(name="bought")],
        dense=["price"],
    )
    with pytest.raises(ConfigError, check=at(str(tmp_path / "0" / "workflow" / "earlier_rows" / "01.parquet"))):
        prepare(other, [second], tmp_path / "1", PrepareOptions(earlier_rows=str(tmp_path / "0")))


def test_earlier_rows_of_other_columns_are_rejected(tmp_path: Path) -> None:
    """The error named the step that was expected twice: times had no nanoseconds before."""
    first, second, _ = write_days(tmp_path, 7)
    prepare(workflow(split=None), [first], tmp_path / "0")
    path = tmp_path / "0" / "workflow" / "earlier_rows" / "01.parquet"
    pq.write_table(pq.read_table(path).drop_columns(["time"]), path)
    with pytest.raises(ConfigError, check=at(path, "'user' (large_string), 'time' (int64)")):
        prepare(Workflow.load(tmp_path / "0" / "workflow"), [second], tmp_path / "1")
