# SPDX-License-Identifier: Apache-2.0
"""Logs -> data sets by the single-machine engine."""

import json
import os
import resource
from pathlib import Path

import numpy as np
import pytest

from terarec.errors import ConfigError, FormatError, StorageError
from terarec.etl import fit, partitions, prepare
from terarec.etl.columns import Rows, concatenate_rows, numpy_values
from terarec.etl.engine import grouped
from terarec.etl.engine.phases import Progress
from terarec.etl.ops import DifferenceLag, FillMissing
from terarec.etl.source.source import open_source
from terarec.etl.workflow import Workflow
from terarec.formats import read_dataset
from terarec.formats.block import ColumnBlock, merge
from terarec.formats.parts import read_part_keys, read_parts
from terarec.spec import (
    LabelSpec,
    PrepareOptions,
    Split,
    SplitByFiles,
    SplitByFraction,
    SplitByHash,
    SplitByTime,
    SplitByUser,
)
from tests.errors import at
from tests.etl.engine.contents import contents, read_split
from tests.etl.engine.logs import SOURCE, shop_files, shop_lines, shop_workflow


@pytest.fixture
def log(tmp_path: Path) -> list[Path]:
    """600 rows in two files."""
    return shop_files(tmp_path / "raw")


def in_memory(workflow: Workflow, log: list[Path], out: Path) -> dict[str, ColumnBlock]:
    """What the workflow that was fitted into `out` makes of all rows at once."""
    fitted = Workflow.load(out / "workflow")
    block = concatenate_rows(list(open_source(SOURCE, log, "raise", 1).blocks()))
    block = block.with_split(expected_split(workflow.spec.split, block))
    done = fitted.apply(block)
    encoded = fitted.encode_rows(done)
    assert block.split is not None
    return {
        name: merge([encoded], np.flatnonzero(block.split == number))
        for number, name in enumerate(("train", "valid", "test"))
    }


