# SPDX-License-Identifier: Apache-2.0
"""The dense part of a session in other executors: scores, the choice by measurement, and where it is kept."""

import dataclasses
import json
import os
import shutil
import signal
import tempfile
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from terarec.cli.inspect_model import describe_checkpoint
from terarec.closer import wait_closed
from terarec.errors import ConfigError, FormatError, MissingDependencyError
from terarec.export.dense_part import DensePart
from terarec.models.artifact import load_model
from terarec.serve import InferenceSession, ServedTables, executors
from terarec.serve.executor_file import EXECUTORS_FILE, kept_choices, this_machine
from terarec.serve.executors import EXECUTORS, Programs, _Folder
from terarec.spec import HostMemorySpec, Numbers, ParameterServerSpec
from terarec.spec.serving import EXECUTOR_NAMES
from tests.cli.conftest import figures
from tests.errors import at
from tests.serve.conftest import TrainedRun
from tests.serve.counted_executor import count_batches
from tests.waiting import PATIENCE

HOST = ParameterServerSpec(tiers=(HostMemorySpec(),))
SLOW = {"compile", "aotinductor"}  # which start a C++ compiler


@pytest.fixture
def run(trained: TrainedRun, tmp_path: Path) -> Path:
    """A copy of the run, which gets a choice."""
    return Path(shutil.copytree(trained.path, tmp_path / "run"))


@pytest.fixture
def without_compilers(monkeypatch: pytest.MonkeyPatch) -> None:
    quick = {name: build for name, build in EXECUTORS.items() if name not in SLOW}
    monkeypatch.setattr(executors, "EXECUTORS", quick)


def test_options_name_every_executor() -> None:
    assert tuple(EXECUTORS) == EXECUTOR_NAMES


@pytest.mark.slow
@pytest.mark.parametrize("tables", [None, ServedTables(server=HOST)], ids=["memory", "parameter server"])
@pytest.mark.parametrize("executor", EXECUTOR_NAMES[1:])
def test_every_executor_gives_the_scores_of_eager_torch(
    trained: TrainedRun, session: InferenceSession, executor: str, tables: ServedTables | None
) -> None:
    if executor in ("onnxruntime", "openvino"):
        pytest.importorskip(executor)
    with InferenceSession.open(trained.path, tables=tables, executor=executor) as other:
        assert set(other.executors.values()) == {executor}
        for bounds in ((0, 0), (0, 1), (1, 3), (0, 300)):
            records = trained.records(*bounds)
            found = other.predict(records)
            assert found.shape == (bounds[1] - bounds[0], 1)
            assert np.abs(found - session.predict(records)).max(initial=0.0) <= 1e-5


@pytest.mark.slow
@pytest.mark.usefixtures("without_compilers")
def test_the_choice_is_kept_and_used(run: Path, trained: TrainedRun, session: InferenceSession) -> None:
    assert InferenceSession.open(run).executors == {}
    assert not (run / EXECUTORS_FILE).exists()
    measured = InferenceSession.open(run, executor="measure")
    (choice,) = kept_choices(run / EXECUTORS_FILE)
    assert choice.is_of(this_machine())
    assert {one.batch: one.executor for one in choice.sizes} == measured.executors
    for size in choice.sizes:
        assert set(size.seconds) == set(executors.EXECUTORS) - set(choice.rejected)
        fastest = min(size.seconds, key=size.seconds.__getitem__)
        assert size.executor in ("eager", fastest)
    written = (run / EXECUTORS_FILE).read_bytes()
    for executor in ("auto", "measure"):
        assert InferenceSession.open(run, executor=executor).executors == measured.executors
    assert (run / EXECUTORS_FILE).read_bytes() == written
    records = trained.records(0, 40)
    assert np.abs(measured.predict(records) - session.predict(records)).max() <= 1e-5


def keep(run: Path, **changes: object) -> None:
    """Write a choice of ONNX Runtime for batches up to 16, and of eager torch for others."""
    chosen = {16: "onnxruntime", 256: "eager"}
    sizes = [{"batch": size, "executor": name, "seconds": {name: 0.1}} for size, name in chosen.items()]
    choice = {**this_machine(), "sizes": sizes, "rejected": {}, **changes}
    content = {"format": "terarec.executors", "version": 1, "choices": [choice]}
    (run / EXECUTORS_FILE).write_text(json.dumps(content))


