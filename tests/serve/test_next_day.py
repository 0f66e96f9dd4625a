# SPDX-License-Identifier: Apache-2.0
"""A replica moves over the day's boundary by a delta alone, with the ids that the new day has added (finding L12)."""

from __future__ import annotations

import dataclasses
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from terarec.apps.promotion import promote
from terarec.checkpoint import complete_checkpoints
from terarec.checkpoint.directory import copy_chain, read_manifest
from terarec.errors import ConfigError
from terarec.etl import prepare
from terarec.etl.engine.score import EncodedFiles
from terarec.etl.ops.categorical import Categorify, Vocabularies
from terarec.etl.values import ValueIds
from terarec.etl.workflow import Workflow
from terarec.serve import (
    InferenceSession,
    LiveUpdates,
    ServedTables,
    UpdatePublisher,
    UpdateReceiver,
    open_stream,
    score_files,
)
from terarec.serve.columns import RecordColumns
from terarec.serve.joined_scoring import JoinedScoring
from terarec.serve.loading import VersionLoader
from terarec.serve.repository import ModelRepository
from terarec.serve.session import Scored
from terarec.spec import (
    CacheSpec,
    DLRMSpec,
    DynamicTablesSpec,
    OneSplit,
    ParameterServerSpec,
    RunSpec,
    ServedTablesSpec,
    SplitByFiles,
    StaticTablesSpec,
    TrainingSpec,
)
from terarec.spec.serving import UpdateStreamSpec
from terarec.spec.serving_repository import PromotionSpec
from terarec.train.run import build
from tests.errors import at
from tests.serve.conftest import CATEGORICAL, DENSE, TrainedRun, generate_logs, log_workflow
from tests.serve.update_servers import stream_server
from tests.waiting import wait_for


@pytest.fixture(scope="module", params=["redis", pytest.param("kafka", marks=pytest.mark.slow)])
def new_stream(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[], UpdateStreamSpec]]:
    with stream_server(request.param, tmp_path_factory.mktemp("server")) as made:
        yield made


TABLES = {"static": StaticTablesSpec(), "dynamic": DynamicTablesSpec(max_rows=20_000)}


@pytest.fixture(scope="module")
def both_days(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Days]:
    """Return a function from a kind of tables to the two days of a run, which are trained once."""
    logs = generate_logs(tmp_path_factory.mktemp("logs"), rows=3_000, days=3)

    @cache
    def trained(kind: str) -> Days:
        return Days(logs, tmp_path_factory.mktemp(kind), TABLES[kind])

    return trained


def with_added_values(workflow: Workflow, log: Path, most: int) -> Workflow:
    """Return a fitted workflow whose ids go on with values of another log that it does not know."""
    lines = [line.split("\t") for line in log.read_text().splitlines()]
    states = dict(workflow.states)
    for step, operator in enumerate(workflow.plan.operators):
        if not isinstance(operator, Categorify):
            continue
        state = states[step]
        assert isinstance(state, Vocabularies)
        ids, counts = dict(state.ids), dict(state.counts)
        for column, held in state.ids.items():
            place = 1 + len(DENSE) + CATEGORICAL.index(column)
            found = {int(line[place], 16) for line in lines if line[place]} - set(held.values.to_pylist())
            added = pa.array(sorted(found)[:most], held.values.type)
            ids[column] = ValueIds(held.kind, pa.concat_arrays([held.values, added]), held.hash_buckets)
            ones = pa.array([1] * len(added), counts[column].type)
            counts[column] = pa.concat_arrays([counts[column], ones])
        states[step] = Vocabularies(ids, counts)
    return Workflow.of(dataclasses.replace(workflow.spec, split=OneSplit(split="train")), states)


