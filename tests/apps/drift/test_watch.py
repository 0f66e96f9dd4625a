# SPDX-License-Identifier: Apache-2.0
"""Drift of served records against the training data, by the figures of whole data sets."""

import gc
import os
import shutil
import weakref
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path

import httpx
import pytest

from terarec.apps.drift.compare import compare
from terarec.apps.drift.summary import summarize_dataset
from terarec.apps.drift.watch import ServedDrift
from terarec.serve import InferenceClient, InferenceSession, ServedModel, ServedModels, drift_counts
from terarec.serve.input_drift import ModelDrift
from terarec.serve.protocol import InferRequest
from terarec.serve.served_records import ServedRecords
from terarec.serve.statistics_board import StatisticsBoard, WorkerStatistics
from terarec.spec import ServingSpec, WatchingSpec
from tests.processes import Python
from tests.serve.conftest import CATEGORICAL, DENSE, TrainedRun, running
from tests.serve.test_models import request_of
from tests.waiting import PATIENCE, wait_for


@pytest.fixture
def drift() -> Iterator[ServedDrift]:
    with closing(ServedDrift(every_seconds=None)) as watch:
        yield watch


def serve(
    session: InferenceSession, drift: ServedDrift, requests: Sequence[InferRequest], versions: Sequence[str] = ("3",)
) -> None:
    """Let a model score requests, all of which are in the sample."""
    # The models end first, as in a server: an answer may be there before it is taken.
    with ServedRecords(WatchingSpec(record_share=1.0), drift) as records, ServedModels() as models:
        models.observer = records
        for version in versions:
            models.install(ServedModel(session, name="dlrm", version=version))
            for request in requests:
                models.submit(request, "dlrm").result(PATIENCE)


def only(drift: ServedDrift) -> ModelDrift:
    (found,) = drift.read()
    return found


def test_the_figures_are_those_of_whole_data_sets(
    session: InferenceSession, trained: TrainedRun, drift: ServedDrift
) -> None:
    rows = len(trained.lines)
    serve(session, drift, [request_of(trained, begin, min(begin + 500, rows)) for begin in range(0, rows, 500)])
    assert drift.read() == []  # nothing is compared in the thread that writes
    drift.poll()
    found = only(drift)
    reference = summarize_dataset(trained.data, ["train"])
    report = compare(reference, summarize_dataset(trained.data, ["valid"]))
    expected = {column.name: column for column in report.columns if column.name != "label"}
    assert (found.model, found.version, found.problem) == ("dlrm", "3", "")
    assert (found.records, found.reference_records) == (rows, reference.rows)
    assert {column.name for column in found.inputs} == {*DENSE, *CATEGORICAL} == expected.keys()
    for column in found.inputs:
        assert column.stability_index == expected[column.name].stability_index
        assert (column.missing, column.rare) == (expected[column.name].missing, expected[column.name].rare)
    indices = [column.stability_index for column in found.inputs]
    assert indices == sorted(indices, reverse=True)


def test_columns_that_have_moved_come_first(session: InferenceSession, trained: TrainedRun, drift: ServedDrift) -> None:
    request = request_of(trained, 0, 400)
    moved = {"I1": [10**6] * 400, "C1": [""] * 400}
    tensors = [tensor._replace(data=moved.get(tensor.name, tensor.data)) for tensor in request.inputs]
    serve(session, drift, [replace(request, inputs=tuple(tensors))])
    drift.poll()
    first, second, third, *_ = only(drift).inputs
    assert {first.name, second.name} == {"I1", "C1"}
    assert all(column.stability_index is not None and column.stability_index > 2 for column in (first, second))
    assert third.stability_index is not None
    assert third.stability_index < 1
    assert next(column for column in (first, second) if column.name == "C1").missing[1] == 1.0