def expected_split(split: Split | None, block: Rows) -> np.ndarray:
    """By plain NumPy; the log has two equal files."""
    rows = block.num_rows
    if isinstance(split, SplitByFraction):
        return np.repeat([0, 1, 2], [rows - 60 - 30, 60, 30]).astype(np.uint8)
    if isinstance(split, SplitByFiles):
        return np.repeat([0, 1], [rows // 2, rows // 2]).astype(np.uint8)
    assert isinstance(split, SplitByTime)
    times = numpy_values(block.columns["time"])
    last = np.sort(times)[rows - 60 - 1]
    return (times > last).astype(np.uint8)


def equal(one: ColumnBlock, other: ColumnBlock) -> None:
    """Every value of every column."""
    np.testing.assert_array_equal(one.label, other.label)
    np.testing.assert_array_equal(one.dense, other.dense)
    for found, expected in zip(one.keys, other.keys, strict=True):
        for left, right in zip(found, expected, strict=True) if isinstance(found, tuple) else [(found, expected)]:
            np.testing.assert_array_equal(left, right)


@pytest.mark.parametrize(
    "split",
    [SplitByFraction(valid=0.1, test=0.05), SplitByFiles(valid=1), SplitByTime(column="time", valid=0.1)],
    ids=lambda split: split.kind,
)
def test_it_is_what_the_workflow_does_to_all_rows_at_once(tmp_path: Path, log: list[Path], split: Split) -> None:
    workflow = shop_workflow(split)
    report = prepare(workflow, log, tmp_path / "out", PrepareOptions(threads=2))
    expected = in_memory(workflow, log, tmp_path / "out")
    for name, rows in report.splits.items():
        assert rows == expected[name].num_rows
        equal(read_split(tmp_path / "out", name), expected[name])


def test_files_do_not_depend_on_threads_or_partitions(
    tmp_path: Path, log: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare(shop_workflow(), log, tmp_path / "a", PrepareOptions(threads=1))
    monkeypatch.setattr(grouped, "_BATCH_ROWS", 3)
    monkeypatch.setattr(partitions, "_BUFFERED_ROWS", 50)
    monkeypatch.setattr("terarec.etl.engine.local.partition_count", lambda *_: 7)
    prepare(shop_workflow(), log, tmp_path / "b", PrepareOptions(threads=3))
    assert contents(tmp_path / "a") == contents(tmp_path / "b")


@pytest.mark.parametrize("split", [None, SplitByHash(valid=0.2), SplitByUser(column="user", valid=0.2, test=0.1)])
def test_a_fitted_workflow_only_transforms(tmp_path: Path, log: list[Path], split: Split | None) -> None:
    first = prepare(shop_workflow(split), log, tmp_path / "a", PrepareOptions())
    fitted = Workflow.load(tmp_path / "a" / "workflow")
    assert fitted.is_fitted
    second = prepare(fitted, log, tmp_path / "b", PrepareOptions(earlier_rows="none"))
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    assert [phase.name for phase in first.phases] == ["group", "fit 1", "fit 2", "write"]
    assert [phase.name for phase in second.phases] == ["group", "write"]


def test_fitting_alone_gives_the_same_workflow(tmp_path: Path, log: list[Path]) -> None:
    prepare(shop_workflow(), log, tmp_path / "out", PrepareOptions())
    fit(shop_workflow(), log, PrepareOptions()).save(tmp_path / "alone")
    saved = {name: content for name, content in contents(tmp_path / "out").items() if name.startswith("workflow/")}
    del saved["workflow/earlier_rows/00.parquet"]  # of prepared rows
    alone = {
        f"workflow/{path.relative_to(tmp_path / 'alone')}": path.read_bytes()
        for path in sorted((tmp_path / "alone").rglob("*"))
        if path.is_file()
    }
    assert saved == alone


def test_the_report_describes_the_run(tmp_path: Path, log: list[Path]) -> None:
    report = prepare(shop_workflow(), log, tmp_path / "out", PrepareOptions())
    assert report.splits == {"train": 510, "valid": 60, "test": 30}
    missing = {column.name: column.missing for column in report.inputs}
    users = [line.split("\t")[2] for line in shop_lines(600)]
    assert missing["user"] == users.count("")
    assert missing["bought"] == 0
    by_name = {column.name: column for column in report.columns}
    spec = read_dataset(tmp_path / "out")
    assert by_name["item"].rows == spec.categorical[1].rows
    assert by_name["seen"].hotness == 4
    table = report.tables[0]
    assert table.rows == sum(column.rows or 0 for column in spec.categorical)
    assert table.bytes == table.rows * table.width * 4
    saved = json.loads((tmp_path / "out" / "report.json").read_text())
    assert saved["format"] == "terarec.prepare-report"
    assert saved["report"]["splits"] == report.splits


def test_progress_rises_to_the_bytes_of_all_phases(tmp_path: Path, log: list[Path]) -> None:
    reported: list[Progress] = []
    prepare(shop_workflow(None), log, tmp_path / "out", PrepareOptions(), reported.append)
    done = [step.done_bytes for step in reported]
    assert done == sorted(done)
    assert done[-1] == reported[-1].total_bytes == 4 * sum(path.stat().st_size for path in log)
    assert list(dict.fromkeys(step.phase for step in reported)) == ["group", "fit 1", "fit 2", "write"]
    assert reported[-1].rows == 600
    assert reported[-1].seconds_left == 0


def test_bad_input_leaves_nothing_behind(tmp_path: Path, log: list[Path]) -> None:
    with log[1].open("a") as file:
        file.write("1\t2\n")
    with pytest.raises(FormatError):
        prepare(shop_workflow(), log, tmp_path / "out", PrepareOptions())
    assert [path.name for path in tmp_path.iterdir()] == ["raw"]


def test_bad_input_is_skipped_and_counted(tmp_path: Path, log: list[Path]) -> None:
    clean = prepare(shop_workflow(SplitByFiles(valid=1)), log, tmp_path / "clean", PrepareOptions())
    with log[1].open("a") as file:
        file.write("1\t2\n")
    options = PrepareOptions(bad_input="skip")
    report = prepare(shop_workflow(SplitByFiles(valid=1)), log, tmp_path / "out", options)
    assert report.splits == clean.splits
    assert sum(report.bad_input.counts.values()) == 1
    assert "day_1.tsv" in report.bad_input.first[0]
    assert "301" in report.bad_input.first[0]


@pytest.mark.parametrize(
    ("split", "problem"),
    [
        (SplitByFiles(valid=1, test=1), "got 2 files of which 1 are for validation and 1 for test"),
        (SplitByFraction(valid=0.5, test=0.4999), "leaves 0 of 600 rows for training"),
    ],
)
def test_a_split_without_training_rows_is_rejected(tmp_path: Path, log: list[Path], split: Split, problem: str) -> None:
    with pytest.raises(ConfigError, check=at("split", problem)):
        prepare(shop_workflow(split), log, tmp_path / "out", PrepareOptions())
    assert [path.name for path in tmp_path.iterdir()] == ["raw"]


def test_a_full_disk_is_reported_and_leaves_nothing(
    tmp_path: Path, log: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        with Path("/dev/full").open("wb", buffering=0) as file:
            file.write(b"x")

    monkeypatch.setattr("terarec.etl.partitions.Partitions.append", full)
    with pytest.raises(StorageError, check=at(f"{tmp_path}/out")):
        prepare(shop_workflow(), log, tmp_path / "out", PrepareOptions())
    assert [path.name for path in tmp_path.iterdir()] == ["raw"]


def test_an_existing_data_set_is_left_alone(tmp_path: Path, log: list[Path]) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("precious")
    with pytest.raises(ConfigError, check=at("out")):
        prepare(shop_workflow(), log, tmp_path / "out", PrepareOptions())
    assert (tmp_path / "out" / "mine").read_text() == "precious"


def test_shuffled_rows_are_the_same_rows(tmp_path: Path, log: list[Path]) -> None:
    prepare(shop_workflow(), log, tmp_path / "a", PrepareOptions())
    prepare(shop_workflow(), log, tmp_path / "b", PrepareOptions(shuffle=True, seed=3, rows_per_shard=100))
    in_order, shuffled = (read_split(tmp_path / name, "train") for name in "ab")
    assert in_order.dense.tolist() != shuffled.dense.tolist()
    assert sorted(in_order.dense.tolist()) == sorted(shuffled.dense.tolist())
    equal(read_split(tmp_path / "a", "valid"), read_split(tmp_path / "b", "valid"))
    assert [shard.rows for shard in read_dataset(tmp_path / "b").shards("train")] == [85] * 6


@pytest.mark.parametrize("shuffle", [False, True])
def test_the_train_split_gets_parts_with_keysets(tmp_path: Path, log: list[Path], shuffle: bool) -> None:
    out = tmp_path / "out"
    prepare(shop_workflow(), log, out, PrepareOptions(parts=4, keysets=True, shuffle=shuffle))
    spec, parts = read_dataset(out), read_parts(out, "train")
    assert [part.rows for part in parts] == [shard.rows for shard in spec.shards("train")]
    assert sum(part.rows for part in parts) == spec.num_rows("train")
    assert len(parts) == 4
    keys = [read_part_keys(out, "train", part) for part in parts]
    whole = read_split(out, "train")
    for column, values in zip(spec.categorical, whole.keys, strict=True):
        found = np.unique(np.concatenate([part[column.name] for part in keys]))
        assert found.tolist() == np.unique(values[0] if isinstance(values, tuple) else values).tolist()


def test_the_best_auc_of_generated_logs_travels(log: list[Path], tmp_path: Path) -> None:
    (log[0].parent / "generated.json").write_text('{"best_auc": 0.8125, "rows": 600}')
    assert prepare(shop_workflow(), log, tmp_path / "out", PrepareOptions()).best_auc == 0.8125
    assert read_dataset(tmp_path / "out").best_auc == 0.8125


def test_counting_beyond_the_memory_goes_through_the_disk_and_is_reported(tmp_path: Path, log: list[Path]) -> None:
    prepare(shop_workflow(), log, tmp_path / "a", PrepareOptions())
    options = PrepareOptions(shuffle=False)
    object.__setattr__(options, "memory_bytes", 120_000)  # less than options accept, for a small log
    report = prepare(shop_workflow(), log, tmp_path / "b", options)
    assert "steps[3] Categorify" in report.spilled
    assert contents(tmp_path / "a") == contents(tmp_path / "b")


def test_a_side_table_that_the_workflow_does_not_join_is_rejected(tmp_path: Path, log: list[Path]) -> None:
    where = "side table 'items'"
    with pytest.raises(ConfigError, check=at(where)):
        prepare(shop_workflow(), log, tmp_path / "out", PrepareOptions(tables={"items": ("items.csv",)}))
    assert not (tmp_path / "out.partial").exists()


def test_sources_that_change_meanwhile_are_rejected(tmp_path: Path, log: list[Path]) -> None:
    def change(progress: Progress) -> None:
        if progress.phase == "write" and progress.rows < 600:
            log[0].write_text(log[0].read_text() + "\n")

    with pytest.raises(FormatError, check=at(f"{tmp_path}/raw/day_0.tsv")):
        prepare(shop_workflow(), log, tmp_path / "out", PrepareOptions(), change)
    assert [path.name for path in tmp_path.iterdir()] == ["raw"]


def test_a_list_sorted_as_texts_is_warned_of(tmp_path: Path) -> None:
    """Finding N1: a list is taken in its order, which may be that of the texts by mistake."""
    log = sorted(shop_files(tmp_path / "raw", files=11))
    with pytest.warns(UserWarning, match="day_10"):
        report = prepare(shop_workflow(), log, tmp_path / "data")
    assert [file.file for file in report.files] == list(map(str, log))


def test_files_of_many_steps_are_not_open_together(
    tmp_path: Path, log: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of eight steps had a file open for each of its partitions, more than a process may have."""
    names = tuple(f"gap{number}" for number in range(4))
    steps = [DifferenceLag(columns=("time",), outputs=(name,), group="item", order="time") for name in names]
    fill = FillMissing(columns=(*names, "price"), value=0)
    workflow = Workflow(
        [*steps, fill], source=shop_workflow().spec.source, labels=[LabelSpec(name="bought")], dense=[*names, "price"]
    )
    prepare(workflow, log, tmp_path / "few", PrepareOptions(threads=1))
    monkeypatch.setattr("terarec.etl.engine.local.partition_count", lambda *_: 64)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 50, hard))
    try:
        prepare(workflow, log, tmp_path / "many", PrepareOptions(threads=1))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    equal(read_split(tmp_path / "many", "train"), read_split(tmp_path / "few", "train"))
