"""What ``terarec inspect`` tells about a data set: its splits and columns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from terarec.errors import ConfigError
from terarec.etl.workflow import IdValues, workflow_of
from terarec.formats import ColumnBlock, Keys, open_shard, read_dataset
from terarec.spec import MISSING_ID, CategoricalColumn, DatasetSpec


def describe_dataset(path: Path, *, allow_import: Sequence[str] = ()) -> dict[str, Any]:
    """Splits and columns of the data set in `path`.

    The shares of missing and rare ids are those of the first row group of the first split: a look, not a scan.

    Raises:
        DataNotFoundError: no data set, or one of its shards is not there.
        FormatError: a file that does not hold what it promises.
    """
    spec = read_dataset(path)
    splits = [_split(path, spec, split) for split in spec.splits]
    workflow = workflow_of(path, allow_import=allow_import)
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
                _key_column(column, IdValues(workflow, column.name), None if sample is None else sample.keys[position])
                for position, column in enumerate(spec.categorical)
            ),
            *([] if spec.weight is None else [_number_column("weight", spec.weight, None)]),
            *(_number_column("metadata", column.name, None) for column in spec.metadata),
        ],
    }


def first_split(spec: DatasetSpec) -> str:
    """The split to look at where none is named: "train" if there is one."""
    if not spec.splits:
        raise ConfigError(f"data set {spec.name!r} has no split, expected one with samples")
    return "train" if "train" in spec.splits else next(iter(spec.splits))


def blocks(path: Path, spec: DatasetSpec, split: str) -> Iterator[ColumnBlock]:
    """The row groups of `split`, in sample order."""
    for description in spec.shards(split):
        shard = open_shard(spec, path / description.file, description.rows)
        for group in range(len(shard.group_rows)):
            yield shard.read_group(group)


def key_values(keys: Keys) -> NDArray[Any]:
    """All keys of a column, whether it holds one a sample or lists."""
    return keys[0] if isinstance(keys, tuple) else keys


def reserved_shares(ids: NDArray[Any], counts: NDArray[np.int64] | None, num_reserved: int) -> dict[str, float | None]:
    """Shares of the ids that stand for no value of their own; None where there are none.

    Args:
        ids: int64[n], or any integers.
        counts: int64[n], how often each of `ids` occurs; None for once.
        num_reserved: `IdValues.num_reserved`.
    """
    weights = np.ones(len(ids), dtype=np.int64) if counts is None else counts
    total = max(int(weights.sum()), 1)
    missing = int(weights[ids == MISSING_ID].sum()) / total if num_reserved else None
    rare = int(weights[(ids > MISSING_ID) & (ids < num_reserved)].sum()) / total if num_reserved > 1 else None
    return {"missing_share": missing, "rare_share": rare}


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
    }


def _key_column(column: CategoricalColumn, made: IdValues, sample: Keys | None) -> dict[str, Any]:
    keys = np.zeros(0, dtype=np.int64) if sample is None else key_values(sample)
    return {
        "column": column.name,
        "role": "categorical",
        "step": made.kind,
        "rows": column.rows,
        "hotness": column.hotness,
        **reserved_shares(keys, None, made.num_reserved),
    }
