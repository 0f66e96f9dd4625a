# SPDX-License-Identifier: Apache-2.0
"""`export_triton`: a run as a model repository of NVIDIA Triton."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from terarec.apps.triton_models import DATASET, NUMBERS, PROGRAM, TABLES
from terarec.config.files import DATASET_DIRECTORY, load_served_tables
from terarec.etl.workflow import workflow_of
from terarec.export import export_run
from terarec.export.artifact import EXPORT_FILE, FORMATS, ExportReport
from terarec.export.scoring import dense_name
from terarec.formats import read_dataset
from terarec.io.directories import atomic_dir, check_replaceable
from terarec.io.files import read_json, write_json
from terarec.io.opening import copy_file
from terarec.serve.padding import LENGTHS, MISSING
from terarec.serve.session import InputColumn, input_columns
from terarec.spec import CacheSpec, DatasetSpec, Numbers, ServedTablesSpec, TritonSpec, to_data

_FORMATS: Mapping[str, str] = {"python": "torch", "onnxruntime": "onnx", "pytorch": "torchscript"}
"""Back end of the dense part -> format of its file."""
_FILES = {"python": PROGRAM, "onnxruntime": "model.onnx", "pytorch": "model.pt"}
_TYPES = {"float32": "TYPE_FP32", "int64": "TYPE_INT64", "bool": "TYPE_BOOL"}
_RAW_TYPES = {"number": "TYPE_FP64", "integer": "TYPE_INT64", "string": "TYPE_STRING"}
CONFIG_FILE = "config.pbtxt"


# No dependency on protobuf and Triton's messages for a text of a few lines.
class Message(dict[str, Any]):
    """A message of protobuf's text format: field -> text (quoted), `Enum`, number, message, or a list of these."""


class Enum(str):
    """The name of an enumerator, which is not quoted."""

    __slots__ = ()


def export_triton(
    run: Path,
    out: Path,
    spec: TritonSpec | None = None,
    *,
    checkpoint: int | str | None = None,
    numbers: Numbers | None = None,
    data: Path | None = None,
    split: str = "valid",
    allow_import: Sequence[str] = (),
) -> ExportReport:
    """Write a model repository into the new directory `out`: one model, or three stages and the ensemble of them.

    One model, ``NAME``, does what a session does, from raw records to scores, in Triton's python back end, whose Python
    needs terarec. Of an ensemble, ``NAME_workflow`` encodes raw records, ``NAME_lookup`` looks their keys up in a
    parameter server that it loads from the run, and ``NAME_dense`` computes the scores. Each stage has a queue of its
    own, and what goes from one to the next is copied between processes.

    The dense part is compared with the model on random samples; ``export.json`` next to it has the difference.

    Args:
        run: Directory of the run, which stays where it is: the model, or the lookup stage, reads it.
        out: The repository.
        spec: Names, back end and batching.
        checkpoint: "last", "best" or a step; None as in `terarec.models.artifact.find_checkpoint`.
        numbers: Numbers of the dense part as in `terarec.export.export_run`, and of rows: those of int8 are in caches
            of this form, in front of the tiers of the lookup stage.
        data: Prepared data set, or HugeCTR's files, on which the AUC of these numbers is computed; None for none.
        split: Split of the data.
        allow_import: Packages whose code the workflow and the model may name.

    Raises:
        ConfigError: `out` holds something, a model that cannot be exported, or numbers that the back end does not have.
        DataNotFoundError: `run` is not a run, or holds no complete checkpoint.
        MissingDependencyError: ``onnx`` is not installed, for the back end "onnxruntime".
        StorageError: The disk is full; nothing is left behind.
    """
    spec = spec or TritonSpec()
    check_replaceable(out)
    columns = input_columns(workflow_of(run / DATASET_DIRECTORY, allow_import=allow_import))
    export = partial(
        export_run,
        run,
        format=_FORMATS[spec.backend],
        tables=False,
        checkpoint=checkpoint,
        numbers=numbers,
        data=data,
        split=split,
        allow_import=allow_import,
    )
    write = _write_model if spec.form == "model" else _write_ensemble
    with atomic_dir(out) as repository:
        report = write(repository, run, spec, numbers, columns, export, allow_import)
        return replace(
            report,
            file=out / spec.name / CONFIG_FILE,
            tables=True,
            inputs=tuple(column.name for column in columns),
            bytes=sum(one.stat().st_size for one in repository.rglob("*") if one.is_file()),
        )


