# SPDX-License-Identifier: Apache-2.0
"""Preview of the output of a preparation, from its first rows. See docs/preparing.md."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from terarec.etl.engine.phases import OnProgress
from terarec.etl.engine.report import BadInput, TableSize
from terarec.etl.preparation import prepare
from terarec.etl.source.files import find_files
from terarec.etl.source.source import SAMPLE_ROWS, open_files
from terarec.etl.workflow import Workflow
from terarec.formats import read_dataset
from terarec.formats.block import ColumnBlock, slice_rows
from terarec.formats.shard import open_shard
from terarec.ragged import Ragged
from terarec.spec import PrepareOptions
from terarec.spec.dataset import DATASET_STORAGES

_SHOWN_ROWS = 10


@dataclass(frozen=True, kw_only=True, slots=True)
class PreviewInput:
    """A column of the sources.

    Attributes:
        name: Its name.
        type: Its type in the files.
        format: Format of its times; None for other types and for seconds.
        separator: Separator of the items of its lists in text; None for one value a row.
        missing_share: Share of missing values in the sample.
    """

    name: str
    type: str
    format: str | None
    separator: str | None
    missing_share: float


@dataclass(frozen=True, kw_only=True, slots=True)
class PreviewColumn:
    """A column of the data set.

    Attributes:
        name: Its name.
        role: Its role, as in `OutputColumn`.
        type: Its type in the shards.
        rows: Ids in the sample, the reserved ones included; None where there are no ids.
        hotness: Maximum number of ids a row, in the sample.
        empty_share: Share of empty lists in the sample; None for one value a row.
        mean_length: Mean length of the lists in the sample; None for one value a row.
    """

    name: str
    role: str
    type: str
    rows: int | None
    hotness: int
    empty_share: float | None = None
    mean_length: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Preview:
    """A preview of a preparation, from its first rows.

    Attributes:
        workflow: Name of the workflow.
        files: Source files.
        input_bytes: Size of the source files, compressed as they are.
        sample_rows: Rows of the sources that were read.
        is_complete: Whether these are all that the preparation would read.
        estimated_rows: Samples that it would write.
        estimated_bytes: Bytes of the shards that it would write.
        estimated_seconds: Time that it would take on this machine; None for Spark.
        inputs: Columns of the sources.
        columns: Columns of the data set.
        rows: First samples, column by column.
        tables: Embedding tables for the ids of the sample.
        bad_input: Bad input in the sample.
    """

    workflow: str
    files: int
    input_bytes: int
    sample_rows: int
    is_complete: bool
    estimated_rows: int
    estimated_bytes: int
    estimated_seconds: float | None
    inputs: tuple[PreviewInput, ...]
    columns: tuple[PreviewColumn, ...]
    rows: Mapping[str, Sequence[object]]
    tables: tuple[TableSize, ...]
    bad_input: BadInput


def preview(
    workflow: Workflow,
    sources: Sequence[str | Path],
    options: PrepareOptions | None = None,
    progress: OnProgress | None = None,
) -> Preview:
    """Estimate the output of `prepare` from the first `SAMPLE_ROWS` rows; only temporary files are written.

    The sample is prepared on this machine by the same code, so that errors in it are those of `prepare`.

    Args:
        workflow: Steps, split and result columns.
        sources: Files, directories, patterns or URLs, in order.
        options: Engine, storage, threads, memory and error policy.
        progress: Callback for the progress of each phase of the sample.

    Raises:
        ConfigError, DataNotFoundError, FormatError, StorageError: As for `prepare`.
    """
    chosen = options or PrepareOptions()
    limit = min(chosen.limit or SAMPLE_ROWS, SAMPLE_ROWS)
    # Not shuffled, so that the samples shown are the first rows of the files, which may all be in one split.
    here = replace(
        chosen, engine="local", spark_master=None, spark_conf={}, limit=limit, shuffle=False, empty_splits="allow"
    )
    spec = workflow.spec.source
    files = find_files(sources)
    everything = open_files(spec, files, chosen.bad_input, chosen.threads)
    sample = open_files(spec, files, chosen.bad_input, chosen.threads, limit)
    with tempfile.TemporaryDirectory(prefix="terarec-") as directory:
        out = Path(directory) / "data"
        report = prepare(workflow, sources, out, here, progress)
        # Names that begin with "_" are lists and keysets next to the shards.
        shards = [path for split in report.splits for path in (out / split).iterdir() if path.name[0] != "_"]
        shard_bytes = sum(path.stat().st_size for path in shards)
        if chosen.storage not in DATASET_STORAGES:  # HugeCTR's files hold the same samples
            out = Path(directory) / "samples"
            prepare(workflow, sources, out, replace(here, storage="parquet"))
        dataset = read_dataset(out)
        shard = dataset.shards(next(iter(dataset.splits)))[0]
        block = open_shard(dataset, out / shard.file, shard.rows).read_group(0)
    sample_rows = sum(sample.count_rows())
    # The sample is everything where the files end before the limit, or where the caller's own limit is this one.
    is_complete = sample_rows < limit or limit == chosen.limit or sample.num_bytes >= everything.num_bytes
    total_rows = sample_rows
    if not is_complete:
        total_rows = round(sample_rows * everything.num_bytes / sample.num_bytes)
        if everything.spec.format == "parquet":  # its footers hold the counts
            total_rows = sum(everything.count_rows())
        total_rows = min(total_rows, chosen.limit or total_rows)
    scale = total_rows / sample_rows
    values = _column_values(block)
    lists = zip(dataset.categorical, block.keys, strict=True)
    lengths = {column.name: np.diff(keys.offsets) for column, keys in lists if isinstance(keys, Ragged)}
    missing = {column.name: column.missing_share for column in report.inputs}
    return Preview(
        workflow=workflow.spec.name,
        files=len(everything.files),
        input_bytes=everything.num_bytes,
        sample_rows=sample_rows,
        is_complete=is_complete,
        estimated_rows=round(report.rows * scale),
        estimated_bytes=round(shard_bytes * scale),
        estimated_seconds=report.seconds * scale if chosen.engine == "local" else None,
        inputs=tuple(
            PreviewInput(
                name=column.name,
                type=column.type,
                format=column.format,
                separator=column.separator,
                missing_share=missing[column.name],
            )
            for column in spec.columns
            if column.name in missing
        ),
        columns=tuple(
            PreviewColumn(
                name=column.name,
                role=column.role,
                type=kind,
                rows=column.rows,
                hotness=column.hotness,
                empty_share=None if column.name not in lengths else float((lengths[column.name] == 0).mean()),
                mean_length=None if column.name not in lengths else float(lengths[column.name].mean()),
            )
            for column, (kind, _) in zip(report.columns, values, strict=True)
        ),
        rows={column.name: shown for column, (_, shown) in zip(report.columns, values, strict=True)},
        tables=report.tables,
        bad_input=report.bad_input,
    )


def _column_values(block: ColumnBlock) -> list[tuple[str, list[object]]]:
    """Return the type and the first values of each column, in the order of `PrepareReport.columns`."""
    block = slice_rows(block, 0, min(_SHOWN_ROWS, block.num_rows))
    columns_shown = [("float32", numbers.tolist()) for numbers in (*block.label.T, *block.dense.T)]
    for keys in block.keys:
        if isinstance(keys, Ragged):
            lists = [items.tolist() for items in np.split(keys.values, keys.offsets[1:-1])]
            columns_shown.append((f"list of {keys.values.dtype}", lists))
        else:
            columns_shown.append((str(keys.dtype), keys.tolist()))
    if block.weight is not None:
        columns_shown.append(("float32", block.weight.tolist()))
    names = {"large_string": "text", "double": "float64"}
    columns_shown += [(names.get(str(array.type), str(array.type)), array.to_pylist()) for array in block.metadata]
    return columns_shown
