# SPDX-License-Identifier: Apache-2.0
"""A served run as a model of Triton's python back end, or as three: workflow, lookup and dense part.

A repository that `terarec.apps.triton.export_triton` writes names these classes in its ``model.py`` files. Triton
calls `initialize`, then `execute` for each group of requests, then `finalize`. ``triton_python_backend_utils`` exists
in its processes alone.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from typing_extensions import override

from terarec.batch import Batch, Jagged
from terarec.config.files import load_served_tables
from terarec.embedding import EmbeddingOutput
from terarec.embedding.lookups import LookupCollection
from terarec.errors import ConfigError
from terarec.etl.workflow import workflow_of
from terarec.etl.workflow.raw_values import RawValues
from terarec.export import NO_KEY, KeyInput
from terarec.export.inputs import given_vectors, padded_keys
from terarec.export.scoring import dense_name
from terarec.formats import read_dataset
from terarec.io.files import read_json
from terarec.models import GraphModel
from terarec.models.artifact import load_without_tables
from terarec.serve.padding import LENGTHS, MISSING, unpad, with_missing
from terarec.serve.record_inputs import RecordBatches
from terarec.serve.session import InferenceSession, InputColumn, input_columns
from terarec.serve.tables import ServedTables, serve_tables
from terarec.spec import Numbers, ParameterServerSpec, from_data
from terarec.spec.checks import quoted
from terarec.spec.dataset import MISSING_KEY

DATASET, PROGRAM, TABLES, NUMBERS = "dataset", "model.pt2", "tables.json", "numbers.json"
"""Files of the stages in their version folders."""

Arrays = Mapping[str, NDArray[np.generic]]
Stage = Callable[[Arrays], Arrays]
"""Name -> array [B, ...] of each input, to those of each output."""


class WorkflowStage:
    """Raw columns -> the dense columns and the keys of each categorical column.

    Args:
        directory: A data set's ``dataset.json`` and workflow.
        allow_import: Packages whose functions the workflow may name.
    """

    def __init__(self, directory: Path, allow_import: Sequence[str] = ()) -> None:
        self.workflow = workflow_of(directory, allow_import=allow_import)
        self._dataset = read_dataset(directory)
        self._inputs = input_columns(self.workflow)
        self._batch = RecordBatches(self.workflow, self._dataset)

    def __call__(self, arrays: Arrays) -> Arrays:
        """Encode B records: those of `raw_values`, in the columns' own types."""
        batch = self._batch(self.workflow.encode(_records(self._inputs, arrays)))
        outputs: dict[str, NDArray[Any]] = (
            {dense_name(self._dataset): batch.dense.numpy()} if self._dataset.dense else {}
        )
        for column in self._dataset.categorical:
            # Padded with `NO_KEY`, since tensors between Triton's stages are dense.
            source = KeyInput(name=column.name, columns=(column.name,), max_keys=1 if column.hotness == 1 else None)
            outputs[column.name] = padded_keys(batch.sparse, source)[:, 0]
        return outputs


class RunStage:
    """Raw columns -> scores of each label, by a session.

    Args:
        session: The session.
        widths: Name of each output -> its number of scores; together those of the session, in its order.
    """

    def __init__(self, session: InferenceSession, widths: Mapping[str, int]) -> None:
        self._session = session
        self._widths = dict(widths)

    def __call__(self, arrays: Arrays) -> Arrays:
        """Score B records: those of `raw_values`, in the columns' own types."""
        scores = self._session.predict(_records(self._session.inputs, arrays))
        ends = list(accumulate(self._widths.values()))
        return dict(zip(self._widths, np.split(scores, ends[:-1], axis=1), strict=True))


