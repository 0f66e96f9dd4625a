# SPDX-License-Identifier: Apache-2.0
"""The devices and placements of a script: ``vvgpu``, kinds of embeddings, ``shard``, plan files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from terarec.apps.sharding import distinct_keys
from terarec.batch import Batch
from terarec.dist import ColumnWise, DataParallel, Hybrid, Placement, Ranks, RowWise, ShardingPlan, TableWise
from terarec.dist.costs import hot_keys
from terarec.dist.devices import shared_device
from terarec.dist.plan import TablePlan, default_plan
from terarec.hugectr.embedding_collection import EmbeddingCollectionConfig
from terarec.hugectr.enums import Embedding_t
from terarec.hugectr.network import LOCALIZED, Network
from terarec.hugectr.objects import SparseEmbedding
from terarec.kernels.environment import launch
from terarec.nn.precision import CPU
from terarec.spec import GraphEmbedding, GraphSpec


def sharding_plan(
    network: Network,
    graph: GraphSpec,
    vvgpu: Sequence[Sequence[int]],
    world_size: int,
    batches: Iterable[Batch],
) -> tuple[ShardingPlan, list[str]]:
    """Translate the placements of a script to ranks.

    GPU number g of all G of ``vvgpu``, counted over the nodes, is rank ``g * R // G``. Slots of localized embeddings
    are on GPU ``slot mod G``, rows of distributed ones on all. Hybrid embeddings have copies of the rows that at least
    half of the ranks' shares of batches ask for, at most ``max_num_frequent_categories`` in each table. Tables of an
    embedding collection are where ``shard`` or a plan file puts them: "dp" is copies, "mp" on one GPU the whole table,
    on several its rows, and a table cut into as many column parts as it has ranks its columns.

    Returns:
        The plan, and messages about placements that are others than the script's.
    """
    num_gpus = sum(map(len, vvgpu))
    messages = []
    if num_gpus != world_size:
        messages.append(
            f"vvgpu names {num_gpus} devices, and {world_size} processes train: device g of them is process "
            f"g * {world_size} // {num_gpus}"
        )
    # Neighbouring devices stay together: those of a machine are on few ranks.
    to_rank = [gpu * world_size // num_gpus for gpu in range(num_gpus)]
    tables = [table for embedding in graph.embeddings for table in embedding.tables]
    # The script's plan replaces it table by table; a collection without a plan keeps it.
    placements: dict[str, Placement] = dict(default_plan(tables, world_size).placements)
    embeddings = {embedding.name: embedding for embedding in graph.embeddings}
    for part in network.of_type(SparseEmbedding):
        names = [table.name for table in embeddings[part.sparse_embedding_name].tables]
        if part.embedding_type in LOCALIZED:
            placements |= {name: TableWise(rank=to_rank[slot % num_gpus]) for slot, name in enumerate(names)}
        elif part.embedding_type is not Embedding_t.HybridSparseEmbedding:
            placements |= dict.fromkeys(names, RowWise())
    placements |= _hybrid(network, embeddings, world_size, batches)
    widths = {table.name: table.width for table in tables}
    for config in network.of_type(EmbeddingCollectionConfig):
        if config.plan is not None:
            placements |= _of_collection(config, to_rank, widths, messages)
    size = len(vvgpu[0])
    # Nodes of a plan hold as many ranks each, in order, so only such a vvgpu tells them.
    has_nodes = num_gpus == world_size and all(len(node) == size for node in vvgpu)
    entries = tuple(TablePlan(table=name, placement=placement) for name, placement in placements.items())
    plan = ShardingPlan(world_size=world_size, tables=entries, ranks_per_node=size if has_nodes else None)
    return plan, messages


def _of_collection(
    config: EmbeddingCollectionConfig, to_rank: Sequence[int], widths: Mapping[str, int], messages: list[str]
) -> dict[str, Placement]:
    assert config.plan is not None, "it has one"
    matrix, placements = config.plan.matrix, {}
    if len(matrix) != len(to_rank):
        messages.append(
            f"the shard_matrix has {len(matrix)} GPUs, and vvgpu {len(to_rank)}: tables are placed by their sizes"
        )
        return {}
    for kind, group in config.plan.strategy:
        for entry in group:
            name, parts = (entry, 1) if isinstance(entry, str) else entry
            gpus = [gpu for gpu, names_on_gpu in enumerate(matrix) if name in names_on_gpu]
            ranks = tuple(dict.fromkeys(to_rank[gpu] for gpu in gpus))
            placement: Placement = RowWise(ranks=ranks)
            if kind == "dp":
                placement = DataParallel()
            elif len(ranks) == 1:
                placement = TableWise(rank=ranks[0])
            # A placement cuts a table by column or by row, not both.
            elif parts == len(ranks) and widths[name] % parts == 0:
                placement = ColumnWise(ranks=ranks)
            elif parts > 1:
                messages.append(
                    f"table {name!r} is cut into {parts} parts by column for {len(ranks)} processes: its rows are "
                    "spread instead"
                )
            placements[name] = placement
    return placements


def _hybrid(
    network: Network, embeddings: Mapping[str, GraphEmbedding], world_size: int, batches: Iterable[Batch]
) -> dict[str, Placement]:
    """Return the placements of the tables of hybrid embeddings, whose hot rows are counted in the first batches."""
    parts = [
        part for part in network.of_type(SparseEmbedding) if part.embedding_type is Embedding_t.HybridSparseEmbedding
    ]
    if not parts:
        return {}
    features = [feature for part in parts for feature in embeddings[part.sparse_embedding_name].features]
    columns = {feature.name: feature.read_column for feature in features}
    shares: dict[str, list[Tensor]] = {}
    for batch in batches:
        for table_name, keys in distinct_keys(batch, world_size, features, columns).items():
            shares.setdefault(table_name, []).extend(keys)
    placements: dict[str, Placement] = {}
    for part in parts:
        most = part.hybrid_embedding_param.max_num_frequent_categories
        for table in embeddings[part.sparse_embedding_name].tables:
            hot = hot_keys(shares.get(table.name, []), most=None if most < 0 else most)
            placements[table.name] = Hybrid(hot_keys=hot) if hot else RowWise()
    return placements


def placement(vvgpu: Sequence[Sequence[int]], num_gpus: int | None = None) -> tuple[torch.device, str]:
    """Return the one device that a model trains on, and a message about requested devices that are not used.

    It is the first device of `vvgpu` that exists, else another GPU, else the CPU. The message is empty if that is all
    that `vvgpu` names.

    Args:
        vvgpu: Numbers of GPUs, node by node.
        num_gpus: Number of existing GPUs; None counts them.
    """
    present = range(torch.cuda.device_count() if num_gpus is None else num_gpus)
    named = [number for node in vvgpu for number in node]
    # Scripts name the GPUs of the machine that they were written for.
    chosen = next((number for number in named if number in present), 0)
    device = torch.device("cuda", chosen) if present else torch.device("cpu")
    if present and named == [chosen]:
        return device, ""
    what = f"{len(named)} devices" if len(named) > 1 else f"GPU {named[0]}, which is not there"
    return device, f"vvgpu names {what}: training runs on {device}, with the same results"


def placement_of_rank(
    vvgpu: Sequence[Sequence[int]], together: Ranks, num_gpus: int | None = None
) -> tuple[torch.device, str]:
    """Return the device of this one of several processes, and a message if they do not train on the GPUs that exist.

    GPU g of all G of `vvgpu` is that of process ``g * R // G``, which takes its first. Where a process does not have
    this number, it takes the GPU of its own number on the machine, or else the first, such as the only one that it may
    see. All processes train on CPUs unless each has a GPU of its own: NCCL refuses to share them.

    Args:
        vvgpu: Numbers of GPUs, node by node.
        together: The processes, all of which call this.
        num_gpus: Number of GPUs of this machine; None counts them.
    """
    present = range(torch.cuda.device_count() if num_gpus is None else num_gpus)
    named = [number for node in vvgpu for number in node]
    rank, size, launched = together.rank, together.size, launch()
    place = -(-rank * len(named) // size) if size <= len(named) else rank * len(named) // size
    wanted = (named[place], rank if launched is None else launched.local_rank, 0)
    chosen = next((number for number in wanted if number in present), None)
    device = CPU if chosen is None else torch.device("cuda", chosen)
    kinds = together.gather("devices of the script", device.type)
    if "cuda" not in kinds:
        return CPU, ""
    if "cpu" in kinds:
        lacking = kinds.index("cpu")
        what = f"process {lacking} ({together.hosts[lacking]}) has no GPU"
    else:
        shared = shared_device(together, device)
        if shared is None:
            return device, ""
        what = f"processes {shared.first} and {shared.second} have the same GPU of {together.hosts[shared.first]}"
    return CPU, f"{what}, and NCCL requires one for each: training runs on CPUs, with the same results"