def test_each_batch_goes_to_the_executor_of_its_size(run: Path, trained: TrainedRun) -> None:
    pytest.importorskip("onnxruntime")
    keep(run)
    session = InferenceSession.open(run)
    calls: list[int] = []
    session._weights.current.model.register_forward_pre_hook(
        lambda module, arguments: calls.append(arguments[0].batch_size)
    )
    for size in (1, 16, 17, 300):
        session.predict(trained.records(0, size))
    assert calls == [17, 300]


@pytest.mark.parametrize("field", ["torch", "processor", "threads"])
def test_the_choice_of_another_machine_is_not_used(run: Path, field: str) -> None:
    keep(run, **{field: "other"} if field != "threads" else {field: 99})
    assert InferenceSession.open(run).executors == {}


@pytest.mark.slow
@pytest.mark.usefixtures("without_compilers")
def test_a_choice_is_kept_next_to_those_of_other_machines(run: Path) -> None:
    keep(run, processor="other")
    InferenceSession.open(run, executor="measure")
    assert [choice.processor == "other" for choice in kept_choices(run / EXECUTORS_FILE)] == [True, False]


@pytest.mark.parametrize("text", ["{", '{"format": "terarec.executors", "version": 1, "choices": [{}]}'])
def test_a_damaged_choice_leaves_eager_torch(run: Path, text: str) -> None:
    (run / EXECUTORS_FILE).write_text(text)
    assert InferenceSession.open(run).executors == {}
    with pytest.raises(FormatError):
        kept_choices(run / EXECUTORS_FILE)


