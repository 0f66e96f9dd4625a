# SPDX-License-Identifier: Apache-2.0
"""Served records: files that preparation and drift read as raw logs, their bounds, and what is lost."""

import contextlib
import fcntl
import json
import logging
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from terarec.apps.drift.compare import compare
from terarec.apps.drift.summary import summarize_dataset, summarize_raw
from terarec.errors import ConfigError
from terarec.etl import prepare
from terarec.formats import read_dataset
from terarec.ragged import Ragged
from terarec.serve import InferenceClient, InferenceSession, ServedModel, ServedModels, score_files
from terarec.serve.protocol import Elements, InferResponse
from terarec.serve.served_records import ServedRecords, check_record_directory
from terarec.spec import ServingSpec, SplitByFraction, WatchingSpec
from terarec.spec.dataset import MISSING_KEY
from tests.cli.conftest import figures
from tests.errors import at
from tests.io.test_atomic_file import full_after
from tests.processes import Python
from tests.serve.conftest import CATEGORICAL, DENSE, TrainedRun, log_workflow, running
from tests.serve.test_models import request_of, scores_of
from tests.waiting import PATIENCE, wait_for


@contextlib.contextmanager
def recorded(session: InferenceSession, directory: Path, **changes: object) -> Iterator[ServedModels]:
    """Serve a model whose requests are all written."""
    spec = WatchingSpec(record_directory=str(directory), **({"record_share": 1.0} | changes))  # type: ignore[arg-type]
    # The models end first, as in a server: an answer may be there before it is taken.
    with ServedRecords(spec) as records, ServedModels() as models:
        models.observer = records
        models.install(ServedModel(session, name="dlrm", version="3"))
        yield models


def counts_of(models: ServedModels) -> tuple[int, int, int]:
    assert isinstance(models.observer, ServedRecords)
    counts = models.observer.counts()
    return counts.written, counts.lost["queue_full"], counts.lost["write_error"]


def files_in(directory: Path) -> list[Path]:
    return sorted((directory / "dlrm").glob("*"))


def rows_of(directory: Path) -> pa.Table:
    return pa.concat_tables(map(pq.read_table, files_in(directory)))


def test_files_have_the_records_and_their_scores(
    session: InferenceSession, trained: TrainedRun, tmp_path: Path
) -> None:
    begun = datetime.now(UTC)
    with recorded(session, tmp_path) as models:
        answers = [models.submit(request_of(trained, n, n + 40), "dlrm").result(PATIENCE) for n in (0, 40)]
        with pytest.raises(ConfigError):
            models.submit(request_of(trained, 0, 1, priority=-1), "dlrm")
    (file,) = files_in(tmp_path)
    assert file.suffix == ".parquet"
    table = pq.read_table(file)
    added = ["score", "model", "version", "step", "time", "request"]
    assert table.column_names == [*DENSE, *CATEGORICAL, *(f"served.{name}" for name in added)]
    records = trained.records(0, 80)
    assert table["C1"].to_pylist() == [value or None for value in records["C1"]]
    assert table["I1"].to_pylist() == records["I1"]
    assert None in records["I1"]
    scores = np.concatenate([scores_of(answer)[:, 0] for answer in answers])
    assert np.array_equal(table["served.score"].to_numpy(), scores)
    assert table["served.request"].to_pylist() == ["0"] * 40 + ["40"] * 40
    assert set(table["served.model"].to_pylist()) == {"dlrm"}
    assert set(table["served.version"].to_pylist()) == {"3"}
    assert set(table["served.step"].to_pylist()) == {session.step}
    assert all(begun <= time <= datetime.now(UTC) for time in table["served.time"].to_pylist())


