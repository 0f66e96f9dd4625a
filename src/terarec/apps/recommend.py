# SPDX-License-Identifier: Apache-2.0
"""Items for users in two stages: a two-tower model retrieves candidates, a ranking model puts them in order."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray

from terarec.apps.item_index import INDEX_FILE, Floats, Integers, ItemIndex
from terarec.apps.retrieval_model import RetrievalModel
from terarec.errors import ConfigError
from terarec.etl.workflow.raw_values import RawValues
from terarec.io.exchange import end_replacement
from terarec.serve.session import InferenceSession
from terarec.spec import ItemIndexSpec, checks
from terarec.spec.checks import quoted
from terarec.spec.registry import unknown_name

_LOGGER = logging.getLogger(__name__)
_RANKED_RECORDS = 65_536  # candidates that are ranked at once


class Catalogue:
    """Items with their raw columns, one row each.

    Attributes:
        columns: The columns, of I values each.
        key: Name of the column that identifies items.

    Args:
        columns: The columns: an Arrow table, or values by name.
        key: Name of the column that identifies items; its values are distinct.

    Raises:
        ConfigError: No such column, no items, or a key that is missing or repeated.
    """

    def __init__(self, columns: pa.Table | Mapping[str, RawValues], key: str) -> None:
        self.columns = columns if isinstance(columns, pa.Table) else pa.table(dict(columns))
        self.key = key
        if key not in self.columns.column_names:
            raise unknown_name("key", key, self.columns.column_names)
        values = self.columns.column(key).to_pylist()
        if not values:
            raise ConfigError("items", "got none, expected at least one")
        self._places = {value: place for place, value in enumerate(values)}
        self._values = values
        if None in self._places:
            raise ConfigError(f"items[{self._places[None]}].{key}", "missing, expected a value for each item")
        if len(self._places) < len(values):
            # Only where there is an error: the place of each value's first occurrence, to name the second.
            first = {value: place for place, value in reversed(list(enumerate(values)))}
            second = next(place for place, value in enumerate(values) if first[value] != place)
            raise ConfigError(f"items[{second}].{key}", f"got {quoted(values[second])} twice, expected distinct values")

    def __len__(self) -> int:
        """Return the number of items."""
        return len(self._values)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the columns."""
        return tuple(self.columns.column_names)

    def places(self, keys: Sequence[object] | NDArray[np.generic] | pa.Array, where: str = "keys") -> Integers:
        """Return the rows of those `keys` that the catalogue has, int64[n].

        Raises:
            ConfigError: A text where the keys of the catalogue are none, or the other way round, in the list `where`.
        """
        listed = keys.to_pylist() if isinstance(keys, pa.Array | pa.ChunkedArray) else list(keys)
        places = [self._places[key] for key in listed if key in self._places]
        are_texts = isinstance(self._values[0], str)
        if len(places) < len(listed):
            for place, key in enumerate(listed):
                if key is not None and isinstance(key, str) is not are_texts:
                    expected = f"keys as in {self.key!r} of the items, such as {quoted(self._values[0])}"
                    raise ConfigError(f"{where}[{place}]", f"got {quoted(key)}, expected {expected}")
        return np.array(places, dtype=np.int64)

    def keys(self, places: Sequence[int]) -> list[object]:
        """Return the keys of rows."""
        return [self._values[place] for place in places]

    def num_users(self, users: Mapping[str, RawValues], needed: Sequence[str]) -> int:
        """Return the number of users.

        Args:
            users: Columns of users by name.
            needed: Columns that have to be there.

        Raises:
            ConfigError: A column that is missing, one of the items' or of another length.
        """
        for name in users:
            if name in self.names:
                raise ConfigError(f"column {name!r}", "is one of the items, expected columns of users")
        expected = ", ".join(needed)
        for name in needed:
            if name not in users:
                raise ConfigError(f"column {name!r}", f"missing, expected {expected}")
        sizes = {len(values) for values in users.values()}
        if len(sizes) != 1:
            raise ConfigError("users", f"got columns of {sorted(sizes)} values, expected the same number in all")
        return sizes.pop()

    def fingerprint(self) -> str:
        """Return the SHA-256 of the columns, in hexadecimal."""
        digest = hashlib.sha256(self.key.encode())
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, self.columns.schema) as stream:
            # In one chunk, so that equal tables have equal bytes however they were read.
            stream.write_table(self.columns.combine_chunks())
        digest.update(sink.getvalue())
        return digest.hexdigest()


@dataclass(frozen=True, kw_only=True, slots=True)
class Recommendations:
    """Items for B users, the best first.

    Attributes:
        items: The keys of each user's items: k of them, or all where there are fewer.
        scores: The score of each: that of the ranking model, or the logit of the retrieval model where there is none.
    """

    items: list[list[object]]
    scores: list[list[float]]


class Candidates(NamedTuple):
    """Items that were retrieved for a user, the best first.

    Attributes:
        places: int64[n], their rows in the catalogue.
        logits: float32[n], those of the retrieval model.
    """

    places: Integers
    logits: Floats


