"""Placements of a run's tables on ranks, planned from its data before anything is allocated. See docs/scale-out.md."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor

from terarec.batch import Batch, first_keys, select, share_of
from terarec.data import open_reader, read_spec
from terarec.dist.bags import is_poolable, numbered_bags
from terarec.dist.plan import ShardingPlan
from terarec.dist.planner import MachineCosts, PlannedSharding, TableLoad, plan_tables, rate_plan
from terarec.embedding.recording import RecordedTables, record_tables
from terarec.models import build_model
from terarec.nn.objectives import build_objective
from terarec.optim.rules import table_rules
from terarec.spec import FeatureSpec, GraphFeature, GraphModelSpec, RunSpec
from terarec.train.table_memory import KeyCounts, planned_tables

SAMPLED_BATCHES = 4
"""Batches whose keys are counted: the distinct keys of a batch differ from one to the next by a few percent."""


def plan_sharding(
    spec: RunSpec,
    world_size: int,
    costs: MachineCosts,
    *,
    plan: ShardingPlan | None = None,
    ranks_per_node: int | None = None,
    rank_bytes: int | None = None,
    fixed: Mapping[str, str] | None = None,
    rows: Mapping[str, int] | None = None,
    allow_import: Sequence[str] = (),
) -> PlannedSharding:
    """Plan the placements of a run's tables, or rate those of a plan.

    Args:
        spec: The run. Its first batches are read.
        world_size: Number of ranks R.
        costs: Costs of parts of a step.
        plan: Plan to rate; None to make one.
        ranks_per_node: Ranks on each machine; None for all on one.
        rank_bytes: Most bytes of tables on a rank, with optimizer state and indexes; None for no bound.
        fixed: Table -> kind of placement that it has to have.
        rows: Table -> expected rows, for tables whose keys the data set does not count.
        allow_import: Packages from which the model may come by name.

    Raises:
        ConfigError: A model that does not fit the data, a plan that does not fit the model or the number of ranks, or
            an unknown table.
        StorageError: No placement that fits into `rank_bytes`, or a plan that does not fit into its own.
        DataNotFoundError: ``spec.data`` is no data set.
    """
    loads = table_loads(spec, world_size, rows=rows or {}, allow_import=allow_import)
    if plan is not None:
        plan.check([load.spec for load in loads], world_size)
        found = rate_plan(plan, loads, costs)
        found.check()
        return found
    return plan_tables(loads, world_size, costs, ranks_per_node=ranks_per_node, rank_bytes=rank_bytes, fixed=fixed)


def table_loads(
    spec: RunSpec, world_size: int, *, rows: Mapping[str, int], allow_import: Sequence[str] = ()
) -> list[TableLoad]:
    """Return the memory of the tables of a run, and the keys that each rank's share of its first batches looks up."""
    dataset = read_spec(spec.data)
    num_outputs = build_objective(spec.objective).num_outputs(len(dataset.labels))
    with torch.random.fork_rng(devices=()), record_tables() as records:
        build_model(spec.model, dataset, num_outputs=num_outputs, allow_import=allow_import)
    counts = KeyCounts(spec, dataset, reads_keysets=True)
    memory = {table.name: table for table in planned_tables(spec, records, counts=counts, given=rows, is_gpu=False)}
    rules = table_rules({"default": spec.sparse_optimizer, **spec.row_optimizers})
    sampled = _sampled_keys(spec, records, world_size) if "train" in dataset.splits else {}
    readers = [feature for record in records for feature in record.features]
    unpooled = {feature.table for feature in readers if not is_poolable(feature.pooling)}
    loads = []
    for table in (table for record in records for table in record.tables):
        of_table = memory[table.name]
        _, options, rule = rules[table.optimizer]
        loads.append(
            TableLoad(
                spec=table,
                rows=of_table.rows,
                num_bytes=of_table.weight_bytes + of_table.state_bytes + of_table.index_bytes,
                row_bytes=of_table.row_bytes,
                batches=[[torch.unique(keys) for keys, _ in shares] for shares in sampled.get(table.name, ())],
                bags=() if table.name in unpooled else sampled.get(table.name, ()),
                needs_whole_rows=bool(rule.row_states) or options.clip_norm is not None,
                forbids_copies=options.clip_global_norm is not None or spec.training.clip_norm is not None,
            )
        )
    return loads


Bags = tuple[Tensor, Tensor]
"""Keys of bags of a table, and the bag of each, rising: int64[N] both."""


def _sampled_keys(spec: RunSpec, records: Sequence[RecordedTables], world_size: int) -> dict[str, list[list[Bags]]]:
    """Return for each table and batch the keys of each rank's share, and their bags."""
    training = spec.training
    reader = open_reader(
        Path(spec.data), "train", batch_size=training.batch_size, shuffle=training.shuffle, seed=training.seed
    )
    columns: dict[str, str] = {}
    if isinstance(spec.model, GraphModelSpec) and spec.model.graph is not None:
        columns = {f.name: f.read_column for held in spec.model.graph.embeddings for f in held.features}
    features = [feature for record in records for feature in record.features]
    found: dict[str, list[list[Bags]]] = {}
    try:
        for batch in islice(reader, SAMPLED_BATCHES):
            for table, shares in keys_of_bags(batch, world_size, features, columns).items():
                found.setdefault(table, []).append(shares)
    finally:
        reader.close()
    return found


def keys_of_bags(
    batch: Batch,
    world_size: int,
    features: Iterable[FeatureSpec | GraphFeature],
    columns: Mapping[str, str],
) -> dict[str, list[Bags]]:
    """Return for each table the bags of each rank's share of a batch.

    Args:
        batch: Batch of all ranks.
        world_size: Number of ranks R.
        features: Features that read the tables.
        columns: Feature -> its column in the batch, where that has another name.
    """
    starts = [share_of(batch.batch_size, rank, world_size).start for rank in range(1, world_size)]
    pieces: dict[str, list[list[Bags]]] = {}
    for number, feature in enumerate(features):
        held = select(batch.sparse, [columns.get(feature.name, feature.name)])
        if feature.max_keys is not None:
            held = first_keys(held, [feature.max_keys])
        bags = numbered_bags(held) + number * batch.batch_size
        of_ranks = pieces.setdefault(feature.table, [[] for _ in range(world_size)])
        ends = held.offsets[starts]
        parts = zip(torch.tensor_split(held.keys, ends), torch.tensor_split(bags, ends), strict=True)
        for of_rank, part in zip(of_ranks, parts, strict=True):
            of_rank.append(part)
    return {
        table: [(torch.cat([keys for keys, _ in held]), torch.cat([bags for _, bags in held])) for held in of_ranks]
        for table, of_ranks in pieces.items()
    }


def distinct_keys(
    batch: Batch,
    world_size: int,
    features: Iterable[FeatureSpec | GraphFeature],
    columns: Mapping[str, str],
) -> dict[str, list[Tensor]]:
    """Return for each table the distinct keys int64[n] of each rank's share of a batch; see `keys_of_bags`."""
    found = keys_of_bags(batch, world_size, features, columns)
    return {table: [torch.unique(keys) for keys, _ in shares] for table, shares in found.items()}
