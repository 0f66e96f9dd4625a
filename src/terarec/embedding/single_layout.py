"""The layout of one feature over one table."""

from __future__ import annotations

from terarec.ops.layout import BagLayout, Pooling


def single_layout(rows: int, width: int, pooling: Pooling) -> BagLayout:
    """That of a feature "input" which looks up the only table, "weight", of so many rows."""
    return BagLayout(
        table_names=("weight",),
        table_base=(0,),
        table_rows=(rows,),
        feature_names=("input",),
        feature_table=(0,),
        pooling=(pooling,),
        width=width,
    )
