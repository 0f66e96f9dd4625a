"""The tiers of embeddings whose rows `CreateETC` puts in files."""

from __future__ import annotations

import os
import uuid
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from terarec.hugectr.enums import TrainPSType_t
from terarec.hugectr.errors import WrongInputError
from terarec.hugectr.network import Plan, capacity, row_copies
from terarec.hugectr.objects import EmbeddingTrainingCacheParams, OptParamsPy, SparseEmbedding
from terarec.io import is_remote
from terarec.spec import GraphEmbedding, Tiers
from terarec.storage.row_store import MOST_ROW_BYTES
from terarec.storage.slots import SLOT_BYTES

_BLOCKS = 1  # of a Cached embedding without a CreateHMemCache
_COUNTER_BYTES = 16  # of a row, which some rules keep besides their states


def with_cache_tiers(
    plan: Plan,
    params: EmbeddingTrainingCacheParams,
    parts: Sequence[SparseEmbedding],
    optimizer: OptParamsPy,
    *,
    num_devices: int,
    device: torch.device,
) -> tuple[Plan, list[str]]:
    """Return `plan` with the tables of Cached embeddings in tiers: workspace, blocks in host memory, files.

    All rows stay in memory without ``local_paths``, where an optimizer moves all rows in every step, and where a row is
    too long for a file; of the latter two a message for each embedding is returned, too.

    Args:
        plan: As planned.
        params: The `CreateETC` object.
        parts: The embeddings, in their order.
        optimizer: The optimizer of embeddings without one of their own.
        num_devices: Devices that share an embedding.
        device: Where the tables are.

    Raises:
        WrongInputError: A remote path.
    """
    if not params.local_paths or len(params.ps_types) != len(parts):
        return plan, []
    folder = params.local_paths[0]  # the others are those of other processes
    if is_remote(folder):
        raise WrongInputError(f"local_paths: got {folder!r}, expected local folders")
    blocks = _blocks(params)
    embeddings: dict[str, GraphEmbedding] = {embedding.name: embedding for embedding in plan.spec.embeddings}
    messages = []
    for number, part in enumerate(parts):
        if params.ps_types[number] is not TrainPSType_t.Cached:
            continue
        name = part.sparse_embedding_name
        own = part.optimizer or optimizer
        row_bytes = 4 * part.embedding_vec_size * row_copies(own) + _COUNTER_BYTES
        options = plan.rules[embeddings[name].optimizer].rows
        in_memory = f"Cached embedding {name} stays in memory: "
        if options is not None and options.mode == "global":
            messages.append(
                f"{in_memory}its optimizer moves all rows in every step, unlike Update_t.LazyGlobal and Local"
            )
            continue
        if row_bytes > MOST_ROW_BYTES:
            messages.append(f"{in_memory}its rows have {row_bytes:,} bytes, those in files at most {MOST_ROW_BYTES:,}")
            continue
        workspace = max(1, capacity(part, own, num_devices)) * (row_bytes + SLOT_BYTES)
        host = workspace * blocks[number]
        file = str(Path(folder).absolute() / f"cache-{os.getpid()}-{uuid.uuid4().hex[:8]}")
        if device.type == "cpu":
            tiers = Tiers(host=str(workspace + host), file=file)
        else:
            tiers = Tiers(device=str(workspace), host=str(host), file=file)
        tables = tuple(replace(table, tiers=tiers) for table in embeddings[name].tables)
        embeddings[name] = replace(embeddings[name], tables=tables)
    return replace(plan, spec=replace(plan.spec, embeddings=tuple(embeddings.values()))), messages


def _blocks(params: EmbeddingTrainingCacheParams) -> list[int]:
    """Return the blocks in host memory of each embedding, as many as its workspace each."""
    configs = params.hmem_cache_configs
    if len(configs) <= 1:
        return [configs[0].num_blocks if configs else _BLOCKS] * len(params.ps_types)
    if len(configs) == len(params.ps_types):
        return [config.num_blocks for config in configs]
    of_cached = iter(configs)
    return [next(of_cached).num_blocks if kind is TrainPSType_t.Cached else 0 for kind in params.ps_types]
