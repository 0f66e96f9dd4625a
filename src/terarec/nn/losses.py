# SPDX-License-Identifier: Apache-2.0
"""Losses of graphs, and the penalties on dense weights that belong to them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, cast

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, softplus
from typing_extensions import override

from terarec.nn.batch_ranks import BatchRanks, rows_of_all, sum_over
from terarec.nn.layer import Layer, LayerOption, TensorShape, choice, list_of, number


@dataclass(frozen=True, slots=True)
class Regularizer:
    """A term that a training step adds to its loss, over all dense weights (biases and the weights of norms included).

    Attributes:
        kind: "l1": strength / B sum |w|, gradient strength / B sign(w); "l2": strength / (2 B) sum w^2, gradient
            strength / B w. B is the batch size, as in HugeCTR on one GPU.
        strength: Lambda.
    """

    kind: Literal["l1", "l2"]
    strength: float

    def penalty(self, weights: Iterable[Tensor], batch_size: int) -> Tensor:
        """Return the term for `weights`, a scalar that autograd differentiates; 0 if there are none."""
        of_one = _absolute if self.kind == "l1" else _half_square
        terms = [of_one(weight) for weight in weights]
        total = torch.stack(terms).sum() if terms else torch.zeros(())
        # HugeCTR divides the penalty by the batch size, so that a run's strength carries over only with its batch size.
        return total * (self.strength / batch_size)


def _absolute(weight: Tensor) -> Tensor:
    return weight.abs().sum()


def _half_square(weight: Tensor) -> Tensor:
    return weight.square().sum() / 2


_REGULARIZER = (
    choice(
        "regularizer", "penalty on the dense weights that belongs to the loss", ("none", "l1", "l2"), default="none"
    ),
    number("strength", "lambda of the penalty", default=0.0, low=0.0),
)


def logistic_loss(logits: Tensor, labels: Tensor, weight: Tensor | None = None) -> Tensor:
    """Return the mean binary cross entropy, a scalar in nats.

    Args:
        logits: Logits [B, L] of any float type; the loss is computed in float32.
        labels: float32[B, L] in [0, 1].
        weight: float32[B], factors of the samples' losses; the mean is still over the number of samples.
    """
    return binary_cross_entropy_with_logits(logits.float(), labels, weight=_of_rows(weight))


def _of_rows(weight: Tensor | None) -> Tensor | None:
    return None if weight is None else weight.unsqueeze(1)


class Loss(Layer):
    """Base of the losses: ``forward(logit, label)`` is a scalar, the mean over the batch, and `predict` probabilities.

    ``forward(logit, label, weight)`` multiplies the loss of each sample by its weight, float32[B], before the mean.

    Attributes:
        regularizer: The penalty that its user adds for the weights of the model, or None.
    """

    OPTIONS: ClassVar[tuple[LayerOption, ...]] = _REGULARIZER
    BOTTOMS = (2, 2)

    def __init__(self, shapes: Sequence[TensorShape], *, regularizer: str, strength: float) -> None:
        super().__init__(())
        kind = cast(Literal["none", "l1", "l2"], regularizer)  # the option takes no other value
        self.regularizer = None if kind == "none" else Regularizer(kind, strength)

    def predict(self, logit: Tensor) -> Tensor:
        """Return probabilities, float32, of the logits' shape."""
        return logit.float().sigmoid()


class BinaryCrossEntropy(Loss):
    """Binary cross entropy of one logit."""

    KIND = "binary_cross_entropy"
    SHAPES = "logit [B, 1], label [B, 1] -> scalar"
    FORMULA = "mean of log(1 + exp(x)) - x y; prediction 1 / (1 + exp(-x))"

    def __init__(self, shapes: Sequence[TensorShape], *, regularizer: str, strength: float) -> None:
        good = shapes[0] == shapes[1] and shapes[0].dims == (1,)
        self.require(good, shapes, "a logit [B, 1] and a label [B, 1]")
        super().__init__(shapes, regularizer=regularizer, strength=strength)

    def forward(self, logit: Tensor, label: Tensor, weight: Tensor | None = None) -> Tensor:
        """Return the mean loss, a scalar, for float[B, 1] of logits and of labels."""
        return logistic_loss(logit, label, weight)