class Recommender:
    """Recommends items of a catalogue: retrieves candidates by vectors, and ranks them by a model. Thread-safe.

    Attributes:
        catalogue: The items.
        index: The vectors of the items under their rows in the catalogue.
        ranker: The ranking model; None for the order of the candidates.

    Args:
        retrieval: The model that retrieves.
        catalogue: The items. Their columns are those of items in both models; all others are the users'.
        index: Vectors of the items under their rows in the catalogue.
        ranker: The ranking model; None for the order of the candidates.
        score: Name of the score to rank by; None for the first one of the ranking model.

    Raises:
        ConfigError: An index of other items, or a score that the ranking model does not have.
    """

    def __init__(
        self,
        retrieval: RetrievalModel,
        catalogue: Catalogue,
        index: ItemIndex,
        ranker: InferenceSession | None = None,
        *,
        score: str | None = None,
    ) -> None:
        # The index has rows of the catalogue for keys, since keys of items may be texts.
        if not np.array_equal(index.keys, np.arange(len(catalogue))):
            raise ConfigError("index", f"has {len(index)} items, expected the {len(catalogue)} of the catalogue")
        names = () if ranker is None else ranker.score_names
        if score is not None and score not in names:
            expected = f"one of {', '.join(names)}" if names else "none without a ranking model"
            raise ConfigError("score", f"got {score!r}, expected {expected}")
        self.catalogue, self.index, self.ranker = catalogue, index, ranker
        self._retrieval = retrieval
        self._score = 0 if score is None else names.index(score)
        needed = [*retrieval.inputs, *(() if ranker is None else ranker.inputs)]
        self.user_columns = tuple(dict.fromkeys(c.name for c in needed if c.name not in catalogue.names))

    @classmethod
    def open(
        cls,
        run: Path | str | RetrievalModel,
        catalogue: Catalogue,
        *,
        ranker: Path | str | InferenceSession | None = None,
        score: str | None = None,
        index: ItemIndexSpec | None = None,
        index_dir: Path | None = None,
        checkpoint: int | str | None = None,
        device: torch.device | None = None,
        allow_import: Sequence[str] = (),
    ) -> Recommender:
        """Load both models, and compute and index the vectors of all items.

        Args:
            run: Run of the two-tower model, or the model itself.
            catalogue: The items.
            ranker: Run of the ranking model, or a session of it; None for none.
            score: Name of the score to rank by; None for the first one.
            index: Search method and its settings.
            index_dir: Directory that keeps the index. One of the same checkpoint, items and settings is read; another
                one is replaced.
            checkpoint: Checkpoint of the two-tower model, as in `InferenceSession.open`.
            device: Device of the models; the CPU by default.
            allow_import: Packages whose functions the workflows, and whose code the models may name.

        Raises:
            ConfigError: A run of another kind of model, a column that a model needs and the workflow cannot read, or
                no such checkpoint or score.
            DataNotFoundError: A directory is not a run, or holds no complete checkpoint.
            FormatError: A damaged file.
            MissingDependencyError: Lists are needed, and faiss is not installed.
        """
        if isinstance(run, RetrievalModel):
            retrieval = run
        else:
            retrieval = RetrievalModel.open(run, checkpoint, device=device, allow_import=allow_import)
        if ranker is not None and not isinstance(ranker, InferenceSession):
            ranker = InferenceSession.open(ranker, device=device, allow_import=allow_import)
        spec = index or ItemIndexSpec()
        item_index = _index_of(retrieval, catalogue, spec, index_dir)
        return cls(retrieval, catalogue, item_index, ranker, score=score)

    def recommend(
        self,
        users: Mapping[str, RawValues],
        k: int = 10,
        *,
        candidates: int = 200,
        exclude: Sequence[Sequence[object]] | None = None,
        allow: Sequence[object] | None = None,
    ) -> Recommendations:
        """Recommend up to k items to each of B users.

        Args:
            users: Each of `user_columns` by name -> its B raw values, as for `InferenceSession.predict`.
            k: Items for a user.
            candidates: Items that are retrieved for the ranking model to put in order; at least k count.
            exclude: Keys of the items that a user is not to get, such as those seen, for each user.
            allow: Keys of the only items that may be recommended; None for all.

        Raises:
            ConfigError: A column that is missing, one of the items' or of another length, a value that a workflow
                cannot read, lists for another number of users, keys of another type than those of the items, or a
                number below 1.
        """
        count = self.catalogue.num_users(users, self.user_columns)
        for name, value in (("k", k), ("candidates", candidates)):
            checks.argument(name, value, checks.integer(1, checks.MOST_BATCH))
        if exclude is not None and len(exclude) != count:
            raise ConfigError("exclude", f"got {len(exclude)} lists, expected {count}, one for each user")
        if not count:
            return Recommendations(items=[], scores=[])
        known = self._retrieval.inputs
        vectors = self._retrieval.users({c.name: users[c.name] for c in known if c.name in users})
        retrieved = self.retrieve(
            vectors, k if self.ranker is None else max(k, candidates), exclude=exclude, allow=allow
        )
        if self.ranker is None:
            return self.best([each.places for each in retrieved], [each.logits for each in retrieved], k)
        places = [each.places for each in retrieved]
        return self.best(places, list(self._ranked(users, places)), k)

    def retrieve(
        self,
        vectors: Floats,
        count: int,
        *,
        exclude: Sequence[Sequence[object]] | None = None,
        allow: Sequence[object] | None = None,
    ) -> list[Candidates]:
        """Return up to `count` items for each of B users.

        Args:
            vectors: float32[B, D], those of the users.
            count: Items for a user.
            exclude: As in `recommend`.
            allow: As in `recommend`.

        Raises:
            ConfigError: Lists for another number of users, or keys of another type than those of the items.
        """
        nearest = self.index.search(
            vectors,
            count,
            exclude=None
            if exclude is None
            else [self.catalogue.places(keys, f"exclude[{user}]") for user, keys in enumerate(exclude)],
            allow=None if allow is None else self.catalogue.places(allow, "allow"),
        )
        lengths = (nearest.keys >= 0).sum(1)
        return [
            Candidates(keys[:length], scores[:length])
            for keys, scores, length in zip(nearest.keys, nearest.scores, lengths, strict=True)
        ]

    def best(self, places: Sequence[Integers], scores: Sequence[Floats], k: int) -> Recommendations:
        """Return the k candidates of each user with the largest scores.

        Args:
            places: Rows of each user's candidates in the catalogue.
            scores: Their scores.
            k: Items for a user.
        """
        items, kept = [], []
        for rows, mine in zip(places, scores, strict=True):
            best = np.argsort(-mine, kind="stable")[:k]  # of equal scores, the one that was retrieved first
            items.append(self.catalogue.keys(rows[best].tolist()))
            kept.append(mine[best].tolist())
        return Recommendations(items=items, scores=kept)

    def ranking_columns(
        self, names: Sequence[str], users: Mapping[str, RawValues], places: Sequence[Integers]
    ) -> dict[str, RawValues]:
        """Return columns of a ranking model, with a record for each candidate of each user.

        Args:
            names: The columns.
            users: Those of users -> B values.
            places: Rows of each user's candidates in the catalogue.
        """
        rows = pa.array(np.concatenate(places))
        user = np.repeat(np.arange(len(places)), [len(keys) for keys in places])
        return {
            name: self.catalogue.columns.column(name).take(rows)
            if name in self.catalogue.names
            else _take(users[name], user)
            for name in names
        }

    def _ranked(self, users: Mapping[str, RawValues], lists: Sequence[Integers]) -> Iterator[Floats]:
        """Yield the ranking model's scores of the items of each user."""
        assert self.ranker is not None
        begin = 0
        while begin < len(lists):
            # Whole users, as many as fit into the bound and at least one: their scores are split by user below.
            end, total = begin + 1, len(lists[begin])
            while end < len(lists) and total + len(lists[end]) <= _RANKED_RECORDS:
                total += len(lists[end])
                end += 1
            part = lists[begin:end]
            of_part = {name: values[begin:end] for name, values in users.items()}
            columns = self.ranking_columns([column.name for column in self.ranker.inputs], of_part, part)
            # Users may have no candidates left after `exclude` and `allow`.
            num_candidates = sum(map(len, part))
            scores = self.ranker.predict(columns)[:, self._score] if num_candidates else np.empty(0, np.float32)
            yield from np.split(scores, np.cumsum([len(keys) for keys in part])[:-1])
            begin = end


