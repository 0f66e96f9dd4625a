# SPDX-License-Identifier: Apache-2.0
"""Two towers for retrieval (Yi et al. 2019, "Sampling-bias-corrected neural modeling", RecSys)."""

from __future__ import annotations

from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from terarec.batch import Batch, select
from terarec.errors import ConfigError
from terarec.models.columns import collection, join, mlp
from terarec.nn.batch_ranks import BatchRanks, rows_of_all, sum_over
from terarec.spec import CategoricalColumn, DatasetSpec, TwoTowerSpec
from terarec.spec.checks import did_you_mean


class TowerVectors(NamedTuple):
    """Vectors of the towers for a batch.

    Attributes:
        user: float[B, vector_width].
        item: float[B, vector_width].
    """

    user: Tensor
    item: Tensor


class TwoTower(nn.Module):
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

    batch_ranks: BatchRanks | None = None
    """The processes that have a part of each batch, since the items of all samples are candidates of each query."""
    gives_probabilities: ClassVar[bool] = False
    """Whether scores are probabilities of the label; the in-batch softmax only orders the items of a user."""
    adds_up: ClassVar[bool] = True
    """Whether the loss of a rank is its part of that of the whole batch, and no mean over its own samples."""

    def __init__(
        self, spec: TwoTowerSpec, dataset: DatasetSpec, *, num_outputs: int | None = None, seed: int = 0
    ) -> None:
        super().__init__()
        outputs = num_outputs or len(dataset.labels)
        if outputs != 1:
            names = ", ".join(label.name for label in dataset.labels)
            raise ConfigError(
                "two_tower",
                f"got {outputs} labels ({names}) in data set {dataset.name!r}, expected 1: the samples with a label "
                "above 0 are the queries of its loss; choose one of them in the workflow's labels, and prepare again",
            )
        _check_columns(spec, dataset)
        generator = torch.Generator().manual_seed(seed)
        # The user's tower draws first: another order would change the initial weights of a seed.
        self.user = Tower(spec, spec.user, dataset, generator=generator, seed=seed)
        self.item = Tower(spec, spec.item, dataset, generator=generator, seed=seed)
        key = _item_key(spec, dataset)
        self.item_key = key.name
        self.is_cosine = spec.similarity == "cosine"
        self.temperature = spec.temperature
        self.frequency: ItemFrequency | None = None
        if spec.correct_sampling:
            self.frequency = ItemFrequency(key.rows, buckets=spec.frequency_buckets, decay=spec.frequency_decay)

    def forward(self, batch: Batch) -> TowerVectors:
        """Return both vectors of each sample."""
        return TowerVectors(self.user_vectors(batch), self.item_vectors(batch))

    def user_vectors(self, batch: Batch) -> Tensor:
        """Return the users' vectors float[B, vector_width], divided by the temperature; reads the user's columns only.

        The dot of one of them with one of `item_vectors` is the logit of the pair.
        """
        # On one side alone, as the dot of both vectors is the logit.
        return self._scaled(self.user(batch)) / self.temperature

    def item_vectors(self, batch: Batch) -> Tensor:
        """Return the items' vectors float[B, vector_width]; only the item's columns are read."""
        return self._scaled(self.item(batch))

    def output_logits(self, output: TowerVectors) -> Tensor:
        """Return the score of each sample's own user and item: float[B, 1]."""
        return (output.user * output.item).sum(1, keepdim=True)

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
        return in_batch_softmax(
            output.user,
            output.item,
            keys,
            log_q=log_q,
            queries=batch.label[:, 0] > 0,
            weights=batch.weight,
            ranks=self.batch_ranks,
        )

    def _scaled(self, vectors: Tensor) -> Tensor:
        return nn.functional.normalize(vectors, dim=1) if self.is_cosine else vectors


