"""Comparison of an exported file with the model on random batches."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from terarec.batch import Batch, Jagged
from terarec.errors import ConfigError
from terarec.export.inputs import NO_KEY, ModelInput
from terarec.export.onnx_graph import onnx_library
from terarec.spec import CategoricalColumn
from terarec.storage import Store

BATCH_SIZES = (1, 7, 64, 9_928)
"""Of the batches that are compared: 10,000 samples."""
TOLERANCE = 1e-4
"""Largest difference that is accepted, for scores up to 1; more for larger ones."""
_ABSENT_KEYS = 8
_MOST_KEYS = 4

Run = Callable[[Mapping[str, NDArray[np.generic]]], Sequence[NDArray[np.generic]]]
"""Name of each input -> its value, to the value of each output."""


def max_difference(
    run: Run,
    inputs: Sequence[ModelInput],
    expected: Callable[[Batch], Sequence[torch.Tensor]],
    batches: Iterable[Batch],
) -> float:
    """Return the largest absolute difference between scores of a file and those of a model.

    Args:
        run: Runs the file.
        inputs: Inputs of the file.
        expected: The model's scores for each output of the file.
        batches: Batches to compare.

    Raises:
        ConfigError: One beyond `TOLERANCE`, or a score that is no number in one of them alone.
    """
    largest = 0.0
    for batch in batches:
        found = run({given.name: given.read(batch) for given in inputs})
        with torch.no_grad():
            wanted = [scores.float().cpu().numpy() for scores in expected(batch)]
        for got, want in zip(found, wanted, strict=True):
            if got.shape != want.shape:
                raise ConfigError("export", f"got scores {list(got.shape)} of the file, expected {list(want.shape)}")
            difference = float(np.abs(got - want).max(initial=0.0))
            bound = TOLERANCE * max(1.0, float(np.abs(want).max(initial=0.0)))
            if not difference <= bound:
                raise ConfigError(
                    "export", f"the file's scores are {difference:.3g} off the model's, expected at most {bound:.3g}"
                )
            largest = max(largest, difference)
    return largest


def onnx_runner(path: Path) -> Run:
    """Run the ONNX file `path` with ONNX Runtime.

    Raises:
        MissingDependencyError: ``onnxruntime`` is not installed.
    """
    session = onnx_library("onnxruntime").InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return lambda feed: [np.asarray(scores) for scores in session.run(None, dict(feed))]


def torch_runner(path: Path, inputs: Sequence[ModelInput]) -> Run:
    """Run the program in the file `path`."""
    return _torch_run(torch.export.load(path).module(), inputs)


def torchscript_runner(path: Path, inputs: Sequence[ModelInput]) -> Run:
    """Run the TorchScript file `path`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of TorchScript as a whole
        return _torch_run(torch.jit.load(path), inputs)  # type: ignore[no-untyped-call]


def aotinductor_runner(path: Path, inputs: Sequence[ModelInput]) -> Run:
    """Run the package of AOTInductor in the file `path`."""
    from torch._inductor import aoti_load_package  # loads the compiler

    return _torch_run(aoti_load_package(str(path)), inputs)


def _torch_run(module: Callable[..., Sequence[torch.Tensor]], inputs: Sequence[ModelInput]) -> Run:
    def run(feed: Mapping[str, NDArray[np.generic]]) -> list[NDArray[np.generic]]:
        with torch.no_grad():
            found = module(*(torch.from_numpy(feed[given.name]) for given in inputs))
        return [scores.numpy() for scores in found]

    return run


def random_batches(
    columns: Sequence[CategoricalColumn], readers: Mapping[str, Sequence[Store]], *, num_dense: int, num_labels: int
) -> list[Batch]:
    """Batches of `BATCH_SIZES` samples, always the same ones.

    Args:
        columns: The categorical columns; a list has 0 to `hotness` keys, at most a few.
        readers: Column -> the tables that its keys are looked up in.
        num_dense: Number F of dense columns, which are normally distributed.
        num_labels: Number of label columns, which are zeros.
    """
    generator = torch.Generator().manual_seed(0)
    known = {column.name: _known_keys(readers.get(column.name, ()), column, generator) for column in columns}
    return [_batch(columns, known, size, num_dense, num_labels, generator) for size in BATCH_SIZES]


def _batch(
    columns: Sequence[CategoricalColumn],
    known: Mapping[str, torch.Tensor],
    size: int,
    num_dense: int,
    num_labels: int,
    generator: torch.Generator,
) -> Batch:
    keys, lengths = [], []
    for column in columns:
        if column.hotness == 1:
            count = torch.ones(size, dtype=torch.int64)
        else:
            count = torch.randint(min(column.hotness, _MOST_KEYS) + 1, (size,), generator=generator)
        choices = known[column.name]
        keys.append(choices[torch.randint(len(choices), (int(count.sum()),), generator=generator)])
        lengths.append(count)
    none = torch.empty(0, dtype=torch.int64)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), torch.cat([none, *lengths]).cumsum(0)])
    return Batch(
        dense=torch.randn(size, num_dense, generator=generator),
        label=torch.zeros(size, num_labels),
        sparse=Jagged(names=tuple(column.name for column in columns), keys=torch.cat([none, *keys]), offsets=offsets),
    )


def _known_keys(tables: Sequence[Store], column: CategoricalColumn, generator: torch.Generator) -> torch.Tensor:
    """Keys to choose from: of static tables those that all of them hold, of dynamic ones also some that are absent."""
    static = [len(table) for table in tables if not table.is_dynamic]
    if static:
        return torch.arange(min(static))
    absent = torch.randint(column.rows or 2**62, (_ABSENT_KEYS,), generator=generator)
    keys = torch.cat([absent, *(table.keys().cpu() for table in tables)])
    return keys if column.hotness == 1 else keys[keys != NO_KEY]
