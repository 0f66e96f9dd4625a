# SPDX-License-Identifier: Apache-2.0
"""Model repositories of Triton: their files, their stages in this process, and a real Triton where one is installed."""

import contextlib
import importlib.util
import json
import os
import re
import runpy
import subprocess
import sys
import time
import types
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch

from terarec.apps.triton import CONFIG_FILE, Enum, Message, export_triton, text_format
from terarec.apps.triton_models import (
    DATASET,
    PROGRAM,
    TABLES,
    DenseStage,
    LookupStage,
    WorkflowStage,
    check_arrays,
    raw_values,
)
from terarec.config import load_run
from terarec.config.files import RUN_FILE, load_served_tables
from terarec.errors import ConfigError
from terarec.export import NO_KEY
from terarec.export.artifact import EXPORT_FILE
from terarec.ps import ParameterServer
from terarec.serve import InferenceSession, ServedTables
from terarec.serve.session import InputColumn, input_columns
from terarec.spec import GraphLayer, GraphModelSpec, Numbers, ParameterServerSpec, TritonSpec
from terarec.train import build
from tests.addresses import own_address
from tests.errors import at
from tests.params import in_every_run
from tests.programs import lacks
from tests.serve.conftest import DENSE, TrainedRun
from tests.waiting import PATIENCE

TRITON = importlib.util.find_spec("pytriton")


def as_arrays(columns: tuple[InputColumn, ...], records: dict[str, list[Any]]) -> dict[str, np.ndarray]:
    """Return raw values as a client of Triton sends them."""
    found = {}
    for column in columns:
        values = records[column.name]
        if column.kind == "number":
            held = np.array([np.nan if value is None else float(value) for value in values])
        elif column.kind == "integer":
            held = np.array([NO_KEY if value is None else int(value) for value in values], np.int64)
        else:
            held = np.array([str(value or "").encode() for value in values], object)
        found[column.name] = held[:, None]
    return found


