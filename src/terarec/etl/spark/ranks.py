"""The rows at given positions of an order, found without sorting them all."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from typing import Any

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F

_CHUNKS = 1 << 16
_KEY, _CHUNK, _PLACE = "key", "chunk", "place"


def values_at(keys: DataFrame, key: Column, positions: Sequence[int]) -> list[Any]:
    """The keys at these positions, from 0, of all keys in rising order.

    One pass counts the keys in 65,536 intervals of equal width, a second one sorts the intervals that hold a position.

    Args:
        keys: the rows.
        key: a number of each, never null.
        positions: rising, each below the number of rows.
    """
    if not positions:
        return []
    frame = keys.select(key.alias(_KEY))
    ((low, high),) = frame.agg(F.min(_KEY), F.max(_KEY)).collect()
    scale = (_CHUNKS - 1) / (float(high) - float(low)) if high > low else 0.0
    chunk = F.floor((F.col(_KEY).cast("double") - F.lit(float(low))) * F.lit(scale)).cast("int")
    chunked = frame.withColumn(_CHUNK, chunk)
    counts = sorted(chunked.groupBy(_CHUNK).count().collect())
    ends, total = [], 0
    for _, count in counts:
        total += count
        ends.append(total)
    wanted: dict[tuple[int, int], int] = {}
    for position in positions:
        place = bisect.bisect_right(ends, position)
        wanted[counts[place][0], position - (ends[place - 1] if place else 0) + 1] = position
    inside = chunked.where(F.col(_CHUNK).isin(*{chunk for chunk, _ in wanted}))
    ranked = inside.withColumn(_PLACE, F.row_number().over(Window.partitionBy(_CHUNK).orderBy(_KEY)))
    found = ranked.where(F.col(_PLACE).isin(*{place for _, place in wanted})).collect()
    keys_at = {wanted[row[_CHUNK], row[_PLACE]]: row[_KEY] for row in found if (row[_CHUNK], row[_PLACE]) in wanted}
    return [keys_at[position] for position in positions]


def number_below(key: Column, bounds: Sequence[int]) -> Column:
    """How many of the rising `bounds` are at most `key`."""
    group = 64  # two searches of at most so many for thousands of bounds
    if not bounds:
        return F.lit(0)
    groups = [bounds[start : start + group] for start in range(0, len(bounds), group)]
    firsts = F.array(*(F.lit(part[0]) for part in groups))
    before = F.size(F.filter(firsts, lambda bound: bound <= key))
    all_bounds = F.array(*map(F.lit, bounds))
    inside = F.slice(all_bounds, F.greatest(before - 1, F.lit(0)) * group + 1, group)
    return F.when(before == 0, 0).otherwise((before - 1) * group + F.size(F.filter(inside, lambda bound: bound <= key)))