class Tower(nn.Module):
    """An MLP over some columns.

    Args:
        spec: Layers.
        names: Names of the columns.
        dataset: All columns.
        generator: Source of the initial weights.
        seed: Seed of the tables' initial weights.
    """

    _dense: Tensor

    def __init__(
        self,
        spec: TwoTowerSpec,
        names: tuple[str, ...],
        dataset: DatasetSpec,
        *,
        generator: torch.Generator,
        seed: int,
    ) -> None:
        super().__init__()
        columns = [column for column in dataset.categorical if column.name in names]
        dense = [index for index, column in enumerate(dataset.dense) if column.name in names]
        # Not persistent: the spec has the columns.
        self.register_buffer("_dense", torch.tensor(dense, dtype=torch.int64), persistent=False)
        self.embedding = collection(columns, spec.tables, width=spec.width, pooling=spec.pooling, seed=seed)
        in_width = len(dense) + spec.width * len(columns)
        self.mlp = mlp(spec, in_width, spec.hidden, spec.vector_width, generator)

    def forward(self, batch: Batch) -> Tensor:
        """Return the vectors float[B, vector_width]."""
        x = batch.dense.index_select(1, self._dense)
        if self.embedding is not None:
            x = join(x, self.embedding(batch.sparse).pooled)
        vectors: Tensor = self.mlp(x)
        return vectors


def _check_columns(spec: TwoTowerSpec, dataset: DatasetSpec) -> None:
    known = [*(column.name for column in dataset.dense), *(column.name for column in dataset.categorical)]
    for tower in ("user", "item"):
        for name in getattr(spec, tower):
            if name not in known:
                raise ConfigError(
                    "two_tower",
                    f"{tower}: data set {dataset.name!r} has no column {name!r}{did_you_mean(name, known)}, "
                    f"expected some of {', '.join(known)}",
                )


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
        weight = (1.0 / sightings).clamp_min(self.decay)
        passed = (self.num_batches - self.last_batch[cells]).float()
        self.interval[cells] = torch.lerp(self.interval[cells], passed, weight)
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


def in_batch_softmax(
    users: Tensor,
    items: Tensor,
    item_keys: Tensor,
    *,
    log_q: Tensor | None = None,
    queries: Tensor | None = None,
    weights: Tensor | None = None,
    ranks: BatchRanks | None = None,
) -> Tensor:
    """Return the in-batch sampled softmax with log-Q correction (Yi et al. 2019, RecSys, eq. 3 to 5).

    Sample i has the loss -log(exp(s_ii) / sum over j of exp(s_ij)) with s_ij = u_i . v_j - log q_j. The samples j whose
    item is that of i, except for i itself, are left out of the sum: they are not negatives.

    Args:
        users: float[B, D], the users' vectors divided by the temperature.
        items: float[B, D].
        item_keys: int64[B], which identify items.
        log_q: float[B], log of the probability that the item is in a batch; None for no correction. Of the samples of
            all `ranks`.
        queries: bool[B], the samples that have a loss; None for all. The items of the others are candidates, too.
        weights: float[B], factors of the samples' losses; None for ones.
        ranks: Processes that have a part of the batch each: candidates are the items of all, `users` and what has no
            other note the samples of this one. None for this one alone.

    Returns:
        The mean of the weighted losses over the queries, a scalar in nats; 0 where no sample is a query. Of several
        ranks each gets its own queries' part of the mean over all.
    """
    first, candidates = 0, item_keys
    if ranks is not None:
        items, first = rows_of_all(ranks, "items of an in-batch softmax", items)
        candidates, _ = rows_of_all(ranks, "keys of an in-batch softmax", item_keys)
    # (B, D) times (D, candidates) gives (B, candidates); in float32, as the sum over candidates is of many small terms.
    scores = users.float() @ items.float().t()
    if log_q is not None:
        # Frequent items come as negatives more often; uncorrected, their scores would be too low.
        scores = scores - log_q
    own = torch.arange(first, first + users.shape[0], device=users.device)[:, None]
    # The diagonal is the positive itself, even if other samples have the same item.
    is_same = (item_keys.unsqueeze(1) == candidates).scatter(1, own, False)
    scores = scores.masked_fill(is_same, -torch.inf)
    losses = scores.logsumexp(1) - scores.gather(1, own)[:, 0]
    if weights is not None:
        losses = losses * weights
    if queries is None and ranks is None:
        return losses.mean()
    # A product with 0 rather than a selection: the number of queries stays on the device.
    is_query = torch.ones_like(losses) if queries is None else queries.float()
    count = is_query.sum() if ranks is None else sum_over(ranks, "queries of an in-batch softmax", is_query.sum())
    return (losses * is_query).sum() / count.clamp_min(1)