class LookupStage:
    """Keys -> the vectors that the model's collections give, from a parameter server."""

    def __init__(
        self, run: Path, checkpoint: int | None, tables: ServedTables, allow_import: Sequence[str] = ()
    ) -> None:
        model = load_without_tables(run, checkpoint, allow_import=allow_import)
        self.served = serve_tables(model, tables, torch.device("cpu"))
        self._model, self._dataset = model.model, model.dataset
        self._paths = [name for name, module in model.model.named_modules() if isinstance(module, LookupCollection)]

    def __call__(self, arrays: Arrays) -> Arrays:
        """Look up ``keys int64[B, K]`` of each column; places without a key have `NO_KEY`."""
        if isinstance(self._model, GraphModel):  # whose vectors have names of their own
            with torch.inference_mode():
                tensors = self._model.inputs(self._batch(arrays))
            return {top: tensors[top].numpy() for embedding in self._model.spec.embeddings for top in embedding.tops}
        # The model itself looks up, since it may change the keys before, as DIN drops one.
        outputs: dict[str, EmbeddingOutput] = {}
        modules: dict[str, nn.Module] = dict(self._model.named_modules())
        missing = set(self._paths)

        def keep(path: str) -> Callable[..., None]:
            def hook(module: nn.Module, arguments: tuple[Any, ...], output: EmbeddingOutput) -> None:
                outputs[path] = output
                missing.discard(path)
                if not missing:
                    raise _LookedUpError  # the layers above belong to the next stage

            return hook

        # Hooks of one call: instances of Triton are processes of their own, so no other call sees them.
        handles = [modules[path].register_forward_hook(keep(path)) for path in self._paths]
        try:
            with torch.inference_mode():
                self._model(self._batch(arrays))
        except _LookedUpError:
            pass
        finally:
            for handle in handles:
                handle.remove()
        named: list[tuple[str, Tensor]] = []
        for path in self._paths:
            named += given_vectors(path, cast(LookupCollection, modules[path]), outputs[path])
        return {name: value.numpy() for name, value in named}

    def _batch(self, arrays: Arrays) -> Batch:
        keys, counts = [np.zeros(0, np.int64)], [np.zeros(1, np.int64)]
        num_records = len(next(iter(arrays.values())))
        for column in self._dataset.categorical:
            keys_of_column = arrays[column.name]
            # A column of one key always has one, which may have the value of `NO_KEY`.
            is_key = np.ones_like(keys_of_column, dtype=bool) if column.hotness == 1 else keys_of_column != NO_KEY
            keys.append(keys_of_column[is_key])
            counts.append(is_key.sum(1))
        return Batch(
            # The layers above the lookups do not run, so that the dense columns may be zeros.
            dense=torch.zeros(num_records, len(self._dataset.dense)),
            label=torch.zeros(num_records, len(self._dataset.labels)),
            sparse=Jagged(
                names=tuple(column.name for column in self._dataset.categorical),
                keys=torch.from_numpy(np.concatenate(keys)),
                offsets=torch.from_numpy(np.concatenate(counts).cumsum()),
            ),
        )


class _LookedUpError(Exception):
    """All collections of a model have looked their features up."""


class DenseStage:
    """Dense columns and vectors -> scores of each label, by a program of `torch.export`."""

    def __init__(self, file: Path, inputs: Sequence[str], outputs: Sequence[str]) -> None:
        self._program = torch.export.load(file).module()
        self._inputs, self._outputs = tuple(inputs), tuple(outputs)

    def __call__(self, arrays: Arrays) -> Arrays:
        """Score B records."""
        with torch.inference_mode():
            results = self._program(*(torch.from_numpy(np.ascontiguousarray(arrays[name])) for name in self._inputs))
        return {name: scores.numpy() for name, scores in zip(self._outputs, results, strict=True)}


def _records(inputs: Sequence[InputColumn], arrays: Arrays) -> dict[str, RawValues]:
    return {
        column.name: raw_values(
            column, arrays[column.name], arrays.get(column.name + LENGTHS), arrays.get(column.name + MISSING)
        )
        for column in inputs
    }


