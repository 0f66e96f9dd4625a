# SPDX-License-Identifier: Apache-2.0
"""Items that a user does not have, drawn at random: samplers of negatives for losses."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from terarec.errors import ConfigError
from terarec.nn.batch_ranks import BatchRanks, rows_of_all
from terarec.spec.negatives import NegativesSpec

_MOST_DRAWS = 16


class Negatives(NamedTuple):
    """Keys that were drawn.

    Attributes:
        keys: int64[n].
        is_valid: bool[n], False for an owner who has all keys to draw from.
    """

    keys: Tensor
    is_valid: Tensor


class Owned:
    """Keys that users have.

    Args:
        owners: int64[m] >= 0, users.
        keys: int64[m], a key of each; those that are not in [0, `stride`) are left out.
        stride: One more than the highest key.
    """

    def __init__(self, owners: Tensor, keys: Tensor, stride: int) -> None:
        self.stride = stride
        is_there = (keys >= 0) & (keys < stride)
        self._codes = (owners[is_there] * stride + keys[is_there]).sort().values

    def has(self, owners: Tensor, keys: Tensor) -> Tensor:
        """Return bool[n]: whether each of the owners int64[n] has its key int64[n]."""
        codes = owners * self.stride + keys
        if not len(self._codes):
            return torch.zeros_like(codes, dtype=torch.bool)
        places = torch.searchsorted(self._codes, codes).clamp(max=len(self._codes) - 1)
        return self._codes[places] == codes

    def keys_of(self, owner: int) -> Tensor:
        """Return the keys of one user, in ascending order."""
        bounds = torch.tensor([owner, owner + 1], device=self._codes.device) * self.stride
        first, last = torch.searchsorted(self._codes, bounds).tolist()
        return self._codes[first:last] - owner * self.stride


def _uniform_keys(
    shape: torch.Size, low: int, high: int, device: torch.device, generator: torch.Generator | None
) -> Tensor:
    """Return int64 keys of a shape, drawn from `low` to `high` - 1."""
    # A generator is one of the CPU, so that its draws are the same whatever the device.
    keys = torch.randint(low, high, shape, generator=generator, device=device if generator is None else "cpu")
    return keys.to(device)


def _uniform_negatives(
    owners: Tensor, owned: list[Owned], low: int, high: int, generator: torch.Generator | None
) -> Negatives:
    device = owners.device
    keys, is_valid = _rejected(owners, owned, lambda: _uniform_keys(owners.shape, low, high, device, generator))
    # Owners of nearly all keys: one of the few free ones is chosen among these alone.
    for place in (~is_valid).nonzero().flatten().tolist():
        free = torch.ones(high - low, dtype=torch.bool, device=device)
        for some in owned:
            own = some.keys_of(int(owners[place]))
            free[own[(own >= low) & (own < high)] - low] = False
        choices = free.nonzero().flatten()
        if len(choices):
            keys[place] = low + choices[torch.randint(len(choices), (), generator=generator).to(device)]
            is_valid[place] = True
    return Negatives(keys, is_valid)


def _rejected(owners: Tensor, owned: list[Owned], draw: Callable[[], Tensor]) -> Negatives:
    """Draw keys until no owner has its own, a bounded number of times."""

    def are_taken(keys: Tensor) -> Tensor:
        is_taken = torch.zeros_like(owners, dtype=torch.bool)
        for some in owned:
            is_taken |= some.has(owners, keys)
        return is_taken

    keys = draw()
    is_taken = are_taken(keys)
    for _ in range(_MOST_DRAWS):
        if not is_taken.any():
            break
        keys = torch.where(is_taken, draw(), keys)
        is_taken = are_taken(keys)
    return Negatives(keys, ~is_taken)


class Candidates(NamedTuple):
    """What negatives are drawn from besides all items.

    Attributes:
        batch: int64[b], those of `Sampler.items_of_batch`; None where the sampler does not read them.
        lists: Keys and offsets int64[B + 1] of a list for each sample, without missing values; None where the sampler
            does not read it.
        samples: int64[n], the sample of each owner, where there are lists.
        score: Function that returns the scores float[n, pool] of keys int64[n, pool] for the owners, where the
            sampler compares them.
    """

    batch: Tensor | None = None
    lists: tuple[Tensor, Tensor] | None = None
    samples: Tensor | None = None
    score: Callable[[Tensor], Tensor] | None = None


class Sampler(nn.Module):
    """Draws negatives as a spec describes it.

    By popularity, it counts the positive items of training in a buffer, which checkpoints have.

    Attributes:
        batch_ranks: The processes that have a part of each batch, whose items are counted and drawn from on each; None
            for this one alone.
        id_buffers: Names of the buffers with an element for each item, to which a further training may add items.

    Args:
        spec: How negatives are drawn.
        low: Lowest item.
        high: One more than the highest item; None for any keys, which only a batch can give.
        where: Beginning of errors.

    Raises:
        ConfigError: Any keys, or a catalogue of fewer than two items.
    """

    counts: Tensor
    batch_ranks: BatchRanks | None = None

    def __init__(self, spec: NegativesSpec, low: int, high: int | None, *, where: str) -> None:
        super().__init__()
        if high is None and spec.draw != "batch":
            raise ConfigError(
                where, f"got negatives by {spec.draw!r} for a column of any keys, expected ids, or the draw 'batch'"
            )
        if high is not None and high - low < 2:
            raise ConfigError(where, f"got {max(0, high - low)} items to draw negatives from, expected at least 2")
        self.spec, self.low, self.high = spec, low, high
        self.id_buffers: tuple[str, ...] = ()
        if spec.draw == "popularity" and high is not None:
            self.register_buffer("counts", torch.zeros(high, dtype=torch.int64))
            self.id_buffers = ("counts",)

    def observe(self, keys: Tensor) -> None:
        """Count the positive items int64[n] of a batch in training, before negatives are drawn for it."""
        if self.spec.draw == "popularity":
            if self.batch_ranks is not None:
                keys, _ = rows_of_all(self.batch_ranks, "items that are counted", keys)
            self.counts += keys.bincount(minlength=len(self.counts))

    def items_of_batch(self, keys: Tensor) -> Tensor:
        """Return what it draws from where these are the items int64[n] of the batch: with those of all processes."""
        if self.batch_ranks is None or self.spec.draw not in ("batch", "mixed"):
            return keys
        return rows_of_all(self.batch_ranks, "items to draw from", keys)[0]

    def draw(
        self,
        owners: Tensor,
        owned: list[Owned],
        candidates: Candidates | None = None,
        generator: torch.Generator | None = None,
    ) -> Negatives:
        """Draw a key for each owner that the owner does not have.

        Args:
            owners: int64[n], the number of a user for each key to draw.
            owned: What users have.
            candidates: What is drawn from besides all items.
            generator: Source of the draws; None for torch's global random state.
        """
        candidates = candidates or Candidates()
        spec, low, high = self.spec, self.low, self.high
        if spec.draw in ("uniform", "hard"):
            assert high is not None
            if spec.draw == "uniform":
                return _uniform_negatives(owners, owned, low, high, generator)
            assert candidates.score is not None
            many = _uniform_negatives(owners.repeat_interleave(spec.pool), owned, low, high, generator)
            keys, is_valid = many.keys.view(-1, spec.pool), many.is_valid.view(-1, spec.pool)
            with torch.no_grad():
                best = candidates.score(keys).masked_fill(~is_valid, -torch.inf).argmax(1, keepdim=True)
            return Negatives(keys.gather(1, best)[:, 0], is_valid.gather(1, best)[:, 0])
        if spec.draw == "column":
            return self._from_lists(owners, owned, candidates, generator)
        return _rejected(owners, owned, lambda: self._shared(owners.shape, candidates.batch, generator))

    def shared(
        self, candidates: Candidates, device: torch.device, generator: torch.Generator | None = None
    ) -> tuple[Tensor, Tensor]:
        """Draw keys that all samples of a batch share, and with replacement.

        Returns:
            int64[count], and float32[count], the logarithms of the probabilities of these keys in a draw.

        Raises:
            ConfigError: Draws that differ by sample.
        """
        if self.spec.draw in ("hard", "column"):
            raise ConfigError("negatives.draw", f"got {self.spec.draw!r} for negatives that all samples share")
        keys = self._shared(torch.Size([self.spec.count]), candidates.batch, generator, device)
        return keys, self.log_probability(keys, candidates.batch)

    def log_probability(self, keys: Tensor, batch: Tensor | None = None) -> Tensor:
        """Return the logarithms float32[n] of the probabilities of keys int64[n] in a shared draw.

        Of a key that no draw can give there is nothing to correct: its logarithm is 0 here.
        """
        spec = self.spec
        uniform = 0.0 if self.high is None else 1.0 / (self.high - self.low)
        if spec.draw == "popularity":
            weights = self._weights()
            return (weights[keys] / weights.sum()).log().float()
        if batch is None or spec.draw == "uniform":
            return torch.full(keys.shape, uniform, device=keys.device).log()
        ascending = batch.sort().values
        counts = torch.searchsorted(ascending, keys, right=True) - torch.searchsorted(ascending, keys)
        share = spec.uniform_share if spec.draw == "mixed" else 0.0
        log_q = (share * uniform + (1 - share) * counts / max(1, len(batch))).log()
        return log_q.masked_fill(log_q.isinf(), 0.0)

    def _shared(
        self,
        shape: torch.Size,
        batch: Tensor | None,
        generator: torch.Generator | None,
        device: torch.device | None = None,
    ) -> Tensor:
        """Draw keys without regard to who has them."""
        spec = self.spec
        if spec.draw == "popularity":
            ends = self._weights().cumsum(0)
            points = _uniform_numbers(shape, ends.device, generator).double() * ends[-1]
            return torch.searchsorted(ends, points, right=True).clamp(self.low, len(ends) - 1)
        if spec.draw in ("batch", "mixed"):
            assert batch is not None
            if not len(batch):  # of a rank without samples, which has no owner either
                return torch.zeros(shape, dtype=torch.int64, device=batch.device)
            keys = batch[_uniform_keys(shape, 0, len(batch), batch.device, generator)]
            if spec.draw == "batch":
                return keys
            assert self.high is not None
            other = _uniform_keys(shape, self.low, self.high, keys.device, generator)
            return torch.where(_uniform_numbers(shape, keys.device, generator) < spec.uniform_share, other, keys)
        assert self.high is not None
        return _uniform_keys(shape, self.low, self.high, device or torch.device("cpu"), generator)

    def _weights(self) -> Tensor:
        weights = (1.0 + self.counts).double() ** self.spec.power
        weights[: self.low] = 0.0
        return weights

    def _from_lists(
        self, owners: Tensor, owned: list[Owned], candidates: Candidates, generator: torch.Generator | None
    ) -> Negatives:
        assert candidates.lists is not None
        assert candidates.samples is not None
        keys, offsets = candidates.lists
        starts, lengths = offsets[candidates.samples], offsets.diff()[candidates.samples]
        if not len(keys):
            return Negatives(torch.full_like(owners, self.low), torch.zeros_like(owners, dtype=torch.bool))

        def draw() -> Tensor:
            steps = (_uniform_numbers(owners.shape, owners.device, generator).double() * lengths).long()
            return keys[(starts + steps).clamp(max=len(keys) - 1)]

        drawn, is_valid = _rejected(owners, owned, draw)
        return Negatives(drawn, is_valid & (lengths > 0))


def _uniform_numbers(shape: torch.Size, device: torch.device, generator: torch.Generator | None) -> Tensor:
    return torch.rand(shape, generator=generator, device=device if generator is None else "cpu").to(device)