def test_drift_and_preparation_read_the_files(session: InferenceSession, trained: TrainedRun, tmp_path: Path) -> None:
    rows = len(trained.lines)
    with recorded(session, tmp_path / "served") as models:
        for begin in range(0, rows, 500):
            models.submit(request_of(trained, begin, min(begin + 500, rows)), "dlrm").result(PATIENCE)
    served = tmp_path / "served" / "dlrm"
    # The same values as in the logs, of which the split "valid" was made.
    reference = summarize_dataset(trained.data, ["valid"])
    report = compare(reference, summarize_raw([served], trained.data))
    assert [column.name for column in report.columns] == [*DENSE, *CATEGORICAL]
    assert report.only_in_reference == ("label",)
    assert report.current.rows == rows
    for column in report.columns:
        assert np.array_equal(column.bins.reference, column.bins.current)
    # Scores of the files are those that were served.
    score_files(session, [served], tmp_path / "scores.parquet")
    again = pq.read_table(tmp_path / "scores.parquet")["score"].to_numpy()
    np.testing.assert_allclose(again, rows_of(tmp_path / "served")["served.score"].to_numpy(), atol=1e-6)
    # Labels come later, and are joined by the user.
    labels = pa.array([int(line.split("\t")[0]) for line in trained.lines])
    pq.write_table(rows_of(tmp_path / "served").append_column("label", labels), tmp_path / "joined.parquet")
    workflow = log_workflow(min_count=2, split=SplitByFraction(valid=0.25))
    prepare(workflow, [tmp_path / "joined.parquet"], tmp_path / "data")
    assert sum(map(read_dataset(tmp_path / "data").num_rows, ("train", "valid"))) == rows


@pytest.mark.slow
def test_the_command_shows_the_drift_of_the_files(
    session: InferenceSession, trained: TrainedRun, tmp_path: Path
) -> None:
    with recorded(session, tmp_path / "served") as models:
        models.submit(request_of(trained, 0, 500), "dlrm").result(PATIENCE)
    report = figures("drift", trained.data, tmp_path / "served" / "dlrm", "--out", tmp_path / "drift.html")
    assert report["current_rows"] == 500
    assert len(json.loads((tmp_path / "drift.json").read_text())["columns"]) == len(DENSE) + len(CATEGORICAL)


def test_files_are_bounded_by_their_size_and_age(
    session: InferenceSession, trained: TrainedRun, tmp_path: Path
) -> None:
    with recorded(session, tmp_path / "size", record_file_bytes=1) as models:
        for begin in (0, 10):
            models.submit(request_of(trained, begin, begin + 10), "dlrm").result(PATIENCE)
            wait_for(lambda begin=begin: counts_of(models)[0] == begin + 10)
    assert [pq.read_metadata(file).num_rows for file in files_in(tmp_path / "size")] == [10, 10]
    with recorded(session, tmp_path / "age", record_file_seconds=0.01) as models:
        models.submit(request_of(trained, 0, 10), "dlrm").result(PATIENCE)
        wait_for(lambda: counts_of(models)[0] == 10)
        assert rows_of(tmp_path / "age").num_rows == 10
    with recorded(session, tmp_path / "neither") as models:
        models.submit(request_of(trained, 0, 10), "dlrm").result(PATIENCE)
        wait_for(lambda: files_in(tmp_path / "neither"))
        assert files_in(tmp_path / "neither")[0].suffix == ".partial"  # which `terarec drift` passes over


def test_a_share_of_the_requests_is_kept(session: InferenceSession, trained: TrainedRun, tmp_path: Path) -> None:
    with recorded(session, tmp_path, record_share=0.5) as models:
        answers = [models.submit(request_of(trained, n, n + 1), "dlrm") for n in range(200)]
        for answer in answers:
            answer.result(PATIENCE)
    assert 60 < rows_of(tmp_path).num_rows < 140  # 5 standard deviations are 35