def _write_ensemble(
    repository: Path,
    run: Path,
    spec: TritonSpec,
    numbers: Numbers | None,
    columns: Sequence[InputColumn],
    export: Callable[[Path], ExportReport],
    allow_import: Sequence[str],
) -> ExportReport:
    """Write three stages and the ensemble; return the report of the dense part."""
    tables = _served_tables(spec, numbers)
    stages = {stage: repository / f"{spec.name}_{stage}" / "1" for stage in ("workflow", "lookup", "dense")}
    for folder in (*stages.values(), repository / spec.name / "1"):
        folder.mkdir(parents=True)
    report = _export_dense(export, stages["dense"])
    file = FORMATS[_FORMATS[spec.backend]]
    (stages["dense"] / file).rename(stages["dense"] / _FILES[spec.backend])
    # A copy, so that this stage needs no file of the run; only the rows stay there.
    shutil.copytree(run / DATASET_DIRECTORY, stages["workflow"] / DATASET, copy_function=copy_file)
    if tables is not None:
        # Not the file itself: its relative paths count from the folder that it is in.
        write_json(stages["lookup"] / TABLES, to_data(tables))
    configs = _Configs(spec, read_dataset(run / DATASET_DIRECTORY), columns, read_json(stages["dense"] / EXPORT_FILE))
    for name, config in configs.all(_parameters(run, report, allow_import)).items():
        (repository / name / CONFIG_FILE).write_text(text_format(config))
    for stage, model in {"workflow": "WorkflowModel", "lookup": "LookupModel", "dense": "DenseModel"}.items():
        if stage != "dense" or spec.backend == "python":
            (stages[stage] / "model.py").write_text(_model_file(model, spec.python_path))
    return report


def _write_model(
    repository: Path,
    run: Path,
    spec: TritonSpec,
    numbers: Numbers | None,
    columns: Sequence[InputColumn],
    export: Callable[[Path], ExportReport],
    allow_import: Sequence[str],
) -> ExportReport:
    """Write one model, which opens a session of the run; return the report of the dense part."""
    # Rows of int8 are in caches before the tiers, or in the session's memory without any.
    tables = None if spec.tables is None else _served_tables(spec, numbers)
    folder = repository / spec.name / "1"
    folder.mkdir(parents=True)
    # For the comparison, the outputs and their widths: the model itself computes with the run's layers.
    report = _export_dense(export, folder)
    (folder / FORMATS[_FORMATS[spec.backend]]).unlink()
    if tables is not None:
        write_json(folder / TABLES, to_data(tables))
    if numbers is not None:
        write_json(folder / NUMBERS, to_data(numbers if tables is None else replace(numbers, row_type="fp32")))
    configs = _Configs(spec, read_dataset(run / DATASET_DIRECTORY), columns, read_json(folder / EXPORT_FILE))
    config = configs.one(_parameters(run, report, allow_import))
    (repository / spec.name / CONFIG_FILE).write_text(text_format(config))
    (folder / "model.py").write_text(_model_file("RunModel", spec.python_path))
    return report


def _export_dense(export: Callable[[Path], ExportReport], folder: Path) -> ExportReport:
    """Export the dense part into a folder that is there."""
    # An export needs a new directory, so it goes into one of its own, whose files are moved to where Triton looks.
    exported = folder / "exported"
    report = export(exported)
    for file in exported.iterdir():
        file.rename(folder / file.name)
    exported.rmdir()
    return report


def _parameters(run: Path, report: ExportReport, allow_import: Sequence[str]) -> Mapping[str, str]:
    # The step and not "last": layers and rows have to be of one checkpoint.
    return {"run": str(run.resolve()), "step": str(report.step), "allow_import": ",".join(allow_import)}


