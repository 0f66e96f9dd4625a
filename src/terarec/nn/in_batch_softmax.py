"""The loss of retrieval models whose negatives are the other items of the batch."""

from __future__ import annotations

import torch
from torch import Tensor


def in_batch_softmax(
    users: Tensor,
    items: Tensor,
    item_keys: Tensor,
    *,
    log_q: Tensor | None = None,
    queries: Tensor | None = None,
    weights: Tensor | None = None,
) -> Tensor:
    """In-batch sampled softmax with log-Q correction (Yi et al. 2019, RecSys, eq. 3 to 5).

    Sample i has the loss -log(exp(s_ii) / sum over j of exp(s_ij)) with s_ij = u_i . v_j - log q_j. The samples j whose
    item is that of i, but for i itself, are left out of the sum: they are no negatives.

    Args:
        users: float[B, D], the users' vectors divided by the temperature.
        items: float[B, D].
        item_keys: int64[B], which tell items apart.
        log_q: float[B], log of the probability that the item is in a batch; None for no correction.
        queries: bool[B], the samples that have a loss; None for all. The items of the others are candidates, too.
        weights: float[B], factors of the samples' losses; None for ones.

    Returns:
        The mean of the weighted losses over the queries, a scalar in nats; 0 where no sample is a query.
    """
    scores = users.float() @ items.float().t()
    if log_q is not None:
        scores = scores - log_q
    is_same = item_keys.unsqueeze(1) == item_keys
    scores = scores.masked_fill(is_same.fill_diagonal_(False), -torch.inf)
    losses = scores.logsumexp(1) - scores.diagonal()
    if weights is not None:
        losses = losses * weights
    if queries is None:
        return losses.mean()
    return (losses * queries).sum() / queries.sum().clamp_min(1)
