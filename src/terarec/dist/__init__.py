# SPDX-License-Identifier: Apache-2.0
"""Training on several processes: process group, placements of tables, and the exchange between ranks."""

from terarec.dist.gradients import GradientSums, sum_gradients
from terarec.dist.joining import join
from terarec.dist.plan import (
    ColumnWise,
    DataParallel,
    Hybrid,
    Placement,
    RowWise,
    ShardingPlan,
    TableRowWise,
    TableWise,
    load_plan,
    same_for_all,
)
from terarec.dist.ranks import Ranks
from terarec.dist.shard import shard

__all__ = [
    "ColumnWise",
    "DataParallel",
    "GradientSums",
    "Hybrid",
    "Placement",
    "Ranks",
    "RowWise",
    "ShardingPlan",
    "TableRowWise",
    "TableWise",
    "join",
    "load_plan",
    "same_for_all",
    "shard",
    "sum_gradients",
]