def _served_tables(spec: TritonSpec, numbers: Numbers | None) -> ServedTablesSpec | None:
    """Return the tiers and caches of the lookup stage; None for host memory alone."""
    tables = None if spec.tables is None else load_served_tables(spec.tables)
    if numbers is None or numbers.row_type != "int8":
        return tables
    tables = tables or ServedTablesSpec()
    return replace(tables, cache=replace(tables.cache or CacheSpec(share=1.0), form="int8"))


class _Configs:
    """The configurations of the model, or of the stages and their ensemble."""

    def __init__(
        self, spec: TritonSpec, dataset: DatasetSpec, raw: Sequence[InputColumn], described: Mapping[str, Any]
    ) -> None:
        self._spec = spec
        self._raw = [tensor for column in raw for tensor in _raw_inputs(column, spec.text)]
        inputs = list(described["inputs"])
        # Triton's shapes leave the batch out.
        # A graph may have another name for the dense columns than the workflow, or ignore them.
        reads_dense = bool(dataset.dense) and inputs[0]["columns"] == [column.name for column in dataset.dense]
        first = [inputs.pop(0)] if reads_dense else []
        width = len(dataset.dense)
        self._encoded = [_tensor(dense_name(dataset), "TYPE_FP32", [width])] if width else []
        self._dense = [_tensor(one["name"], "TYPE_FP32", [width]) for one in first]
        self._keys = [
            _tensor(column.name, "TYPE_INT64", [1 if column.hotness == 1 else -1]) for column in dataset.categorical
        ]
        self._vectors = [_tensor(one["name"], _TYPES[one["dtype"]], _dims(one["shape"])) for one in inputs]
        widths = zip(described["outputs"], described["output_widths"], strict=True)
        self._scores = [_tensor(name, "TYPE_FP32", [width]) for name, width in widths]

    def one(self, parameters: Mapping[str, str]) -> Message:
        """Return the configuration of the model that does the work of all stages."""
        return self._model(self._spec.name, "python", self._raw, self._scores, parameters)

    def all(self, parameters: Mapping[str, str]) -> dict[str, Message]:
        """Return the configuration of each stage and of the ensemble."""
        name = self._spec.name
        dense_inputs = self._dense + self._vectors
        names = {str(tensor["name"]): str(tensor["name"]) for tensor in (*dense_inputs, *self._scores)}
        if self._spec.backend == "pytorch":  # which knows arguments and results by their places
            names = {str(tensor["name"]): f"INPUT__{place}" for place, tensor in enumerate(dense_inputs)}
            names |= {str(tensor["name"]): f"OUTPUT__{place}" for place, tensor in enumerate(self._scores)}
        dense = self._model(
            f"{name}_dense",
            self._spec.backend,
            [Message(tensor, name=names[str(tensor["name"])]) for tensor in dense_inputs],
            [Message(tensor, name=names[str(tensor["name"])]) for tensor in self._scores],
        )
        return {
            f"{name}_workflow": self._model(
                f"{name}_workflow", "python", self._raw, self._encoded + self._keys, parameters
            ),
            f"{name}_lookup": self._model(f"{name}_lookup", "python", self._keys, self._vectors, parameters),
            f"{name}_dense": dense,
            name: self._ensemble(names),
        }

    def _model(
        self,
        name: str,
        backend: str,
        inputs: Sequence[Mapping[str, Any]],
        outputs: Sequence[Mapping[str, Any]],
        parameters: Mapping[str, str] | None = None,
    ) -> Message:
        config = Message(
            name=name,
            backend=backend,
            max_batch_size=self._spec.max_batch,
            input=[Message(tensor) for tensor in inputs],
            output=[Message(tensor) for tensor in outputs],
            instance_group=[Message(count=self._spec.instances, kind=Enum("KIND_CPU"))],
            dynamic_batching=Message(
                preferred_batch_size=list(self._spec.preferred_batches),
                max_queue_delay_microseconds=self._spec.queue_delay_microseconds,
            ),
            version_policy=Message(latest=Message(num_versions=1)),
        )
        if parameters is not None:
            config["parameters"] = [
                Message(key=key, value=Message(string_value=value)) for key, value in parameters.items() if value
            ]
        return config

    def _ensemble(self, names: Mapping[str, str]) -> Message:
        name = self._spec.name

        def step(stage: str, inputs: Mapping[str, str], outputs: Mapping[str, str]) -> Message:
            return Message(
                model_name=f"{name}_{stage}",
                model_version=-1,
                input_map=[Message(key=key, value=value) for key, value in inputs.items()],
                output_map=[Message(key=key, value=value) for key, value in outputs.items()],
            )

        raw = {str(tensor["name"]): str(tensor["name"]) for tensor in self._raw}
        # Tensors of an ensemble share their names, and a raw column may be called as the keys that are made of it.
        encoded = {str(tensor["name"]): f"encoded:{tensor['name']}" for tensor in (*self._encoded, *self._keys)}
        keys = {str(tensor["name"]): encoded[tensor["name"]] for tensor in self._keys}
        vectors = {str(tensor["name"]): f"vectors:{tensor['name']}" for tensor in self._vectors}
        into_dense = {
            names[str(tensor["name"])]: encoded[own["name"]]
            for tensor, own in zip(self._dense, self._encoded, strict=False)
        }
        into_dense |= {names[key]: value for key, value in vectors.items()}
        scores = {names[str(tensor["name"])]: str(tensor["name"]) for tensor in self._scores}
        return Message(
            name=name,
            platform="ensemble",
            max_batch_size=self._spec.max_batch,
            input=[Message(tensor) for tensor in self._raw],
            output=[Message(tensor) for tensor in self._scores],
            ensemble_scheduling=Message(
                step=[
                    step("workflow", raw, encoded),
                    step("lookup", keys, vectors),
                    step("dense", into_dense, scores),
                ]
            ),
        )


