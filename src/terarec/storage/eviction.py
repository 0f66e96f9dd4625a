"""Which rows of a dynamic table go."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from terarec.errors import ConfigError
from terarec.kernels.row_scan import rows_at_most
from terarec.spec import EvictionSpec, LFUEviction, ScoreEviction, TTLEviction

COUNT, LAST_STEP = "count", "last_step"
USES = {COUNT: torch.int64, LAST_STEP: torch.int32}
"""What can be noted of a row's use: how often it occurred, and the table's batch in which it last did."""


def needed_uses(policy: EvictionSpec | None) -> tuple[str, ...]:
    """What `policy` must know of a row's use."""
    if policy is None:
        return ()
    if isinstance(policy, ScoreEviction):
        return (COUNT, LAST_STEP)
    return (COUNT,) if isinstance(policy, LFUEviction) else (LAST_STEP,)


def doomed(
    policy: EvictionSpec, keys: Tensor, uses: Mapping[str, Tensor], clock: int, *, most: int, spared: Tensor
) -> Tensor:
    """The keys that go, by rising key: the lowest scores, of equal ones the lowest keys.

    Args:
        policy: what the scores are; a time to live also spares what is young.
        keys: int64[n] that are held.
        uses: of each key, as `needed_uses` lists them.
        clock: the table's batches so far.
        most: at most so many go.
        spared: bool[n], keys that stay in any case.

    Raises:
        ConfigError: a score function that gives something else than a number for each key.
    """
    scores = _scores(policy, keys, uses)
    if isinstance(policy, TTLEviction):
        found = rows_at_most(scores, clock - policy.steps, spared)
    else:
        found = (~spared).nonzero().squeeze(1)
    if found.numel() > most:
        found = _lowest(scores, keys, found, most)
    return keys[found].sort().values


def _scores(policy: EvictionSpec, keys: Tensor, uses: Mapping[str, Tensor]) -> Tensor:
    if isinstance(policy, LFUEviction):
        return uses[COUNT]
    if not isinstance(policy, ScoreEviction):
        return uses[LAST_STEP]
    scores: Tensor = policy.score(keys, uses[COUNT], uses[LAST_STEP])
    is_ordered = isinstance(scores, Tensor) and not (scores.is_complex() or scores.dtype == torch.bool)
    if not is_ordered or scores.shape != keys.shape or bool(scores.isnan().any()):
        got = f"{scores.dtype}{list(scores.shape)}" if isinstance(scores, Tensor) else type(scores).__name__
        raise ConfigError(f"score function: got {got}, expected a tensor of {keys.numel()} numbers without NaN")
    return scores


def _lowest(scores: Tensor, keys: Tensor, found: Tensor, most: int) -> Tensor:
    """The `most` of the places `found` with the lowest (score, key); linear in their number."""
    if most == 0:
        return found[:0]
    mine = scores[found]
    limit = mine.kthvalue(most).values
    below, tied = found[mine < limit], found[mine == limit]
    return torch.cat([below, tied[keys[tied].argsort()[: most - below.numel()]]])
