"""Training pass by pass, for `CreateETC` and `CreateMOS`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from terarec.batch import Jagged
from terarec.embedding import EmbeddingCollection
from terarec.formats.hugectr import read_keyset
from terarec.hugectr.errors import MissingKeyError, WrongInputError
from terarec.hugectr.objects import EmbeddingTrainingCacheParams, ModelOversubscriberParams, Solver
from terarec.hugectr.schema.table import bind_arguments
from terarec.hugectr.weights import EmbeddingFile, FileNames, load_sparse, save_sparse
from terarec.hugectr.weights.sparse import held_rows
from terarec.io import is_remote
from terarec.kernels.hash_index import HashIndex, new_hash_index
from terarec.train.passes import PartKeys, PartRows

IncrementalModel = list[tuple[NDArray[np.int64], NDArray[np.float32]]]


class TrainingCache:
    """The passes of a model: which keys each may touch, and where the rows go in the end.

    Rows keep their optimizer states, so training equals that without a cache as long as the keysets hold what the data
    holds, and a key that they do not hold is an error. Where the tables are in tiers (`terarec.hugectr.cache_tiers`), a
    pass loads the rows of its keyset into the fastest, as many as fit, and writes changed ones back; where all rows are
    in memory it moves nothing. (HugeCTR keeps the states of a "Cached" table from pass to pass, too; those of a
    "Staged" one start anew in every pass there.)

    Args:
        params: The `CreateETC` or `CreateMOS` object.
        files: The embeddings, in the order of the model; rows are loaded into them from the folders that are there.
        collections: Their tables with the features that read them.
        key_bytes: 4 or 8 bytes a key in keysets, as ``i64_input_key`` says.
        keysets: Returns the keysets of the passes in their order: while one trains, rows of the next are read ahead.

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
    ) -> None:
        self._files, self._key_bytes, self._keysets = list(files), key_bytes, keysets
        paths = _paths(params, self._files)
        for file, path in zip(self._files, paths, strict=False):
            if _has_rows(path):
                load_sparse(file, path)
        # One file of the older form is where to start from alone.
        self._folders = [] if any(path.is_file() for path in paths) else paths
        self._consumed = [np.empty(0, np.int64) for _ in self._files]
        self._passes = [_Pass(file, collection) for file, collection in zip(self._files, collections, strict=True)]
        self._in_tiers = [one for one in self._passes if one.collection.tier_use() is not None]
        self._rows = PartRows([one.collection for one in self._in_tiers])

    @bind_arguments("EmbeddingTrainingCache.update")
    def update(self, keyset_file: str | Sequence[str]) -> None:
        """Begin the next pass, which may touch the keys of the keyset: one for all embeddings, or one for each.

        Raises:
            WrongInputError: Another number of files than embeddings, or one without keys.
            DataNotFoundError: No such file.
            FormatError: A size that is no multiple of a key's.
        """
        self.begin_pass(keyset_file, self._after(keyset_file))

    def begin_pass(self, keyset_file: str | Sequence[str], coming: str | None) -> None:
        """Begin a pass as `update` does, and read rows of the keyset that is `coming` after it, if any, ahead."""
        paths = [keyset_file] * len(self._files) if isinstance(keyset_file, str) else list(keyset_file)
        if len(paths) != len(self._files):
            raise WrongInputError("update", f"got {len(paths)} keysets, expected one, or {len(self._files)}: one each")
        read = {path: read_keyset(path, self._key_bytes) for path in dict.fromkeys(paths)}
        for path, keys in read.items():
            if not len(keys):
                raise WrongInputError("update", f"{path} holds no key, expected those of the pass")
        indexes = {path: _index(keys) for path, keys in read.items()}
        for number, (path, one) in enumerate(zip(paths, self._passes, strict=True)):
            one.begin(path, indexes[path])
            self._consumed[number] = np.union1d(self._consumed[number], read[path])
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
        keys = read_keyset(path, self._key_bytes)
        return [one.keys_of(keys) for one in self._in_tiers]

    def store(self, snapshot_file_list: Sequence[str]) -> None:
        """Write each embedding as one file of the form that releases up to 3.0 have.

        Raises:
            WrongInputError: Another number of files than embeddings.
            StorageError: The disk is full.
        """
        if len(snapshot_file_list) != len(self._files):
            raise WrongInputError("store", f"got {len(snapshot_file_list)} files, expected {len(self._files)}")
        for file, path in zip(self._files, snapshot_file_list, strict=True):
            save_sparse(file, Path(path), single_file=True)

    def save(self, folder: Path, names: FileNames, *, single_file: bool = False) -> None:
        """Write each embedding to its folder or, without one, to that of `names` in `folder`.

        Args:
            folder: Folder of embeddings without one of their own.
            names: File names there.
            single_file: Write one file there, as releases up to 3.0 did.

        Raises:
            StorageError: The disk is full.
        """
        for number, file in enumerate(self._files):
            if self._folders:
                save_sparse(file, self._folders[number])
            else:
                save_sparse(file, folder / names.sparse(number), single_file=single_file)

    def incremental_model(self) -> IncrementalModel:
        """Return keys int64[n] and vectors float32[n, D] of each embedding, of the passes since the last call.

        These are the rows of all keys of the keysets; a key that has no row is left out.
        """
        found = [held_rows(file, keys) for file, keys in zip(self._files, self._consumed, strict=True)]
        self._consumed = [np.empty(0, np.int64) for _ in self._files]
        return found


class _Pass:
    """Refuses the keys of training batches that the keyset of the pass does not hold.

    Attributes:
        collection: The tables.
    """

    def __init__(self, file: EmbeddingFile, collection: EmbeddingCollection) -> None:
        self._name = file.name
        bases = dict(zip((table.name for table in file.tables), file.bases, strict=True))
        self._base_of = {feature.name: bases[feature.table] for feature in collection.features}
        self._path = ""
        self._index: HashIndex | None = None
        self._samples = 0
        self.collection = collection
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
        if self._index is None or not (collection.training and torch.is_grad_enabled()):
            return
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
                found = (sample, name, int(keys[absent[0]]))
                first = found if first is None else min(first, found, key=lambda one: one[0])
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
    """Return the model oversubscriber that a solver of 2.3 or 3.0 asks for: its rows are in files."""
    values = solver.values()
    if not values.get("use_model_oversubscriber"):
        return None
    files = values["embedding_files"]
    return ModelOversubscriberParams(not files, False, files)