def raw_values(
    column: InputColumn,
    values: NDArray[np.generic],
    lengths: NDArray[np.generic] | None = None,
    is_missing: NDArray[np.generic] | None = None,
) -> RawValues:
    """Return the raw values of B records in a tensor [B, K]; K is 1 for a column of one value a record.

    Such a tensor has no null: where nothing else says what is, NaN, the lowest int64 and empty strings stand for it.
    Text may also be UTF-8 in uint8[B, L], or uint8[B, K, L] for lists, with zeros after its end.

    Args:
        column: The column.
        values: The tensor.
        lengths: Length of each list, [B, 1]; None as for `terarec.serve.padding.unpad`.
        is_missing: Which places are null, bool[B, K]; None for those whose values stand for it.
    """
    if column.kind == "string" and values.dtype == np.uint8:
        encoded = values.astype(np.uint8, copy=False)
        values = _text(encoded if encoded.ndim == 3 else encoded[:, None])
    flat = values.reshape(-1).tolist()
    if column.kind == "string":
        flat = [value.decode() if isinstance(value, bytes) else str(value) for value in flat]
    if is_missing is None:
        stand_in = {"integer": MISSING_KEY, "string": ""}.get(column.kind)
        is_null = [value == stand_in or value != value for value in flat]  # NaN alone differs from itself
    elif is_missing.shape != values.shape:
        got, expected = list(is_missing.shape), list(values.shape)
        raise ConfigError(column.name + MISSING, f"got {got}, expected {expected} as {quoted(column.name)}")
    else:
        is_null = is_missing.reshape(-1).tolist()
    elements = with_missing(flat, is_null)
    if column.hotness == 1:
        return elements
    return unpad(
        elements,
        (values.shape[0], values.shape[1]),
        None if lengths is None else lengths.reshape(-1).tolist(),
        where=column.name,
        lengths_where=column.name + LENGTHS,
    )


def _text(encoded: NDArray[np.uint8]) -> NDArray[np.object_]:
    """Return the texts [B, K] of ``uint8[B, K, L]``."""
    batch, count, length = encoded.shape
    if not length:
        return np.full((batch, count), "", object)
    flat = np.ascontiguousarray(encoded).view(f"S{length}")[..., 0]  # without zeros at the end
    texts = [[value.decode() for value in row] for row in flat.tolist()]
    return np.array(texts, object).reshape(batch, count)


def check_arrays(backend: ModuleType) -> None:
    """Check that a back end of Triton gives Python the arrays that clients send, which text needs.

    One that was built with pybind11 before 2.12 finds the size of an element in NumPy 1's place. Under NumPy 2 it is 0
    there, and every element of an array is the first one; the lengths of texts are then wrong, which ends its process.
    """
    sent = torch.arange(3, dtype=torch.uint8)
    received = backend.Tensor.from_dlpack("sent", sent).as_numpy()
    if not np.array_equal(received, sent.numpy()):
        problem = (
            f"got NumPy {np.__version__}, expected numpy<2: this Triton's back end does not read text under NumPy 2"
        )
        raise ConfigError("Triton", problem)


