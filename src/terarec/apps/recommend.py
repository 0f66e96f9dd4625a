# SPDX-License-Identifier: Apache-2.0
"""Items for users in two stages: a two-tower model retrieves candidates, a ranking model puts them in order."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from torch import Tensor

from terarec.apps.item_index import INDEX_FILE, Floats, Integers, ItemIndex
from terarec.batch import Batch, to_device
from terarec.config.files import DATASET_DIRECTORY
from terarec.errors import ConfigError
from terarec.etl.workflow import Workflow, workflow_of
from terarec.etl.workflow.raw_values import RawValues
from terarec.models import TwoTower
from terarec.models.artifact import LoadedModel, load_model
from terarec.models.contract import device_of
from terarec.nn.precision import autocast
from terarec.serve.record_batches import RecordBatches
from terarec.serve.session import InferenceSession, InputColumn, input_columns
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

    def places(self, keys: Sequence[object] | NDArray[np.generic] | pa.Array) -> Integers:
        """Return the rows of those `keys` that the catalogue has, int64[n]."""
        listed = keys.to_pylist() if isinstance(keys, pa.Array | pa.ChunkedArray) else list(keys)
        places = [self._places[key] for key in listed if key in self._places]
        return np.array(places, dtype=np.int64)

    def keys(self, places: Sequence[int]) -> list[object]:
        """Return the keys of rows."""
        return [self._values[place] for place in places]

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
        scores: The score of each: that of the ranking model, or the logit of the two towers where there is none.
    """

    items: list[list[object]]
    scores: list[list[float]]


class Towers:
    """A trained two-tower model and its workflow: vectors of users and of items from raw columns.

    Attributes:
        inputs: Raw columns of a record.
        step: Training steps of the weights.

    Args:
        loaded: The model and what describes it.
        workflow: Encodes raw values as they were for training.

    Raises:
        ConfigError: A model of another kind.
    """

    def __init__(self, loaded: LoadedModel, workflow: Workflow) -> None:
        if not isinstance(loaded.model, TwoTower):
            raise ConfigError("run", f"holds a model of the kind {loaded.spec.model.kind!r}, expected 'two_tower'")
        self._model = loaded.model
        self._device = device_of(loaded.model)
        self._training = loaded.spec.training
        self._workflow = workflow
        self._batch = RecordBatches(workflow, loaded.dataset)
        self.inputs: tuple[InputColumn, ...] = input_columns(workflow)
        self.step = loaded.step

    @classmethod
    def open(
        cls,
        run: Path | str,
        checkpoint: int | str | None = None,
        *,
        device: torch.device | None = None,
        allow_import: Sequence[str] = (),
    ) -> Self:
        """Load a checkpoint of a run; arguments and errors are those of `InferenceSession.open`."""
        loaded = load_model(run, checkpoint, device=device, allow_import=allow_import)
        return cls(loaded, workflow_of(Path(run) / DATASET_DIRECTORY, allow_import=allow_import))

    def fingerprint(self) -> str:
        """Return the SHA-256 of the item tower's dense weights and of the number of steps, in hexadecimal."""
        digest = hashlib.sha256(str(self.step).encode())
        for name, tensor in self._model.item.state_dict().items():
            digest.update(name.encode())
            digest.update(tensor.detach().float().cpu().numpy().tobytes())
        return digest.hexdigest()

    def users(self, columns: Mapping[str, RawValues]) -> Floats:
        """Return vectors float32[B, D] of B users; columns of items alone may be absent."""
        return self._vectors(columns, of_items=False)

    def items(self, columns: Mapping[str, RawValues]) -> Floats:
        """Return vectors float32[I, D] of I items; columns of users alone may be absent."""
        return self._vectors(columns, of_items=True)

    def _vectors(self, columns: Mapping[str, RawValues], *, of_items: bool) -> Floats:
        count, size = len(next(iter(columns.values()))), self._training.batch_size
        # `concatenate` needs an array, and no batch says how wide the vectors are.
        parts = [np.empty((0, 1), np.float32)] if not count else []
        for begin in range(0, count, size):
            part = min(size, count - begin)
            # The workflow encodes all of its columns: those of the other tower, which are not read, as missing values.
            columns_of_part = {
                column.name: columns[column.name][begin : begin + part] if column.name in columns else [None] * part
                for column in self.inputs
            }
            batch = to_device(self._batch(self._workflow.encode(columns_of_part)), self._device)
            with torch.inference_mode(), autocast(self._training.precision, self._device):
                parts.append(self._of(batch, of_items=of_items).float().cpu().numpy())
        return np.concatenate(parts)

    def _of(self, batch: Batch, *, of_items: bool) -> Tensor:
        return self._model.item_vectors(batch) if of_items else self._model.user_vectors(batch)


