"""`export_model` and `export_run`: a directory with a model as a file for another runtime, and its description."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from terarec.batch import Batch
from terarec.config import DATASET_DIRECTORY
from terarec.data import open_reader, read_spec
from terarec.errors import ConfigError
from terarec.export.files import (
    BATCH_SIZES,
    NARROW_TOLERANCES,
    TOLERANCE,
    Runner,
    aotinductor_runner,
    max_difference,
    onnx_runner,
    quantize_onnx,
    random_batches,
    save_aotinductor,
    save_onnx,
    save_torch,
    save_torchscript,
    torch_runner,
    torchscript_runner,
    trace,
)
from terarec.export.graph_models import default_key_inputs, export_onnx, graph_inputs, needed_layers
from terarec.export.inputs import NO_KEY, KeyInput, ModelInput
from terarec.export.onnx_graph import OPSET, onnx_library
from terarec.export.scoring import Scores, Scoring, collections
from terarec.io import atomic_dir, check_replaceable, write_versioned_json
from terarec.metrics import MetricSet
from terarec.models import GraphModel
from terarec.models.artifact import check_columns, load_model
from terarec.models.narrow import narrow
from terarec.nn.objectives import build_objective
from terarec.nn.registry import LAYERS
from terarec.spec import CategoricalColumn, DatasetSpec, FieldError, Numbers
from terarec.spec.registry import Registry
from terarec.storage import Store

EXPORT_FILE = "export.json"
FORMATS = Registry(
    "format",
    {"onnx": "model.onnx", "torch": "model.pt2", "torchscript": "model.pt", "aotinductor": "compiled.pt2"},
)
"""Format -> name of the file with the model."""
_NAME, _VERSION = "terarec.export", 1
_LIBRARIES: dict[str, tuple[str, ...]] = {"onnx": ("onnx", "onnxscript", "onnxruntime")}
_LIST_LENGTH = 4
"""Most keys of the random bags for columns of a graph, which does not say how long bags are."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportReport:
    """The result of an export.

    Attributes:
        file: The model's file.
        step: Training steps of the weights; None for a model without a run.
        model: Class of the model.
        tables: Whether the tables are in the file.
        inputs: Names of the inputs, in order.
        outputs: Names of the outputs, in order.
        max_abs_difference: Largest difference between the file's scores and the model's on random batches; the model
            computes with the numbers of the file.
        auc: Area under the ROC curve of the file's scores, the mean over labels, on the samples that were given.
        auc_change: Difference of `auc` from the AUC of the model in fp32.
        bytes: Size of the directory's files.
    """

    file: Path
    step: int | None
    model: str
    tables: bool
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    max_abs_difference: float
    bytes: int
    auc: float | None = None
    auc_change: float | None = None


class RunStep(NamedTuple):
    """A run, and the training steps of its checkpoint."""

    run: Path
    step: int


@dataclass(frozen=True, kw_only=True, slots=True)
class _Written:
    """A file, its signature, the scores to compare with, and the AUC of the model in fp32 if samples are given."""

    inputs: Sequence[ModelInput]
    outputs: Sequence[str]
    run: Runner
    expected: Callable[[Batch], Sequence[Tensor]]
    batches: Sequence[Batch]
    auc: float | None = None


