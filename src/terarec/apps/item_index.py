# SPDX-License-Identifier: Apache-2.0
"""`ItemIndex`: the items whose vectors have the largest dot products with a query, exactly or by inverted lists."""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from terarec.errors import ConfigError, FormatError, MissingDependencyError
from terarec.export.table_rows import table_chunks
from terarec.formats.container import read_tensors, write_tensors
from terarec.io.directories import atomic_dir
from terarec.io.exchange import end_replacement
from terarec.io.files import read_versioned_json, write_versioned_json
from terarec.io.opening import sha256_of
from terarec.metrics.ranking import best_items
from terarec.ragged import Ragged, offsets_of
from terarec.spec import ItemIndexSpec, checks, from_data

INDEX_FILE = "index.json"
_VECTORS, _LISTS = "vectors.safetensors", "lists.faiss"
_FILES = r"index\.json|vectors\.safetensors|lists\.faiss"
_NAME, _VERSION = "terarec.item_index", 1
_BLOCK_BYTES = 64 << 20  # of the scores of one block of queries
_ITEMS_PER_LIST = 39  # of the sample that centres are fitted on: the fewest that faiss accepts without a warning

Floats = NDArray[np.float32]
Integers = NDArray[np.int64]
KeyLists = Sequence[Sequence[int] | Integers]
"""Keys of items for each query."""


class FoundItems(NamedTuple):
    """Items of Q queries, the best first.

    Attributes:
        keys: int64[Q, k]; -1 where there are fewer items.
        scores: float32[Q, k], the dot products; minus infinity where there are fewer items.
    """

    keys: Integers
    scores: Floats