@pytest.fixture(scope="module")
def repository(trained: TrainedRun, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("triton") / "repository"
    report = export_triton(trained.path, out, TritonSpec(name="clicks", form="ensemble", preferred_batches=(8, 64)))
    assert report.max_abs_difference <= 1e-4
    assert report.outputs == ("label",)
    return out


@pytest.mark.slow
def test_the_stages_score_as_the_session(trained: TrainedRun, session: InferenceSession, repository: Path) -> None:
    records = trained.records(0, 200)
    workflow = WorkflowStage(repository / "clicks_workflow" / "1" / DATASET)
    with ParameterServer(ParameterServerSpec()) as server:
        lookup = LookupStage(trained.path, session.step, ServedTables(server=server))
        encoded = workflow(as_arrays(session.inputs, records))
        vectors = lookup({name: keys for name, keys in encoded.items() if name != "dense"})
    dense = DenseStage(repository / "clicks_dense" / "1" / PROGRAM, ["dense", *vectors], ["label"])
    scores = dense({"dense": encoded["dense"], **vectors})["label"]
    assert np.abs(scores - session.predict(records)).max() <= 1e-6


def test_an_output_of_classes_has_their_number(trained: TrainedRun, graph_run: Path, tmp_path: Path) -> None:
    """The loss of a graph says how many scores a sample has, whatever the objective of the run."""
    spec = load_run(graph_run / RUN_FILE)
    assert isinstance(spec.model, GraphModelSpec)
    layers = (
        *spec.model.graph.layers[:-2],
        GraphLayer(kind="mlp", bottoms=("all",), tops=("logit",), options={"num_outputs": [2]}),
        GraphLayer(kind="cross_entropy", bottoms=("logit", "label"), tops=("loss",), options={}),
    )
    model = GraphModelSpec(graph=replace(spec.model.graph, layers=layers))
    build(replace(spec, model=model), tmp_path / "run").fit()
    export_triton(tmp_path / "run", tmp_path / "out", TritonSpec(name="clicks", form="ensemble"))
    for name in ("clicks", "clicks_dense"):
        (output,) = re.findall(r"^output \{(.*?)^\}", (tmp_path / "out" / name / CONFIG_FILE).read_text(), re.M | re.S)
        assert re.findall(r"dims: (-?\d+)", output) == ["2"]
    inputs = json.loads((tmp_path / "out" / "clicks_dense" / "1" / EXPORT_FILE).read_text())["inputs"]
    zeros = {one["name"]: np.zeros([3, *one["shape"][1:]], np.float32) for one in inputs}
    stage = DenseStage(tmp_path / "out" / "clicks_dense" / "1" / PROGRAM, list(zeros), ["label"])
    assert stage(zeros)["label"].shape == (3, 2)


@pytest.mark.slow
def test_the_stages_of_a_graph_score_as_the_session(trained: TrainedRun, graph_run: Path, tmp_path: Path) -> None:
    """Its dense columns and vectors have names of their own."""
    export_triton(graph_run, tmp_path / "out", TritonSpec(form="ensemble"))
    folder = tmp_path / "out" / "terarec_dense" / "1"
    names = [given["name"] for given in json.loads((folder / EXPORT_FILE).read_text())["inputs"]]
    assert names == ["numbers", "one", "two", "single"]
    ensemble = (tmp_path / "out" / "terarec" / CONFIG_FILE).read_text()
    assert re.search(r'key: "numbers"\s+value: "encoded:dense"', ensemble)
    records = trained.records(0, 200)
    with InferenceSession.open(graph_run) as session, ParameterServer(ParameterServerSpec()) as server:
        encoded = WorkflowStage(tmp_path / "out" / "terarec_workflow" / "1" / DATASET)(
            as_arrays(session.inputs, records)
        )
        lookup = LookupStage(graph_run, session.step, ServedTables(server=server))
        vectors = lookup({name: keys for name, keys in encoded.items() if name != "dense"})
        scores = DenseStage(folder / PROGRAM, names, ["label"])({"numbers": encoded["dense"], **vectors})["label"]
        assert np.abs(scores - session.predict(records)).max() <= 1e-6


def test_the_files_of_a_repository(repository: Path, session: InferenceSession) -> None:
    names = ["clicks", "clicks_dense", "clicks_lookup", "clicks_workflow"]
    assert sorted(path.name for path in repository.iterdir()) == names
    configs = {name: (repository / name / CONFIG_FILE).read_text() for name in names}
    assert all((repository / name / "1").is_dir() for name in names)
    for name in names[1:]:
        assert "preferred_batch_size: 8\n  preferred_batch_size: 64\n" in configs[name]
        assert "max_queue_delay_microseconds: 500" in configs[name]
        assert (repository / name / "1" / "model.py").is_file()
    stages = re.findall(r'model_name: "(\w+)"', configs["clicks"])
    assert stages == ["clicks_workflow", "clicks_lookup", "clicks_dense"]
    raw = [column.name for column in input_columns(session.workflow)]
    inputs = re.findall(r'^input \{\n  name: "([\w.]+)".*?^\}', configs["clicks"], re.MULTILINE | re.DOTALL)
    assert inputs == [tensor for name in raw for tensor in (name, f"{name}.missing")]
    assert "/" not in configs["clicks_dense"], "it names no path of this machine"


def test_text_format_quotes_text_alone() -> None:
    message = Message(name='a"b\n', kind=Enum("KIND_CPU"), dims=[1, -1], inner=[Message(key="k")])
    assert text_format(message) == 'name: "a\\"b\\n"\nkind: KIND_CPU\ndims: 1\ndims: -1\ninner {\n  key: "k"\n}\n'


@pytest.mark.parametrize("field", ["max_batch", "preferred_batches", "backend"])
def test_wrong_options_are_rejected(field: str) -> None:
    with pytest.raises(ConfigError, check=at(f"TritonSpec.{field}")):
        TritonSpec(**{field: {"max_batch": 0, "preferred_batches": (2048,), "backend": "tvm"}[field]})  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["onnxruntime", "pytorch"])