class CrossEntropy(Loss):
    """Cross entropy of two classes; a label of at least 1/2 names the second, and of two labels the last counts."""

    KIND = "cross_entropy"
    SHAPES = "logits [B, 2], label [B, 1] or [B, 2] -> scalar"
    FORMULA = "mean of -log softmax(x)[class]; prediction softmax(x)"

    def __init__(self, shapes: Sequence[TensorShape], *, regularizer: str, strength: float) -> None:
        logits, label = shapes
        good = logits.dims == (2,) and label.dims in ((1,), (2,)) and logits.rows == label.rows
        self.require(good, shapes, "logits [B, 2] and a label [B, 1] or [B, 2]")
        super().__init__(shapes, regularizer=regularizer, strength=strength)

    def forward(self, logit: Tensor, label: Tensor, weight: Tensor | None = None) -> Tensor:
        """Return the mean loss, a scalar, for logits float[B, 2] and labels float[B, 1], or [B, 2] for both classes."""
        # Labels are floats in every batch, and torch's function takes classes as integers.
        classes = (label[:, -1] >= 0.5).long()
        if weight is None:
            return cross_entropy(logit.float(), classes)
        return (cross_entropy(logit.float(), classes, reduction="none") * weight).mean()

    @override
    def predict(self, logit: Tensor) -> Tensor:
        return logit.float().softmax(1)


class MultiCrossEntropy(Loss):
    """Weighted binary cross entropies of several labels; a label below -1/2 is unknown and adds nothing."""

    KIND = "multi_cross_entropy"
    OPTIONS = (list_of(number("target_weights", "weight of each label")), *_REGULARIZER)
    SHAPES = "logits [B, d], labels [B, d] -> scalar"
    FORMULA = "sum of w_j (log(1 + exp(x)) - x y) over the known labels, over B d; prediction 1 / (1 + exp(-x))"

    _weights: Tensor

    def __init__(
        self, shapes: Sequence[TensorShape], *, target_weights: tuple[float, ...], regularizer: str, strength: float
    ) -> None:
        logits, labels = shapes
        self.require(logits == labels and len(logits.dims) == 1, shapes, "logits [B, d] and labels [B, d]")
        count = logits.dims[0]
        self.require(len(target_weights) == count, shapes, f"{count} weights", target_weights=target_weights)
        super().__init__(shapes, regularizer=regularizer, strength=strength)
        # A buffer, so that it moves with the model; not persistent, as the options have it.
        self.register_buffer("_weights", torch.tensor(target_weights), persistent=False)

    def forward(self, logit: Tensor, label: Tensor, weight: Tensor | None = None) -> Tensor:
        """Return the mean loss, a scalar, for float[B, d] of logits and of labels."""
        # Unknown labels, such as -1, get the weight 0, so that their terms vanish.
        weights = self._weights * (label >= -0.5)
        if weight is not None:
            weights = weights * weight.unsqueeze(1)
        return binary_cross_entropy_with_logits(logit.float(), label, weight=weights)


def bpr_loss(own: Tensor, others: Tensor, is_valid: Tensor) -> Tensor:
    """Return the mean of log(1 + exp(-(own - other))) over the other scores that count (Rendle et al. 2009, BPR-Opt).

    Args:
        own: float32[n].
        others: float32[n, K].
        is_valid: bool[n, K], which of these count.

    Returns:
        float32[n]; 0 where none counts.
    """
    losses = softplus(others - own.unsqueeze(1)) * is_valid
    return losses.sum(1) / is_valid.sum(1).clamp_min(1)


def sampled_softmax_loss(own: Tensor, others: Tensor, *, own_log_q: Tensor, log_q: Tensor, is_taken: Tensor) -> Tensor:
    """Return the cross entropy of the own item among drawn ones, corrected by the probabilities of the draws.

    The logits are s - log q, so that the expected loss nears that over all items (Bengio and Senecal 2008; Jean et al.
    2015, arXiv 1412.2007, eq. 9).

    Args:
        own: float32[n], scores of the own items.
        others: float32[n, N], those of drawn ones.
        own_log_q: float32[n], logarithms of the probabilities of the own items in a draw.
        log_q: float32[N], those of the drawn ones.
        is_taken: bool[n, N], drawn ones that are no negatives.

    Returns:
        float32[n].
    """
    own = own - own_log_q
    others = (others - log_q).masked_fill(is_taken, -torch.inf)
    return torch.cat([own.unsqueeze(1), others], dim=1).logsumexp(1) - own


