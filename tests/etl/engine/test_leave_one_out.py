# SPDX-License-Identifier: Apache-2.0
"""The split of each user's last rows, in the order of time, against plain Python."""

from __future__ import annotations

import dataclasses
import tempfile
from collections import Counter, defaultdict
from pathlib import Path
from typing import TypeAlias

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from terarec.data import open_reader
from terarec.errors import ConfigError, RunInterruptedError
from terarec.etl import partitions, prepare
from terarec.etl.engine.phases import Progress
from terarec.etl.ops import Explode, GivenIds, History, NegativeSampling
from terarec.etl.workflow import Workflow
from terarec.spec import LabelSpec, LeaveOneOut, PrepareOptions, SourceColumn, SourceSpec
from terarec.spec.checks import FieldError
from tests.errors import at
from tests.etl.engine.contents import contents
from tests.etl.engine.logs import shop_files, shop_workflow
from tests.params import examples

Event: TypeAlias = tuple[str | None, int | None]
"""User and time of a row."""
Sample: TypeAlias = tuple[int, tuple[int, ...]]
"""Number of a row and its history, which is of such numbers."""
LENGTH = 4


def workflow(split: LeaveOneOut) -> Workflow:
    """Histories of the numbers of rows, which are keys."""
    types = (("label", "integer"), ("time", "integer"), ("user", "text"), ("row", "integer"))
    return Workflow(
        [
            History(columns=("row",), outputs=("seen",), group="user", order="time", max_length=LENGTH),
            GivenIds(columns=("row", "seen"), rows=(None, None)),
        ],
        source=SourceSpec(
            format="delimited",
            delimiter=",",
            columns=tuple(SourceColumn(name=name, type=kind) for name, kind in types),  # type: ignore[arg-type]
        ),
        labels=[LabelSpec(name="label")],
        keys=["row", "seen"],
        split=split,
    )


