"""Scores of a data set, as a file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import torch

from terarec.data import Reader
from terarec.formats import check_new_file, check_suffix, table_file
from terarec.metrics import Throughput
from terarec.models.artifact import load_model
from terarec.train.columns import check_columns
from terarec.train.run_dir import RunDirectory, check_run
from terarec.train.scoring import score


@dataclass(frozen=True, kw_only=True, slots=True)
class PredictReport:
    """What `predict` wrote.

    Attributes:
        step: training steps behind the weights.
        rows: samples scored.
        seconds: wall-clock time, reading and writing included.
        samples_per_second: rows / seconds.
    """

    step: int
    rows: int
    seconds: float
    samples_per_second: float


def predict(
    run_dir: Path,
    dataset: Path,
    split: str,
    out: Path,
    *,
    checkpoint: int | str | None = None,
    replace: bool = False,
    progress: Callable[[int], None] | None = None,
    allow_import: Sequence[str] = (),
) -> PredictReport:
    """Score every sample of `split` with a checkpoint of a run and write `out`, whole or not at all.

    `out` has a row per sample in input order: the probability of each label as float32, named ``score`` if there is one
    label and else ``score_<label>``, then the labels themselves under their names.

    Args:
        run_dir: what training wrote.
        dataset: a data set with the columns that the model was trained on.
        split: its split.
        out: a file whose name ends in .parquet, .csv or .jsonl.
        checkpoint: "last", "best" or a step; None for the last one, or the best one of a run with patience.
        replace: whether a file at `out` is replaced.
        progress: called after every batch with the samples done.
        allow_import: Packages whose code the model may name.

    Raises:
        ConfigError: the data set lacks the split, or its columns are not those of the run; the run holds no such
            checkpoint; `out` is there, or its name has another end.
        DataNotFoundError: `run_dir` is no run, or holds no whole checkpoint.
        FormatError: a damaged file.
        StorageError: the disk is full.
    """
    check_new_file(out, replace=replace)
    check_suffix(out)
    check_run(run_dir)
    throughput = Throughput()
    model, spec, trained_on, step = load_model(run_dir, checkpoint, allow_import=allow_import)
    training = spec.training
    reader = Reader(dataset, split=split, batch_size=training.batch_size, threads=training.reader_threads)
    check_columns(reader.spec, dataset, trained_on, RunDirectory(run_dir).dataset)
    names = [label.name for label in trained_on.labels]
    scores = ["score"] if len(names) == 1 else [f"score_{name}" for name in names]
    schema = pa.schema([(name, pa.float32()) for name in (*scores, *names)])
    with table_file(out, schema, replace=replace) as writer:
        for batch, logits in score(model, reader, training.precision):
            columns = torch.cat([logits.sigmoid(), batch.label], dim=1)
            writer.write_table(pa.table([column.numpy() for column in columns.T.contiguous()], schema=schema))
            throughput.update(batch.batch_size)
            if progress is not None:
                progress(throughput.samples)
    seconds = throughput.seconds
    return PredictReport(
        step=step, rows=throughput.samples, seconds=seconds, samples_per_second=throughput.samples / seconds
    )
