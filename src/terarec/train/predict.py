# SPDX-License-Identifier: Apache-2.0
"""Scores of a data set, as a file."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch
from torch import Tensor

from terarec.batch import Batch, select
from terarec.config import load_run
from terarec.config.files import RUN_FILE
from terarec.data import BatchReader, open_reader, read_spec
from terarec.formats import read_dataset
from terarec.formats.block import METADATA_TYPES
from terarec.formats.table_file import check_suffix, table_file
from terarec.io.files import check_new_file
from terarec.metrics.means import Throughput
from terarec.metrics.samples import NamesOfIds
from terarec.models.artifact import LoadedModel, load_model
from terarec.models.contract import score_names
from terarec.models.trained_columns import check_columns
from terarec.nn.objectives import build_objective
from terarec.spec import DatasetSpec
from terarec.spec.checks import FieldError, did_you_mean, quoted
from terarec.train.evaluation import score
from terarec.train.run_dir import RunDirectory, check_run


class BatchScorer(Protocol):
    """Scores batches of a run's columns, as `terarec.serve.InferenceSession` does."""

    @property
    def step(self) -> int:
        """Training steps behind the weights."""
        ...

    def score_batch(self, batch: Batch) -> npt.NDArray[np.float32]:
        """Return the scores float32[B, C] of a batch."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class NamedColumns:
    """Columns to keep, with names in place of the ids of categorical ones.

    Attributes:
        columns: Their names.
        names: Names of ids, such as `terarec.etl.workflow.ValueNames`.
    """

    columns: Sequence[str]
    names: NamesOfIds


@dataclass(frozen=True, kw_only=True, slots=True)
class PredictReport:
    """Results of `predict`.

    Attributes:
        step: Training steps of the weights.
        rows: Samples scored.
        seconds: Wall-clock time, reading and writing included.
        samples_per_second: Rows / seconds.
    """

    step: int
    rows: int
    seconds: float
    samples_per_second: float


def predict(
    run_dir: Path | str,
    dataset: Path | str,
    split: str,
    out: Path | str,
    *,
    checkpoint: int | str | BatchScorer | None = None,
    keep: Sequence[str] | NamedColumns = (),
    replace: bool = False,
    device: torch.device | None = None,
    allow_import: Sequence[str] = (),
    progress: Callable[[int], None] | None = None,
) -> PredictReport:
    """Score every sample of `split` with a checkpoint of a run and write `out` atomically.

    `out` has a row per sample in input order: the columns of `keep`; the probability of each label as float32, named
    ``score`` if there is one label and else ``score_<label>``; then the labels themselves under their names.

    Args:
        run_dir: Directory of the run.
        dataset: A data set with the columns that the model was trained on.
        split: Its split.
        out: A file whose name ends in .parquet, .csv or .jsonl.
        checkpoint: "last", "best" or a step; None for the last one, or the best one of a run with patience. Or a scorer
            that has loaded one, such as a session with an executor, to which `device` and `allow_import` do not apply.
        keep: Columns of the data set to write before the scores: metadata as it is, the weight, and categorical columns
            of one key a sample as int64, or as text where they are `NamedColumns` and have names. A name of both is
            that of the metadata.
        replace: Whether a file at `out` is replaced.
        device: Device of the model; the CPU by default.
        allow_import: Packages whose code the model may name.
        progress: Called after every batch with the samples done.

    Raises:
        ConfigError: The data set lacks the split, or its columns are not those of the run; the run holds no such
            checkpoint; a name of `keep` is unknown; `out` is there, or its name has another end.
        DataNotFoundError: `run_dir` is not a run, or holds no complete checkpoint.
        FormatError: A damaged file.
        StorageError: The disk is full.
    """
    run_dir, dataset, out = Path(run_dir), Path(dataset), Path(out)
    check_new_file(out, replace=replace)
    check_suffix(out)
    check_run(run_dir)
    throughput = Throughput()
    spec, trained_on = load_run(run_dir / RUN_FILE), read_dataset(RunDirectory(run_dir).dataset)
    training = spec.training
    reader = open_reader(dataset, split, batch_size=training.batch_size, threads=training.reader_threads)
    described = read_spec(dataset)
    check_columns(described, dataset, trained_on, RunDirectory(run_dir).dataset)
    labels = [label.name for label in trained_on.labels]
    scores = score_names(labels, build_objective(spec.objective).num_outputs(len(labels)))
    columns, names = (keep.columns, keep.names) if isinstance(keep, NamedColumns) else (keep, None)
    kept = _kept_columns(described, columns, reserved=(*scores, *labels))
    if names is not None:
        none = np.zeros(0, np.int64)
        kept |= {name: pa.string() for name in kept if names(name, none) is not None}
    schema = pa.schema([*kept.items(), *((name, pa.float32()) for name in (*scores, *labels))])
    # The model is loaded when all else is known to fit.
    if checkpoint is None or isinstance(checkpoint, int | str):
        loaded = load_model(run_dir, checkpoint, device=device, allow_import=allow_import)
        step, scored = loaded.step, _scores(loaded, reader)
    else:
        scorer = checkpoint
        step, scored = scorer.step, ((batch, torch.from_numpy(scorer.score_batch(batch))) for batch in reader)
    with table_file(out, schema, replace=replace) as writer:
        for batch, batch_scores in scored:
            outputs = torch.cat([batch_scores, batch.label], dim=1)
            arrays = [_kept(batch, described, name, names) for name in kept]
            # Arrow takes a column without a copy only where its numbers are one after the other.
            arrays += [pa.array(column.numpy()) for column in outputs.T.contiguous()]
            writer.write_table(pa.table(arrays, schema=schema))
            throughput.update(batch.batch_size)
            if progress is not None:
                progress(throughput.samples)
    seconds = throughput.seconds
    return PredictReport(
        step=step, rows=throughput.samples, seconds=seconds, samples_per_second=throughput.samples / seconds
    )


def _scores(loaded: LoadedModel, reader: BatchReader) -> Iterator[tuple[Batch, Tensor]]:
    """Yield the batches with their scores float32[B, C]; on a GPU, batches are copied ahead."""
    to_scores = build_objective(loaded.spec.objective).scores
    for batch, logits, _ in score(loaded.model, reader, loaded.spec.training.precision):
        yield batch, to_scores(logits)


def _kept_columns(dataset: DatasetSpec, keep: Sequence[str], *, reserved: Sequence[str]) -> dict[str, pa.DataType]:
    """Return the columns of `keep` and the Arrow types in which they are written next to scores."""
    types: dict[str, pa.DataType] = {column.name: pa.int64() for column in dataset.categorical if column.hotness == 1}
    if dataset.weight is not None:
        types[dataset.weight] = pa.float32()
    types |= {column.name: METADATA_TYPES[column.type] for column in dataset.metadata}
    lists = {column.name: column.hotness for column in dataset.categorical if column.hotness > 1}
    kept: dict[str, pa.DataType] = {}
    for name in keep:
        if name in kept or name in reserved:
            others = ", ".join((*kept, *reserved))
            raise FieldError("", "keep", f"got {name!r}, expected other columns than {others}")
        if name not in types and name in lists:
            kind = f"lists of {lists[name]} keys"
            raise FieldError("", "keep", f"column {name!r} holds {kind}, expected one value a sample")
        if name not in types:
            there = ", ".join(types) or "none"
            raise FieldError(
                "",
                "keep",
                f"data set {dataset.name!r} has no column {quoted(name)}{did_you_mean(name, types)} to keep, expected "
                f"metadata, the weight or categorical columns of one key: {there}",
            )
        kept[name] = types[name]
    return kept


def _kept(batch: Batch, dataset: DatasetSpec, name: str, names: NamesOfIds | None) -> pa.Array:
    if name in batch.metadata:
        return batch.metadata[name]
    if name == dataset.weight:
        assert batch.weight is not None
        return pa.array(batch.weight.numpy())
    ids = select(batch.sparse, (name,)).keys.numpy()
    if names is not None:
        distinct, places = np.unique(ids, return_inverse=True)
        values = names(name, distinct)
        if values is not None:
            return pa.array(values, pa.string()).take(pa.array(places))
    return pa.array(ids)