def _index_of(
    retrieval: RetrievalModel, catalogue: Catalogue, spec: ItemIndexSpec, directory: Path | None
) -> ItemIndex:
    """Return the index of a catalogue, from its directory if that has it."""
    source = {"model": retrieval.fingerprint(), "items": catalogue.fingerprint()}
    if directory is not None and (end_replacement(directory) or (directory / INDEX_FILE).is_file()):
        saved = ItemIndex.load(directory, source=source)
        if saved is not None and saved.spec == spec:
            return saved
        _LOGGER.info("%s: of another checkpoint, catalogue or search; it is replaced", directory)
    names = [column.name for column in retrieval.inputs if column.name in catalogue.names]
    if not names:
        expected = ", ".join(column.name for column in retrieval.inputs)
        raise ConfigError("items", f"got the columns {', '.join(catalogue.names)}, expected some of {expected}")
    index = ItemIndex(retrieval.items({name: catalogue.columns.column(name) for name in names}), spec=spec)
    if directory is not None:
        index.save(directory, source=source)
    return index


def _take(values: RawValues, places: Integers) -> RawValues:
    if isinstance(values, pa.Array | pa.ChunkedArray):
        return values.take(pa.array(places))
    return values[places] if isinstance(values, np.ndarray) else [values[place] for place in places.tolist()]
