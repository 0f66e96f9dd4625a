# SPDX-License-Identifier: Apache-2.0
"""Training in passes, for `CreateETC` and `CreateMOS`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from terarec.batch import Jagged
from terarec.dist import Ranks
from terarec.embedding import EmbeddingCollection
from terarec.formats.hugectr.split_writer import read_keyset
from terarec.hugectr.data import FileNames
from terarec.hugectr.enums import TrainPSType_t
from terarec.hugectr.errors import MissingKeyError, WrongInputError
from terarec.hugectr.network import NetworkPlan, capacity, row_copies, workspace_rows
from terarec.hugectr.objects import (
    EmbeddingTrainingCacheParams,
    ModelOversubscriberParams,
    OptParamsPy,
    Solver,
    SparseEmbedding,
)
from terarec.hugectr.schema.table import bind_arguments
from terarec.hugectr.sparse_weights import EmbeddingFile, held_rows, load_sparse, save_sparse
from terarec.hugectr.update_messages import UpdatedRows
from terarec.io.owned import own_directory
from terarec.io.remote import is_remote
from terarec.kernels import memory
from terarec.kernels.hash_index import HashIndex, new_hash_index
from terarec.kernels.slots import SLOT_BYTES
from terarec.memory.row_store import MOST_ROW_BYTES
from terarec.spec import GraphEmbedding, Tiers
from terarec.train.passes import PartKeys, PartRows

IncrementalModel = list[tuple[NDArray[np.int64], NDArray[np.float32]]]


UseOfRows = Callable[[Sequence[EmbeddingFile]], None]
"""Function of the embeddings with all of their rows."""


@dataclass(frozen=True, kw_only=True)
class WholeRows:
    """Calls functions with all rows of the embeddings: of several processes in the first one alone.

    Attributes:
        change: Calls a function that changes rows, which all processes get then.
        read: Calls one that reads them.
        ranks: The processes.
    """

    change: Callable[[UseOfRows], None]
    read: Callable[[UseOfRows], None]
    ranks: Ranks

    def shared(self, rows: UpdatedRows) -> UpdatedRows:
        """Return the rows of the first process on all."""
        if self.ranks.size == 1:
            return rows
        keys, vectors = (
            torch.cat(self.ranks.gather_rows("incremental model", torch.from_numpy(values))).numpy()
            for values in (rows.keys, rows.vectors)
        )
        return UpdatedRows(keys, vectors)


class TrainingCache:
    """The passes of a model: the keys of each, and the folders of the trained rows.

    Rows keep their optimizer states, so training equals that without a cache as long as the keysets hold what the data
    holds, and a key that they do not hold is an error. Where the tables are in tiers (`with_cache_tiers`), a pass loads
    the rows of its keyset into the fastest, as many as fit, and writes changed ones back; where all rows are in memory
    it moves nothing. (HugeCTR keeps the states of a "Cached" table from pass to pass, too; those of a "Staged" one
    start again in every pass there.)

    Args:
        params: The `CreateETC` or `CreateMOS` object.
        files: The embeddings, in the order of the model; rows are loaded into them from the folders that are there.
        collections: Their tables with the features that read them.
        key_bytes: Bytes of a key in keysets, 4 or 8, by ``i64_input_key``.
        keysets: Function that returns the keysets of the passes in order, of which the next is prefetched.
        whole: The rows of all processes; None for one process, which has them.

    Raises:
        WrongInputError: Another number of folders than embeddings, or folders that should be there, or should not.
        FormatError: A folder that does not fit its embedding.
    """

    def __init__(
        self,
        params: EmbeddingTrainingCacheParams | ModelOversubscriberParams,
        files: Sequence[EmbeddingFile],
        collections: Sequence[EmbeddingCollection],
        *,
        key_bytes: int,
        keysets: Callable[[], Sequence[str]] = tuple,
        whole: WholeRows | None = None,
    ) -> None:
        self._files, self._key_bytes, self._keysets = list(files), key_bytes, keysets
        self._whole = whole or WholeRows(change=self._use, read=self._use, ranks=Ranks())
        paths = _paths(params, self._files)
        if any(map(_has_rows, paths)):
            self._whole.change(partial(_load, paths))
        # One file of the older form is where to start from alone.
        self._folders = [] if any(path.is_file() for path in paths) else paths
        self._consumed = [np.empty(0, np.int64) for _ in self._files]
        self._passes = [_Pass(file, collection) for file, collection in zip(self._files, collections, strict=True)]
        self._in_tiers = [one for one in self._passes if one.collection.tier_use() is not None]
        self._rows = PartRows([one.collection for one in self._in_tiers])

    @bind_arguments("EmbeddingTrainingCache.update")
    def update(self, keyset_file: str | Sequence[str]) -> None:
        """Start the next pass, which may update the rows of the keyset: one for all embeddings, or one for each.

        Raises:
            WrongInputError: Another number of files than embeddings, or one without keys.
            DataNotFoundError: No such file.
            FormatError: A size that is not a multiple of a key's.
        """
        self.begin_pass(keyset_file, self._after(keyset_file))

    def begin_pass(self, keyset_file: str | Sequence[str], coming: str | None) -> None:
        """Start a pass as `update` does, and prefetch rows of the keyset `coming` after it, if any."""
        paths = [keyset_file] * len(self._files) if isinstance(keyset_file, str) else list(keyset_file)
        if len(paths) != len(self._files):
            raise WrongInputError("update", f"got {len(paths)} keysets, expected one, or {len(self._files)}: one each")
        read = {path: _keys_in(path, self._key_bytes) for path in dict.fromkeys(paths)}
        for path, keys in read.items():
            if not len(keys):
                raise WrongInputError("update", f"{path} holds no key, expected those of the pass")
        # All keysets are read before the first embedding begins its pass, so that a damaged one leaves the old pass.
        indexes = {path: _index(keys) for path, keys in read.items()}
        for number, (path, one) in enumerate(zip(paths, self._passes, strict=True)):
            one.begin(path, indexes[path])
            # A key of several passes is one row of the incremental model.
            self._consumed[number] = np.union1d(self._consumed[number], read[path])
        # Rows of tables in memory need no moving, only the check of `begin` above.
        if not self._in_tiers:
            return
        own = dict(zip(self._passes, paths, strict=True))
        self._rows.begin([one.keys_of(read[own[one]]) for one in self._in_tiers])
        if coming is not None:
            self._rows.read_ahead(partial(self._keys_of, coming))

    def _after(self, keyset_file: str | Sequence[str]) -> str | None:
        """Return the keyset of the pass that is likely to follow; None after the last."""
        known = list(self._keysets())
        if not isinstance(keyset_file, str) or keyset_file not in known[:-1]:
            return None
        return known[known.index(keyset_file) + 1]

    def _keys_of(self, path: str) -> PartKeys:
        keys = _keys_in(path, self._key_bytes)
        return [one.keys_of(keys) for one in self._in_tiers]

    def store(self, snapshot_file_list: Sequence[str]) -> None:
        """Write each embedding as one file in the format of releases up to 3.0.

        Raises:
            WrongInputError: Another number of files than embeddings.
            StorageError: The disk is full.
        """
        if len(snapshot_file_list) != len(self._files):
            raise WrongInputError("store", f"got {len(snapshot_file_list)} files, expected {len(self._files)}")
        self._whole.read(partial(_store, snapshot_file_list))

    def save(
        self,
        folder: Path,
        names: FileNames,
        *,
        single_file: bool = False,
        files: Sequence[EmbeddingFile] | None = None,
    ) -> None:
        """Write each embedding to its folder or, without one, to that of `names` in `folder`.

        Args:
            folder: Folder of embeddings without one of their own.
            names: File names there.
            single_file: Write one file there, as releases up to 3.0 did.
            files: The embeddings with all of their rows; None for those of one process.
        """
        for number, file in enumerate(self._files if files is None else files):
            if self._folders:
                save_sparse(file, self._folders[number])
            else:
                save_sparse(file, folder / names.sparse(number), single_file=single_file)

    def incremental_model(self) -> IncrementalModel:
        """Return keys int64[n] and vectors float32[n, D] of each embedding, of the passes since the last call.

        These are the rows of all keys of the keysets; a key that has no row is left out. All processes get them.
        """
        with self.sending() as tables:
            shared = [self._whole.shared(rows) for _, rows in tables]
        return [(rows.keys, rows.vectors) for rows in shared]

    @contextmanager
    def sending(self) -> Iterator[list[tuple[str, UpdatedRows]]]:
        """Give the name and the rows of each embedding as `incremental_model`, again where the block does not end.

        Of several processes the first one gets the rows, and the others none.
        """
        rows = [UpdatedRows(np.empty(0, np.int64), np.empty((0, file.width), np.float32)) for file in self._files]

        def read(files: Sequence[EmbeddingFile]) -> None:
            rows[:] = [UpdatedRows(*held_rows(file, keys)) for file, keys in zip(files, self._consumed, strict=True)]

        self._whole.read(read)
        yield list(zip([file.name for file in self._files], rows, strict=True))
        self._consumed = [np.empty(0, np.int64) for _ in self._files]

    def _use(self, call: UseOfRows) -> None:
        """Call a function with the embeddings of one process."""
        call(self._files)


class _Pass:
    """Pass of an embedding, which rejects keys of training batches that are not in its keyset."""

    def __init__(self, file: EmbeddingFile, collection: EmbeddingCollection) -> None:
        self._name = file.name
        bases = dict(zip((table.name for table in file.tables), file.bases, strict=True))
        self._base_of = {feature.name: bases[feature.table] for feature in collection.features}
        self._path = ""
        self._index: HashIndex | None = None
        self._samples = 0
        self.collection = collection
        # Before the lookup, which would insert the key into a dynamic table.
        collection.register_forward_pre_hook(self._check)

    def begin(self, path: str, index: HashIndex) -> None:
        """Begin a pass with the keys of the keyset at `path`."""
        self._path, self._index, self._samples = path, index, 0

    def keys_of(self, keyset: NDArray[np.int64]) -> dict[str, Tensor]:
        """Return the keys int64[n] of a keyset for one feature of each table."""
        readers = {feature.table: feature.name for feature in self.collection.features}
        distinct = torch.from_numpy(np.unique(keyset))
        return {name: distinct - self._base_of[name] for name in readers.values()}

    def _check(self, collection: nn.Module, inputs: tuple[Jagged]) -> None:
        # Evaluation may look up any key: the keyset names those whose rows a pass trains.
        if self._index is None or not (collection.training and torch.is_grad_enabled()):
            return
        # The bags of a feature are contiguous: every `batch_size`-th offset is where its keys begin.
        (jagged,) = inputs
        first: tuple[int, str, int] | None = None  # sample, feature and key
        ends = jagged.offsets[:: jagged.batch_size].tolist() if jagged.batch_size else []
        for number, (name, start, stop) in enumerate(zip(jagged.names, ends, ends[1:], strict=False)):
            if name not in self._base_of:
                continue
            keys = jagged.keys[start:stop].cpu() + self._base_of[name]  # the index is in host memory
            absent = (self._index.find(keys) < 0).nonzero()[:, 0]
            if absent.numel():
                bags = jagged.offsets[number * jagged.batch_size :][: jagged.batch_size + 1].cpu()
                sample = int(torch.searchsorted(bags, absent[0] + start, right=True)) - 1
                unknown = (sample, name, int(keys[absent[0]]))
                # Features come one after the other, so a later one may hold the earlier sample.
                first = unknown if first is None else min(first, unknown, key=lambda one: one[0])
        if first is not None:
            sample, name, key = self._samples + first[0], first[1], first[2]
            raise MissingKeyError(
                f"embedding {self._name!r}",
                f"got key {key} of {name!r} in sample {sample} of the pass, expected one of the "
                f"{len(self._index):,} keys of the pass in {self._path}",
                slot=name,
                key=key,
                sample=sample,
            )
        self._samples += jagged.batch_size


def _load(paths: Sequence[Path], files: Sequence[EmbeddingFile]) -> None:
    """Load the rows of the paths that hold some."""
    for file, path in zip(files, paths, strict=False):
        if _has_rows(path):
            load_sparse(file, path)


def _store(paths: Sequence[str], files: Sequence[EmbeddingFile]) -> None:
    """Write each embedding as one file."""
    for file, path in zip(files, paths, strict=True):
        save_sparse(file, Path(path), single_file=True)


def _keys_in(path: str, key_bytes: int) -> NDArray[np.int64]:
    """Return the keys of a keyset; those of 4 bytes from 2^31 on as negative ones, too, as Parquet's int32 has them."""
    keys = read_keyset(path, key_bytes)
    # HugeCTR compares bits: to it both are one key.
    return keys if key_bytes == 8 else np.concatenate([keys, keys[keys >= 2**31] - 2**32])


