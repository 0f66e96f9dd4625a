# SPDX-License-Identifier: Apache-2.0
"""Mult-VAE (Liang et al. 2018, arXiv 1802.05814)."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor, nn

from terarec.batch import Batch, Jagged, select
from terarec.embedding import EmbeddingCollection
from terarec.embedding.output import PaddedKeys
from terarec.models.columns import one_key_bags, samples_of_keys
from terarec.models.next_items import NextItemModel, NextItemVectors
from terarec.nn import MLP
from terarec.nn.initializers import dense_distributions
from terarec.spec import DatasetSpec, FeatureSpec, MultVAESpec
from terarec.spec.dataset import FIRST_ID

ENCODER_SUFFIX, BIAS_SUFFIX = ".encoder", ".bias"


class MultVAE(NextItemModel):
    """A variational autoencoder of the items of a user.

    The encoder reads the history, the sum of its vectors divided by the root of its length; the likelihood is that of
    the history and of the item. The first layer of the encoder and the last one of the decoder are tables. A score is
    the logit of an item for the mean of the latent vector.

    Attributes:
        updates: Number of batches that were trained, by which the factor of the divergence rises.

    Args:
        spec: Columns, layers and loss.
        dataset: Columns, with one label.
        num_outputs: Number of outputs, which is 1; None for one a label.
        seed: Seed of the initial weights.

    Raises:
        ConfigError: See `NextItemModel`.
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
                FeatureSpec(name=spec.history, table=encoder, pooling="sum"),
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
        keys, lengths = self._kept(jagged)
        pooled = self.embedding(keys).pooled
        width = self.spec.hidden[0]
        row, read = pooled[:, :width], pooled[:, width:]
        factor = lengths.clamp(min=1).to(read.dtype).rsqrt()
        if self.training:
            factor = factor / (1.0 - self.spec.dropout)
        hidden = torch.tanh(read * factor.unsqueeze(1) + self.first_bias)
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
        is_item = jagged.keys >= FIRST_ID
        return samples_of_keys(jagged)[is_item], jagged.keys[is_item]

    def vectors_of_items(self, keys: Tensor) -> Tensor:
        """Return the vectors float[n, W] of any items int64[n]."""
        jagged = one_key_bags((self.item_key, self.history), self.item_key, keys)
        rows = self.embedding(jagged).pooled[:, : self.spec.hidden[0]]
        return torch.cat([rows, self.biases(jagged).pooled], dim=1)

    def _kept(self, jagged: Jagged | PaddedKeys) -> tuple[Jagged, Tensor]:
        """Return the keys, in training without those that are left out, and the lengths of the histories int64[B]."""
        if isinstance(jagged, PaddedKeys):  # in an exported program
            return jagged, jagged.masks[self.history].sum(1)  # type: ignore[return-value]
        jagged = select(jagged, (self.item_key, self.history))
        size = jagged.batch_size
        lengths = jagged.offsets[size:].diff()
        if not self.training or not self.spec.dropout:
            return jagged, lengths
        is_kept = torch.rand(jagged.keys.shape, device=jagged.keys.device) >= self.spec.dropout
        is_kept[: int(jagged.offsets[size])] = True  # the items
        ends = torch.cat([jagged.offsets[:1], is_kept.cumsum(0)])
        keys = dataclasses.replace(
            jagged, keys=jagged.keys[is_kept], offsets=ends[jagged.offsets], weights=None, ends=None
        )
        return keys, lengths