def test_the_last_records_are_compared(
    session: InferenceSession, trained: TrainedRun, drift: ServedDrift, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("terarec.apps.drift.watch.WINDOW_RECORDS", 60)
    for begin in (0, 40, 80):
        serve(session, drift, [request_of(trained, begin, begin + 40)])
        drift.poll()
    assert only(drift).records == 60


def test_training_data_that_are_not_there_are_a_problem_in_words(
    session: InferenceSession, trained: TrainedRun, tmp_path: Path
) -> None:
    with closing(ServedDrift(tmp_path / "nothing", every_seconds=0.01)) as drift:
        serve(session, drift, [request_of(trained, 0, 10)])
        wait_for(drift.read)  # its own thread compares
        found = only(drift)
    assert str(tmp_path / "nothing") in found.problem
    assert (found.records, found.inputs) == (0, ())


def test_a_version_that_is_served_no_longer_is_not_kept(
    session: InferenceSession, trained: TrainedRun, drift: ServedDrift
) -> None:
    model = ServedModel(session, name="dlrm", version="3")
    answer = model.submit(request_of(trained, 0, 10))
    records = ServedRecords(WatchingSpec(record_share=1.0), drift)
    with records:
        records.observe(request_of(trained, 0, 10), model, answer)
        answer.result(PATIENCE)
    drift.poll()
    model.close()
    kept = weakref.ref(model)
    del model, answer, records
    wait_for(lambda: gc.collect() >= 0 and kept() is None)
    assert only(drift).records == 10


def test_training_data_that_come_later_are_compared_with(
    session: InferenceSession, trained: TrainedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("terarec.apps.drift.watch._EVERY_SECONDS", 0.0)
    with closing(ServedDrift(tmp_path / "later", every_seconds=None)) as drift:
        serve(session, drift, [request_of(trained, 0, 10)])
        drift.poll()
        assert only(drift).records == 0
        (tmp_path / "later").symlink_to(trained.data)
        serve(session, drift, [request_of(trained, 0, 10)])
        drift.poll()
        assert (only(drift).records, only(drift).problem) == (20, "")


def test_a_version_stays_compared_with_the_data_that_it_was_trained_on(
    session: InferenceSession, trained: TrainedRun, tmp_path: Path
) -> None:
    """Where a preparation replaces them each day, every later version was compared with the first ones."""
    data, replaced = tmp_path / "data", tmp_path / "replaced"
    data.symlink_to(trained.data)
    with closing(ServedDrift(data, every_seconds=None)) as drift:
        serve(session, drift, [request_of(trained, 0, 10)])
        drift.poll()
        shutil.copytree(trained.data, replaced)
        shutil.rmtree(replaced / "train")
        (replaced / "valid").rename(replaced / "train")
        data.unlink()
        data.symlink_to(replaced)
        serve(session, drift, [request_of(trained, 0, 10)], ["4"])
        drift.poll()
        former, latter = drift.read()
        assert former.inputs != latter.inputs
        serve(session, drift, [request_of(trained, 0, 10)], ["3"])
        drift.poll()
        latter, former = drift.read()
        indices = {column.name: column.stability_index for column in former.inputs}
    with closing(ServedDrift(trained.data, every_seconds=None)) as drift:
        serve(session, drift, [request_of(trained, 0, 10)] * 2)
        drift.poll()
        assert {column.name: column.stability_index for column in only(drift).inputs} == indices


def test_versions_that_are_served_stay_however_many_they_are(
    session: InferenceSession, trained: TrainedRun, drift: ServedDrift, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("terarec.apps.drift.watch._MOST_VERSIONS", 2)
    serve(session, drift, [request_of(trained, 0, 10)], ["1", "2", "3", "4"])
    drift.poll()
    assert [found.version for found in drift.read()] == ["1", "2", "3", "4"]
    gc.collect()  # the models, which are served no longer
    serve(session, drift, [request_of(trained, 0, 10)], ["2", "5"])
    drift.poll()
    assert [found.version for found in drift.read()] == ["2", "5"]


def test_what_waits_for_a_comparison_is_bounded_in_bytes(
    session: InferenceSession, trained: TrainedRun, drift: ServedDrift, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("terarec.apps.drift.watch._MOST_BYTES", 50_000)
    serve(session, drift, [request_of(trained, 0, 10), *[request_of(trained, 0, 400)] * 4])
    drift.poll()
    assert 10 <= only(drift).records < 1610


def test_processes_that_share_the_records_of_a_model_compare_all_of_them(
    session: InferenceSession, trained: TrainedRun, drift: ServedDrift
) -> None:
    """Each worker showed the drift of the records that it had scored."""
    rows = len(trained.lines)
    board = StatisticsBoard(3)
    first, second, third = (WorkerStatistics(board, index) for index in range(3))
    with first, second, third, closing(ServedDrift(every_seconds=None)) as other:
        first.drift, second.drift = drift.counts, other.counts
        serve(session, drift, [request_of(trained, 0, 100)])
        serve(session, other, [request_of(trained, begin, begin + 100) for begin in range(100, rows, 100)])
        drift.poll()
        other.poll()
        assert [found.records for found in (only(drift), only(other))] == [100, rows - 100]
        first.poll()
        second.poll()
        of_first, of_second = drift.read(first.other_drift()), other.read(second.other_drift())
        assert of_first == of_second
        with closing(ServedDrift(every_seconds=None)) as none:  # of a worker that has scored nothing
            assert list(none.read(third.other_drift())) == of_first
        with closing(ServedDrift(every_seconds=None)) as whole:
            serve(session, whole, [request_of(trained, begin, begin + 100) for begin in range(0, rows, 100)])
            whole.poll()
            assert list(whole.read()) == of_first
        board.bury(1)  # its last records are those of nobody
        assert drift.read(first.other_drift()) == drift.read()


def test_processes_that_compare_with_other_data_show_the_same(
    session: InferenceSession, trained: TrainedRun, drift: ServedDrift, tmp_path: Path
) -> None:
    replaced = tmp_path / "data"
    shutil.copytree(trained.data, replaced)
    with (
        closing(ServedDrift(replaced, every_seconds=None)) as other,
        closing(ServedDrift(tmp_path / "none", every_seconds=None)) as failed,
    ):
        for watch, records in ((drift, 30), (other, 40), (failed, 50)):
            serve(session, watch, [request_of(trained, 0, records)])
            watch.poll()
        watches = (drift, other, failed)
        shown = [
            watch.read([each for others in watches if others is not watch for each in others.counts()])
            for watch in watches
        ]
        assert shown[0] == shown[1] == shown[2]
        assert shown[0][0].records == 40
        assert "none" in only(failed).problem


def test_counts_come_back_from_their_text(session: InferenceSession, trained: TrainedRun, drift: ServedDrift) -> None:
    serve(session, drift, [request_of(trained, 0, 30)])
    drift.poll()
    assert drift_counts.of_json(drift_counts.to_json(drift.counts())) == list(drift.counts())


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_each_worker_of_a_server_shows_the_drift_of_all(trained: TrainedRun) -> None:
    program = """
import sys
from functools import partial
from pathlib import Path
from terarec.apps.drift.watch import ServedDrift
from terarec.serve import serve
from terarec.spec import ServingSpec, WatchingSpec
spec = ServingSpec(name="dlrm", port=0, workers=2, watching=WatchingSpec(record_share=1.0))
drift = partial(ServedDrift, every_seconds=0.05)
serve(Path(sys.argv[1]), spec, lambda server: print(server.port, flush=True), drift=drift)
"""
    with closing(Python(program, trained.path)) as process:
        url = f"http://127.0.0.1:{process.read_line()}"
        client = InferenceClient(url, model="dlrm")
        for _ in range(40):  # connections go to either worker
            client.infer(trained.records(0, 10))

        def shown() -> set[int]:
            found = [httpx.get(f"{url}/drift").json()["models"] for _ in range(8)]
            return {sum(model["records"] for model in models) for models in found}

        wait_for(lambda: shown() == {400})
        metrics = [httpx.get(f"{url}/metrics").text for _ in range(8)]
        assert all(" 400.0" in line for text in metrics for line in text.splitlines() if "drift_records{" in line)


def test_a_server_compares_what_it_scores(trained: TrainedRun) -> None:
    spec = ServingSpec(name="dlrm", port=0, watching=WatchingSpec(record_share=1.0))
    with running(trained.path, spec, drift=partial(ServedDrift, every_seconds=0.05)) as server:
        InferenceClient(server.url, model="dlrm").infer(trained.records(0, 200))
        wait_for(lambda: httpx.get(f"{server.url}/drift").json()["models"])
        (found,) = httpx.get(f"{server.url}/drift").json()["models"]
        metrics = httpx.get(f"{server.url}/metrics").text
    assert (found["model"], found["records"], len(found["inputs"])) == ("dlrm", 200, len(DENSE) + len(CATEGORICAL))
    assert f'terarec_input_drift_records{{model="dlrm",version="{found["version"]}"}} 200.0' in metrics
    assert 'terarec_sink_written_total{sink="served_records"}' in metrics


def test_a_part_of_large_data_is_read(trained: TrainedRun) -> None:
    complete = summarize_dataset(trained.data, ["train"])
    part = summarize_dataset(trained.data, ["train"], most_rows=1)
    assert 0 < part.rows <= complete.rows
    assert summarize_dataset(trained.data, ["train"], most_rows=complete.rows).rows == complete.rows