class Recommender:
    """Recommends items of a catalogue: retrieves candidates by vectors, and ranks them by a model. Thread-safe.

    Attributes:
        catalogue: The items.
        index: The vectors of the items under their rows in the catalogue.
        ranker: The ranking model; None for the order of the two towers.

    Args:
        towers: The two-tower model.
        catalogue: The items. Their columns are those of items in both models; all others are the users'.
        index: Vectors of the items under their rows in the catalogue.
        ranker: The ranking model; None for the order of the two towers.
        score: Name of the score to rank by; None for the first one of the ranking model.

    Raises:
        ConfigError: An index of other items, or a score that the ranking model does not have.
    """

    def __init__(
        self,
        towers: Towers,
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
        self._towers = towers
        self._score = 0 if score is None else names.index(score)
        needed = [*towers.inputs, *(() if ranker is None else ranker.inputs)]
        self.user_columns = tuple(dict.fromkeys(c.name for c in needed if c.name not in catalogue.names))

    @classmethod
    def open(
        cls,
        run: Path | str | Towers,
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
        if isinstance(run, Towers):
            towers = run
        else:
            towers = Towers.open(run, checkpoint, device=device, allow_import=allow_import)
        if ranker is not None and not isinstance(ranker, InferenceSession):
            ranker = InferenceSession.open(ranker, device=device, allow_import=allow_import)
        spec = index or ItemIndexSpec()
        item_index = _index_of(towers, catalogue, spec, index_dir)
        return cls(towers, catalogue, item_index, ranker, score=score)

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
                cannot read, lists for another number of users, or a number below 1.
        """
        count = self._checked_users(users)
        for name, value in (("k", k), ("candidates", candidates)):
            checks.argument(name, value, checks.integer(1, checks.MOST_BATCH))
        if exclude is not None and len(exclude) != count:
            raise ConfigError("exclude", f"got {len(exclude)} lists, expected {count}, one for each user")
        if not count:
            return Recommendations(items=[], scores=[])
        known = self._towers.inputs
        vectors = self._towers.users({c.name: users[c.name] for c in known if c.name in users})
        nearest = self.index.search(
            vectors,
            k if self.ranker is None else max(k, candidates),
            exclude=None if exclude is None else [self.catalogue.places(keys) for keys in exclude],
            allow=None if allow is None else self.catalogue.places(allow),
        )
        lists = [keys[keys >= 0] for keys in nearest.keys]
        if self.ranker is None:
            scores = [row[: len(keys)] for row, keys in zip(nearest.scores, lists, strict=True)]
        else:
            scores = list(self._ranked(users, lists))
        items, kept = [], []
        for places, mine in zip(lists, scores, strict=True):
            best = np.argsort(-mine, kind="stable")[:k]  # of equal scores, the one that the towers prefer
            items.append(self.catalogue.keys(places[best].tolist()))
            kept.append(mine[best].tolist())
        return Recommendations(items=items, scores=kept)

    def _checked_users(self, users: Mapping[str, RawValues]) -> int:
        for name in users:
            if name in self.catalogue.names:
                raise ConfigError(f"column {name!r}", "is one of the items, expected columns of users")
        expected = ", ".join(self.user_columns)
        for name in self.user_columns:
            if name not in users:
                raise ConfigError(f"column {name!r}", f"missing, expected {expected}")
        sizes = {len(values) for values in users.values()}
        if len(sizes) != 1:
            raise ConfigError("users", f"got columns of {sorted(sizes)} values, expected the same number in all")
        return sizes.pop()

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
            places = np.concatenate(part)
            user = np.repeat(np.arange(begin, end), [len(keys) for keys in part])
            columns = {}
            for column in self.ranker.inputs:
                if column.name in self.catalogue.names:
                    columns[column.name] = self.catalogue.columns.column(column.name).take(pa.array(places))
                else:
                    columns[column.name] = _take(users[column.name], user)
            # Users may have no candidates left after `exclude` and `allow`.
            scores = self.ranker.predict(columns)[:, self._score] if len(places) else np.empty(0, np.float32)
            yield from np.split(scores, np.cumsum([len(keys) for keys in part])[:-1])
            begin = end


def _index_of(towers: Towers, catalogue: Catalogue, spec: ItemIndexSpec, directory: Path | None) -> ItemIndex:
    """Return the index of a catalogue, from its directory if that has it."""
    source = {"model": towers.fingerprint(), "items": catalogue.fingerprint()}
    if directory is not None and (directory / INDEX_FILE).is_file():
        saved = ItemIndex.load(directory, source=source)
        if saved is not None and saved.spec == spec:
            return saved
        _LOGGER.info("%s: of another checkpoint, catalogue or search; it is replaced", directory)
    names = [column.name for column in towers.inputs if column.name in catalogue.names]
    if not names:
        expected = ", ".join(column.name for column in towers.inputs)
        raise ConfigError("items", f"got the columns {', '.join(catalogue.names)}, expected some of {expected}")
    index = ItemIndex(towers.items({name: catalogue.columns.column(name) for name in names}), spec=spec)
    if directory is not None:
        index.save(directory, source=source)
    return index


def _take(values: RawValues, places: Integers) -> RawValues:
    if isinstance(values, pa.Array | pa.ChunkedArray):
        return values.take(pa.array(places))
    return values[places] if isinstance(values, np.ndarray) else [values[place] for place in places.tolist()]
