"""Keys of dynamic tables -> arena rows, before the lookup that serves all of an arena's tables."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from itertools import groupby

import torch

from terarec.batch import Jagged, first_keys, select
from terarec.errors import ConfigError
from terarec.spec import FeatureSpec
from terarec.storage import Store


def translate(jagged: Jagged, features: Sequence[FeatureSpec], tables: Mapping[str, Store], *, train: bool) -> Jagged:
    """`features` of `jagged` with arena rows in the place of keys.

    All keys that a table gets in this batch reach it in one call, so that what it evicts for some of them is none of
    the others.

    Args:
        jagged: keys of at least `features`.
        features: of dynamic tables of one arena, table by table.
        tables: by name.
        train: whether tables may take up unseen keys.

    Raises:
        ConfigError: a feature that `jagged` does not hold, or offsets that fall or do not cover the keys.
        StorageError: memory or a table is full.
    """
    part = select(jagged, [feature.name for feature in features])
    if any(feature.max_keys is not None for feature in features):
        part = first_keys(part, [feature.max_keys for feature in features])  # the others get no rows
    batch_size = part.batch_size
    if not batch_size:
        return part
    ends = part.offsets[::batch_size].tolist()
    if ends[0] != 0 or ends[-1] != part.keys.numel() or ends != sorted(ends):
        raise ConfigError(
            f"offsets: got {ends} at the ends of features, expected offsets rising from 0 to {part.keys.numel()}"
        )
    rows = torch.empty_like(part.keys)
    done = 0
    for name, readers in groupby(features, key=lambda feature: feature.table):
        first, done = done, done + len(list(readers))
        span = slice(ends[first], ends[done])
        rows[span] = tables[name].rows(part.keys[span], train=train)
    return dataclasses.replace(part, keys=rows)