def _index(keys: NDArray[np.int64]) -> HashIndex:
    index = new_hash_index()
    index.insert(torch.from_numpy(keys), torch.empty(0, dtype=torch.int64), 0)
    return index


def _paths(
    params: EmbeddingTrainingCacheParams | ModelOversubscriberParams, files: Sequence[EmbeddingFile]
) -> list[Path]:
    """Return the paths of each embedding's rows; none where a script of release 3.0 starts from scratch."""
    name = "sparse_models"
    is_older = False
    if isinstance(params, ModelOversubscriberParams):
        is_older = True
        name = "dest_sparse_models" if params.train_from_scratch else "trained_sparse_models"
    elif len(params.ps_types) != len(files):
        raise WrongInputError(
            "ps_types", f"got {len(params.ps_types)}, expected one for each of {len(files)} embeddings"
        )
    for path in getattr(params, name):
        if is_remote(path):
            raise WrongInputError(
                name, f"got {path!r}, expected local folders: a training cache writes to them in place"
            )
    paths = [Path(path) for path in getattr(params, name)]
    if len(paths) != len(files) and (paths or not is_older):
        raise WrongInputError(name, f"got {len(paths)} folders, expected one for each of {len(files)} embeddings")
    for path in paths:
        if name == "dest_sparse_models" and _has_rows(path):
            raise WrongInputError(name, f"{path} holds rows, expected a new folder with train_from_scratch=True")
        if name == "trained_sparse_models" and not _has_rows(path):
            raise WrongInputError(name, f"{path} holds no rows, expected some with train_from_scratch=False")
    return paths


