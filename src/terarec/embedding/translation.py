"""Keys of dynamic tables -> arena rows, before the lookup that serves all of an arena's tables."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Protocol

import torch
from torch import Tensor

from terarec.batch import Jagged, first_keys, select
from terarec.spec import FeatureSpec


class KeyFinder(Protocol):
    """What finds a table's rows, such as a `terarec.storage.Store`."""

    def rows(self, keys: Tensor, *, train: bool) -> Tensor:
        """Rows int64[n] of ``keys int64[n]``; with `train` unseen keys may get some."""


def translate(
    jagged: Jagged, features: Sequence[FeatureSpec], tables: Mapping[str, KeyFinder], *, train: bool
) -> Jagged:
    """`features` of `jagged` with arena rows in the place of keys.

    All keys that a table gets in this batch reach it in one call, so that what it evicts for some of them is none of
    the others.

    Args:
        jagged: keys of at least `features`, with offsets that `terarec.batch.check_offsets` let pass.
        features: of dynamic tables of one arena, table by table.
        tables: by name.
        train: whether tables may take up unseen keys.

    Raises:
        ConfigError: a feature that `jagged` does not hold.
        StorageError: memory or a table is full.
    """
    part = select(jagged, [feature.name for feature in features])
    if any(feature.max_keys is not None for feature in features):
        part = first_keys(part, [feature.max_keys for feature in features])  # the others get no rows
    batch_size = part.batch_size
    if not batch_size:
        return part
    ends = part.offsets[::batch_size].tolist()
    rows = torch.empty_like(part.keys)
    done = 0
    for name, readers in groupby(features, key=lambda feature: feature.table):
        first, done = done, done + len(list(readers))
        span = slice(ends[first], ends[done])
        rows[span] = tables[name].rows(part.keys[span], train=train)
    return dataclasses.replace(part, keys=rows)