def test_dense_parts_of_other_back_ends(trained: TrainedRun, tmp_path: Path, backend: str) -> None:
    export_triton(trained.path, tmp_path / "out", TritonSpec(form="ensemble", backend=backend))  # type: ignore[arg-type]
    folder = tmp_path / "out" / "terarec_dense"
    config = (folder / CONFIG_FILE).read_text()
    assert f'backend: "{backend}"' in config
    assert (folder / "1" / {"onnxruntime": "model.onnx", "pytorch": "model.pt"}[backend]).is_file()
    assert ("INPUT__0" in config) == (backend == "pytorch")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "numbers"),
    [
        ("python", Numbers(row_type="int8", precision="bf16")),
        ("pytorch", Numbers(row_type="int8", precision="int8")),
        ("onnxruntime", Numbers(precision="int8")),
    ],
)
def test_repositories_in_narrower_numbers(
    trained: TrainedRun, session: InferenceSession, tmp_path: Path, backend: Literal["python"], numbers: Numbers
) -> None:
    spec = TritonSpec(form="ensemble", backend=backend)
    report = export_triton(trained.path, tmp_path / "out", spec, numbers=numbers, data=trained.data)
    assert report.auc is not None
    assert report.auc_change is not None
    assert 0 < abs(report.auc_change) < 0.05
    description = json.loads((tmp_path / "out" / "terarec_dense" / "1" / EXPORT_FILE).read_text())
    assert (description["row_type"], description["precision"]) == (numbers.row_type, numbers.precision)
    assert description["auc_change"] == report.auc_change
    tables = tmp_path / "out" / "terarec_lookup" / "1" / TABLES
    assert tables.is_file() == (numbers.row_type == "int8")
    if backend != "python":
        return
    records = trained.records(0, 200)
    encoded = WorkflowStage(tmp_path / "out" / "terarec_workflow" / "1" / DATASET)(as_arrays(session.inputs, records))
    held = load_served_tables(tables)
    assert held.cache is not None
    assert held.cache.form == "int8"
    with ParameterServer(held.server) as server:
        lookup = LookupStage(trained.path, session.step, ServedTables(server=server, cache=held.cache))
        vectors = lookup({name: keys for name, keys in encoded.items() if name != "dense"})
    dense = DenseStage(tmp_path / "out" / "terarec_dense" / "1" / PROGRAM, ["dense", *vectors], ["label"])
    scores = dense({"dense": encoded["dense"], **vectors})["label"]
    narrowed = InferenceSession.open(trained.path, numbers=numbers).predict(records)
    assert np.abs(scores - narrowed).max() <= 0.01
    assert np.abs(scores - session.predict(records)).max() > 1e-6


@contextlib.contextmanager
def running(repository: Path, log: Path) -> Iterator[str]:
    """A Triton of the ``nvidia-pytriton`` wheel that serves a repository."""
    assert TRITON is not None
    assert TRITON.origin is not None
    home = Path(TRITON.origin).parent / "tritonserver"
    host, port = own_address()
    stub = home / "python_backend_stubs" / f"{sys.version_info[0]}.{sys.version_info[1]}" / "triton_python_backend_stub"
    backends = log.parent / "backends"
    (backends / "python").mkdir(parents=True)
    for file in (home / "backends" / "python").iterdir():
        (backends / "python" / file.name).symlink_to(file)
    with contextlib.suppress(FileExistsError):
        (backends / "python" / "triton_python_backend_stub").symlink_to(stub)
    libraries = f"{home / 'external_libs'}:{home / 'lib'}:{os.environ.get('LD_LIBRARY_PATH', '')}"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [
                str(home / "bin" / "tritonserver"),
                f"--model-repository={repository}",
                f"--backend-directory={backends}",
                f"--http-port={port}",
                f"--http-address={host}",
                "--allow-grpc=false",
                "--allow-metrics=false",
                "--exit-timeout-secs=5",
                "--backend-config=python,shm-default-byte-size=4194304",
            ],
            env={**os.environ, "LD_LIBRARY_PATH": libraries},
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            for _ in range(1200):
                assert process.poll() is None, log.read_text()[-3000:]
                with contextlib.suppress(OSError):
                    urllib.request.urlopen(f"http://{host}:{port}/v2/health/ready", timeout=1)
                    break
                time.sleep(0.1)
            yield f"http://{host}:{port}"
        finally:
            process.terminate()
            try:
                process.wait(PATIENCE)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def test_text_may_be_utf8_in_bytes() -> None:
    one = InputColumn(name="c", kind="string")
    assert raw_values(one, as_utf8(["a9", "", "東京"])) == ["a9", None, "東京"]
    assert raw_values(one, np.zeros((2, 0), np.uint8)) == [None, None]
    several = InputColumn(name="c", kind="string", hotness=None)
    lists = as_utf8(["a", "bcd", "", ""]).reshape(2, 2, -1)
    assert raw_values(several, lists) == [["a", "bcd"], []]