def test_a_full_disk_loses_records_and_no_request(
    session: InferenceSession, trained: TrainedRun, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with recorded(session, tmp_path, record_file_bytes=1) as models:
        with caplog.at_level(logging.WARNING, "terarec"), full_after(2000):
            for count in (10, 20):
                models.submit(request_of(trained, 0, 10), "dlrm").result(PATIENCE)
                wait_for(lambda count=count: counts_of(models)[2] == count)
        assert files_in(tmp_path) == []
        models.submit(request_of(trained, 0, 10), "dlrm").result(PATIENCE)
        wait_for(lambda: counts_of(models)[0] == 10)
    assert len(caplog.records) == 1
    assert "nothing was left behind" in caplog.text
    assert rows_of(tmp_path).num_rows == 10


def test_what_cannot_be_written_loses_its_own_records_alone(
    session: InferenceSession, trained: TrainedRun, tmp_path: Path
) -> None:
    """The error of a library ended the thread's work: what waited behind was lost, and never counted."""
    request = request_of(trained, 0, 10)
    with recorded(session, tmp_path) as models:
        records = models.observer
        assert isinstance(records, ServedRecords)
        with records._polling:  # until all of them wait
            for each in (replace(request, id="\ud800"), request):
                models.submit(each, "dlrm").result(PATIENCE)
            wait_for(lambda: len(records._waiting) == 2)
        wait_for(lambda: counts_of(models)[2] == 10)
        wait_for(lambda: not records._waiting)
        assert records._num_bytes == 0
        # A file that somebody has removed is lost, and the next one is not.
        wait_for(lambda: bool(files_in(tmp_path)))
        with records._polling:  # once it is open: else it is made again
            files_in(tmp_path)[0].unlink()
        models.submit(request, "dlrm").result(PATIENCE)
        wait_for(lambda: counts_of(models)[2] == 30)
        models.submit(request, "dlrm").result(PATIENCE)
    assert counts_of(models) == (10, 0, 30)
    assert rows_of(tmp_path).num_rows == 10


def test_integers_that_a_model_takes_for_numbers_stay_integers(
    session: InferenceSession, trained: TrainedRun, tmp_path: Path
) -> None:
    """Files with -2^63 and with rounded integers could not be read as the logs of the model."""
    request = request_of(trained, 0, 1)
    (first, *others) = request.inputs
    assert first.name == "I1"
    values: list[Elements] = [[MISSING_KEY], [None], [2**53 + 1], np.array([2.0**25], np.float32), [1.5]]
    with recorded(session, tmp_path / "served") as models:
        answers = []
        for data in values:
            tensor = first._replace(data=data, datatype="FP32" if isinstance(data, np.ndarray) else "INT64")
            answers.append(models.submit(replace(request, inputs=(tensor, *others)), "dlrm").result(PATIENCE))
        wait_for(lambda: counts_of(models)[2] == 1)  # which no log of integers holds
    assert rows_of(tmp_path / "served")["I1"].to_pylist() == [None, None, 2**53 + 1, 2**25]
    assert rows_of(tmp_path / "served")["I1"].type == pa.int64()
    score_files(session, [tmp_path / "served" / "dlrm"], tmp_path / "scores.parquet")
    again = pq.read_table(tmp_path / "scores.parquet")["score"].to_numpy()
    served = np.concatenate([scores_of(answer)[:, 0] for answer in answers[:4]])
    np.testing.assert_allclose(again, served, atol=1e-6)


def test_requests_that_wait_are_bounded(
    session: InferenceSession, trained: TrainedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("terarec.serve.served_records._MOST_BYTES", 1000)
    with recorded(session, tmp_path) as models:
        models.submit(request_of(trained, 0, 100), "dlrm").result(PATIENCE)
        wait_for(lambda: counts_of(models)[1] == 100)
    assert not (tmp_path / "dlrm").exists()


def test_requests_of_models_that_answer_at_once_are_counted_one_by_one(
    session: InferenceSession, trained: TrainedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two that saw the last place, the second was lost, and its bytes counted for ever."""
    monkeypatch.setattr("terarec.serve.served_records._MOST_WAITING", 1)
    both = threading.Barrier(2)

    class Answer(Future[InferResponse]):
        def result(self, timeout: float | None = None) -> InferResponse:
            both.wait(PATIENCE)
            return super().result(timeout)

    with ServedModels() as models, ServedRecords(WatchingSpec(record_share=1.0)) as records:
        models.install(ServedModel(session, name="dlrm"))
        request = request_of(trained, 0, 10)
        scores = models.submit(request, "dlrm").result(PATIENCE)
        answers = [Answer(), Answer()]
        for answer in answers:
            records.observe(request, models.get("dlrm"), answer)
        with records._polling, ThreadPoolExecutor() as pool:  # nothing is written meanwhile
            list(pool.map(lambda answer: answer.set_result(scores), answers))
        assert records.counts().lost["queue_full"] == 10
        wait_for(lambda: records.poll() == 0 and records._num_bytes == 0)


def test_a_directory_that_cannot_be_made_is_an_error_before_anything_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, check=at("WatchingSpec.record_directory", "cannot be made")):
        check_record_directory(WatchingSpec(record_directory=str(tmp_path / "file" / "records")))
    with pytest.raises(ConfigError, check=at("WatchingSpec.record_share")):
        WatchingSpec(record_directory="records", record_share=1.5)


def test_a_server_writes_the_records_that_clients_send(trained: TrainedRun, tmp_path: Path) -> None:
    watching = WatchingSpec(record_directory=str(tmp_path), record_share=1.0)
    with running(trained.path, ServingSpec(name="dlrm", port=0, watching=watching)) as server:
        InferenceClient(server.url, model="dlrm").infer(trained.records(5, 25))
    table = rows_of(tmp_path)
    expected, found = (
        InferenceSession.open(trained.path).workflow.encode(columns)
        for columns in (
            trained.records(5, 25),
            table,
        )
    )
    assert np.array_equal(expected.dense, found.dense, equal_nan=True)
    for keys, others in zip(expected.keys, found.keys, strict=True):
        assert not isinstance(keys, Ragged)
        assert np.array_equal(keys, others)


def test_only_unfinished_files_of_servers_that_are_gone_are_removed(tmp_path: Path) -> None:
    names = {
        "gone": "20261127T093000Z-1f0c62aa.parquet.0a1b2c3d.partial",
        "young": "20261127T093000Z-1f0c62ab.parquet.0a1b2c3d.partial",
        "locked": "20261127T093000Z-1f0c62ac.parquet.0a1b2c3d.partial",
        "finished": "20261127T093000Z-1f0c62ad.parquet",
        "of others": "notes.partial",
    }
    files = {case: tmp_path / "shop" / name for case, name in names.items()}
    files["gone"].parent.mkdir()
    for case, file in files.items():
        file.write_bytes(b"PAR1")
        if case != "young":
            os.utime(file, (0, 0))
    with files["locked"].open("rb") as writer:
        fcntl.flock(writer, fcntl.LOCK_EX)
        check_record_directory(WatchingSpec(record_directory=str(tmp_path)))
    assert {case for case, file in files.items() if not file.exists()} == {"gone"}


def test_a_file_that_is_being_written_is_locked(session: InferenceSession, trained: TrainedRun, tmp_path: Path) -> None:
    with recorded(session, tmp_path) as models:
        models.submit(request_of(trained, 0, 3), "dlrm").result(PATIENCE)
        wait_for(lambda: any(tmp_path.rglob("*.partial")))
        (file,) = tmp_path.rglob("*.partial")
        os.utime(file, (0, 0))
        check_record_directory(WatchingSpec(record_directory=str(tmp_path)))
        assert file.exists()
    assert len(files_in(tmp_path)) == 1


PROGRAM = """
import sys
from pathlib import Path
from terarec.serve import serve
from terarec.spec import ServingSpec, WatchingSpec
watching = WatchingSpec(access_log=sys.argv[2] + "/log", record_directory=sys.argv[2], record_share=1.0)
spec = ServingSpec(name="dlrm", port=0, workers=2, watching=watching)
serve(Path(sys.argv[1]), spec, lambda server: print(server.url, flush=True))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_workers_write_files_of_their_own_and_append_to_one_log(trained: TrainedRun, tmp_path: Path) -> None:
    with contextlib.closing(Python(PROGRAM, trained.path, tmp_path)) as process:
        client = InferenceClient(process.read_line(), model="dlrm")
        for begin in range(0, 30, 3):
            client.infer(trained.records(begin, begin + 3))
        process.send_signal(signal.SIGTERM)
        assert process.wait().returncode == 0
    assert len(files_in(tmp_path)) in (1, 2)
    assert sorted(rows_of(tmp_path)["C1"].to_pylist(), key=str) == sorted(
        (value or None for value in trained.records(0, 30)["C1"]), key=str
    )
    lines = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert [line["records"] for line in lines if line["path"].endswith("/infer")] == [3] * 10
