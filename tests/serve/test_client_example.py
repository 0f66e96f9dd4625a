# SPDX-License-Identifier: Apache-2.0
"""``examples/serve_client.py`` runs as its users run it, against a server."""

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from terarec.serve import InferenceSession, RunningServer
from tests.serve.conftest import TrainedRun

EXAMPLE = Path(__file__).parents[2] / "examples" / "serve_client.py"


def call(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, list[dict[str, Any]], list[str]]:
    """Return the exit status, the records that were printed, and the lines of errors."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [str(EXAMPLE), *map(str, words)])
        status = runpy.run_path(str(EXAMPLE))["main"]()
    captured = capsys.readouterr()
    return status, [json.loads(line) for line in captured.out.splitlines()], captured.err.splitlines()


def records_of(trained: TrainedRun, count: int) -> list[dict[str, Any]]:
    columns = trained.records(0, count)
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def written(path: Path, lines: list[str]) -> Path:
    path.write_text("\n".join(lines) + "\n")
    return path


def test_every_record_comes_back_with_the_score_of_a_session(
    trained: TrainedRun, session: InferenceSession, server: RunningServer, tmp_path: Path, capsys: Any
) -> None:
    records = records_of(trained, 7)
    path = written(tmp_path / "records.jsonl", list(map(json.dumps, records)))
    status, scored, errors = call(capsys, path, "--url", server.url, "--model", "dlrm", "--batch-size", 3)
    assert (status, errors) == (0, [])
    scores = [record.pop("score")[0] for record in scored]
    assert scored == records
    assert np.allclose(scores, session.predict(trained.records(0, 7))[:, 0], rtol=1e-5)


def test_records_that_are_not_accepted_are_reported_by_line_and_the_others_scored(
    trained: TrainedRun, server: RunningServer, tmp_path: Path, capsys: Any
) -> None:
    good = records_of(trained, 2)
    wrong = [good[0] | {"I1": "many"}, good[0] | {"I99": 1.0}]
    lines = [json.dumps(record) for record in (good[0], *wrong, good[1])]
    path = written(tmp_path / "records.jsonl", [*lines, "[1]", "{"])
    status, scored, errors = call(capsys, path, "--url", server.url, "--model", "dlrm")
    assert status == 1
    assert [{name: record[name] for name in good[0]} for record in scored] == good
    assert sorted(line.removeprefix(f"{path}: ").split(":")[0] for line in errors) == [
        f"line {number}" for number in (2, 3, 5, 6)
    ]
    assert any("line 2: " in line and "'many'" in line for line in errors)
    assert any("line 3: column 'I99'" in line for line in errors)


@pytest.mark.parametrize("model", ["dlrm", "other"])
def test_a_server_that_does_not_answer_and_an_unknown_model_are_one_line(
    server: RunningServer, tmp_path: Path, capsys: Any, model: str
) -> None:
    path = written(tmp_path / "records.jsonl", ["{}"])
    url = "http://127.0.0.1:9" if model == "dlrm" else server.url
    status, scored, errors = call(capsys, path, "--url", url, "--model", model)
    assert (status, scored, len(errors)) == (1, [], 1)
    assert errors[0].startswith(f"error: {url}/v2/models/{model}: ")