def test_a_program_with_other_scores_is_not_chosen(trained: TrainedRun, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(part: DensePart, folder: Path) -> executors.Program:
        return lambda values: [scores + 2e-4 for scores in part.module(*values)]

    quick = {"eager": EXECUTORS["eager"], "onnxruntime": wrong}
    monkeypatch.setattr(executors, "EXECUTORS", quick)
    loaded = load_model(trained.path)
    part = DensePart.of(loaded.model, loaded.dataset, torch.sigmoid)
    programs, choice = Programs.measured(part)
    assert set(programs.chosen.values()) == {"eager"}
    assert set(choice.rejected) == {"onnxruntime"}
    with pytest.raises(ConfigError, check=at("executor 'onnxruntime'")):
        Programs.of(part, {1: "onnxruntime"})


def test_an_executor_that_is_not_installed_is_named(trained: TrainedRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingDependencyError, check=at("openvino")):
        InferenceSession.open(trained.path, executor="openvino")


def test_an_unknown_executor_is_rejected(trained: TrainedRun) -> None:
    with pytest.raises(ConfigError, check=at("executor")):
        InferenceSession.open(trained.path, executor="tvm")


@pytest.mark.parametrize("numbers", [Numbers(precision="bf16"), Numbers(precision="int8"), Numbers(row_type="int8")])
def test_narrower_numbers_run_in_eager_torch(trained: TrainedRun, numbers: Numbers) -> None:
    assert InferenceSession.open(trained.path, executor="measure", numbers=numbers).executors == {}
    with pytest.raises(ConfigError, check=at("executor")):
        InferenceSession.open(trained.path, executor="onnxruntime", numbers=numbers)


def test_the_layers_of_a_graph_are_computed_apart(
    graph_run: Path, trained: TrainedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = count_batches(monkeypatch)
    with InferenceSession.open(graph_run, executor="onnxruntime") as session:
        sizes.clear()
        for bounds in ((0, 1), (0, 200)):
            records = trained.records(*bounds)
            found = session.predict(records)
            session._weights.current.programs, programs = None, session._weights.current.programs
            assert np.abs(found - session.predict(records)).max() <= 1e-6
            session._weights.current.programs = programs
    assert sizes == [1, 200]


@pytest.mark.slow
@pytest.mark.parametrize("executor", EXECUTOR_NAMES[1:])
def test_every_executor_computes_graphs(graph_run: Path, trained: TrainedRun, executor: str) -> None:
    if executor in ("onnxruntime", "openvino"):
        pytest.importorskip(executor)
    records = trained.records(0, 300)
    expected = InferenceSession.open(graph_run).predict(records)
    session = InferenceSession.open(graph_run, executor=executor)
    assert set(session.executors.values()) == {executor}
    assert np.abs(session.predict(records) - expected).max() <= 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("executor", EXECUTOR_NAMES[1:])
def test_vectors_may_be_parts_of_a_wider_tensor(executor: str) -> None:
    """A compiled program read the vectors of other features in their place."""
    if executor in ("onnxruntime", "openvino"):
        pytest.importorskip(executor)
    from tests.export.test_tables import BAGS, EMBEDDINGS, batch, graph  # which needs the extra 'onnx'

    model = graph(next(embedding for embedding in EMBEDDINGS if embedding.output == "apart"))
    samples = batch(model, BAGS)
    part = DensePart.of_graph(model)
    assert not all(value.is_contiguous() for value in part.look_up(samples))
    with torch.inference_mode():
        found = Programs.of(part, {8: executor}).scores(samples)
    assert found is not None
    assert (found - model.predict(samples)).abs().max() <= 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("options", [["--executor", "onnxruntime"], ["--executor", "measure"], ["--row-type", "int8"]])
@pytest.mark.usefixtures("without_compilers")
def test_predict_scores_a_data_set_in_an_executor(
    run: Path, trained: TrainedRun, tmp_path: Path, options: list[str]
) -> None:
    pytest.importorskip("onnxruntime")
    scoring = ["predict", run, "--data", trained.data, "--out"]
    plain = figures(*scoring, tmp_path / "plain.parquet")
    scored = figures(*scoring, tmp_path / "other.parquet", *options)
    assert scored["rows"] == plain["rows"] > 1000
    expected, found = (pq.read_table(tmp_path / f"{name}.parquet") for name in ("plain", "other"))
    assert found["label"].equals(expected["label"])
    difference = np.abs(found["score"].to_numpy() - expected["score"].to_numpy()).max()
    assert difference <= (1e-5 if "--executor" in options else 0.05)
    assert difference > 0 or "measure" in options  # it was another computation
    assert (run / EXECUTORS_FILE).is_file() == ("measure" in options)


def test_inspect_shows_the_choice(run: Path) -> None:
    keep(run)
    (first, second) = describe_checkpoint(run)["executors"]
    assert (first["batch"], first["executor"], first["onnxruntime_ms"], first["eager_ms"]) == (
        16,
        "onnxruntime",
        100.0,
        None,
    )
    assert (second["batch"], second["executor"]) == (256, "eager")


def test_a_model_that_looks_up_other_keys_is_not_split(trained: TrainedRun) -> None:
    loaded = load_model(trained.path)
    loaded.model.embedding.register_forward_pre_hook(lambda module, given: (dataclasses.replace(given[0]),))
    with pytest.raises(ConfigError, check=at("DLRM")):
        DensePart.of(loaded.model, loaded.dataset, torch.sigmoid)


GOOD = {"batch": 1, "executor": "eager", "seconds": {"eager": 0.1}}
CHOICE = {"torch": "2", "processor": "x", "threads": 1, "sizes": [GOOD], "rejected": {}}


@pytest.mark.parametrize(
    "content",
    [
        {"choices": 3},
        {"choices": [3]},
        {"choices": [{**CHOICE, "sizes": []}]},
        {"choices": [{**CHOICE, "sizes": [{**GOOD, "seconds": {"eager": "fast"}}]}]},
        {"choices": [{**CHOICE, "sizes": [{**GOOD, "batch": 1e400}]}]},
        {"choices": [{**CHOICE, "rejected": ["ab"]}]},
        {},
    ],
    ids=str,
)
def test_a_damaged_file_of_choices_is_rejected(tmp_path, content):
    """Finding Q6: it was a defect."""
    file = tmp_path / "executors.json"
    file.write_text(json.dumps({"format": "terarec.executors", "version": 1, **content}))
    with pytest.raises(FormatError):
        kept_choices(file)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_the_files_of_a_process_that_was_killed_go_with_the_next_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each worker that was killed left its compiled programs on the disk for good."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    child = os.fork()
    if not child:
        folder = _Folder()
        (folder.path / "model.onnx").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    (left,) = tmp_path.iterdir()
    folder = _Folder()
    assert not left.exists()
    other = _Folder()
    assert folder.path.is_dir()
    del folder, other
    wait_closed(PATIENCE)
    assert list(tmp_path.iterdir()) == []