def export_run(
    run_dir: Path | str,
    out: Path | str,
    *,
    format: str = "onnx",  # noqa: A002
    tables: bool = True,
    checkpoint: int | str | None = None,
    scores: Scores | None = None,
    numbers: Numbers | None = None,
    data: Path | None = None,
    split: str = "valid",
    allow_import: Sequence[str] = (),
) -> ExportReport:
    """Write the model of a run into the new directory `out`; see `export_model`.

    Args:
        run_dir: Directory of the run.
        out: Output directory.
        format: "onnx", "torch", "aotinductor" or "torchscript".
        tables: Whether the tables are in the file.
        checkpoint: "last", "best" or a step; None as in `terarec.models.artifact.find_checkpoint`.
        scores: Scores of logits; None for those of the run's objective.
        numbers: Numbers of rows and layers as in `export_model`.
        data: Prepared data set, or HugeCTR's files, on which the AUC of the file is computed; None for none.
        split: Split of the data.
        allow_import: Packages whose code a model of the kind "python" may name.

    Raises:
        ConfigError: See `export_model`; or data of other columns than the run's, or labels that are not binary.
        DataNotFoundError: `run_dir` is not a run, or holds no complete checkpoint.
    """
    run_dir, out = Path(run_dir), Path(out)
    _check(out, format)
    _check_numbers(numbers or Numbers(), format)
    loaded = load_model(run_dir, checkpoint, allow_import=allow_import)
    batches = None
    if data is not None:
        check_columns(read_spec(data), data, loaded.dataset, run_dir / DATASET_DIRECTORY)
        batches = open_reader(data, split, batch_size=loaded.spec.training.batch_size)
    return export_model(
        loaded.model,
        out,
        dataset=loaded.dataset,
        format=format,
        tables=tables,
        scores=scores or build_objective(loaded.spec.objective).scores,
        source=RunStep(run_dir, loaded.step),
        numbers=numbers,
        samples=batches,
    )


def export_model(
    model: nn.Module,
    out: Path,
    *,
    dataset: DatasetSpec | None = None,
    format: str = "onnx",  # noqa: A002
    tables: bool = True,
    key_inputs: Sequence[KeyInput] = (),
    scores: Scores = torch.sigmoid,
    source: RunStep | None = None,
    numbers: Numbers | None = None,
    samples: Iterable[Batch] | None = None,
) -> ExportReport:
    """Write `model` in evaluation into the new directory `out`, and compare the file with it on random batches.

    `out` gets the file of the format (`FORMATS`) and `EXPORT_FILE`, which names inputs and outputs (docs/export.md).

    Args:
        model: A module that takes a `Batch`, on the CPU; put into evaluation mode.
        out: Output directory.
        dataset: The columns that the model reads; a `GraphModel` needs none.
        format: "onnx"; "torch" for a program of `torch.export`; "aotinductor" for one that is compiled for this
            machine; "torchscript" for a trace of TorchScript.
        tables: Whether the tables are in the file; else the vectors that they give are inputs.
        key_inputs: Sources of the keys; by default an input for each column.
        scores: Scores of logits; a `GraphModel` gives the predictions of its losses.
        source: The run that the model is from; None for one of no run.
        numbers: Numbers of rows and layers; None for fp32. With others the model itself is changed to them, since the
            file is compared with it. Without tables the rows are those of the vectors that the file is compared with.
        samples: Batches with labels of 0 and 1, on which the AUC of the file and its change are computed; read twice.

    Raises:
        ConfigError: `out` holds something, an unknown format, numbers, a layer or an operation that the format cannot
            hold, or scores of the file that are not the model's.
        MissingDependencyError: A library of the extra "onnx" is not installed.
        StorageError: The disk is full; nothing is left behind.
    """
    numbers = numbers or Numbers()
    _check(out, format)
    _check_numbers(numbers, format)
    model.eval()
    with atomic_dir(out) as partial:
        path = partial / FORMATS[format]
        if isinstance(model, GraphModel):
            written = _write_graph(model, dataset, path, format, tables, key_inputs, numbers, samples)
        elif dataset is None:
            raise ConfigError(
                "export", f"got a {type(model).__name__} without dataset, expected the columns that it reads"
            )
        else:
            written = _write_native(model, dataset, path, format, tables, key_inputs, scores, numbers, samples)
        tolerance = NARROW_TOLERANCES.get(numbers.precision or "fp32", TOLERANCE)
        # Before the directory appears under its name: a file that gives other scores never stays.
        difference = max_difference(written.run, written.inputs, written.expected, written.batches, tolerance)
        auc, auc_change = None, None
        if samples is not None and written.auc is not None:
            auc = _auc(samples, lambda batch: written.run({given.name: given.read(batch) for given in written.inputs}))
            auc_change = auc - written.auc
        content = {
            "run": None if source is None else str(source.run),
            "step": None if source is None else source.step,
            "model": type(model).__name__,
            "file": path.name,
            "file_format": format,
            "tables": tables,
            "no_key": NO_KEY,
            "inputs": [_described(given) for given in written.inputs],
            "outputs": list(written.outputs),
            "row_type": numbers.row_type,
            "precision": numbers.precision or "fp32",
            "max_abs_difference": difference,
            "tolerance": tolerance,
            "auc": auc,
            "auc_change": auc_change,
            "compared_samples": sum(BATCH_SIZES),
            "versions": _versions(format),
        }
        write_versioned_json(partial / EXPORT_FILE, _NAME, _VERSION, content)
        size = sum(file.stat().st_size for file in partial.iterdir())
    return ExportReport(
        file=out / path.name,
        step=None if source is None else source.step,
        model=type(model).__name__,
        tables=tables,
        inputs=tuple(given.name for given in written.inputs),
        outputs=tuple(written.outputs),
        max_abs_difference=difference,
        bytes=size,
        auc=auc,
        auc_change=auc_change,
    )


