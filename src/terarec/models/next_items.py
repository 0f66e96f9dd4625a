# SPDX-License-Identifier: Apache-2.0
"""Models that reduce a history to one vector, whose dot with that of an item is its score: YouTubeDNN and Mult-VAE."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from terarec.batch import Batch, Jagged, select
from terarec.embedding import EmbeddingCollection
from terarec.embedding.output import PaddedKeys
from terarec.models.columns import (
    categorical_column,
    check_history,
    check_known,
    check_one_label,
    item_ids,
    join,
    mlp,
    one_key_bags,
    own_tables,
    owner,
    samples_of_keys,
    without_keys,
)
from terarec.models.retrieving import RetrievalModel
from terarec.nn import MLP
from terarec.nn.initializers import dense_distributions
from terarec.nn.losses import dots, sampled_softmax_loss
from terarec.nn.negatives import Candidates, Owned, Sampler
from terarec.spec import DatasetSpec, FeatureSpec, MultVAESpec, YouTubeDNNSpec


class NextItemVectors(NamedTuple):
    """Vectors of a batch.

    Attributes:
        user: float[B, W], of the histories.
        item: float[B, W], of the items.
        penalty: float[B], a further term of the loss of each sample; None for none.
    """

    user: Tensor
    item: Tensor
    penalty: Tensor | None = None


class NextItemModel(RetrievalModel):
    """A vector of a history and one of an item; the loss compares the scores of items for each history.

    Samples with a label above 0 have a loss. Drawn items are none of the sample's.

    Args:
        spec: Columns and loss.
        dataset: Columns, with one label.
        num_outputs: Number of outputs, which is 1; None for one a label.

    Raises:
        ConfigError: A column that is not there, a history of other ids, several outputs, or no second item.
    """

    def __init__(self, spec: YouTubeDNNSpec | MultVAESpec, dataset: DatasetSpec, *, num_outputs: int | None) -> None:
        super().__init__()
        check_one_label(spec.kind, dataset, num_outputs)
        check_history(spec.kind, "", spec.item, spec.history, dataset)
        item = categorical_column(spec.kind, "item", spec.item, dataset, one_key=True)
        self.item_key, self.history = spec.item, spec.history
        self.user_columns, self.item_columns = (spec.history,), (spec.item,)
        self.first_item, self.num_items = item_ids(spec.kind, item, dataset)
        self.missing = dataset.missing_key(spec.history)
        self._loss = spec.loss
        self.sampler = Sampler(spec.negatives, self.first_item, self.num_items, where=f"{spec.kind}: negatives")

    def vectors_of_items(self, keys: Tensor) -> Tensor:
        """Return the vectors float[n, W] of any items int64[n]."""
        raise NotImplementedError

    def targets(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the samples and the keys that the loss is over, in training; in evaluation that of each sample."""
        return self._items(batch)

    def training_loss(self, output: NextItemVectors, batch: Batch) -> Tensor:
        """Return the mean loss over the samples with a label above 0 and an item, a scalar in nats."""
        samples, keys = self.targets(batch) if self.training else self._items(batch)
        users = output.user.float()
        losses = (
            self._of_all(users, samples, keys)
            if self._loss == "softmax"
            else self._of_drawn(users, samples, keys, batch)
        )
        # Of the items of a sample the losses are added up: the multinomial likelihood of all.
        of_samples = torch.zeros(batch.batch_size, device=losses.device).index_add(0, samples, losses)
        if output.penalty is not None:
            of_samples = of_samples + output.penalty
        _, items = self._items(batch)
        counts = (batch.label[:, 0] > 0) & (items >= self.first_item)
        return self.mean_loss(of_samples, counts, batch.weight)

    def _of_all(self, users: Tensor, samples: Tensor, keys: Tensor) -> Tensor:
        """Return the cross entropy float32[T] of each of the keys among all items."""
        every = torch.arange(self.first_item, self.num_items, device=users.device)
        logits = dots(users, self.vectors_of_items(every))
        classes = (keys - self.first_item).clamp(0, len(every) - 1)
        return logits.logsumexp(1)[samples] - logits[samples, classes]

    def _of_drawn(self, users: Tensor, samples: Tensor, keys: Tensor, batch: Batch) -> Tensor:
        """Return the cross entropy float32[T] of each of the keys among drawn items, which all samples share."""
        # Of all that is predicted: a key that no draw can give has no probability to correct its score by.
        items = keys[keys >= self.first_item]
        if self.training:
            self.sampler.observe(keys[(batch.label[:, 0] > 0)[samples] & (keys >= self.first_item)])
        items = self.sampler.items_of_batch(items)
        drawn, log_q = self.sampler.shared(Candidates(batch=items), keys.device, self.draws())
        jagged = select(batch.sparse, (self.history, self.item_key))
        owned = Owned(samples_of_keys(jagged), jagged.keys, self.num_items)
        is_taken = owned.has(torch.arange(batch.batch_size, device=keys.device).unsqueeze(1), drawn)
        others = dots(users, self.vectors_of_items(drawn))
        own = (users[samples] * self.vectors_of_items(keys).float()).sum(1)
        own_log_q = self.sampler.log_probability(keys.clamp(min=self.first_item), items)
        return sampled_softmax_loss(own, others[samples], own_log_q=own_log_q, log_q=log_q, is_taken=is_taken[samples])

    def _items(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the numbers of the samples, and their items int64[B]."""
        keys = select(batch.sparse, (self.item_key,)).keys
        return torch.arange(batch.batch_size, device=keys.device), keys

    def without_missing(self, batch: Batch) -> Jagged:
        """Return the keys of a batch without missing values in its histories."""
        return cast(Jagged, without_keys(batch.sparse, {self.history: self.missing}))


class YouTubeDNN(NextItemModel):
    """An MLP over the mean of the history's vectors and further columns of the user.

    The history shares the item's table (Covington et al. 2016, "Deep neural networks for YouTube recommendations").

    Arguments and errors are those of `NextItemModel`, and for a column of the user that is not there; `seed` is that of
    the initial weights.
    """

    _dense: Tensor

    def __init__(
        self, spec: YouTubeDNNSpec, dataset: DatasetSpec, *, num_outputs: int | None = None, seed: int = 0
    ) -> None:
        super().__init__(spec, dataset, num_outputs=num_outputs)
        check_known(spec.kind, "user", spec.user, dataset)
        self.spec = spec
        self.user_columns = (spec.history, *spec.user)
        dense = [index for index, column in enumerate(dataset.dense) if column.name in spec.user]
        # Not persistent: the spec has the columns.
        self.register_buffer("_dense", torch.tensor(dense, dtype=torch.int64), persistent=False)
        of_item = owner(spec.item, spec.tables)
        others = [column for column in dataset.categorical if column.name in spec.user]
        self.embedding = EmbeddingCollection(
            own_tables(
                [column for column in dataset.categorical if column.name == spec.item or column in others],
                spec.tables,
                width=spec.width,
            ),
            [
                FeatureSpec(name=spec.item, table=of_item, pooling="sum"),
                FeatureSpec(name=spec.history, table=of_item, pooling="mean"),
                *(FeatureSpec(name=c.name, table=owner(c.name, spec.tables), pooling=spec.pooling) for c in others),
            ],
            seed=seed,
        )
        self.names = tuple(feature.name for feature in self.embedding.features)
        generator = torch.Generator().manual_seed(seed)
        self.mlp = mlp(spec, len(dense) + spec.width * (1 + len(others)), spec.hidden, spec.width, generator)

    def forward(self, batch: Batch) -> NextItemVectors:
        """Return the vectors of users, divided by the temperature, and of items."""
        pooled = self.embedding(self.without_missing(batch)).pooled
        width = self.spec.width
        user = self.mlp(join(batch.dense.index_select(1, self._dense), pooled[:, width:]))
        return NextItemVectors(self._scaled(user) / self.spec.temperature, self._scaled(pooled[:, :width]))

    def vectors_of_items(self, keys: Tensor) -> Tensor:
        """Return the vectors float[n, W] of any items int64[n]."""
        pooled = self.embedding(one_key_bags(self.names, self.item_key, keys)).pooled
        return self._scaled(pooled[:, : self.spec.width])

    def _scaled(self, vectors: Tensor) -> Tensor:
        return normalize(vectors, dim=1) if self.spec.similarity == "cosine" else vectors


ENCODER_SUFFIX, BIAS_SUFFIX = ".encoder", ".bias"


class MultVAE(NextItemModel):
    """A variational autoencoder of the items of a user (Liang et al. 2018, arXiv 1802.05814).

    The encoder reads the history, the sum of its vectors divided by the root of its length; the likelihood is that of
    the history and of the item. The first layer of the encoder and the last one of the decoder are tables. A score is
    the logit of an item for the mean of the latent vector.

    Attributes:
        updates: Number of batches that were trained, by which the factor of the divergence rises.

    Arguments and errors are those of `NextItemModel`; `seed` is that of the initial weights.
    """

    updates: Tensor

    def __init__(
        self, spec: MultVAESpec, dataset: DatasetSpec, *, num_outputs: int | None = None, seed: int = 0
    ) -> None:
        super().__init__(spec, dataset, num_outputs=num_outputs)
        self.spec = spec
        width, item = spec.hidden[0], spec.item
        rows = next(column.rows for column in dataset.categorical if column.name == item)
        encoder = spec.tables.shared.get(spec.history, item + ENCODER_SUFFIX)
        self.embedding = EmbeddingCollection(
            [spec.tables.table(name, rows=rows, width=width) for name in dict.fromkeys((item, encoder))],
            [
                FeatureSpec(name=item, table=item, pooling="sum"),
                FeatureSpec(name=spec.history, table=encoder, pooling="sqrtn"),
            ],
            seed=seed,
        )
        self.biases = EmbeddingCollection(
            [spec.tables.table(item + BIAS_SUFFIX, rows=rows, width=1, initializer="zeros")],
            [FeatureSpec(name=item, table=item + BIAS_SUFFIX, pooling="sum")],
            seed=seed,
        )
        generator = torch.Generator().manual_seed(seed)
        initial = dense_distributions("xavier_normal")
        self.first_bias = nn.Parameter(torch.zeros(width))
        self.encoder = MLP(
            width, (*spec.hidden[1:], 2 * spec.latent), generator=generator, initial=initial, activation="tanh"
        )
        self.decoder = MLP(
            spec.latent,
            spec.hidden[::-1],
            generator=generator,
            relus=(True,) * len(spec.hidden),
            initial=initial,
            activation="tanh",
        )
        self.register_buffer("updates", torch.zeros((), dtype=torch.int64))

    def forward(self, batch: Batch) -> NextItemVectors:
        """Return the vectors of users and items; in training the divergence too."""
        jagged = self.without_missing(batch)
        keys, factor = (jagged, None) if isinstance(jagged, PaddedKeys) else self._kept(jagged)
        pooled = self.embedding(keys).pooled
        width = self.spec.hidden[0]
        row, read = pooled[:, :width], pooled[:, width:]
        if factor is not None:
            read = read * factor.unsqueeze(1)
        hidden = torch.tanh(read + self.first_bias)
        mean, log_variance = self.encoder(hidden).chunk(2, dim=1)
        latent, penalty = mean, None
        if self.training:
            latent = mean + torch.randn_like(mean) * (log_variance / 2).exp()
            divergence = (mean.square() + log_variance.exp() - 1 - log_variance).float().sum(1) / 2
            penalty = divergence * self.factor()
        decoded = self.decoder(latent)
        # The last one is the factor of the bias.
        user = torch.cat([decoded, torch.ones_like(decoded[:, :1])], dim=1)
        return NextItemVectors(user, torch.cat([row, self.biases(keys).pooled], dim=1), penalty)

    def factor(self) -> Tensor:
        """Return the factor of the divergence in this step, a scalar."""
        share = (self.updates + 1) / max(1, self.spec.anneal_steps)
        return share.clamp(max=1.0) * self.spec.beta

    def training_loss(self, output: NextItemVectors, batch: Batch) -> Tensor:
        """Return the mean over samples of the negative likelihood and the weighted divergence; see `NextItemModel`."""
        loss = super().training_loss(output, batch)
        if self.training:
            self.updates += 1
        return loss

    def targets(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the samples and keys of all items of the histories, and of the items."""
        jagged = select(self.without_missing(batch), (self.history, self.item_key))
        is_item = jagged.keys >= self.first_item
        return samples_of_keys(jagged)[is_item], jagged.keys[is_item]

    def vectors_of_items(self, keys: Tensor) -> Tensor:
        """Return the vectors float[n, W] of any items int64[n]."""
        jagged = one_key_bags((self.item_key, self.history), self.item_key, keys)
        rows = self.embedding(jagged).pooled[:, : self.spec.hidden[0]]
        return torch.cat([rows, self.biases(jagged).pooled], dim=1)

    def _kept(self, jagged: Jagged) -> tuple[Jagged, Tensor | None]:
        """Return the keys, in training without those that are left out, and factors float32[B] in place of these."""
        jagged = select(jagged, (self.item_key, self.history))
        if not self.training or not self.spec.dropout:
            return jagged, None
        size = jagged.batch_size
        is_kept = torch.rand(jagged.keys.shape, device=jagged.keys.device) >= self.spec.dropout
        is_kept[: int(jagged.offsets[size])] = True  # the items
        ends = torch.cat([jagged.offsets[:1], is_kept.cumsum(0)])
        keys = dataclasses.replace(
            jagged, keys=jagged.keys[is_kept], offsets=ends[jagged.offsets], weights=None, ends=None
        )
        # The sum of the kept ones is divided by the root of their number, and not by that of all.
        kept, every = (offsets[size:].diff().float() for offsets in (keys.offsets, jagged.offsets))
        return keys, (kept / every.clamp(min=1)).sqrt() / (1.0 - self.spec.dropout)