def as_utf8(values: list[Any]) -> np.ndarray:
    """Return texts as uint8[B, L]."""
    held = [str(value or "").encode() for value in values]
    return np.array(held, f"S{max(map(len, held))}").view(np.uint8).reshape(len(held), -1)


class _Tensor:
    """An array of a back end that finds the size of an element in the place of another NumPy."""

    def __init__(self, array: np.ndarray) -> None:
        self._array = array

    @classmethod
    def from_dlpack(cls, name: str, tensor: torch.Tensor) -> "_Tensor":
        return cls(np.lib.stride_tricks.as_strided(tensor.numpy(), strides=(0,)).copy())

    def as_numpy(self) -> np.ndarray:
        return self._array


def test_a_back_end_that_misreads_arrays_is_rejected() -> None:
    with pytest.raises(ConfigError, check=at("Triton")):
        check_arrays(types.SimpleNamespace(Tensor=_Tensor))


def export_for_triton(run: Path, repository: Path, **options: Any) -> None:
    # Triton has a Python of its own, with its own standard library.
    own = {path for path in sys.path if path.startswith(sys.base_prefix) and not path.endswith("site-packages")}
    paths = tuple(path for path in sys.path if path and path not in own)
    export_triton(run, repository, TritonSpec(name="clicks", python_path=paths, **options))


@dataclass
class _Sent:
    """A tensor of a request, or of an answer, as Triton's python back end has them."""

    name: str
    array: np.ndarray

    @classmethod
    def from_dlpack(cls, name: str, tensor: torch.Tensor) -> "_Sent":
        return cls(name, tensor.numpy())

    def to_dlpack(self) -> Any:
        return torch.utils.dlpack.to_dlpack(torch.from_numpy(self.array))

    def as_numpy(self) -> np.ndarray:
        return self.array


def back_end() -> types.ModuleType:
    """The names of Triton's python back end that its processes have, for requests that are lists of tensors."""
    module = types.ModuleType("triton_python_backend_utils")
    names = {
        "Tensor": _Sent,
        "TritonError": RuntimeError,
        "InferenceResponse": types.SimpleNamespace,
        "get_input_tensor_by_name": lambda request, name: next((one for one in request if one.name == name), None),
        "triton_string_to_numpy": lambda name: {"TYPE_FP32": np.float32, "TYPE_INT64": np.int64}[name],
    }
    vars(module).update(names)
    return module


def config_of(folder: Path) -> Any:
    """Read a model's configuration by Triton's own messages."""
    parse = pytest.importorskip("google.protobuf.text_format").Parse
    messages = pytest.importorskip("tritonclient.grpc.model_config_pb2")
    return parse((folder / CONFIG_FILE).read_text(), messages.ModelConfig())


def loaded(folder: Path) -> Any:
    """Load a model as Triton does, of its files alone."""
    to_json = pytest.importorskip("google.protobuf.json_format").MessageToJson
    config = to_json(config_of(folder), preserving_proto_field_name=True)
    model = runpy.run_path(str(folder / "1" / "model.py"))["TritonPythonModel"]()
    model.initialize({"model_repository": str(folder), "model_version": "1", "model_config": config})
    return model


NARROW = Numbers(row_type="int8", precision="bf16")


