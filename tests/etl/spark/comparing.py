"""Two data sets, column by column."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from terarec.formats import merge, open_shard, read_dataset
from terarec.spec import DatasetSpec


def assert_same(spark: Path, local: Path) -> None:
    """The same shards, ids exactly and numbers to one float32."""
    found, expected = read_dataset(spark), read_dataset(local)
    assert found == expected
    assert any(expected.num_rows(split) for split in expected.splits)
    for split in expected.splits:
        got, wanted = _rows(spark, found, split), _rows(local, expected, split)
        np.testing.assert_array_equal(got.label, wanted.label)
        np.testing.assert_array_max_ulp(got.dense, wanted.dense, maxulp=1)
        for column, ours, theirs in zip(expected.categorical, got.keys, wanted.keys, strict=True):
            assert _plain(ours) == _plain(theirs), (split, column.name)
        assert (got.weight is None) == (wanted.weight is None)
        if wanted.weight is not None:
            np.testing.assert_array_equal(got.weight, wanted.weight)
        for ours, theirs in zip(got.metadata, wanted.metadata, strict=True):
            assert ours.equals(theirs)


def _plain(keys: Any) -> Any:
    return [part.tolist() for part in keys] if isinstance(keys, tuple) else keys.tolist()


def _rows(directory: Path, spec: DatasetSpec, split: str) -> Any:
    groups = []
    for shard in spec.shards(split):
        opened = open_shard(spec, directory / shard.file, shard.rows)
        groups += [opened.read_group(group) for group in range(len(opened.group_rows))]
    return merge(groups)