def _has_rows(path: Path) -> bool:
    keys = path if path.is_file() else path / "key"
    return keys.is_file() and keys.stat().st_size > 0


def oversubscriber_of(solver: Solver) -> ModelOversubscriberParams | None:
    """Return the model oversubscriber that a solver of 2.3 or 3.0 requests: its rows are in files."""
    values = solver.values()
    if not values.get("use_model_oversubscriber"):
        return None
    files = values["embedding_files"]
    return ModelOversubscriberParams(not files, False, files)


def newest_form(
    params: EmbeddingTrainingCacheParams | ModelOversubscriberParams | None,
) -> EmbeddingTrainingCacheParams | ModelOversubscriberParams | None:
    """Return the `CreateETC` object that the `CreateMOS` object of 3.2.1 stands for; others as they are."""
    values = params.values() if isinstance(params, ModelOversubscriberParams) else {}
    if "ps_types" not in values:
        return params
    names = ("ps_types", "sparse_models", "local_paths", "hmem_cache_configs")
    return EmbeddingTrainingCacheParams(*(values[name] for name in names))


_BLOCKS = 1  # where no CreateHMemCache says how many: room for the rows of the next pass
_COUNTER_BYTES = 16  # of a row, which some rules keep besides their states
_STAGED_SHARE = 0.5  # of the available host memory, for all Staged embeddings of a model on a GPU


