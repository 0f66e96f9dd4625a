# SPDX-License-Identifier: Apache-2.0
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
from torch import nn

from terarec.batch import Batch
from terarec.config.files import DATASET_DIRECTORY
from terarec.data import open_reader, read_spec
from terarec.errors import ConfigError
from terarec.export.files import (
    BATCH_SIZES,
    NARROW_TOLERANCES,
    TOLERANCE,
    Runner,
    aotinductor_runner,
    max_difference,
    random_batches,
    save_aotinductor,
    save_torch,
    save_torchscript,
    torch_runner,
    torchscript_runner,
    trace,
)
from terarec.export.graph_models import GraphScoring
from terarec.export.inputs import NO_KEY, KeyInput, ModelInput
from terarec.export.onnx_file import OPSET, onnx_library, onnx_runner, quantize_onnx, save_onnx
from terarec.export.scoring import BatchScoring, Scores, Scoring
from terarec.io.directories import atomic_dir, check_replaceable
from terarec.io.files import write_versioned_json
from terarec.metrics import MetricSet
from terarec.models import GraphModel
from terarec.models.artifact import load_model
from terarec.models.narrow import narrow
from terarec.models.trained_columns import check_columns
from terarec.nn.objectives import BinaryObjective, build_objective
from terarec.spec import BinarySpec, DatasetSpec, Numbers
from terarec.spec.checks import FieldError
from terarec.spec.codec import finite_data
from terarec.spec.registry import Registry
from terarec.spec.run import calibration_of

