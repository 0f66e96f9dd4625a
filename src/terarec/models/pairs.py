# SPDX-License-Identifier: Apache-2.0
"""Models of a user and an item whose losses draw other items: MF-BPR (arXiv 1205.2618) and NCF (arXiv 1708.05031)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, cast

import torch
from torch import Tensor
from torch.nn.functional import softplus
from typing_extensions import override

from terarec.batch import Batch, feature_keys, select
from terarec.embedding import EmbeddingCollection
from terarec.embedding.output import PaddedKeys
from terarec.models.columns import (
    categorical_column,
    check_one_label,
    check_same_ids,
    item_ids,
    one_key_bags,
    own_tables,
    owner,
    without_keys,
)
from terarec.models.contract import device_of
from terarec.models.retrieving import Pairs, RetrievalModel
from terarec.nn import MLP
from terarec.nn.dense import new_linear
from terarec.nn.initializers import dense_distributions, xavier_uniform
from terarec.nn.losses import bpr_loss, sampled_softmax_loss
from terarec.nn.negatives import Candidates, Owned, Sampler
from terarec.spec import DatasetSpec, FeatureSpec, MFBPRSpec, NCFSpec
from terarec.spec.retrieval import PairSpec


class PairVectors(NamedTuple):
    """Vectors of a batch.

    Attributes:
        user: float[B, W].
        item: float[B, W].
        logits: float[B, 1], the scores of both.
    """

    user: Tensor
    item: Tensor
    logits: Tensor


class PairModel(RetrievalModel):
    """A score of a vector of the user and one of the item.

    Samples with a label above 0 are positive. Their losses compare their item with drawn ones, none of which the user
    is known to have: in the batch, and in what `know_positives` was given.

    Args:
        spec: Columns and loss.
        dataset: Columns, with one label.
        width: Width W of the vectors.
        kind: Kind of the model.
        num_outputs: Number of outputs, which is 1; None for one a label.
        seed: Seed of the initial weights.

    Raises:
        ConfigError: A column that is not there or has lists, several outputs, or negatives that the items cannot give.
    """

    def __init__(
        self, spec: PairSpec, dataset: DatasetSpec, *, width: int, kind: str, num_outputs: int | None, seed: int
    ) -> None:
        super().__init__()
        check_one_label(kind, dataset, num_outputs)
        user = categorical_column(kind, "user", spec.user, dataset, one_key=True)
        item = categorical_column(kind, "item", spec.item, dataset, one_key=True)
        self.spec = spec
        self.user_key, self.item_key = spec.user, spec.item
        self.user_columns, self.item_columns = (spec.user,), (spec.item,)
        self.first_item, self.num_items = item_ids(kind, item, dataset)
        self.sampler = Sampler(spec.negatives, self.first_item, self.num_items, where=f"{kind}: negatives")
        self._missing: dict[str, int] = {}
        if spec.negatives.column is not None:
            shown = categorical_column(kind, "negatives.column", spec.negatives.column, dataset, one_key=False)
            check_same_ids(kind, "negatives.column", shown, item)
            self._missing = {shown.name: dataset.missing_key(shown.name)}
        self.embedding = EmbeddingCollection(
            own_tables([user, item], spec.tables, width=width),
            [FeatureSpec(name=name, table=owner(name, spec.tables), pooling="sum") for name in (spec.user, spec.item)],
            seed=seed,
        )
        self.width = width
        self._users: Tensor | None = None  # the distinct ones of any keys
        self._known: Owned | None = None
        self._has_user_ids = user.rows is not None

    def forward(self, batch: Batch) -> PairVectors:
        """Return the vectors of users and items, and their scores."""
        pooled = self.embedding(batch.sparse).pooled
        user, item = pooled[:, : self.width], pooled[:, self.width :]
        return PairVectors(user, item, self.pair_scores(user, item.unsqueeze(1)))

    def pair_scores(self, users: Tensor, items: Tensor) -> Tensor:
        """Return the scores float[n, K] of K items for each of n users: float[n, W], float[n or 1, K, W]."""
        raise NotImplementedError

    def vectors_of_items(self, keys: Tensor) -> Tensor:
        """Return the vectors float[n, W] of any items int64[n]."""
        pooled: Tensor = self.embedding(one_key_bags((self.user_key, self.item_key), self.item_key, keys)).pooled
        return pooled[:, self.width :]

    @override
    def output_logits(self, output: Pairs) -> Tensor:
        return cast(PairVectors, output).logits

    def learn_positives(self, batches: Iterable[Batch]) -> None:
        """Know the samples with a label above 0 in all batches of the train split: 8 bytes of memory each."""
        users: list[Tensor] = []
        items: list[Tensor] = []
        for batch in batches:
            is_positive = batch.label[:, 0] > 0
            users.append(feature_keys(batch, self.user_key)[is_positive])
            items.append(feature_keys(batch, self.item_key)[is_positive])
        if users:
            device = device_of(self)
            self.know_positives(torch.cat(users).to(device), torch.cat(items).to(device))

    def know_positives(self, users: Tensor, items: Tensor) -> None:
        """Let no negative be one of these items int64[m] of users int64[m], such as those of the train split."""
        if not self._has_user_ids:
            self._users, users = torch.unique(users, return_inverse=True)
        self._known = Owned(users, items, self.num_items)

    def training_loss(self, output: PairVectors, batch: Batch) -> Tensor:
        """Return the mean loss over the positive samples, a scalar in nats.

        Samples with a label of 0 have the loss -log(1 - p) with "bce", and none with the others.
        """
        spec, items = self.spec, feature_keys(batch, self.item_key)
        is_item = items >= self.first_item
        is_positive = is_item & (batch.label[:, 0] > 0)
        owners = self._owners(batch)
        owned = [*self._known_items, Owned(owners[is_positive], items[is_positive], self.num_items)]
        if self.training:
            self.sampler.observe(items[is_positive])
        candidates = self.sampler.items_of_batch(items[is_item])
        generator, own = self.draws(), output.logits[:, 0].float()
        counts = is_positive
        if spec.loss == "sampled_softmax":
            keys, log_q = self.sampler.shared(Candidates(batch=candidates), items.device, generator)
            others = self.pair_scores(output.user, self.vectors_of_items(keys).unsqueeze(0)).float()
            is_taken = torch.zeros_like(others, dtype=torch.bool)
            for some in owned:
                is_taken |= some.has(owners.unsqueeze(1), keys)
            own_log_q = self.sampler.log_probability(items.clamp(min=self.first_item), candidates)
            losses = sampled_softmax_loss(own, others, own_log_q=own_log_q, log_q=log_q, is_taken=is_taken)
        else:
            others, is_valid = self._drawn(output, batch, owners, owned, candidates, generator)
            if spec.loss == "bpr":
                losses = bpr_loss(own, others, is_valid)
                counts = counts & is_valid.any(1)
            else:
                counts = is_item
                drawn = (softplus(others) * is_valid).sum(1) * is_positive
                label = batch.label[:, 0]
                losses = label * softplus(-own) + (1 - label) * softplus(own) + drawn
        return self.mean_loss(losses, counts, batch.weight)

    @property
    def _known_items(self) -> list[Owned]:
        # Not in an evaluation: a loaded model does not know them, and has the same loss of the same samples.
        return [self._known] if self.training and self._known is not None else []

    def _owners(self, batch: Batch) -> Tensor:
        """Return the numbers of the users int64[B]."""
        users = feature_keys(batch, self.user_key)
        if self._has_user_ids:
            return users
        if self._users is None or not len(self._users) or not self._known_items:
            _, numbers = torch.unique(users, return_inverse=True)
            return cast(Tensor, numbers)
        places = torch.searchsorted(self._users, users).clamp(max=len(self._users) - 1)
        # Users who are not in the train split have no known items; they have one number.
        return torch.where(self._users[places] == users, places, len(self._users))

    def _drawn(
        self,
        output: PairVectors,
        batch: Batch,
        owners: Tensor,
        owned: list[Owned],
        items: Tensor,
        generator: torch.Generator | None,
    ) -> tuple[Tensor, Tensor]:
        """Return the scores of drawn items float32[B, count], and which of them count."""
        count, size = self.spec.negatives.count, batch.batch_size
        samples = torch.arange(size, device=owners.device).repeat_interleave(count)
        users = output.user.index_select(0, samples)

        def score(keys: Tensor) -> Tensor:
            vectors = self.vectors_of_items(keys.flatten()).view(*keys.shape, self.width)
            return self.pair_scores(users, vectors)

        lists = None
        if self._missing:
            shown = without_keys(select(batch.sparse, tuple(self._missing)), self._missing)
            assert not isinstance(shown, PaddedKeys)
            lists = (shown.keys, shown.offsets)
        candidates = Candidates(batch=items, lists=lists, samples=samples, score=score)
        keys, is_valid = self.sampler.draw(owners.index_select(0, samples), owned, candidates, generator)
        scores = score(keys.unsqueeze(1)).float()
        return scores.view(size, count), is_valid.view(size, count)


class MFBPR(PairModel):
    """Matrix factorization, trained by BPR: the dot of both vectors (Rendle et al. 2009, arXiv 1205.2618).

    Arguments and errors are those of `PairModel`.
    """

    def __init__(self, spec: MFBPRSpec, dataset: DatasetSpec, *, num_outputs: int | None = None, seed: int = 0) -> None:
        super().__init__(spec, dataset, width=spec.width, kind=spec.kind, num_outputs=num_outputs, seed=seed)

    def pair_scores(self, users: Tensor, items: Tensor) -> Tensor:
        """Return the dots; see `PairModel`."""
        return (users.unsqueeze(1) * items).sum(2)


class NCF(PairModel):
    """Neural collaborative filtering: a product of vectors, an MLP, or both (He et al. 2017, arXiv 1708.05031).

    Arguments and errors are those of `PairModel`.
    """

    scores_are_dots = False

    def __init__(self, spec: NCFSpec, dataset: DatasetSpec, *, num_outputs: int | None = None, seed: int = 0) -> None:
        product_width = 0 if spec.form == "mlp" else spec.width
        mlp_width = 0 if spec.form == "gmf" else spec.mlp_width or spec.width
        super().__init__(
            spec, dataset, width=product_width + mlp_width, kind=spec.kind, num_outputs=num_outputs, seed=seed
        )
        generator = torch.Generator().manual_seed(seed)
        self.product_width = product_width
        self.mlp: MLP | None = None
        out_width = self.product_width
        if spec.form != "gmf":
            self.mlp = MLP(
                2 * mlp_width,
                spec.hidden,
                generator=generator,
                relus=(True,) * len(spec.hidden),
                dropout=spec.dropout,
                initial=dense_distributions("xavier_uniform"),
                activation=spec.activation,
            )
            out_width += spec.hidden[-1]
        # Without a bias, as in the paper; the losses that compare scores would not move it.
        self.output = new_linear(out_width, 1, weight=xavier_uniform(out_width, 1), bias=None, generator=generator)

    def pair_scores(self, users: Tensor, items: Tensor) -> Tensor:
        """Return the logits; see `PairModel`."""
        users = users.unsqueeze(1).expand(-1, items.shape[1], -1)
        items = items.expand_as(users)
        width = self.product_width
        parts = [users[..., :width] * items[..., :width]] if width else []
        if self.mlp is not None:
            both = torch.cat([users[..., width:], items[..., width:]], dim=2)
            parts.append(self.mlp(both.flatten(0, 1)).unflatten(0, both.shape[:2]))
        scores: Tensor = self.output(torch.cat(parts, dim=2)).squeeze(2)
        return scores