def _check(out: Path, format: str) -> None:  # noqa: A002
    """Raise errors that would otherwise occur after a large model is loaded."""
    FORMATS.find(format)
    for library in _LIBRARIES.get(format, ()):
        onnx_library(library)
    check_replaceable(out)


_PRODUCTS = {
    "onnx": ("fp32", "int8"),  # its runtime has no products of 16 bits on a CPU
    "torch": ("fp32", "bf16", "fp16"),
    "aotinductor": ("fp32", "bf16", "fp16"),
    "torchscript": ("fp32", "bf16", "fp16", "int8"),  # `torch.export` traces no packed weights
}


def _check_numbers(numbers: Numbers, format: str) -> None:  # noqa: A002
    if numbers.precision is not None and numbers.precision not in _PRODUCTS[format]:
        expected = ", ".join(_PRODUCTS[format])
        raise FieldError("", "precision", f"got {numbers.precision!r} for {format!r}, expected one of {expected}")


def _write_native(
    model: nn.Module,
    dataset: DatasetSpec,
    path: Path,
    format: str,  # noqa: A002
    tables: bool,
    key_inputs: Sequence[KeyInput],
    scores: Scores,
    numbers: Numbers,
    samples: Iterable[Batch] | None,
) -> _Written:
    # Before narrowing, which changes the model itself: the AUC to compare with is that of fp32.
    plain = Scoring(model, dataset, tables=tables, key_inputs=key_inputs, scores=scores)
    auc = None if samples is None else _auc(samples, lambda batch: [out.numpy() for out in plain.scores_of(batch)])
    scoring = Scoring(model, dataset, tables=tables, key_inputs=key_inputs, scores=scores, numbers=numbers)
    # Before the model is narrowed, after which its collections have no tables.
    readers: dict[str, list[Store]] = {}
    for collection in collections(model).values():
        for feature in collection.features:
            readers.setdefault(feature.name, []).append(collection.tables[feature.table])
    batches = random_batches(dataset.categorical, readers, num_dense=len(dataset.dense), num_labels=len(dataset.labels))
    # ONNX has integer products of its own, put into the finished file: torch's cannot be exported.
    is_quantized_after = format == "onnx" and numbers.precision == "int8"
    if numbers.precision == "int8" and not is_quantized_after:
        narrow(model, Numbers(precision="int8"))
    _save(scoring, path, format, tables)
    if is_quantized_after:
        quantize_onnx(path)
    # Only now: the file is made of the rows as they are.
    narrow(model, Numbers(row_type=numbers.row_type, precision="int8" if is_quantized_after else None))
    return _Written(
        inputs=scoring.inputs,
        outputs=scoring.outputs,
        run=onnx_runner(path) if format == "onnx" else _RUNNERS[format](path, scoring.inputs),
        expected=scoring.scores_of,
        batches=batches,
        auc=auc,
    )


