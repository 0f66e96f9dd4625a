# SPDX-License-Identifier: Apache-2.0
"""Placements of a run's tables on ranks, planned from its data and the costs of the machine. See docs/scale-out.md."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor

from terarec.apps.planner import PlannedSharding, plan_tables, rate_plan
from terarec.batch import Batch, Jagged, first_keys, select, share_of
from terarec.data import open_reader, read_spec
from terarec.dist.costs import GPU_COSTS, MachineCosts, TableLoad
from terarec.dist.plan import ShardingPlan
from terarec.dist.ranks import Ranks
from terarec.dist.routing import is_poolable
from terarec.embedding import EmbeddingCollection
from terarec.embedding.tables import RecordedTables, record_tables
from terarec.errors import NoSpaceError
from terarec.kernels.ref.bag_lookup import numbered_bags
from terarec.models import build_model
from terarec.nn.objectives import build_objective
from terarec.ops.split_rows import num_row_sums
from terarec.optim import RowOptimizer
from terarec.optim.rules import table_rules
from terarec.spec import AdaGradSpec, FeatureSpec, GraphFeature, GraphModelSpec, RunSpec, TableSpec
from terarec.train.plan import plan_run
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
    device_bytes: int | None = None,
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
        rank_bytes: Maximum bytes of tables on a rank, with optimizer state and indexes; None for no bound, or that of
            `device_bytes`.
        device_bytes: Memory of the device of each rank, from which `device_room` follows; None for host memory.
        fixed: Table -> kind of placement that it has to have.
        rows: Table -> expected rows, for tables whose keys the data set does not count.
        allow_import: Packages from which the model may come by name.

    Raises:
        ConfigError: A model that does not fit the data, a plan that does not fit the model or the number of ranks, or
            an unknown table.
        StorageError: No placement that fits into `rank_bytes`, or a plan that does not fit into its own.
        DataNotFoundError: ``spec.data`` is not a data set.
    """
    loads = table_loads(spec, world_size, rows=rows or {}, allow_import=allow_import, is_gpu=device_bytes is not None)
    if device_bytes is not None:
        room = device_room(spec, loads, world_size, device_bytes, allow_import=allow_import)
        rank_bytes = room if rank_bytes is None else min(room, rank_bytes)
    if plan is not None:
        plan.check([load.spec for load in loads], world_size)
        if rank_bytes is not None:
            plan = replace(plan, rank_bytes=min(rank_bytes, plan.rank_bytes or rank_bytes))
        rating = rate_plan(plan, loads, costs)
        rating.check()
        return rating
    return plan_tables(loads, world_size, costs, ranks_per_node=ranks_per_node, rank_bytes=rank_bytes, fixed=fixed)


CONTEXT_BYTES = 1 << 30
"""Memory of a GPU that the libraries of the device and the channels of NCCL are assumed to take."""


def device_room(
    spec: RunSpec,
    loads: Sequence[TableLoad],
    world_size: int,
    device_bytes: int,
    *,
    allow_import: Sequence[str] = (),
) -> int:
    """Return the bytes of a device that are left for tables: without layers, a batch and what is exchanged.

    Args:
        spec: The run.
        loads: Its tables.
        world_size: Number of ranks R.
        device_bytes: Memory of the device of each rank.
        allow_import: Packages from which the model may come by name.
    """
    memory = plan_run(spec, reads_keysets=False, allow_import=allow_import)
    parts = {
        "layers": memory.dense_bytes,
        "a batch": memory.batch_bytes // world_size,
        "exchanged rows": exchanged_bytes(loads),
        "libraries": CONTEXT_BYTES,
    }
    room = device_bytes - sum(parts.values())
    if room <= 0:
        takes = ", ".join(f"{name} {size:,}" for name, size in parts.items())
        raise NoSpaceError(
            "--device-memory", f"got {device_bytes:,} bytes, of which none is left for tables ({takes}); expected more"
        )
    return room


def exchanged_bytes(loads: Sequence[TableLoad]) -> int:
    """Return the bytes of keys, vectors and gradients of a step on a rank, which requests as many rows as it is asked.

    A key is there as it goes and as it comes, a vector and a gradient as they go, come and are joined.
    """
    total = 0
    for load in loads:
        shares = [max(keys.numel() for keys in batch) for batch in load.batches if len(batch)]
        total += 2 * max(shares, default=0) * (2 * 8 + 2 * 3 * 4 * load.spec.width)
    return total


