# SPDX-License-Identifier: Apache-2.0
"""Two towers for retrieval (Yi et al. 2019, "Sampling-bias-corrected neural modeling", RecSys)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from terarec.batch import Batch, select
from terarec.embedding import EmbeddingCollection
from terarec.errors import ConfigError
from terarec.models.columns import check_known, check_one_label, collection, join, mlp, with_empty_bags
from terarec.models.retrieving import RetrievalModel
from terarec.nn.batch_ranks import rows_of_all
from terarec.nn.losses import in_batch_softmax
from terarec.spec import CategoricalColumn, DatasetSpec, TwoTowerSpec


class TowerVectors(NamedTuple):
    """Vectors of the towers for a batch.

    Attributes:
        user: float[B, vector_width].
        item: float[B, vector_width].
    """

    user: Tensor
    item: Tensor


class TwoTower(RetrievalModel):
    """A vector of the user and one of the item, whose dot is the score.

    ``forward`` gives both vectors; ``output_logits`` makes scores of them, ``training_loss`` the in-batch softmax, so
    that one pass serves both. Samples with a label above 0 are the queries of the loss; the items of all samples are
    its candidates.

    Args:
        spec: Columns and layers of the towers.
        dataset: Columns, with one label.
        num_outputs: Number of outputs, which is 1; None for one a label.
        seed: Seed of the initial weights.

    Raises:
        ConfigError: A column that is not there, an item key that is none, or several outputs.
    """

    def __init__(
        self, spec: TwoTowerSpec, dataset: DatasetSpec, *, num_outputs: int | None = None, seed: int = 0
    ) -> None:
        super().__init__()
        check_one_label(spec.kind, dataset, num_outputs)
        check_known(spec.kind, "user", spec.user, dataset)
        check_known(spec.kind, "item", spec.item, dataset)
        self.user_columns, self.item_columns = spec.user, spec.item
        generator = torch.Generator().manual_seed(seed)
        user, item = ([c for c in dataset.categorical if c.name in names] for names in (spec.user, spec.item))
        self.embedding: EmbeddingCollection | None = None
        if any((name in spec.user) != (other in spec.user) for name, other in spec.tables.shared.items()):
            # A table of both towers: these have none of their own, so that the keys of a batch are looked up once.
            self.embedding = collection([*user, *item], spec.tables, width=spec.width, pooling=spec.pooling, seed=seed)
        has_tables = self.embedding is None
        # The user's tower draws first: another order would change the initial weights of a seed.
        self.user = Tower(spec, spec.user, dataset, has_tables=has_tables, generator=generator, seed=seed)
        self.item = Tower(spec, spec.item, dataset, has_tables=has_tables, generator=generator, seed=seed)
        key = _item_key(spec, dataset)
        self.item_key = key.name
        self.is_cosine = spec.similarity == "cosine"
        self.temperature = spec.temperature
        self.frequency: ItemFrequency | None = None
        if spec.correct_sampling:
            self.frequency = ItemFrequency(key.rows, buckets=spec.frequency_buckets, decay=spec.frequency_decay)

    def forward(self, batch: Batch) -> TowerVectors:
        """Return both vectors of each sample."""
        if self.embedding is None:
            return TowerVectors(self.user_vectors(batch), self.item_vectors(batch))
        pooled = self.embedding(batch.sparse).pooled
        user, item = pooled.split([self.user.pooled_width, self.item.pooled_width], dim=1)
        return TowerVectors(self._user_vectors(batch, user), self._item_vectors(batch, item))

    def user_vectors(self, batch: Batch) -> Tensor:
        """Return the users' vectors float[B, vector_width], divided by the temperature; reads the user's columns only.

        The dot of one of them with one of `item_vectors` is the logit of the pair.
        """
        return self._user_vectors(batch, self._pooled(self.user, batch))

    def item_vectors(self, batch: Batch) -> Tensor:
        """Return the items' vectors float[B, vector_width]; only the item's columns are read."""
        return self._item_vectors(batch, self._pooled(self.item, batch))

    def training_loss(self, output: TowerVectors, batch: Batch) -> Tensor:
        """Return the in-batch softmax, a scalar in nats; in training mode the items' frequencies are updated first."""
        keys = select(batch.sparse, [self.item_key]).keys
        if keys.shape[0] != batch.batch_size:
            raise ConfigError(
                "two_tower",
                f"got {keys.shape[0]} keys of {self.item_key!r} for {batch.batch_size} samples, expected one for each",
            )
        log_q = None
        if self.frequency is not None:
            every = keys if self.batch_ranks is None else rows_of_all(self.batch_ranks, "keys of items", keys)[0]
            if self.training:
                # Keys of all ranks, so that the estimate, which is a buffer, is the same on each.
                self.frequency.update(every)
            log_q = self.frequency.log_probability(every)
        losses = in_batch_softmax(output.user, output.item, keys, log_q=log_q, ranks=self.batch_ranks)
        return self.mean_loss(losses, batch.label[:, 0] > 0, batch.weight)

    def _user_vectors(self, batch: Batch, pooled: Tensor | None) -> Tensor:
        # On one side alone, as the dot of both vectors is the logit.
        return self._scaled(self.user(batch, pooled)) / self.temperature

    def _item_vectors(self, batch: Batch, pooled: Tensor | None) -> Tensor:
        return self._scaled(self.item(batch, pooled))

    def _pooled(self, tower: Tower, batch: Batch) -> Tensor | None:
        """Return the vectors of a tower's own columns in the tables of both; None where it has tables of its own."""
        if self.embedding is None:
            return None
        names = [feature.name for feature in self.embedding.features]
        pooled: Tensor = self.embedding(with_empty_bags(batch.sparse, tower.names, names)).pooled
        first = names.index(tower.names[0]) * tower.width
        return pooled[:, first : first + tower.pooled_width]

    def _scaled(self, vectors: Tensor) -> Tensor:
        return nn.functional.normalize(vectors, dim=1) if self.is_cosine else vectors