def _auc(samples: Iterable[Batch], score: Callable[[Batch], Sequence[NDArray[np.generic]]]) -> float:
    found: MetricSet | None = None
    for batch in samples:
        # Batch by batch: neither samples nor scores of a split need fit into memory.
        labels = batch.label.numpy()
        found = found or MetricSet(["auc"], [str(number) for number in range(labels.shape[1])])
        with torch.no_grad():
            scores = np.concatenate(list(score(batch)), axis=1)
        weights = None if batch.weight is None else batch.weight.numpy()
        found.update(labels=labels, scores=scores, logits=scores, weights=weights)
    if found is None:
        raise ConfigError("samples", "got none, expected some to compute the AUC on")
    return float(found.compute()["auc"])


_RUNNERS = {"torch": torch_runner, "torchscript": torchscript_runner, "aotinductor": aotinductor_runner}


def _save(scoring: Scoring, path: Path, format: str, tables: bool) -> None:  # noqa: A002
    if format == "torchscript":
        save_torchscript(scoring, path, tables=tables)
        return
    program = trace(scoring, tables=tables)
    if format == "onnx":
        save_onnx(program, scoring, path)
    elif format == "aotinductor":
        save_aotinductor(program, path)
    else:
        save_torch(program, path)


def _write_graph(
    model: GraphModel,
    dataset: DatasetSpec | None,
    path: Path,
    format: str,  # noqa: A002
    tables: bool,
    key_inputs: Sequence[KeyInput],
    numbers: Numbers,
    samples: Iterable[Batch] | None,
) -> _Written:
    if format != "onnx":
        raise ConfigError("format", f"got {format!r} for a GraphModel, expected 'onnx'")

    def expected(batch: Batch) -> list[Tensor]:
        return list(model.predictions(model(batch)).values())

    auc = None if samples is None else _auc(samples, lambda batch: [scores.numpy() for scores in expected(batch)])
    export_onnx(model, path, embeddings=tables, key_inputs=key_inputs, row_type=numbers.row_type)
    spec = model.spec
    longest: dict[str, int] = {}
    readers: dict[str, list[Store]] = {}
    for embedding in spec.embeddings:
        for feature in embedding.features:
            column = feature.read_column
            limit = feature.vectors if feature.pooling == "concat" else _LIST_LENGTH
            # Of several features that read a column the shortest limit counts: the file cuts longer bags.
            longest[column] = min(limit, longest.get(column, limit))
            readers.setdefault(column, []).append(model.collection(embedding.name).tables[feature.table])
    for source in key_inputs:
        for column in source.columns:
            longest[column] = min(longest[column], source.max_keys or _LIST_LENGTH)
    if numbers.precision == "int8":
        quantize_onnx(path)
    narrow(model, numbers)  # only now: the file is made of the rows as they are
    return _Written(
        inputs=graph_inputs(
            model,
            (key_inputs or default_key_inputs(spec)) if tables else None,
            dense=() if dataset is None else [column.name for column in dataset.dense],
        ),
        outputs=[layer.bottoms[1] for layer in needed_layers(spec) if LAYERS[layer.kind].is_loss],
        run=onnx_runner(path),
        expected=expected,
        auc=auc,
        batches=random_batches(
            [CategoricalColumn(name=column, hotness=most) for column, most in longest.items()],
            readers,
            num_dense=spec.dense_dim,
            num_labels=sum(label.dim for label in spec.labels),
        ),
    )


def _described(given: ModelInput) -> dict[str, object]:
    return {
        "name": given.name,
        "dtype": given.dtype,
        "shape": ["batch", *given.dims],
        "columns": list(given.columns),
    }


def _versions(format: str) -> dict[str, object]:  # noqa: A002
    """Return the versions of the libraries that wrote the file."""
    found: dict[str, object] = {"python": platform.python_version()}
    for library in ("terarec", "torch", *_LIBRARIES.get(format, ())):
        try:
            found[library] = version(library)
        except PackageNotFoundError:
            found[library] = None
    return {**found, "opset": OPSET} if format == "onnx" else found
