"""In-batch softmax of retrieval models, and the estimate of item frequencies that corrects it (Yi et al. 2019)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from terarec.nn.batch_ranks import BatchRanks, rows_of_all, sum_over

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
        """Take in the items of one more batch: int64[B], each counted once."""
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
        """Return float[B] for int64[B]; an item that was never met counts as met once in all batches so far."""
        interval = self.interval[self._cells(keys)]
        return -torch.where(interval > 0, interval, self.num_batches.clamp_min(1).float()).log()

    def _cells(self, keys: Tensor) -> Tensor:
        if not self.is_hashed:
            return keys
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
    """In-batch sampled softmax with log-Q correction (Yi et al. 2019, RecSys, eq. 3 to 5).

    Sample i has the loss -log(exp(s_ii) / sum over j of exp(s_ij)) with s_ij = u_i . v_j - log q_j. The samples j whose
    item is that of i, but for i itself, are left out of the sum: they are no negatives.

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
    scores = users.float() @ items.float().t()
    if log_q is not None:
        scores = scores - log_q
    own = torch.arange(first, first + users.shape[0], device=users.device)[:, None]
    is_same = (item_keys.unsqueeze(1) == candidates).scatter(1, own, False)
    scores = scores.masked_fill(is_same, -torch.inf)
    losses = scores.logsumexp(1) - scores.gather(1, own)[:, 0]
    if weights is not None:
        losses = losses * weights
    if queries is None and ranks is None:
        return losses.mean()
    is_query = torch.ones_like(losses) if queries is None else queries.float()
    count = is_query.sum() if ranks is None else sum_over(ranks, "queries of an in-batch softmax", is_query.sum())
    return (losses * is_query).sum() / count.clamp_min(1)