class Tower(nn.Module):
    """An MLP over some columns.

    Without tables of its own, those of both towers give its vectors.
    """

    _dense: Tensor

    def __init__(
        self,
        spec: TwoTowerSpec,
        names: tuple[str, ...],
        dataset: DatasetSpec,
        *,
        has_tables: bool,
        generator: torch.Generator,
        seed: int,
    ) -> None:
        super().__init__()
        columns = [column for column in dataset.categorical if column.name in names]
        dense = [index for index, column in enumerate(dataset.dense) if column.name in names]
        # Not persistent: the spec has the columns.
        self.register_buffer("_dense", torch.tensor(dense, dtype=torch.int64), persistent=False)
        self.embedding: EmbeddingCollection | None = None
        if has_tables:
            self.embedding = collection(columns, spec.tables, width=spec.width, pooling=spec.pooling, seed=seed)
        self.names = tuple(column.name for column in columns)
        self.width, self.pooled_width = spec.width, spec.width * len(columns)
        self.mlp = mlp(spec, len(dense) + self.pooled_width, spec.hidden, spec.vector_width, generator)

    def forward(self, batch: Batch, pooled: Tensor | None) -> Tensor:
        """Return the vectors float[B, vector_width]; `pooled` are those of its columns where it has no tables."""
        x = batch.dense.index_select(1, self._dense)
        if self.embedding is not None:
            pooled = self.embedding(batch.sparse).pooled
        if pooled is not None:
            x = join(x, pooled)
        vectors: Tensor = self.mlp(x)
        return vectors


def _item_key(spec: TwoTowerSpec, dataset: DatasetSpec) -> CategoricalColumn:
    """Return the column that identifies items."""
    columns = {column.name: column for column in dataset.categorical if column.name in spec.item}
    wanted = spec.item_key or next(iter(name for name in spec.item if name in columns), None)
    if wanted is None or wanted not in columns or columns[wanted].hotness > 1:
        single = [name for name, column in columns.items() if column.hotness == 1]
        raise ConfigError(
            "two_tower: item_key",
            f"got {wanted!r}, expected a categorical column of one key a sample in item"
            + (f": {', '.join(single)}" if single else ""),
        )
    return columns[wanted]


_MULTIPLIER = 0x5851F42D4C957F2D  # odd, of Knuth's MMIX; its products' high bits depend on all bits of a key


class ItemFrequency(nn.Module):
    """Streaming estimate of the probability that an item is in a batch (Yi et al. 2019, RecSys, algorithm 2).

    A cell keeps the number of the last batch with its item and the mean interval between such batches; the probability
    is 1 / interval. The first intervals of a cell count alike, so that its estimate is exact counting; from
    1 / decay of them on, a new one counts `decay`, so that the estimate follows changes. The paper starts from a guess
    instead. The cells are buffers: checkpoints have them.

    Attributes:
        id_buffers: Names of the buffers with a cell for each item, to which a further training may add items.

    Args:
        num_items: Number of items, each of which has its own cell; None for any int64 keys.
        buckets: Number of cells for any keys; items that share one by their hash look more frequent.
        decay: Weight of a new interval.
    """

    last_batch: Tensor
    sightings: Tensor
    interval: Tensor
    num_batches: Tensor

    def __init__(self, num_items: int | None, *, buckets: int, decay: float) -> None:
        super().__init__()
        self.is_hashed = num_items is None
        self.decay = decay
        size = buckets if num_items is None else num_items
        self.id_buffers = () if self.is_hashed else ("last_batch", "sightings", "interval")
        self.register_buffer("last_batch", torch.zeros(size, dtype=torch.int64))
        self.register_buffer("sightings", torch.zeros(size, dtype=torch.int64))
        self.register_buffer("interval", torch.zeros(size))
        self.register_buffer("num_batches", torch.zeros((), dtype=torch.int64))

    def update(self, keys: Tensor) -> None:
        """Update with the items of a batch: int64[B], each counted once."""
        cells = self._cells(keys)
        self.num_batches += 1
        # A cell may occur often in `cells`; all of these writes have the same value.
        sightings = self.sightings[cells] + 1
        interval = self.interval[cells]
        # In the type of the cells, which `Module.double` changes.
        weight = (1.0 / sightings.to(interval.dtype)).clamp_min(self.decay)
        passed = (self.num_batches - self.last_batch[cells]).to(interval.dtype)
        self.interval[cells] = torch.lerp(interval, passed, weight)
        self.sightings[cells] = sightings
        self.last_batch[cells] = self.num_batches.expand_as(cells)

    def log_probability(self, keys: Tensor) -> Tensor:
        """Return float[B] for int64[B]; an unseen item counts as seen once in all batches so far."""
        interval = self.interval[self._cells(keys)]
        return -torch.where(interval > 0, interval, self.num_batches.clamp_min(1).float()).log()

    def _cells(self, keys: Tensor) -> Tensor:
        if not self.is_hashed:
            return keys
        # The product moves low bits up only: high bits of a key are first folded into the low half.
        mixed = (keys ^ (keys >> 32)) * _MULTIPLIER
        return (mixed >> 32).remainder(self.interval.shape[0])