class Days:
    """Two days of a run: the second one has more ids, and touches few of the rows."""

    def __init__(self, logs: list[Path], root: Path, tables: StaticTablesSpec | DynamicTablesSpec) -> None:
        prepare(log_workflow(min_count=1, split=SplitByFiles(valid=1)), logs[:2], root / "data1")
        few = root / "day2.tsv"
        lines = logs[2].read_text().splitlines()[:40]
        few.write_text("\n".join(lines) + "\n")
        grown = with_added_values(Workflow.load(root / "data1/workflow"), few, 5)
        prepare(grown, [few], root / "data2")
        self.lines = tuple(lines)
        self.root, self.first, self.second = root, root / "day1", root / "day2"
        self.spec = RunSpec(
            data=str(root / "data1"),
            model=DLRMSpec(width=4, bottom=(8, 4), top=(8,), tables=tables),
            training=TrainingSpec(batch_size=128, max_steps=7, delta_every=3, reader_threads=1),
        )
        build(self.spec, self.first).fit()
        training = dataclasses.replace(
            self.spec.training, max_steps=2, batch_size=20, delta_every=None, eval_split=None
        )
        spec = dataclasses.replace(self.spec, data=str(self.root / "data2"), training=training)
        build(spec, self.second, init_from=self.first, extend_chain=True).fit()
        newest = complete_checkpoints(self.second / "checkpoints")[-1]
        assert newest.name == "step-00000009"
        assert read_manifest(newest).delta is not None

    @property
    def records(self) -> dict[str, list[object]]:
        return TrainedRun(self.second, self.root, self.lines).records(0, len(self.lines))


def publish(run: Path, spec: UpdateStreamSpec) -> tuple[int, int]:
    """Publish what is new; return the number of checkpoints and their bytes."""
    stream = open_stream(spec)
    try:
        publisher = UpdatePublisher(run, stream, every_seconds=None)
        return publisher.poll(), publisher.statistics().bytes
    finally:
        stream.close()


@pytest.mark.parametrize(
    ("kind", "cached"),
    [
        pytest.param("static", None, marks=pytest.mark.slow),
        pytest.param("static", CacheSpec(share=0.5), marks=pytest.mark.slow),
        ("dynamic", None),
    ],
    ids=["static", "static with a cache", "dynamic"],
)
def test_a_replica_crosses_the_day_by_the_delta_alone(
    kind: str,
    cached: CacheSpec | None,
    both_days: Callable[[str], Days],
    new_stream: Callable[[], UpdateStreamSpec],
    tmp_path: Path,
) -> None:
    days, replica, spec = both_days(kind), tmp_path / "replica", new_stream()
    _, of_first = publish(days.first, spec)
    with UpdateReceiver(open_stream(spec), replica, every_seconds=None) as receiver:
        assert receiver.poll()  # all that is there, where `wait` ends with the first checkpoint
    with (
        InferenceSession.open(replica, tables=ServedTables(server=ParameterServerSpec(), cache=cached)) as session,
        LiveUpdates(session, replica, every_seconds=None) as updates,
    ):
        assert session.step == 7
        before = session.predict(days.records)
        checkpoints, of_second = publish(days.second, spec)
        assert checkpoints == 1
        assert of_second < of_first / 2
        with UpdateReceiver(open_stream(spec), replica, every_seconds=None) as receiver:
            assert receiver.poll() == 1
            assert receiver.statistics().rejected == 0
        assert updates.poll()
        assert (updates.statistics().deltas, updates.statistics().snapshots) == (1, 0)
        assert session.step == 9
        expected = InferenceSession.open(days.second).predict(days.records)
        assert np.array_equal(session.predict(days.records), expected)
        assert not np.array_equal(before, expected)
    # A replica that starts now finds all of it in its own directory.
    with InferenceSession.open(replica) as opened:
        assert np.array_equal(opened.predict(days.records), expected)


def test_a_replica_that_begins_on_the_second_day_gets_its_ids(
    both_days: Callable[[str], Days], new_stream: Callable[[], UpdateStreamSpec], tmp_path: Path
) -> None:
    days, spec = both_days("static"), new_stream()
    assert publish(days.second, spec)[0] > 1  # the chain of the first day, then its delta
    with UpdateReceiver(open_stream(spec), tmp_path / "replica", every_seconds=None) as receiver:
        assert receiver.poll() > 1
    opened = InferenceSession.open(tmp_path / "replica")
    assert np.array_equal(opened.predict(days.records), InferenceSession.open(days.second).predict(days.records))


def begin_second_day(run: Path, days: Days) -> None:
    """Add the ids and the delta of the second day to a copy of the first day's run."""
    shutil.rmtree(run / "dataset")
    shutil.copytree(days.second / "dataset", run / "dataset")
    copy_chain(complete_checkpoints(days.second / "checkpoints")[-1], run / "checkpoints")


