"""The stages of a served run as models of Triton's python back end: workflow, lookup and dense part.

A repository that `terarec.serve.triton.export_triton` writes names these classes in its ``model.py`` files. Triton
calls `initialize`, then `execute` for each group of requests, then `finalize`. ``triton_python_backend_utils`` exists
in its processes alone.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from terarec.batch import Batch, Jagged
from terarec.config import load_served_tables
from terarec.embedding import EmbeddingOutput, LookupCollection
from terarec.errors import ConfigError
from terarec.etl.workflow import RawValues, workflow_of
from terarec.export import NO_KEY, KeyInput
from terarec.export.inputs import given_vectors, padded_keys
from terarec.export.scoring import dense_name
from terarec.formats import read_dataset
from terarec.models.artifact import load_without_tables
from terarec.serve.session import InputColumn, RecordBatches, input_columns
from terarec.serve.tables import ServedTables, serve_tables
from terarec.spec import ParameterServerSpec

DATASET, PROGRAM, TABLES = "dataset", "model.pt2", "tables.json"
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

    def __call__(self, given: Arrays) -> Arrays:
        """Encode B records: those of `raw_values`, in the columns' own types."""
        records = {column.name: raw_values(column, given[column.name]) for column in self._inputs}
        batch = self._batch(self.workflow.encode(records))
        found: dict[str, NDArray[Any]] = {dense_name(self._dataset): batch.dense.numpy()} if self._dataset.dense else {}
        for column in self._dataset.categorical:
            # Padded with `NO_KEY`, since tensors between Triton's stages are dense.
            source = KeyInput(name=column.name, columns=(column.name,), max_keys=1 if column.hotness == 1 else None)
            found[column.name] = padded_keys(batch.sparse, source)[:, 0]
        return found


class LookupStage:
    """Keys -> the vectors that the model's collections give, from a parameter server.

    Args:
        run: The run.
        checkpoint: Step of the checkpoint.
        tables: Location of its rows.
        allow_import: Packages whose code the model may name.
    """

    def __init__(
        self, run: Path, checkpoint: int | None, tables: ServedTables, allow_import: Sequence[str] = ()
    ) -> None:
        held = load_without_tables(run, checkpoint, allow_import=allow_import)
        self.served = serve_tables(held, tables, torch.device("cpu"))
        self._model, self._dataset = held.model, held.dataset
        self._paths = [name for name, module in held.model.named_modules() if isinstance(module, LookupCollection)]

    def __call__(self, given: Arrays) -> Arrays:
        """Look up ``keys int64[B, K]`` of each column; places without a key have `NO_KEY`."""
        # The model itself looks up, since it may change the keys before, as DIN drops one.
        found: dict[str, EmbeddingOutput] = {}
        modules: dict[str, nn.Module] = dict(self._model.named_modules())
        missing = set(self._paths)

        def keep(path: str) -> Callable[..., None]:
            def hook(module: nn.Module, arguments: tuple[Any, ...], output: EmbeddingOutput) -> None:
                found[path] = output
                missing.discard(path)
                if not missing:
                    raise _LookedUpError  # the layers above belong to the next stage

            return hook

        # Hooks of one call: instances of Triton are processes of their own, so no other call sees them.
        handles = [modules[path].register_forward_hook(keep(path)) for path in self._paths]
        try:
            with torch.inference_mode():
                self._model(self._batch(given))
        except _LookedUpError:
            pass
        finally:
            for handle in handles:
                handle.remove()
        named: list[tuple[str, Tensor]] = []
        for path in self._paths:
            named += given_vectors(path, cast(LookupCollection, modules[path]), found[path])
        return {name: value.numpy() for name, value in named}

    def _batch(self, given: Arrays) -> Batch:
        keys, counts = [np.zeros(0, np.int64)], [np.zeros(1, np.int64)]
        num_records = len(next(iter(given.values())))
        for column in self._dataset.categorical:
            held = given[column.name]
            # A column of one key always has one, and the key of a missing value may be the value of `NO_KEY`.
            is_key = np.ones_like(held, dtype=bool) if column.hotness == 1 else held != NO_KEY
            keys.append(held[is_key])
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
    """Dense columns and vectors -> scores of each label, by a program of `torch.export`.

    Args:
        file: The program.
        inputs: Names of its arguments.
        outputs: Names of its results.
    """

    def __init__(self, file: Path, inputs: Sequence[str], outputs: Sequence[str]) -> None:
        self._program = torch.export.load(file).module()
        self._inputs, self._outputs = tuple(inputs), tuple(outputs)

    def __call__(self, given: Arrays) -> Arrays:
        """Score B records."""
        with torch.inference_mode():
            found = self._program(*(torch.from_numpy(np.ascontiguousarray(given[name])) for name in self._inputs))
        return {name: scores.numpy() for name, scores in zip(self._outputs, found, strict=True)}


