"""The tiers of embeddings that train pass by pass: memory for one pass, then host memory or files."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from terarec.hugectr.enums import TrainPSType_t
from terarec.hugectr.errors import WrongInputError
from terarec.hugectr.network import Plan, capacity, row_copies
from terarec.hugectr.objects import (
    EmbeddingTrainingCacheParams,
    ModelOversubscriberParams,
    OptParamsPy,
    SparseEmbedding,
)
from terarec.io import is_remote
from terarec.kernels import memory
from terarec.spec import GraphEmbedding, Tiers
from terarec.storage.row_store import MOST_ROW_BYTES
from terarec.storage.slots import SLOT_BYTES
from terarec.storage.tier_files import own_directory

_BLOCKS = 1  # where no CreateHMemCache says how many: room for the rows of the next pass
_COUNTER_BYTES = 16  # of a row, which some rules keep besides their states
_STAGED_SHARE = 0.5  # of the available host memory, for all Staged embeddings of a model on a GPU


@dataclass(frozen=True, kw_only=True, slots=True)
class _Place:
    """Where the rows of an embedding lie that are not in its workspace.

    Attributes:
        folder: Folder of their files; None for host memory.
        blocks: Blocks of host memory in front of the files, each as large as the workspace.
    """

    folder: Path | None
    blocks: int = 0


def with_cache_tiers(
    plan: Plan,
    params: EmbeddingTrainingCacheParams | ModelOversubscriberParams,
    parts: Sequence[SparseEmbedding],
    optimizer: OptParamsPy,
    *,
    num_devices: int,
    device: torch.device,
    folder: str | None = None,
) -> tuple[Plan, list[str]]:
    """Return `plan` with the tables of its embeddings in tiers, and a message for each where something differs.

    The fastest tier has the size of the workspace. Behind it is host memory, for Staged embeddings and
    ``use_host_memory_ps=True``, or files, with blocks of host memory in front of them. On a CPU the fastest tier is
    host memory: rows that would be behind it in host memory simply stay in memory, and blocks make it larger. Rows of a
    Cached embedding without ``local_paths``, rows too long for a file, and those that move in every step
    (``Update_t.Global``), are in memory.

    Args:
        plan: As planned.
        params: The `CreateETC` or `CreateMOS` object.
        parts: The embeddings, in their order.
        optimizer: The optimizer of embeddings without one of their own.
        num_devices: Devices that share an embedding.
        device: Where the tables are.
        folder: Folder of files of a `CreateMOS` object; None for those of its sparse models.

    Raises:
        WrongInputError: A remote path.
    """
    places = _places(params, len(parts), folder)
    if len(places) != len(parts):  # which `TrainingCache` reports
        return plan, []
    embeddings: dict[str, GraphEmbedding] = {embedding.name: embedding for embedding in plan.spec.embeddings}
    messages = []
    for part, place in zip(parts, places, strict=True):
        name = part.sparse_embedding_name
        own = part.optimizer or optimizer
        row_bytes = 4 * part.embedding_vec_size * row_copies(own) + _COUNTER_BYTES
        if place.folder is not None and row_bytes > MOST_ROW_BYTES:
            messages.append(
                f"embedding {name} stays in memory: its rows have {row_bytes:,} bytes, those in files at most "
                f"{MOST_ROW_BYTES:,}"
            )
            place = _Place(folder=None)
        workspace = max(1, capacity(part, own, num_devices)) * (row_bytes + SLOT_BYTES)
        bound = sum(part.slot_size_array) * (row_bytes + SLOT_BYTES) or math.inf
        tiers = _tiers(place, workspace, device, most_staged=min(bound, _staged_bytes(len(parts))))
        if tiers is None:
            continue
        embedding = embeddings[name]
        options = plan.rules[embedding.optimizer].rows
        if options is not None and options.mode == "global":
            messages.append(
                f"embedding {name} stays in memory: Update_t.Global moves all of its rows in every step, "
                "Update_t.LazyGlobal or Update_t.Local those that a batch uses"
            )
            continue
        tables = tuple(replace(table, tiers=tiers) for table in embedding.tables)
        embeddings[name] = replace(embedding, tables=tables)
    return replace(plan, spec=replace(plan.spec, embeddings=tuple(embeddings.values()))), messages


def _places(
    params: EmbeddingTrainingCacheParams | ModelOversubscriberParams, count: int, folder: str | None
) -> list[_Place]:
    """Return where the rows of each embedding are; fewer than `count` where there are not enough paths."""
    if isinstance(params, ModelOversubscriberParams):
        if params.use_host_memory_ps:
            return [_Place(folder=None)] * count
        if folder is not None:
            return [_Place(folder=_local("temp_embedding_dir", folder), blocks=_BLOCKS)] * count
        name = "dest_sparse_models" if params.train_from_scratch else "trained_sparse_models"
        return [_Place(folder=_local(name, path).parent, blocks=_BLOCKS) for path in getattr(params, name)]
    if not params.local_paths:
        return [_Place(folder=None) for _ in params.ps_types]
    local = _local("local_paths", params.local_paths[0])  # the others are those of other processes
    return [
        _Place(folder=local if kind is TrainPSType_t.Cached else None, blocks=blocks)
        for kind, blocks in zip(params.ps_types, _blocks(params), strict=True)
    ]


def _local(name: str, path: str) -> Path:
    if is_remote(path):
        raise WrongInputError(name, f"got {path!r}, expected local folders")
    return Path(path).absolute()


def _staged_bytes(num_embeddings: int) -> int:
    available = memory.available_bytes() or memory.total_bytes()
    return int(_STAGED_SHARE * available) // num_embeddings


def _tiers(place: _Place, workspace: int, device: torch.device, *, most_staged: float) -> Tiers | None:
    """Return the tiers of an embedding; None where all of its rows are in memory."""
    is_cpu = device.type == "cpu"
    if place.folder is None:
        if is_cpu:
            return None
        return Tiers(device=str(workspace), host=str(int(most_staged)))
    file = str(own_directory(place.folder, "cache"))
    host = workspace * place.blocks
    if is_cpu:
        return Tiers(host=str(workspace + host), file=file)
    return Tiers(device=str(workspace), host=str(host) if host else None, file=file)


def _blocks(params: EmbeddingTrainingCacheParams) -> list[int]:
    """Return the blocks in host memory of each embedding, as many as its workspace each."""
    configs = params.hmem_cache_configs
    if len(configs) <= 1:
        return [configs[0].num_blocks if configs else _BLOCKS] * len(params.ps_types)
    if len(configs) == len(params.ps_types):
        return [config.num_blocks for config in configs]
    of_cached = iter(configs)
    return [next(of_cached).num_blocks if kind is TrainPSType_t.Cached else 0 for kind in params.ps_types]