def noise_contrastive_loss(
    own: Tensor, others: Tensor, *, own_log_q: Tensor, log_q: Tensor, is_taken: Tensor, num_items: int
) -> Tensor:
    """Return the binary cross entropy that tells the own item from drawn ones (Mnih and Teh 2012, arXiv 1206.6426).

    An item has the probability exp(s) / V; a logit is the logarithm of its ratio to that of N draws, s - log(V N q).
    So scores near log-probabilities, as those of `sampled_softmax_loss`, from the uniform distribution on.

    Args:
        own: float32[n], scores of the own items.
        others: float32[n, N], those of drawn ones.
        own_log_q: float32[n], logarithms of the probabilities of the own items in a draw.
        log_q: float32[N], those of the drawn ones.
        is_taken: bool[n, N], drawn ones that are no negatives.
        num_items: Number of items V.

    Returns:
        float32[n].
    """
    shift = math.log(num_items * max(1, others.shape[1]))
    losses = softplus(others - (log_q + shift)).masked_fill(is_taken, 0.0)
    return softplus(own_log_q + shift - own) + losses.sum(1)


def dots(users: Tensor, items: Tensor) -> Tensor:
    """Return the dot of each of float[n, D] with each of float[m, D]: float32[n, m], for sums of many small terms."""
    # Under autocast the product itself has 16 bits.
    return (users.float() @ items.float().t()).float()


def in_batch_softmax(
    users: Tensor,
    items: Tensor,
    item_keys: Tensor,
    *,
    log_q: Tensor | None = None,
    ranks: BatchRanks | None = None,
) -> Tensor:
    """Return the losses float32[B] of the in-batch softmax with log-Q correction (Yi et al. 2019, RecSys, eq. 3 to 5).

    Sample i has the loss -log(exp(s_ii) / sum over j of exp(s_ij)) with s_ij = u_i . v_j - log q_j. The samples j whose
    item is that of i, except for i itself, are left out of the sum: they are not negatives.

    Args:
        users: float[B, D], the users' vectors divided by the temperature.
        items: float[B, D].
        item_keys: int64[B], which identify items.
        log_q: float[B], log of the probability that the item is in a batch; None for no correction. Of the samples of
            all `ranks`.
        ranks: Processes that have a part of the batch each: candidates are the items of all, `users` and what has no
            other note the samples of this one. None for this one alone.
    """
    first, candidates = 0, item_keys
    if ranks is not None:
        items, first = rows_of_all(ranks, "items of an in-batch softmax", items)
        candidates, _ = rows_of_all(ranks, "keys of an in-batch softmax", item_keys)
    scores = dots(users, items)
    if log_q is None:
        log_q = scores.new_zeros(scores.shape[1])
    places = slice(first, first + scores.shape[0])
    return sampled_softmax_loss(
        scores[:, places].diagonal(),
        scores,
        own_log_q=log_q[places],
        log_q=log_q,
        is_taken=item_keys.unsqueeze(1) == candidates,
    )


def mean_of_counted(
    losses: Tensor, counts: Tensor, weights: Tensor | None, ranks: BatchRanks | None
) -> tuple[Tensor, Tensor]:
    """Return the mean of the weighted losses that count.

    Args:
        losses: float[n].
        counts: bool[n].
        weights: float[n]; None for ones.
        ranks: Processes that have a part of the losses each; None for this one alone.

    Returns:
        A scalar; 0 where none counts. Of several ranks each gets its own losses' part of the mean over all. And the
        number of those that count on all ranks.
    """
    if weights is not None:
        losses = losses * weights
    number = counts.sum()  # which stays on the device
    if ranks is not None:
        number = sum_over(ranks, "losses that count", number)
    # Not a product: a loss that does not count may be infinite.
    return losses.masked_fill(~counts, 0.0).sum() / number.clamp_min(1), number