def raw_values(column: InputColumn, given: NDArray[np.generic]) -> RawValues:
    """Return the raw values of B records in a tensor [B, K]; K is 1 for a column of one value a record.

    Missing values, and places that lists do not fill, are NaN, the lowest int64, or empty strings. Text may also be
    UTF-8 in uint8[B, L], or uint8[B, K, L] for lists, with zeros after its end.
    """
    if column.kind == "string" and given.dtype == np.uint8:
        encoded = given.astype(np.uint8, copy=False)
        given = _text(encoded if encoded.ndim == 3 else encoded[:, None])
    if column.kind == "number":
        rows = [[None if value != value else value for value in row] for row in given.tolist()]
    elif column.kind == "integer":
        rows = [[None if value == NO_KEY else value for value in row] for row in given.tolist()]
    else:
        rows = [[value.decode() if isinstance(value, bytes) else str(value) for value in row] for row in given.tolist()]
    if column.hotness == 1:
        return [row[0] for row in rows]
    return [[value for value in row if value not in (None, "")] for row in rows]


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

    Raises:
        ConfigError: They are others.
    """
    sent = torch.arange(3, dtype=torch.uint8)
    found = backend.Tensor.from_dlpack("sent", sent).as_numpy()
    if not np.array_equal(found, sent.numpy()):
        problem = (
            f"got NumPy {np.__version__}, expected numpy<2: this Triton's back end does not read text under NumPy 2"
        )
        raise ConfigError("Triton", problem)


class _TritonModel:
    """Base of the models in Triton's python back end."""

    _stage: Stage

    def initialize(self, given: Mapping[str, str]) -> None:
        """Load the stage."""
        self._backend = importlib.import_module("triton_python_backend_utils")
        config = json.loads(given["model_config"])
        folder = Path(given["model_repository"]) / given["model_version"]
        # Order and types are those of config.pbtxt, which Triton passes on: they are written in one place.
        self._names = [held["name"] for held in config["input"]]
        self._input_types = {held["name"]: held["data_type"] for held in config["input"]}
        if "TYPE_STRING" in self._input_types.values():
            check_arrays(self._backend)
        self._types = {held["name"]: self._numpy_type(held["data_type"]) for held in config["output"]}
        parameters = {name: held["string_value"] for name, held in config.get("parameters", {}).items()}
        self._stage = self._load(folder, parameters)

    def execute(self, requests: Sequence[object]) -> list[object]:
        """Answer each request; those of the same lengths are computed together."""
        backend = self._backend
        given = [
            {name: self._array(backend.get_input_tensor_by_name(request, name), name) for name in self._names}
            for request in requests
        ]
        # Clients pad lists to lengths of their own, which cannot be joined.
        groups: dict[tuple[tuple[int, ...], ...], list[int]] = {}
        for place, arrays in enumerate(given):
            groups.setdefault(tuple(array.shape[1:] for array in arrays.values()), []).append(place)
        answers: list[object] = [None] * len(requests)
        for places in groups.values():
            joined = {name: np.concatenate([given[place][name] for place in places]) for name in self._names}
            try:
                found = self._stage(joined)
            except Exception as error:  # the client gets any error
                for place in places:
                    answers[place] = backend.InferenceResponse(error=backend.TritonError(str(error)))
                continue
            begin = 0
            for place in places:
                end = begin + len(given[place][self._names[0]])
                tensors = [
                    backend.Tensor.from_dlpack(name, torch.tensor(found[name][begin:end].astype(dtype, copy=False)))
                    for name, dtype in self._types.items()
                ]
                answers[place] = backend.InferenceResponse(output_tensors=tensors)
                begin = end
        return answers

    def finalize(self) -> None:
        """Release the resources of the stage."""

    def _load(self, folder: Path, parameters: Mapping[str, str]) -> Stage:
        raise NotImplementedError

    def _array(self, tensor: Any, name: str) -> NDArray[Any]:
        """Return the values of an input; numbers by DLPack, which does not depend on the version of NumPy."""
        if self._input_types[name] == "TYPE_STRING":
            text: NDArray[Any] = tensor.as_numpy()
            return text
        values: NDArray[Any] = torch.utils.dlpack.from_dlpack(tensor.to_dlpack()).numpy()
        return values.astype(bool, copy=False) if self._input_types[name] == "TYPE_BOOL" else values

    def _numpy_type(self, triton_type: str) -> Any:
        return self._backend.triton_string_to_numpy(triton_type)


class WorkflowModel(_TritonModel):
    """`WorkflowStage` in Triton."""

    def _load(self, folder: Path, parameters: Mapping[str, str]) -> Stage:
        return WorkflowStage(folder / DATASET, _packages(parameters))


class LookupModel(_TritonModel):
    """`LookupStage` in Triton."""

    def _load(self, folder: Path, parameters: Mapping[str, str]) -> Stage:
        tables = folder / TABLES
        described = ServedTables(server=ParameterServerSpec())
        if tables.is_file():
            spec = load_served_tables(tables)
            described = ServedTables(server=spec.server, cache=spec.cache)
        self._lookup = LookupStage(Path(parameters["run"]), int(parameters["step"]), described, _packages(parameters))
        return self._lookup

    def finalize(self) -> None:
        """Close the parameter server."""
        self._lookup.served.close()


class DenseModel(_TritonModel):
    """`DenseStage` in Triton."""

    def _load(self, folder: Path, parameters: Mapping[str, str]) -> Stage:
        return DenseStage(folder / PROGRAM, self._names, list(self._types))


def _packages(parameters: Mapping[str, str]) -> list[str]:
    return parameters["allow_import"].split(",") if parameters.get("allow_import") else []