def table_loads(
    spec: RunSpec,
    world_size: int,
    *,
    rows: Mapping[str, int],
    allow_import: Sequence[str] = (),
    is_gpu: bool = False,
) -> list[TableLoad]:
    """Return the memory of the tables of a run, and the keys that each rank's share of its first batches looks up."""
    dataset = read_spec(spec.data)
    num_outputs = build_objective(spec.objective).num_outputs(len(dataset.labels))
    # Only the tables' sizes are needed: recorded tables take no memory, and the weights drawn shift no random numbers.
    with torch.random.fork_rng(devices=()), record_tables() as records:
        build_model(spec.model, dataset, num_outputs=num_outputs, allow_import=allow_import)
    counts = KeyCounts(spec, dataset, reads_keysets=True)
    memory = {table.name: table for table in planned_tables(spec, records, counts=counts, sizes=rows, is_gpu=is_gpu)}
    rules = table_rules({"default": spec.sparse_optimizer, **spec.row_optimizers})
    sampled = _sampled_keys(spec, records, world_size) if "train" in dataset.splits else {}
    readers = [feature for record in records for feature in record.features]
    unpooled = {feature.table for feature in readers if not is_poolable(feature.pooling)}
    loads = []
    for table in (table for record in records for table in record.tables):
        of_table = memory[table.name]
        options = rules[table.optimizer].options
        loads.append(
            TableLoad(
                spec=table,
                rows=of_table.rows,
                num_bytes=of_table.weight_bytes + of_table.state_bytes + of_table.index_bytes,
                row_bytes=of_table.row_bytes,
                batches=[[torch.unique(keys) for keys, _ in shares] for shares in sampled.get(table.name, ())],
                bags=() if table.name in unpooled else sampled.get(table.name, ()),
                row_sums=num_row_sums(rules[table.optimizer].row_rule),
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
        columns = {f.name: f.read_column for embedding in spec.model.graph.embeddings for f in embedding.features}
    features = [feature for record in records for feature in record.features]
    bags_of_table: dict[str, list[list[Bags]]] = {}
    try:
        for batch in islice(reader, SAMPLED_BATCHES):
            for table, shares in keys_of_bags(batch, world_size, features, columns).items():
                bags_of_table.setdefault(table, []).append(shares)
    finally:
        reader.close()
    return bags_of_table


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
        column = select(batch.sparse, [columns.get(feature.name, feature.name)])
        if feature.max_keys is not None:
            column = first_keys(column, [feature.max_keys])
        # Bags of features that read one table stay apart.
        bags = numbered_bags(column.offsets.diff(), column.keys.numel()) + number * batch.batch_size
        of_ranks = pieces.setdefault(feature.table, [[] for _ in range(world_size)])
        ends = column.offsets[starts]
        parts = zip(torch.tensor_split(column.keys, ends), torch.tensor_split(bags, ends), strict=True)
        for of_rank, part in zip(of_ranks, parts, strict=True):
            of_rank.append(part)
    return {
        table: [(torch.cat([keys for keys, _ in pairs]), torch.cat([bags for _, bags in pairs])) for pairs in of_ranks]
        for table, of_ranks in pieces.items()
    }


def distinct_keys(
    batch: Batch,
    world_size: int,
    features: Iterable[FeatureSpec | GraphFeature],
    columns: Mapping[str, str],
) -> dict[str, list[Tensor]]:
    """Return for each table the distinct keys int64[n] of each rank's share of a batch; see `keys_of_bags`."""
    keys_and_bags = keys_of_bags(batch, world_size, features, columns)
    return {table: [torch.unique(keys) for keys, _ in shares] for table, shares in keys_and_bags.items()}


PROBE_SECONDS = 5.0
"""Time of a probe."""
# The line through two widths gives the time of a row and that of a byte.
_WIDTHS = (16, 128)
_TABLE_BYTES = 1 << 26  # more than the caches that a core of present processors has for itself
_KEYS = 1 << 14
_MESSAGE_BYTES = 1 << 24
_DEVICE_SCALE = 16  # rows and keys on a device, in proportion to those in host memory
_CPU = torch.device("cpu")
_FEWEST = 3  # repeats of each measurement, however long one takes


def probe(ranks: Ranks, *, device: torch.device = _CPU) -> MachineCosts:
    """Measure lookups and updates of rows in memory and, with several ranks, the links between them.

    All ranks call it, and all get the slowest values of any rank. Links that do not exist, such as between machines if
    all ranks are on one, keep the assumed speed.
    """
    parts = 2 * len(_WIDTHS) + 3
    looked_up, updated = [], []
    for width in _WIDTHS:
        lookup, update = _time_rows(width, device, PROBE_SECONDS / parts)
        looked_up.append(lookup)
        updated.append(update)
    measured = dict(zip(("lookup_seconds", "lookup_byte_seconds"), _fit_line(looked_up, 4), strict=True))
    measured |= zip(("update_seconds", "update_byte_seconds"), _fit_line(updated, 8), strict=True)
    names = list(measured)
    slowest = ranks.all_reduce_("probe of rows", torch.tensor([measured[name] for name in names]), "max").tolist()
    assumed = MachineCosts() if device.type == "cpu" else GPU_COSTS
    costs = replace(assumed, **dict(zip(names, slowest, strict=True)), source="probe of rows")
    return costs if ranks.size == 1 else probe_links(ranks, costs, device=device, seconds=3 * PROBE_SECONDS / parts)


def probe_links(ranks: Ranks, costs: MachineCosts, *, device: torch.device = _CPU, seconds: float) -> MachineCosts:
    """Measure the links between several ranks; return `costs` with their latency and bandwidths."""
    nodes = ranks.nodes
    here = [rank for rank in range(ranks.size) if nodes[rank] == nodes[ranks.rank]]
    there = [rank for rank in range(ranks.size) if nodes[rank] != nodes[ranks.rank]]
    latency = max(_time_message(ranks, list(range(ranks.size)), 0, device, seconds / 3), 1e-9)
    speeds = {}
    for name, others in (("local_bandwidth", here), ("bandwidth", there)):
        # All ranks take part, those without such links with nothing to send.
        taken = _time_message(ranks, others, _MESSAGE_BYTES, device, seconds / 3)
        sent = _MESSAGE_BYTES * len([rank for rank in others if rank != ranks.rank])
        least = ranks.all_reduce_(
            "probe of links", torch.tensor([sent / taken if sent else float("inf")]), "min"
        ).item()
        if least != float("inf"):
            speeds[name] = least
    return replace(costs, latency=latency, source=f"{costs.source} and links", **speeds)


def _time_rows(width: int, device: torch.device, seconds: float) -> tuple[float, float]:
    """Return the seconds of a lookup and of an update by AdaGrad for each of many distinct rows."""
    # A device has wide caches, and launches take longer than few rows.
    scale = 1 if device.type == "cpu" else _DEVICE_SCALE
    rows, count = scale * _TABLE_BYTES // (4 * width), scale * _KEYS
    tables = EmbeddingCollection(
        [TableSpec(name="probe", rows=rows, width=width, initializer="zeros")],
        [FeatureSpec(name="probe", table="probe")],
    )
    tables.is_exchanged = True  # each rank has a table of its own here, and means to
    tables.to(device)
    optimizer = RowOptimizer(tables, AdaGradSpec(lr=0.01))
    generator = torch.Generator().manual_seed(0)
    offsets = torch.arange(count + 1, device=device)
    lookups: list[float] = []
    updates: list[float] = []
    end = time.monotonic() + 2 * seconds
    while len(lookups) <= _FEWEST or time.monotonic() < end:
        keys = torch.randint(0, rows, (count,), generator=generator).to(device)
        start = _finish(device)
        pooled = tables(Jagged(names=("probe",), keys=keys, offsets=offsets, ends=(0, count))).pooled
        between = _finish(device)
        # Any gradient costs the same.
        pooled.backward(pooled.detach())
        optimizer.step()
        updates.append((_finish(device) - between) / count)
        lookups.append((between - start) / count)
    # Without the first, which touches memory for the first time.
    return statistics.median(lookups[1:]), statistics.median(updates[1:])


def _finish(device: torch.device) -> float:
    """Wait for the device and return the time."""
    if device.type != "cpu":
        torch.get_device_module(device).synchronize(device)
    return time.perf_counter()


def _fit_line(seconds: list[float], bytes_per_column: int) -> tuple[float, float]:
    """Return the seconds for a row and for each of its bytes, from the seconds at `_WIDTHS`."""
    slope = (seconds[1] - seconds[0]) / (bytes_per_column * (_WIDTHS[1] - _WIDTHS[0]))
    slope = max(slope, 1e-12)  # a wide row that takes no longer than a narrow one
    return max(seconds[0] - slope * bytes_per_column * _WIDTHS[0], 1e-10), slope


def _time_message(ranks: Ranks, others: list[int], num_bytes: int, device: torch.device, seconds: float) -> float:
    """Return the median seconds of an exchange of this many bytes, in both directions, with each of `others`."""
    sizes = [num_bytes if rank in others and rank != ranks.rank else 0 for rank in range(ranks.size)]
    values = torch.zeros(sum(sizes), dtype=torch.uint8, device=device)

    def once() -> float:
        # Without it the time would be that of waiting for the slowest rank to begin.
        ranks.barrier("probe of links")
        start = _finish(device)
        ranks.all_to_all("probe of links", values, sizes, sizes)
        return _finish(device) - start

    once()
    # The slowest rank's time on all ranks: each repeat is a collective, so that all have to repeat as often.
    first = ranks.all_reduce_("probe of links", torch.tensor([once()]), "max").item()
    return statistics.median(once() for _ in range(max(_FEWEST, min(50, int(seconds / first)))))
