"""Which tables share an arena, and which features are looked up in one call."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from terarec.errors import ConfigError
from terarec.ops.layout import BagLayout
from terarec.spec import FeatureSpec, TableSpec
from terarec.storage import Arena


@dataclass(frozen=True, kw_only=True, slots=True)
class LookupGroup:
    """The features that one call of ``ops.bag_lookup`` serves: of one arena, all pooled or all sequences.

    Attributes:
        arena: index of the arena.
        layout: where each feature's rows are.
        is_pooled: whether the call gives ``float32[B, S * D]`` or the vectors of every key.
    """

    arena: int
    layout: BagLayout
    is_pooled: bool


def check_names(tables: Sequence[TableSpec], features: Sequence[FeatureSpec]) -> None:
    """Raise `ConfigError` unless there are tables, names are distinct and each feature's table exists."""
    if not tables:
        raise ConfigError("tables: got none, expected at least one")
    _check_distinct("tables", [table.name for table in tables])
    _check_distinct("features", [feature.name for feature in features])
    known = {table.name for table in tables}
    for feature in features:
        if feature.table not in known:
            raise ConfigError(
                f"feature {feature.name!r}: got table {feature.table!r}, expected one of {', '.join(sorted(known))}"
            )


def split_by_width(tables: Sequence[TableSpec]) -> list[list[TableSpec]]:
    """The tables of each width, widths in order of first appearance."""
    by_width: dict[int, list[TableSpec]] = {}
    for table in tables:
        by_width.setdefault(table.width, []).append(table)
    return list(by_width.values())


def lookup_groups(arenas: Sequence[Arena], features: Sequence[FeatureSpec]) -> list[LookupGroup]:
    """One group per arena and kind of result, for those that have features."""
    groups: list[LookupGroup] = []
    for index, arena in enumerate(arenas):
        mine = [feature for feature in features if feature.table in arena.table_names]
        for is_pooled in (True, False):
            members = [feature for feature in mine if (feature.pooling != "none") == is_pooled]
            if members:
                groups.append(LookupGroup(arena=index, layout=_layout(arena, members), is_pooled=is_pooled))
    return groups


def _layout(arena: Arena, features: Sequence[FeatureSpec]) -> BagLayout:
    return BagLayout(
        table_names=arena.table_names,
        table_base=arena.table_base,
        table_rows=arena.table_rows,
        feature_names=tuple(feature.name for feature in features),
        feature_table=tuple(arena.table_names.index(feature.table) for feature in features),
        pooling=tuple(feature.pooling for feature in features),
        width=arena.width,
    )


def _check_distinct(what: str, names: Sequence[str]) -> None:
    repeated = sorted(name for name, count in Counter(names).items() if count > 1)
    if repeated:
        raise ConfigError(f"{what}: the name {repeated[0]!r} occurs more than once, expected distinct names")