@pytest.mark.parametrize("numbers", in_every_run([None], [None, NARROW]))
def test_one_model_scores_as_the_session(
    trained: TrainedRun, tmp_path: Path, numbers: Numbers | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", back_end())
    report = export_triton(trained.path, tmp_path / "out", TritonSpec(name="clicks"), numbers=numbers)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["clicks"]
    assert report.outputs == ("label",)
    folder = tmp_path / "out" / "clicks"
    expected = {"model.py", EXPORT_FILE} | ({"numbers.json"} if numbers else set())
    assert {path.name for path in (folder / "1").iterdir()} == expected
    records = trained.records(0, 40)
    with InferenceSession.open(trained.path, report.step, numbers=numbers) as session:
        arrays, scores = as_arrays(session.inputs, records), session.predict(records)
    model = loaded(folder)
    # Triton joins requests: the second one says beside its values which are missing.
    stated = {name: array[8:] for name, array in arrays.items()}
    stated["I1.missing"] = np.isnan(stated["I1"])
    stated["I1"] = np.nan_to_num(stated["I1"], nan=5.0)
    assert stated["I1.missing"].any()
    requests = [{name: array[:8] for name, array in arrays.items()}, stated]
    answers = model.execute([[_Sent(name, array) for name, array in one.items()] for one in requests])
    (first,), (second,) = (answer.output_tensors for answer in answers)
    assert (first.name, first.array.dtype, first.array.shape) == ("label", np.float32, (8, 1))
    assert np.abs(np.concatenate([first.array, second.array]) - scores).max() <= 1e-6
    model.finalize()


def test_requests_that_leave_optional_inputs_out(
    repository: Path, session: InferenceSession, trained: TrainedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton calls the model with requests that say what is missing, and with some that do not, at once."""
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", back_end())
    folder = repository / "clicks_workflow"
    config = config_of(folder)
    assert all(tensor.optional == tensor.name.endswith(".missing") for tensor in config.input)
    ensemble = config_of(repository / "clicks")
    # Triton demands that an ensemble and its steps agree on what is optional.
    assert [(one.name, one.optional) for one in ensemble.input] == [(one.name, one.optional) for one in config.input]

    model = loaded(folder)
    records = trained.records(0, 8)
    plain = as_arrays(session.inputs, records)
    missing = {name: np.array([[value in (None, "")] for value in values]) for name, values in records.items()}
    filled = as_arrays(
        session.inputs,
        {name: [value if value not in (None, "") else 5 for value in values] for name, values in records.items()},
    )
    stated = {**filled, **{f"{name}.missing": mask for name, mask in missing.items()}}
    assert any(mask.any() for mask in missing.values())

    def request(arrays: dict[str, np.ndarray], rows: slice) -> list[_Sent]:
        return [_Sent(name, array[rows]) for name, array in arrays.items()]

    requests = [request(plain, slice(0, 3)), request(stated, slice(0, 8)), request(plain, slice(3, 8))]
    answers = model.execute(requests)
    outputs = [{one.name: one.array for one in answer.output_tensors} for answer in answers]
    for name, array in outputs[1].items():
        assert np.array_equal(np.concatenate([outputs[0][name], outputs[2][name]]), array)
    wrong = request({**plain, "C1.missing": np.zeros((8, 2), bool)}, slice(0, 8))
    (answer,) = model.execute([wrong])
    assert "C1.missing: got [8, 2], expected [8, 1]" in str(answer.error)
    # An error concerns the request that sent what is wrong, and not those that were joined with it.
    wrong = request({**plain, "C1": np.array([["zz"]] * 8, object)}, slice(0, 8))
    good, bad = model.execute([request(plain, slice(0, 8)), wrong])
    assert {one.name: one.array.tolist() for one in good.output_tensors} == {
        k: a.tolist() for k, a in outputs[1].items()
    }
    assert "zz" in str(bad.error)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["model", "ensemble"])
@pytest.mark.skipif(TRITON is None, reason=lacks("Triton", "pip install nvidia-pytriton"))
def test_a_real_triton_scores_raw_records(
    trained: TrainedRun, session: InferenceSession, tmp_path: Path, form: str
) -> None:
    export_for_triton(trained.path, tmp_path / "repository", text="utf8", form=form)
    records = trained.records(0, 40)
    kinds = {column.name: column.kind for column in session.inputs}
    inputs = []
    for name, values in records.items():
        is_number = kinds[name] == "number"
        # JSON has no NaN: the numbers say beside them what is missing, the texts leave that optional input out.
        held = np.array([[value or 0.0] for value in values], float) if is_number else as_utf8(values)
        shape, kind = list(held.shape), "FP64" if is_number else "UINT8"
        inputs.append({"name": name, "datatype": kind, "shape": shape, "data": held.ravel().tolist()})
        if is_number:
            missing = [value is None for value in values]
            inputs.append({"name": f"{name}.missing", "datatype": "BOOL", "shape": [40, 1], "data": missing})
    assert any(value is None for name in DENSE for value in records[name])
    with running(tmp_path / "repository", tmp_path / "triton.log") as url:  # ready once every model is
        request = urllib.request.Request(f"{url}/v2/models/clicks/infer", json.dumps({"inputs": inputs}).encode())
        with urllib.request.urlopen(request, timeout=60) as answer:
            (output,) = json.load(answer)["outputs"]
    assert (output["name"], output["shape"]) == ("label", [40, 1])
    assert np.abs(np.array(output["data"])[:, None] - session.predict(records)).max() <= 1e-5