@dataclass(frozen=True, kw_only=True, slots=True)
class _Place:
    """Storage of the rows of an embedding that are not in its workspace.

    Attributes:
        folder: Folder of their files; None for host memory.
        blocks: Blocks of host memory in front of the files, each as large as the workspace.
    """

    folder: Path | None
    blocks: int = 0


def with_cache_tiers(
    plan: NetworkPlan,
    params: EmbeddingTrainingCacheParams | ModelOversubscriberParams,
    parts: Sequence[SparseEmbedding],
    optimizer: OptParamsPy,
    *,
    num_devices: int,
    device: torch.device,
    folder: str | None = None,
) -> tuple[NetworkPlan, list[str]]:
    """Return `plan` with the tables of its embeddings in tiers, and a message for each where something differs.

    The fastest tier has the size of the workspace. Behind it is host memory, for Staged embeddings and
    ``use_host_memory_ps=True``, or files, with blocks of host memory in front of them. On a CPU the fastest tier is
    host memory: rows that would be behind it in host memory simply stay in memory, and blocks make it larger. Rows of a
    Cached embedding without ``local_paths``, rows too long for a file, and those that move in every step
    (``Update_t.Global``), are in memory.

    Args:
        plan: Plan of the network.
        params: The `CreateETC` or `CreateMOS` object.
        parts: The embeddings, in their order.
        optimizer: The optimizer of embeddings without one of their own.
        num_devices: Devices that share an embedding.
        device: Device of the tables.
        folder: Folder of files of a `CreateMOS` object; None for those of its sparse models.
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
        # Sizes of slots say how many rows there are, not how many a pass has.
        rows = workspace_rows(part, own, num_devices) or capacity(part, own, num_devices)
        # A workspace of 0 MiB still needs a slot: rows are trained in the fastest tier.
        workspace = max(1, rows) * (row_bytes + SLOT_BYTES)
        # Without the sizes of slots nothing bounds the rows of a hash embedding.
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


def with_folders_of_first(plan: NetworkPlan, together: Ranks) -> NetworkPlan:
    """Return `plan` with the directories of tiers that the first process has chosen, in which each has its own."""
    chosen = {
        embedding.name: tiers.file
        for embedding in plan.spec.embeddings
        if (tiers := embedding.tables[0].tiers) is not None and tiers.file is not None
    }
    chosen = together.gather("folders of a training cache", chosen)[0]
    embeddings = tuple(
        replace(
            embedding,
            tables=tuple(
                replace(table, tiers=replace(table.tiers, file=chosen[embedding.name])) if table.tiers else table
                for table in embedding.tables
            ),
        )
        if embedding.name in chosen
        else embedding
        for embedding in plan.spec.embeddings
    )
    return replace(plan, spec=replace(plan.spec, embeddings=embeddings))


def _places(
    params: EmbeddingTrainingCacheParams | ModelOversubscriberParams, count: int, folder: str | None
) -> list[_Place]:
    """Return the storage of the rows of each embedding; fewer than `count` if there are not enough paths."""
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
    # If the free memory is unknown, half of the total memory.
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