def write(directory: Path, events: list[Event], files: int) -> list[Path]:
    lines = [f"1,{'' if time is None else time},{user or ''},{row}\n" for row, (user, time) in enumerate(events)]
    size = -(-len(lines) // files)
    paths = [directory / f"{number}.csv" for number in range(-(-len(lines) // size))]
    for number, path in enumerate(paths):
        path.write_text("".join(lines[number * size : (number + 1) * size]))
    return paths


def samples(out: Path) -> dict[str, list[Sample]]:
    """Split -> its samples in their order."""
    found = {}
    for split in ("train", "valid", "test"):
        if (out / split).is_dir():
            (batch,) = open_reader(out, split, batch_size=1000)
            keys, ends, size = batch.sparse.keys.tolist(), batch.sparse.offsets.tolist(), batch.batch_size
            lists = [tuple(keys[ends[size + row] : ends[size + row + 1]]) for row in range(size)]
            found[split] = list(zip(keys[:size], lists, strict=True))
    return found


def expected(events: list[Event], split: LeaveOneOut) -> dict[str, list[Sample]]:
    places: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for row, (user, time) in enumerate(events):
        if user is not None and time is not None:
            places[user].append((time, row))
    names = dict.fromkeys(range(len(events)), "train")
    for of_user in places.values():
        rows = [row for _, row in sorted(of_user)]
        is_split = len(rows) >= split.min_rows
        if is_split:
            names[rows[-2]], names[rows[-1]] = "valid", "test"
        if split.train == "last":
            for row in rows[:-3] if is_split else rows[:-1]:
                del names[row]
    made = defaultdict(list)
    for row, name in sorted(names.items()):
        user, time = events[row]
        before = sorted(place for place in places.get(user or "", []) if time is not None and place[0] < time)
        made[name].append((row, tuple(earlier for _, earlier in before[-LENGTH:])))
    return dict(made)


SPLIT = LeaveOneOut(column="user", order="time")


@settings(max_examples=examples(25))
@given(
    st.lists(st.tuples(st.sampled_from([None, "a", "b", "c"]), st.none() | st.integers(0, 6)), min_size=1, max_size=40),
    st.integers(1, 3),
    st.builds(
        LeaveOneOut,
        column=st.just("user"),
        order=st.just("time"),
        min_rows=st.integers(3, 5),
        train=st.sampled_from(["all", "last"]),
    ),
)
def test_splits_and_histories_are_those_of_plain_python(events: list[Event], files: int, split: LeaveOneOut) -> None:
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        patch.setattr("terarec.etl.engine.local.partition_count", lambda *_: files)
        patch.setattr(partitions, "_BUFFERED_ROWS", 7)
        directory = Path(name)
        paths = write(directory, events, files)
        report = prepare(workflow(split), paths, directory / "out", PrepareOptions(empty_splits="allow", threads=2))
        made = expected(events, split)
        assert samples(directory / "out") == made
        assert report.splits == {name: len(rows) for name, rows in made.items()}


def test_a_log_of_fewer_rows_of_each_user_has_nothing_to_test(tmp_path: Path) -> None:
    paths = write(tmp_path, [("a", 1), ("a", 2), ("b", 1), ("a", None), (None, 5)], 1)
    with pytest.raises(FieldError, check=at("split", "no 'user' has 3 rows with a 'time'")):
        prepare(workflow(SPLIT), paths, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_what_is_fitted_sees_the_training_rows_alone_and_an_interrupted_run_goes_on(tmp_path: Path) -> None:
    log, split = shop_files(tmp_path / "raw"), LeaveOneOut(column="user", order="time", train="last")
    report = prepare(shop_workflow(split, min_count=1), log, tmp_path / "whole")
    users = Counter(line.split("\t")[2] for path in log for line in path.read_text().splitlines())
    del users[""]
    assert report.splits["valid"] == report.splits["test"] == sum(rows >= 3 for rows in users.values())
    # Each user has a row for training, and so an id; two ids are of missing and of unseen values.
    assert {column.name: column.rows for column in report.columns}["user"] == 2 + len(users)

    def interrupt(progress: Progress) -> None:
        if progress.phase == "fit 1":
            raise KeyboardInterrupt

    with pytest.raises(RunInterruptedError):
        prepare(shop_workflow(split, min_count=1), log, tmp_path / "out", progress=interrupt)
    again = prepare(shop_workflow(split, min_count=1), log, tmp_path / "out")
    assert [phase.name for phase in again.phases if phase.resumed] == ["split", "group"]
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_items_of_a_row_are_events_in_their_order(tmp_path: Path) -> None:
    """The ids of such rows have gaps."""
    lists = SourceSpec(
        format="json_lines",
        columns=(
            SourceColumn(name="user", type="text"),
            SourceColumn(name="time", type="integer"),
            SourceColumn(name="items", type="integer", separator=" "),
            SourceColumn(name="label", type="integer"),
        ),
    )
    (tmp_path / "log.jsonl").write_text(
        '{"user": "a", "time": 2, "items": [7, 8], "label": 1}\n{"user": "a", "time": 1, "items": [5, 6], "label": 1}\n'
    )
    exploded = Workflow(
        [Explode(columns=("items",)), GivenIds(columns=("items",), rows=(None,))],
        source=lists,
        labels=[LabelSpec(name="label")],
        keys=["items"],
        split=SPLIT,
    )
    prepare(exploded, [tmp_path / "log.jsonl"], tmp_path / "out")
    found = {
        split: next(iter(open_reader(tmp_path / "out", split, batch_size=9))).sparse.keys.tolist()
        for split in ("train", "valid", "test")
    }
    assert found == {"train": [5, 6], "valid": [7], "test": [8]}


def test_drawn_rows_are_no_events() -> None:
    spec = workflow(SPLIT).spec
    draws = NegativeSampling(table="rows", column="row", negatives=1, label="drawn")
    spec = dataclasses.replace(spec, steps=(draws, *spec.steps), tables={"rows": spec.source})
    with pytest.raises(ConfigError, check=at("split", "counts the rows of a user")):
        Workflow.of(spec)