class _TritonModel:
    """Base of the models in Triton's python back end."""

    _stage: Stage

    def initialize(self, arguments: Mapping[str, str]) -> None:
        """Load the stage."""
        self._backend = importlib.import_module("triton_python_backend_utils")
        config = json.loads(arguments["model_config"])
        folder = Path(arguments["model_repository"]) / arguments["model_version"]
        # Order and types are those of config.pbtxt, which Triton passes on: they are written in one place.
        self._names = [tensor["name"] for tensor in config["input"]]
        self._input_types = {tensor["name"]: tensor["data_type"] for tensor in config["input"]}
        if "TYPE_STRING" in self._input_types.values():
            check_arrays(self._backend)
        self._types = {tensor["name"]: self._numpy_type(tensor["data_type"]) for tensor in config["output"]}
        self._widths = {tensor["name"]: int(tensor["dims"][0]) for tensor in config["output"]}
        parameters = {name: parameter["string_value"] for name, parameter in config.get("parameters", {}).items()}
        self._stage = self._load(folder, parameters)

    def execute(self, requests: Sequence[object]) -> list[object]:
        """Answer each request; those of the same lengths are computed together."""
        inputs = [self._arrays(request) for request in requests]
        # Clients pad lists to lengths of their own and leave optional inputs out: such requests cannot be joined.
        groups: dict[tuple[tuple[str, tuple[int, ...]], ...], list[int]] = {}
        for place, arrays in enumerate(inputs):
            groups.setdefault(tuple((name, array.shape[1:]) for name, array in arrays.items()), []).append(place)
        answers: dict[int, object] = {}
        for places in groups.values():
            answers.update(self._answers({place: inputs[place] for place in places}))
        return [answers[place] for place in range(len(requests))]

    def _answers(self, inputs: Mapping[int, Arrays]) -> dict[int, object]:
        """Return the answer of each request; their arrays are of one form, and are computed together."""
        backend = self._backend
        names = next(iter(inputs.values()))
        try:
            outputs = self._stage(
                {name: np.concatenate([arrays[name] for arrays in inputs.values()]) for name in names}
            )
        except Exception as error:  # the client gets any error
            if len(inputs) == 1:
                return dict.fromkeys(inputs, backend.InferenceResponse(error=backend.TritonError(str(error))))
            # Alone, so that the error, which may quote a value, reaches only the client that sent what is wrong.
            return {place: self._answers({place: arrays})[place] for place, arrays in inputs.items()}
        answers, begin = dict[int, object](), 0
        for place, arrays in inputs.items():
            end = begin + len(arrays[self._names[0]])
            tensors = [
                backend.Tensor.from_dlpack(name, torch.tensor(outputs[name][begin:end].astype(dtype, copy=False)))
                for name, dtype in self._types.items()
            ]
            answers[place] = backend.InferenceResponse(output_tensors=tensors)
            begin = end
        return answers

    def finalize(self) -> None:
        """Release the resources of the stage."""

    def _load(self, folder: Path, parameters: Mapping[str, str]) -> Stage:
        raise NotImplementedError

    def _arrays(self, request: object) -> dict[str, NDArray[Any]]:
        """Return the inputs of a request in the order of the configuration, without optional ones left out."""
        tensors = {name: self._backend.get_input_tensor_by_name(request, name) for name in self._names}
        return {name: self._array(tensor, name) for name, tensor in tensors.items() if tensor is not None}

    def _array(self, tensor: Any, name: str) -> NDArray[Any]:
        """Return the values of an input; numbers by DLPack, which does not depend on the version of NumPy."""
        if self._input_types[name] == "TYPE_STRING":
            text: NDArray[Any] = tensor.as_numpy()
            return text
        values: NDArray[Any] = torch.utils.dlpack.from_dlpack(tensor.to_dlpack()).numpy()
        return values.astype(bool, copy=False) if self._input_types[name] == "TYPE_BOOL" else values

    def _numpy_type(self, triton_type: str) -> Any:
        return self._backend.triton_string_to_numpy(triton_type)


class RunModel(_TritonModel):
    """`RunStage` in Triton."""

    @override
    def _load(self, folder: Path, parameters: Mapping[str, str]) -> Stage:
        numbers = folder / NUMBERS
        self._session = InferenceSession.open(
            Path(parameters["run"]),
            int(parameters["step"]),
            allow_import=_packages(parameters),
            tables=_served_tables(folder),
            numbers=from_data(Numbers, read_json(numbers), f"{numbers}: $") if numbers.is_file() else None,
        )
        return RunStage(self._session, self._widths)

    @override
    def finalize(self) -> None:
        self._session.close()


class WorkflowModel(_TritonModel):
    """`WorkflowStage` in Triton."""

    @override
    def _load(self, folder: Path, parameters: Mapping[str, str]) -> Stage:
        return WorkflowStage(folder / DATASET, _packages(parameters))


class LookupModel(_TritonModel):
    """`LookupStage` in Triton."""

    @override
    def _load(self, folder: Path, parameters: Mapping[str, str]) -> Stage:
        described = _served_tables(folder) or ServedTables(server=ParameterServerSpec())
        self._lookup = LookupStage(Path(parameters["run"]), int(parameters["step"]), described, _packages(parameters))
        return self._lookup

    @override
    def finalize(self) -> None:
        self._lookup.served.close()


class DenseModel(_TritonModel):
    """`DenseStage` in Triton."""

    @override
    def _load(self, folder: Path, parameters: Mapping[str, str]) -> Stage:
        return DenseStage(folder / PROGRAM, self._names, list(self._types))


def _served_tables(folder: Path) -> ServedTables | None:
    """Return where the rows of the tables are; None for what the model decides."""
    tables = folder / TABLES
    if not tables.is_file():
        return None
    spec = load_served_tables(tables)
    return ServedTables(server=spec.server, cache=spec.cache)


def _packages(parameters: Mapping[str, str]) -> list[str]:
    return parameters["allow_import"].split(",") if parameters.get("allow_import") else []