def test_a_batch_is_encoded_with_the_ids_of_the_weights_that_score_it(
    both_days: Callable[[str], Days], tmp_path: Path
) -> None:
    """The day changed between the two: ids of the first day found rows of the second."""
    days, run = both_days("dynamic"), tmp_path / "run"
    shutil.copytree(days.first, run)
    requests = [RecordColumns(days.records, len(days.lines))]
    with (
        InferenceSession.open(run, tables=ServedTables(server=ParameterServerSpec())) as session,
        LiveUpdates(session, run, every_seconds=None) as updates,
    ):
        expected = {7: session.predict(days.records), 9: InferenceSession.open(days.second).predict(days.records)}
        workflow, encode = session.workflow, session.workflow.encode
        moving = threading.Thread(target=updates.poll)

        def encoded(columns: Any) -> Any:
            records = encode(columns)
            moving.start()
            wait_for(lambda: session.step == 9)  # new batches have the new weights
            return records

        begin_second_day(run, days)
        with mock.patch.object(workflow, "encode", encoded):
            (found,) = JoinedScoring(session)(requests).outcomes
        moving.join()
        assert isinstance(found, Scored)
        assert session.step == 9
        assert np.array_equal(found.scores, expected[found.step])
        (found,) = JoinedScoring(session)(requests).outcomes
        assert isinstance(found, Scored)
        assert np.array_equal(found.scores, expected[9])


def test_a_file_is_scored_with_one_state_of_the_weights(both_days: Callable[[str], Days], tmp_path: Path) -> None:
    """The session moved on between two blocks of a file, whose records had the former ids."""
    days, run = both_days("dynamic"), tmp_path / "run"
    shutil.copytree(days.first, run)
    (tmp_path / "log.tsv").write_text("\n".join(days.lines) + "\n")
    with (
        InferenceSession.open(run, tables=ServedTables(server=ParameterServerSpec())) as session,
        LiveUpdates(session, run, every_seconds=None) as updates,
    ):
        expected = session.predict(days.records)
        begin_second_day(run, days)
        moving = threading.Thread(target=updates.poll)
        blocks = EncodedFiles.blocks

        def moved(files: EncodedFiles) -> Iterator[Any]:
            for block in blocks(files):
                moving.start()
                wait_for(lambda: session.step == 9)
                yield block

        with mock.patch.object(EncodedFiles, "blocks", moved):
            report = score_files(session, [tmp_path / "log.tsv"], tmp_path / "scores.parquet")
        moving.join()
        found = pq.read_table(tmp_path / "scores.parquet")["score"].to_numpy()
        assert report.step == 7
        assert np.allclose(found, expected[:, 0], atol=1e-6)
        assert not np.allclose(session.predict(days.records), expected, atol=1e-6)


def test_a_version_that_follows_a_run_has_the_ids_of_its_later_days(
    both_days: Callable[[str], Days], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The version is a copy of the run, in which no ids are added. It looks as often as the tables say."""
    monkeypatch.setattr("terarec.serve.loading._FOLLOW_SECONDS", 1e6)
    days, run, repository = both_days("dynamic"), tmp_path / "run", tmp_path / "models"
    shutil.copytree(days.first, run)
    promote(run, repository, "shop", PromotionSpec(follow=True))
    with (
        closing(VersionLoader(follow_runs=True, tables=ServedTablesSpec(follow_seconds=0.02))) as loader,
        closing(loader.load(ModelRepository(repository).known("shop"), 1)) as model,
    ):
        expected = InferenceSession.open(days.second).predict(days.records)
        assert not np.array_equal(model.session.predict(days.records), expected)
        begin_second_day(run, days)
        wait_for(lambda: model.session.step == 9)
        assert np.array_equal(model.session.predict(days.records), expected)


def test_a_run_that_describes_other_columns_is_rejected_by_a_session(
    both_days: Callable[[str], Days], tmp_path: Path
) -> None:
    days, run = both_days("static"), tmp_path / "run"
    shutil.copytree(days.first, run)
    with (
        InferenceSession.open(run, tables=ServedTables(server=ParameterServerSpec())) as session,
        LiveUpdates(session, run, every_seconds=None) as updates,
    ):
        before = session.predict(days.records)
        copy_chain(complete_checkpoints(days.second / "checkpoints")[-1], run / "checkpoints")
        file = run / "dataset/dataset.json"
        file.write_text(file.read_text().replace('"C26"', '"C27"'))
        with pytest.raises(ConfigError, check=at("data set 'criteo'", "the column 'C27'")):
            updates.poll()
        assert updates.statistics().rejected == 1
        assert np.array_equal(session.predict(days.records), before)