EXPORT_FILE = "export.json"
FORMATS = Registry(
    "format",
    {"onnx": "model.onnx", "torch": "model.pt2", "torchscript": "model.pt", "aotinductor": "compiled.pt2"},
)
"""Format -> name of the file with the model."""
_NAME, _VERSION = "terarec.export", 1
_LIBRARIES: dict[str, tuple[str, ...]] = {"onnx": ("onnx", "onnxscript", "onnxruntime")}


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
        auc: Area under the ROC curve of the file's scores, the mean over labels, on the samples that were given; NaN,
            null in the file, where they lack a class.
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
        scores: Scores of logits; None for those of the run's objective, and for a graph whose objective is plain binary
            cross entropy for the predictions of its losses.
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
    objective = loaded.spec.objective
    if scores is None and (not isinstance(objective, BinarySpec | None) or calibration_of(loaded.spec) is not None):
        scores = build_objective(objective).scores
    return export_model(
        loaded.model,
        out,
        dataset=loaded.dataset,
        format=format,
        tables=tables,
        scores=scores,
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
    scores: Scores | None = None,
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
        scores: Scores of logits; None for probabilities, and for the predictions of the losses of a `GraphModel`.
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
        # Before the model is changed to other numbers: the AUC to compare with is that of fp32.
        auc_before = None
        if samples is not None:
            plain = _scoring(model, dataset, tables, key_inputs, scores, Numbers())
            auc_before = _auc(samples, lambda batch: [output.numpy() for output in plain.scores_of(batch)])
        scoring = _scoring(model, dataset, tables, key_inputs, scores, numbers)
        run, batches = _write(scoring, path, format, numbers)
        tolerance = NARROW_TOLERANCES.get(numbers.precision or "fp32", TOLERANCE)
        # Before the directory appears under its name: a file that gives other scores never stays.
        difference = max_difference(run, scoring.inputs, scoring.scores_of, batches, tolerance)
        auc, auc_change = None, None
        if samples is not None and auc_before is not None:
            auc = _auc(
                samples,
                lambda batch: run(
                    {source_of_input.name: source_of_input.read(batch) for source_of_input in scoring.inputs}
                ),
            )
            auc_change = auc - auc_before
        content = {
            "run": None if source is None else str(source.run),
            "step": None if source is None else source.step,
            "model": type(model).__name__,
            "file": path.name,
            "file_format": format,
            "tables": tables,
            "no_key": NO_KEY,
            "inputs": [_described(one, scoring.batch_size) for one in scoring.inputs],
            "outputs": list(scoring.outputs),
            "output_widths": [scores.shape[1] for scores in scoring.scores_of(batches[0])],
            "row_type": numbers.row_type,
            "precision": numbers.precision or "fp32",
            "max_abs_difference": difference,
            "tolerance": tolerance,
            "auc": auc,
            "auc_change": auc_change,
            "compared_samples": sum(batch.batch_size for batch in batches),
            "versions": _versions(format),
        }
        write_versioned_json(partial / EXPORT_FILE, _NAME, _VERSION, finite_data(content))
        size = sum(file.stat().st_size for file in partial.iterdir())
    return ExportReport(
        file=out / path.name,
        step=None if source is None else source.step,
        model=type(model).__name__,
        tables=tables,
        inputs=tuple(one.name for one in scoring.inputs),
        outputs=scoring.outputs,
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


def _scoring(
    model: nn.Module,
    dataset: DatasetSpec | None,
    tables: bool,
    key_inputs: Sequence[KeyInput],
    scores: Scores | None,
    numbers: Numbers,
) -> Scoring:
    if isinstance(model, GraphModel):
        dense = () if dataset is None else [column.name for column in dataset.dense]
        return GraphScoring(model, tables=tables, key_inputs=key_inputs, dense=dense, scores=scores, numbers=numbers)
    if dataset is None:
        raise ConfigError("export", f"got a {type(model).__name__} without dataset, expected the columns that it reads")
    scores = scores or BinaryObjective().scores
    return BatchScoring(model, dataset, tables=tables, key_inputs=key_inputs, scores=scores, numbers=numbers)


def _write(
    scoring: Scoring,
    path: Path,
    format: str,  # noqa: A002
    numbers: Numbers,
) -> tuple[Runner, Sequence[Batch]]:
    """Write the file of `scoring` and change its model to `numbers`.

    Returns:
        A runner of the file, and random batches.
    """
    model = scoring.model
    # Before the model is narrowed, after which its collections have no tables.
    sizes = BATCH_SIZES if scoring.batch_size is None else (scoring.batch_size,) * len(BATCH_SIZES)
    batches = random_batches(scoring.columns(), sizes)
    # ONNX has integer products of its own, put into the finished file: torch's cannot be exported.
    is_quantized_after = format == "onnx" and numbers.precision == "int8"
    if numbers.precision == "int8" and not is_quantized_after:
        narrow(model, Numbers(precision="int8"))
    _save(scoring, path, format)
    if is_quantized_after:
        quantize_onnx(path)
    # Only now: the file is made of the rows as they are.
    narrow(model, Numbers(row_type=numbers.row_type, precision="int8" if is_quantized_after else None))
    return onnx_runner(path) if format == "onnx" else _RUNNERS[format](path, scoring.inputs), batches


def _auc(samples: Iterable[Batch], score: Callable[[Batch], Sequence[NDArray[np.generic]]]) -> float:
    metrics: MetricSet | None = None
    for batch in samples:
        # Batch by batch: neither samples nor scores of a split need fit into memory.
        labels = batch.label.numpy()
        metrics = metrics or MetricSet(["auc"], [str(number) for number in range(labels.shape[1])])
        with torch.no_grad():
            scores = np.concatenate(list(score(batch)), axis=1)
        weights = None if batch.weight is None else batch.weight.numpy()
        metrics.update(labels=labels, scores=scores, logits=scores, weights=weights)
    if metrics is None:
        raise ConfigError("samples", "got none, expected some to compute the AUC on")
    return float(metrics.compute()["auc"])


_RUNNERS = {"torch": torch_runner, "torchscript": torchscript_runner, "aotinductor": aotinductor_runner}


def _save(scoring: Scoring, path: Path, format: str) -> None:  # noqa: A002
    if format == "torchscript":
        save_torchscript(scoring, path)
        return
    program = trace(scoring)
    if format == "onnx":
        save_onnx(program, scoring, path)
    elif format == "aotinductor":
        save_aotinductor(program, path)
    else:
        save_torch(program, path)


def _described(model_input: ModelInput, batch_size: int | None) -> dict[str, object]:
    return {
        "name": model_input.name,
        "dtype": model_input.dtype,
        "shape": [batch_size or "batch", *model_input.dims],
        "columns": list(model_input.columns),
    }


def _versions(format: str) -> dict[str, object]:  # noqa: A002
    """Return the versions of the libraries that wrote the file."""
    versions: dict[str, object] = {"python": platform.python_version()}
    for library in ("terarec", "torch", *_LIBRARIES.get(format, ())):
        try:
            versions[library] = version(library)
        except PackageNotFoundError:
            versions[library] = None
    return {**versions, "opset": OPSET} if format == "onnx" else versions
