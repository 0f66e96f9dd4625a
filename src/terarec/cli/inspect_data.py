# SPDX-License-Identifier: Apache-2.0
"""Output of ``terarec inspect`` for a data set: its splits and columns, or the values of one column."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from terarec.errors import ConfigError
from terarec.etl.workflow import Workflow, workflow_of
from terarec.etl.workflow.datasets import IdValues
from terarec.formats import read_dataset
from terarec.formats.block import ColumnBlock, Keys
from terarec.formats.shard import open_shard
from terarec.ragged import Ragged, flat_values
from terarec.reports.text import Advance
from terarec.spec import DatasetSpec
from terarec.spec.dataset import MISSING_ID


def describe_dataset(path: Path, *, allow_import: Sequence[str] = ()) -> dict[str, Any]:
    """Return splits and columns of the data set in `path`.

    The shares of missing and rare ids are those of the first row group of the first split, so that no scan is needed.

    Raises:
        DataNotFoundError: No data set, or one of its shards is not there.
        FormatError: A file that does not hold what it promises.
    """
    spec = read_dataset(path)
    splits = [_split(path, spec, split) for split in spec.splits]
    workflow = workflow_of(path, allow_import=allow_import)
    # One row group: a share of missing ids needs no more, and data sets have thousands of them.
    sample = next(blocks(path, spec, first_split(spec)), None) if spec.splits else None
    return {
        "what": "dataset",
        "path": str(path),
        "name": spec.name,
        "storage": spec.storage,
        "rows": sum(split["rows"] for split in splits),
        "bytes": sum(split["bytes"] for split in splits),
        "best_auc": spec.best_auc,
        "embedding_rows": sum(column.rows or 0 for column in spec.categorical),
        "sampled_rows": 0 if sample is None else sample.num_rows,
        "splits": splits,
        "columns": [
            *(_number_column("label", column.name, None) for column in spec.labels),
            *(_number_column("dense", column.name, IdValues(workflow, column.name).kind) for column in spec.dense),
            *(
                _key_column(spec, workflow, position, None if sample is None else sample.keys[position])
                for position in range(len(spec.categorical))
            ),
            *([] if spec.weight is None else [_number_column("weight", spec.weight, None)]),
            *(_number_column("metadata", column.name, None) for column in spec.metadata),
        ],
    }


def first_split(spec: DatasetSpec) -> str:
    """Return the split to read where none is named: "train" if there is one."""
    if not spec.splits:
        raise ConfigError(f"data set {spec.name!r}", "has no split, expected one with samples")
    return "train" if "train" in spec.splits else next(iter(spec.splits))


def blocks(path: Path, spec: DatasetSpec, split: str) -> Iterator[ColumnBlock]:
    """Yield the row groups of `split`, in sample order."""
    for description in spec.shards(split):
        shard = open_shard(spec, path / description.file, description.rows)
        for group in range(len(shard.group_rows)):
            yield shard.read_group(group)


def reserved_shares(ids: NDArray[Any], counts: NDArray[np.int64] | None, num_reserved: int) -> dict[str, float | None]:
    """Return the shares of the ids reserved for missing, rare and unseen values; None where there are none.

    Args:
        ids: int64[n], or any integers.
        counts: int64[n], how often each of `ids` occurs; None for once.
        num_reserved: Number of the first ids that are those of missing, rare and unseen values.
    """
    weights = np.ones(len(ids), dtype=np.int64) if counts is None else counts
    total = max(int(weights.sum()), 1)
    missing = int(weights[ids == MISSING_ID].sum()) / total if num_reserved else None
    rare = int(weights[(ids > MISSING_ID) & (ids < num_reserved)].sum()) / total if num_reserved > 1 else None
    return {"missing_share": missing, "rare_share": rare}


def list_figures(keys: Keys | None) -> dict[str, float | None]:
    """Return the share of empty lists and the mean length; None where there are no lists."""
    if not isinstance(keys, Ragged) or len(keys.offsets) < 2:
        return {"empty_share": None, "mean_length": None}
    lengths = np.diff(keys.offsets)
    return {"empty_share": float((lengths == 0).mean()), "mean_length": float(lengths.mean())}


def _split(path: Path, spec: DatasetSpec, split: str) -> dict[str, Any]:
    shards = spec.shards(split)
    sizes = [open_shard(spec, path / shard.file, shard.rows).path.stat().st_size for shard in shards]
    return {"split": split, "rows": spec.num_rows(split), "shards": len(shards), "bytes": sum(sizes)}


def _number_column(role: str, name: str, kind: str | None) -> dict[str, Any]:
    return {
        "column": name,
        "role": role,
        "step": kind,
        "rows": None,
        "hotness": None,
        "missing_share": None,
        "rare_share": None,
        "empty_share": None,
        "mean_length": None,
    }


def _num_reserved(spec: DatasetSpec, name: str, id_values: IdValues) -> int:
    # Data that no workflow made may have an id of missing values, too.
    return id_values.num_reserved or spec.first_id(name)


def _key_column(spec: DatasetSpec, workflow: Workflow, position: int, sample: Keys | None) -> dict[str, Any]:
    column = spec.categorical[position]
    id_values = IdValues(workflow, column.name)
    keys = np.zeros(0, dtype=np.int64) if sample is None else flat_values(sample)
    return {
        "column": column.name,
        "role": "categorical",
        "step": id_values.kind,
        "rows": column.rows,
        "hotness": column.hotness,
        **reserved_shares(keys, None, _num_reserved(spec, column.name, id_values)),
        **list_figures(sample),
    }


Counts: TypeAlias = tuple[NDArray[np.int64], NDArray[np.int64]]
"""Distinct ids int64[n] and how often each occurs."""

_MERGED_BLOCKS = 64  # what is kept beside the counts at most


def describe_column(
    path: Path, name: str, split: str | None, top: int, progress: Advance, *, allow_import: Sequence[str] = ()
) -> dict[str, Any]:
    """Return the values of a column in all samples of a split: the most frequent ids or values, or the numbers' range.

    Args:
        path: The data set.
        name: The column.
        split: The split to scan; None takes the train split.
        top: Number of ids to show.
        progress: Function that is called with the rows scanned and all rows.
        allow_import: Packages whose functions the workflow may name, as for `terarec.etl.workflow.Workflow.load`.

    Raises:
        ConfigError: No such column or split.
        FormatError: A shard that does not hold what dataset.json promises.
    """
    spec = read_dataset(path)
    split = split or first_split(spec)
    scanned = _with_progress(blocks(path, spec, split), spec.num_rows(split), progress)
    figures = {"what": "column", "path": str(path), "split": split, "column": name}
    numbers = list(spec.column_names[: len(spec.labels) + len(spec.dense)])
    if name in numbers:
        position = numbers.index(name)
        # Labels come before dense columns in `column_names`, as here.
        return {**figures, **_numbers(np.hstack([block.label, block.dense])[:, position] for block in scanned)}
    if name == spec.weight:
        return {**figures, **_numbers(block.weight for block in scanned if block.weight is not None)}
    for position, column in enumerate(spec.categorical):
        if column.name == name:
            id_values = IdValues(workflow_of(path, allow_import=allow_import), name)
            return {**figures, **_categories(spec, id_values, scanned, position, top)}
    metadata = [column.name for column in spec.metadata]
    if name in metadata:
        return {**figures, **_values((block.metadata[metadata.index(name)] for block in scanned), top)}
    known = ", ".join(dict.fromkeys((*spec.column_names, *([] if spec.weight is None else [spec.weight]), *metadata)))
    raise ConfigError(f"data set {spec.name!r}", f"has no column {name!r}, expected one of {known}")


def _with_progress(scanned: Iterator[ColumnBlock], total: int, progress: Advance) -> Iterator[ColumnBlock]:
    done = 0
    for block in scanned:
        yield block
        done += block.num_rows
        progress(done, total)


def _categories(
    spec: DatasetSpec, id_values: IdValues, scanned: Iterator[ColumnBlock], position: int, top: int
) -> dict[str, Any]:
    rows, column = 0, spec.categorical[position]
    seen: list[Counts] = []
    for block in scanned:
        seen.append(np.unique(flat_values(block.keys[position]).astype(np.int64), return_counts=True))
        # Merging each block at once would sort all ids again for every block.
        seen = [_merged(seen)] if len(seen) >= _MERGED_BLOCKS else seen
        rows += block.num_rows
    ids, counts = _merged(seen)
    # Stable, so that equal counts come by rising id in every run.
    order = np.argsort(-counts, kind="stable")[:top]
    num_keys = max(int(counts.sum()), 1)
    return {
        "rows": rows,
        "cardinality": column.rows,
        "ids_seen": ids.size,
        **reserved_shares(ids, counts, _num_reserved(spec, column.name, id_values)),
        "most_frequent": [
            {"id": int(ids[place]), "value": value, "count": int(counts[place]), "share": int(counts[place]) / num_keys}
            for place, value in zip(order, id_values.values(ids[order]), strict=True)
        ],
    }


def _merged(seen: list[Counts]) -> Counts:
    """Add up several counts: distinct ids by rising id, and the sum of the counts of each."""
    none = np.zeros(0, dtype=np.int64)
    ids, places = np.unique(np.concatenate([none, *(ids for ids, _ in seen)]), return_inverse=True)
    total = np.zeros(ids.size, dtype=np.int64)
    # Unbuffered: ``total[places] += ...`` would count a repeated place once.
    np.add.at(total, places, np.concatenate([none, *(counts for _, counts in seen)]))
    return ids, total


def _values(scanned: Iterable[pa.Array], top: int) -> dict[str, Any]:
    """Return the most frequent values of a metadata column."""
    counts = pa.table({"value": pa.array([], pa.null()), "count": pa.array([], pa.int64())})
    for array in scanned:
        more = pa.table({"value": array, "count": pa.repeat(1, len(array))})
        # The type of the values is known from the first array on.
        known = counts if counts.num_rows else more.slice(0, 0)
        summed = pa.concat_tables([known, more]).group_by("value").aggregate([("count", "sum")])
        counts = summed.rename_columns({"count_sum": "count"}).select(["value", "count"])
    rows = pc.sum(counts["count"]).as_py() or 0
    is_missing = pc.is_null(counts["value"])
    seen = counts.filter(pc.invert(is_missing))
    most = seen.sort_by([("count", "descending"), ("value", "ascending")]).slice(0, top)
    return {
        "rows": rows,
        "missing_share": (pc.sum(counts.filter(is_missing)["count"]).as_py() or 0) / max(rows, 1),
        "values_seen": seen.num_rows,
        "most_frequent": [{**row, "share": row["count"] / rows} for row in most.to_pylist()],
    }


def _numbers(scanned: Iterable[NDArray[np.float32]]) -> dict[str, Any]:
    rows, shift, total, squares, low, high = 0, 0.0, 0.0, 0.0, math.inf, -math.inf
    for column in scanned:
        numbers = column.astype(np.float64)
        if numbers.size:
            low, high = min(low, float(numbers.min())), max(high, float(numbers.max()))
            # Squares of differences from some value of the column: those of large numbers that differ little, such as
            # times, would cancel.
            shift = shift if rows else float(numbers[0])
            numbers -= shift
            rows += numbers.size
            total += float(numbers.sum())
            squares += float(numbers @ numbers)
    offset = total / rows if rows else math.nan
    # Rounding may leave a constant column slightly below zero.
    deviation = math.sqrt(max(squares / rows - offset * offset, 0.0)) if rows else math.nan
    return {"rows": rows, "minimum": low, "mean": shift + offset, "deviation": deviation, "maximum": high}