def _model_file(model: str, python_path: Sequence[str]) -> str:
    line = f"from terarec.apps.triton_models import {model} as TritonPythonModel  # noqa: F401\n"
    # In front, so that these win over packages of the same names in Triton's own Python.
    return f"import sys\n\nsys.path[:0] = {list(python_path)!r}\n{line}" if python_path else line


def text_format(message: Message, indent: str = "") -> str:
    """Return a message in protobuf's text format."""
    lines = []
    for field, value in message.items():
        values = value if isinstance(value, list) else [value]
        for one in values:
            if isinstance(one, Message):
                lines.append(f"{indent}{field} {{\n{text_format(one, indent + '  ')}{indent}}}\n")
            elif isinstance(one, Enum) or not isinstance(one, str):
                lines.append(f"{indent}{field}: {one}\n")
            else:
                # JSON's escapes are among those of protobuf's text format.
                lines.append(f"{indent}{field}: {json.dumps(one, ensure_ascii=True)}\n")
    return "".join(lines)


def _raw_inputs(column: InputColumn, text: str) -> list[Message]:
    """Return the tensors of a raw column: its values, and what Triton's tensors, which have no null, cannot say."""
    is_single = column.hotness == 1
    dims = [1 if is_single else -1]
    lengths = [] if is_single else [_optional(column.name + LENGTHS, "TYPE_INT64", [1])]
    optional = [*lengths, _optional(column.name + MISSING, "TYPE_BOOL", dims)]
    if column.kind == "string" and text == "utf8":
        return [_tensor(column.name, "TYPE_UINT8", [-1] if is_single else [-1, -1]), *optional]
    return [_tensor(column.name, _RAW_TYPES[column.kind], dims), *optional]


def _optional(name: str, data_type: str, dims: Sequence[int]) -> Message:
    return Message(_tensor(name, data_type, dims), optional=Enum("true"))


def _tensor(name: str, data_type: str, dims: Sequence[int]) -> Message:
    return Message(name=name, data_type=Enum(data_type), dims=list(dims))


def _dims(shape: Sequence[Any]) -> list[int]:
    return [dim if isinstance(dim, int) else -1 for dim in shape[1:]]