class ItemIndex:
    """Vectors of items and the search among them. Thread-safe.

    Attributes:
        keys: int64[I], the items' keys.
        vectors: float32[I, D].
        spec: Search method and its settings.
        method: "exact" or "lists".

    Args:
        vectors: float32[I, D].
        keys: int64[I], distinct and at least 0; None for 0 to I - 1.
        spec: Search method and its settings.

    Raises:
        ConfigError: No items, vectors that are not finite, or keys that are not distinct or negative.
        MissingDependencyError: Lists are needed, and faiss is not installed.
    """

    def __init__(self, vectors: Floats, keys: Integers | None = None, spec: ItemIndexSpec | None = None) -> None:
        self._lists: _Lists | None = None
        self._set(vectors, keys, spec or ItemIndexSpec())
        if self.method == "lists":
            self._lists = _Lists.build(self.vectors, self.spec)

    @classmethod
    def of_table(
        cls, run: Path | str, table: str, spec: ItemIndexSpec | None = None, *, checkpoint: int | str | None = None
    ) -> ItemIndex:
        """Return an index of the rows of a run's table, under their keys.

        Args:
            run: Directory of the run.
            table: Name of the table.
            spec: Search method and its settings.
            checkpoint: "last", "best" or a step; None as in `terarec.models.artifact.find_checkpoint`.

        Raises:
            ConfigError: No such table or checkpoint, or no rows.
            DataNotFoundError: `run` is not a run, or holds no complete checkpoint.
            FormatError: A damaged file.
        """
        pieces = [(chunk.keys, chunk.vectors) for chunk in table_chunks(run, table, checkpoint)]
        if not pieces:
            raise ConfigError("table", f"{table!r} has no rows, expected at least one")
        keys, vectors = (np.concatenate(parts) for parts in zip(*pieces, strict=True))
        return cls(vectors, keys, spec)

    def __len__(self) -> int:
        """Return the number of items."""
        return len(self.keys)

    def search(
        self,
        queries: Floats,
        k: int,
        *,
        exclude: KeyLists | None = None,
        allow: KeyLists | Integers | None = None,
    ) -> FoundItems:
        """Find the k items with the largest dot products for each query; for one of zeros, the first items.

        Allowed items are searched exactly, whatever the method. Keys that the index does not have are ignored.

        Args:
            queries: float32[Q, D].
            k: Number of items.
            exclude: Keys that are not to be found, for each query.
            allow: The only keys that may be found: int64[n] for all queries, or a list for each.

        Raises:
            ConfigError: Queries of another width or that are not finite, k < 1, or lists for another number of queries.
        """
        queries = _checked(queries, "queries", self.vectors.shape[1])
        checks.argument("k", k, checks.integer(1, checks.MOST_BATCH))
        excluded = self._places("exclude", exclude, len(queries))
        if isinstance(allow, np.ndarray) and allow.ndim == 1:
            places = np.unique(self._places("allow", [allow], 1).values)
            # One list for all queries is a smaller index: a single product finds its best items.
            best = _best_exact(queries, self.vectors[places], k, _within(excluded, places))
            return self._best_items(queries, np.where(best < 0, -1, _take(places, best)), k)
        if allow is not None:
            return self._search_lists(queries, k, excluded, self._places("allow", list(allow), len(queries)))
        if self.method == "exact":
            return self._best_items(queries, _best_exact(queries, self.vectors, k, excluded), k)
        return self._best_items(queries, self._by_lists(queries, k, excluded), k)

    def save(self, directory: Path, *, source: Mapping[str, str] | None = None) -> None:
        """Write the index into a new directory, atomically.

        Args:
            directory: The directory; an index there is replaced.
            source: Identity of the vectors' source, which `load` compares.

        Raises:
            ConfigError: The directory holds something else.
            StorageError: The disk is full; nothing is left behind.
        """
        # Only a directory of these files is replaced: a wrong path must not delete something else.
        with atomic_dir(directory, replaceable=_FILES) as partial:
            checksums = {_VECTORS: write_tensors(partial / _VECTORS, {"keys": self.keys, "vectors": self.vectors}, {})}
            if self._lists is not None:
                self._lists.write(partial / _LISTS)
                checksums[_LISTS] = sha256_of(partial / _LISTS)
            content = {"spec": asdict(self.spec), "sha256": checksums, "source": dict(source or {})}
            write_versioned_json(partial / INDEX_FILE, _NAME, _VERSION, content)

    @classmethod
    def load(cls, directory: Path, *, source: Mapping[str, str] | None = None) -> ItemIndex | None:
        """Read an index; return None if it is made of another `source`.

        Raises:
            DataNotFoundError: There is none.
            FormatError: A damaged file.
        """
        end_replacement(directory)
        path = directory / INDEX_FILE
        content = read_versioned_json(path, _NAME, _VERSION)
        if source is not None and content.get("source") != dict(source):
            return None
        checksums = content.get("sha256")
        if not isinstance(checksums, dict) or _VECTORS not in checksums:
            raise FormatError(path, "$.sha256", f"got {checksums!r}, expected a checksum of each file")
        try:
            spec = from_data(ItemIndexSpec, content.get("spec"), f"{path}: $.spec")
        except ConfigError as error:
            raise FormatError(error.where, error.problem) from None
        arrays, _ = read_tensors(directory / _VECTORS, sha256=str(checksums[_VECTORS]))
        # Without `__init__`, which would build the lists that are read here.
        index = object.__new__(cls)
        index._lists = None
        index._set(arrays["vectors"], arrays["keys"], spec)
        if index.method == "lists":
            index._lists = _Lists.read(directory / _LISTS, len(index), checksums.get(_LISTS))
        return index

    def _set(self, vectors: Floats, keys: Integers | None, spec: ItemIndexSpec) -> None:
        if not len(vectors):
            raise ConfigError("vectors", "got no items, expected at least one")
        self.vectors = _checked(vectors, "vectors", None)
        self.keys = np.arange(len(vectors)) if keys is None else np.asarray(keys, dtype=np.int64)
        # Sorted once, so that keys of requests are found by binary search for any order of the items.
        self._order = self.keys.argsort(kind="stable")
        self._sorted = self.keys[self._order]
        if self.keys.shape != (len(vectors),) or self._sorted[0] < 0 or (np.diff(self._sorted) == 0).any():
            raise ConfigError("keys", f"got {self.keys.shape[0]} keys, expected {len(vectors)} distinct ones >= 0")
        self.spec = spec
        is_exact = spec.method == "exact" or (spec.method == "auto" and len(vectors) <= spec.exact_items)
        self.method = "exact" if is_exact else "lists"

    def _places(self, name: str, lists: KeyLists | None, num_queries: int) -> Ragged[Integers, Integers]:
        """Return the places of the known keys of each list, none twice."""
        key_lists = [np.empty(0, np.int64)] * num_queries if lists is None else [np.asarray(keys) for keys in lists]
        if len(key_lists) != num_queries:
            raise ConfigError(name, f"got {len(key_lists)} lists, expected {num_queries}, one for each query")
        lengths = [len(keys) for keys in key_lists]
        flat = np.concatenate([np.empty(0, np.int64), *(keys for keys in key_lists if len(keys))])
        if len(flat) and flat.dtype.kind not in "iu":
            raise ConfigError(name, f"got values of type {flat.dtype}, expected integers: keys of items")
        query = np.repeat(np.arange(num_queries), lengths)
        # The clip is for keys above all items, whose place is past the end; the comparison below then rejects them.
        at = np.searchsorted(self._sorted, flat).clip(max=len(self) - 1)
        is_known = self._sorted[at] == flat
        # One number for query and place: sorted and made distinct for all queries in one call.
        pairs = np.unique(query[is_known] * len(self) + self._order[at[is_known]])
        return Ragged(pairs % len(self), offsets_of(np.bincount(pairs // len(self), minlength=num_queries)))

    def _search_lists(
        self, queries: Floats, k: int, excluded: Ragged[Integers, Integers], allowed: Ragged[Integers, Integers]
    ) -> FoundItems:
        places = np.full((len(queries), k), -1, dtype=np.int64)
        for number, query in enumerate(queries):
            mine = np.setdiff1d(_list(allowed, number), _list(excluded, number), assume_unique=True)
            scores = self.vectors[mine] @ query
            best = np.argsort(-scores, kind="stable")[:k]
            places[number, : len(best)] = mine[best]
        return self._best_items(queries, places, k)

    def _by_lists(self, queries: Floats, k: int, excluded: Ragged[Integers, Integers]) -> Integers:
        """Search for as many items more as the longest list excludes, and leave those out."""
        assert self._lists is not None
        most = int(np.diff(excluded.offsets).max(initial=0))
        # faiss cannot leave out other items for each query, so that many more are requested.
        wanted = min(len(self), k + most)
        # One more shows whether the last place is tied, of which faiss finds any.
        beyond = min(len(self), wanted + 1)
        nearest, distances = self._lists.search(queries, beyond, self.spec.probes)
        tied = (distances[:, wanted - 1] == distances[:, -1]) & (beyond > wanted)
        nearest = nearest[:, :wanted]
        # The lists near a query may hold fewer items than are wanted. Then all products find the others.
        short = np.flatnonzero((nearest[:, -1] < 0) | tied | ~queries.any(axis=1))
        none = Ragged(np.empty(0, np.int64), np.zeros(len(short) + 1, np.int64))
        nearest[short] = _best_exact(queries[short], self.vectors, wanted, none)
        if most:
            query = np.repeat(np.arange(len(queries)), np.diff(excluded.offsets))
            codes = query * len(self) + excluded.values
            nearest[np.isin(np.arange(len(queries))[:, None] * len(self) + nearest, codes)] = -1
        return nearest

    def _best_items(self, queries: Floats, places: Integers, k: int) -> FoundItems:
        """Return places int64[Q, n], -1 being none, as k keys in the order of their exact scores."""
        places = np.pad(places, ((0, 0), (0, max(0, k - places.shape[1]))), constant_values=-1)
        # Scored again, exactly: a place means the same product whichever search found it.
        scores = np.einsum("qnd,qd->qn", self.vectors[places], queries, dtype=np.float32)
        scores[places < 0] = -np.inf
        # Equal scores in the order of the items, so that all methods give the same list.
        order = np.lexsort((places, -scores), axis=1)
        places, scores = (np.take_along_axis(values, order[:, :k], 1) for values in (places, scores))
        return FoundItems(np.where(places < 0, -1, self.keys[places]), scores)


class _Lists:
    """Inverted lists of faiss, each of the items nearest to its centre.

    Of 1 M vectors of 64 numbers, whose lengths differ, 256 of 4096 lists hold 97 % of the best 100, found at 13 times
    the rate of all products. A graph (HNSW of faiss, 32 neighbours) found 96 % at 4.5 times that rate and took ten
    times as long to build; usearch's found less than that of faiss (2 Zen 4 cores, `benchmarks/vector_index.py`).

    The lists are those nearest to a query, which for dot products would be the ones of the longest vectors. With one
    number more all items have the same length; the order of the Euclidean distances to a query, whose further number
    is 0, is then that of the dot products (Bachrach et al. 2014).
    """

    def __init__(self, library: Any, index: Any) -> None:
        self._library, self._index = library, index

    @classmethod
    def build(cls, vectors: Floats, spec: ItemIndexSpec) -> _Lists:
        library = _faiss()
        lists = min(spec.lists or 4 * math.isqrt(len(vectors)), len(vectors))
        squares = np.square(vectors).sum(1, keepdims=True)
        # The further number that makes all lengths equal; the longest item gets 0.
        items = np.concatenate([vectors, np.sqrt(squares.max() - squares)], axis=1)
        index = library.index_factory(items.shape[1], f"IVF{lists},Flat", library.METRIC_L2)
        index.train(items[:: max(1, len(items) // (_ITEMS_PER_LIST * lists))])
        index.add(items)
        return cls(library, index)

    @classmethod
    def read(cls, path: Path, num_items: int, sha256: object) -> _Lists:
        library = _faiss()
        if not path.is_file():
            raise FormatError(path, "missing, expected the lists of an index")
        if sha256_of(path) != sha256:
            raise FormatError(path, f"damaged: its SHA-256 is not the one in {INDEX_FILE}")
        index = library.read_index(str(path))
        if index.ntotal != num_items:
            raise FormatError(path, f"holds {index.ntotal} items, expected {num_items}")
        return cls(library, index)

    def write(self, path: Path) -> None:
        self._library.write_index(self._index, str(path))

    def search(self, queries: Floats, k: int, probes: int | None) -> tuple[Integers, Floats]:
        """Return the places int64[Q, k] of the best items, -1 where the lists hold fewer, and their distances."""
        extended = np.concatenate([queries, np.zeros((len(queries), 1), np.float32)], axis=1)
        number = min(probes or max(1, self._index.nlist // 16), self._index.nlist)
        parameters = self._library.SearchParametersIVF(nprobe=number)
        # The settings go with the call: the index is shared by threads, which may search other numbers of lists.
        distances, neighbours = self._index.search(extended, k, params=parameters)
        return neighbours, distances


def _best_exact(queries: Floats, vectors: Floats, k: int, excluded: Ragged[Integers, Integers]) -> Integers:
    """Return the places int64[Q, k] of the largest products, the first of equal ones; -1 for want of items."""
    nearest = np.full((len(queries), k), -1, dtype=np.int64)
    most = min(k, len(vectors))
    if not most:
        return nearest
    # By torch: NumPy has no `topk`, and its `argpartition` runs on one thread.
    items, rows = torch.from_numpy(vectors).T, torch.from_numpy(queries)
    block = max(1, _BLOCK_BYTES // (4 * len(vectors)))
    for begin in range(0, len(queries), block):
        scores = rows[begin : begin + block] @ items
        bounds = excluded.offsets[begin : begin + len(scores) + 1]
        lengths = np.diff(bounds)
        row = torch.from_numpy(np.repeat(np.arange(len(scores)), lengths))
        scores[row, torch.from_numpy(excluded.values[bounds[0] : bounds[-1]])] = -torch.inf
        best = best_items(scores, most)
        nearest[begin : begin + block, :most] = torch.where(scores.gather(1, best) > -torch.inf, best, -1).numpy()
    return nearest


def _within(lists: Ragged[Integers, Integers], places: Integers) -> Ragged[Integers, Integers]:
    """Return lists of places as positions in the rising `places`, without those that are not there."""
    query = np.repeat(np.arange(len(lists.offsets) - 1), np.diff(lists.offsets))
    at = np.searchsorted(places, lists.values)
    is_in = np.isin(lists.values, places)
    return Ragged(at[is_in], offsets_of(np.bincount(query[is_in], minlength=len(lists.offsets) - 1)))


def _take(places: Integers, columns: Integers) -> Integers:
    return places[columns] if len(places) else columns


def _list(lists: Ragged[Integers, Integers], number: int) -> Integers:
    return lists.values[lists.offsets[number] : lists.offsets[number + 1]]


def _checked(vectors: Floats, name: str, width: int | None) -> Floats:
    # Contiguous float32 is what faiss reads by address.
    array = np.ascontiguousarray(vectors, dtype=np.float32)
    if array.ndim != 2 or array.shape[1] != (width or array.shape[-1]):
        expected = f"float32[n, {'D' if width is None else width}]"
        raise ConfigError(name, f"got {list(array.shape)}, expected {expected}")
    if not np.isfinite(array).all():
        row = int(np.argmin(np.isfinite(array).all(1)))
        raise ConfigError(f"{name}[{row}]", "not finite, expected finite numbers")
    return array


def _faiss() -> Any:
    try:
        return importlib.import_module("faiss")
    except ImportError:
        raise MissingDependencyError("faiss", "not installed, expected pip install 'terarec[ann]'") from None
