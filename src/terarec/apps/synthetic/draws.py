# SPDX-License-Identifier: Apache-2.0
"""Independent random numbers for any part of a log; and users who like groups of items."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from terarec.apps.synthetic.click_model import bias_for

IndexArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def uniforms(seed: int, stream: tuple[int, ...], start: int, stop: int) -> FloatArray:
    """Return numbers `start` to `stop` of a stream; one number is one step of the bit generator, so it can jump."""
    bits = np.random.PCG64DXSM(np.random.SeedSequence(seed, spawn_key=stream))
    return np.random.Generator(bits.advance(start)).random(stop - start)


def numbers(seed: int, stream: tuple[int, ...]) -> np.random.Generator:
    """Return a generator for the parameters of a log."""
    return np.random.Generator(np.random.PCG64DXSM(np.random.SeedSequence(seed, spawn_key=stream)))


def traits(seed: int, stream: int, indices: IndexArray) -> FloatArray:
    """Return a uniform number in [0, 1) for each of `indices` (users, items, pairs of them), in any order.

    A trait is computed at each request, so there may be any number of users. Steele, Lea and Flood's
    SplitMix64: the finalizer of its counter.
    """
    # A hash of the index and no generator, since indices come in any order, and the same one comes again.
    first = np.random.SeedSequence(seed, spawn_key=(stream,)).generate_state(1, np.uint64)
    bits = _mixed(indices.astype(np.uint64) * _GOLDEN + first)
    # The 53 bits that a double holds exactly.
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def choices(seed: int, stream: int, indices: IndexArray, count: int) -> IndexArray:
    """Return one of `count` numbers from 0 on for each of `indices`, all equally likely."""
    return _number(count, traits(seed, stream, indices))


def normal_traits(seed: int, stream: int, indices: IndexArray) -> FloatArray:
    """Return nearly normal `traits` of mean 0 and deviation 1: sums of four uniform numbers, from four streams."""
    total = np.full(indices.shape, -2.0)
    for part in range(4):
        total += traits(seed, stream + part, indices)
    total *= 3.0**0.5
    return total


def _mixed(bits: NDArray[np.uint64]) -> NDArray[np.uint64]:
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        bits ^= bits >> np.uint64(shift)
        bits *= np.uint64(factor)
    return bits ^ (bits >> np.uint64(31))


_APPEAL = 0.9
"""Deviation of what an item adds to the logit for every user."""
_LEANING = 0.3
"""Deviation of what a user adds for every item: small, since a model needs many rows of a user to fit it."""
MET_FAVOURITES = 0.6
"""Share of the items that a user sees because their group is a favourite."""
_FIRST, _SECOND, _ITEM, _USER, _APPEAL_STREAM, _LEANING_STREAM = 1_000, 1_001, 1_002, 1_003, 1_010, 1_020
"""Streams of the traits: of users, of encounters, of items."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tastes:
    """Users, items and groups of items, each a number from 0 on. All is computed, nothing stored per user or item.

    Attributes:
        seed: Seed of all random numbers.
        num_users: Number of users.
        num_items: Number of items; low numbers are met more often.
        num_groups: Number of groups; item i is of group i modulo it.
        fit: Addition to the logit where an item's group is a favourite of the user's.
    """

    seed: int
    num_users: int
    num_items: int
    num_groups: int
    fit: float = 3.0

    def favourites(self, users: IndexArray) -> IndexArray:
        """Return the two different groups int64[n, 2] that each of `users` likes."""
        first = _number(self.num_groups, traits(self.seed, _FIRST, users))
        # A distance of at least 1, so that the second group is another one.
        further = 1 + _number(self.num_groups - 1, traits(self.seed, _SECOND, users))
        return np.stack([first, (first + further) % self.num_groups], axis=-1)

    def groups(self, items: IndexArray) -> IndexArray:
        """Return the group of each of `items`."""
        return items % self.num_groups

    def draw_users(self, encounters: IndexArray) -> IndexArray:
        """Draw a user for each encounter (identified by a number), all equally likely."""
        return _number(self.num_users, traits(self.seed, _USER, encounters))

    def draw_items(self, users: IndexArray, encounters: IndexArray, favourites: float = MET_FAVOURITES) -> IndexArray:
        """Draw an item for each of `users`: a share `favourites` of favourite groups, and rather low numbers."""
        place, which, why = (traits(self.seed, _ITEM + 10 * part, encounters) for part in range(3))
        # Squared, so that low numbers are met more often.
        items = _number(self.num_items, place**2)
        wanted = self.favourites(users)[np.arange(len(users)), (which < 0.5).astype(np.int64)]
        moved = np.minimum(items - items % self.num_groups + wanted, self.num_items - 1)
        return np.where(why < favourites, moved, items)

    def planted_bias(
        self, num_encounters: int, positive_share: float, logits: Callable[[IndexArray, IndexArray], FloatArray]
    ) -> float:
        """Return the bias that makes a share of the encounters positive.

        Args:
            num_encounters: Encounters on which it is found; none of them is in the log.
            positive_share: Their share.
            logits: Users and items of encounters -> logits without a bias.
        """
        # Negative numbers, which no encounter of the log has.
        pilot = -1 - np.arange(num_encounters)
        users = self.draw_users(pilot)
        return bias_for(logits(users, self.draw_items(users, pilot)), positive_share)

    def brands(self, items: IndexArray, streams: tuple[int, int], count: int, unnamed: float) -> IndexArray:
        """Return one of `count` brands for each of `items`; `count` itself for the share `unnamed` without one."""
        brands = choices(self.seed, streams[0], items, count)
        return np.where(traits(self.seed, streams[1], items) < unnamed, count, brands)

    def fits(self, users: IndexArray, groups: IndexArray) -> NDArray[np.bool_]:
        """Return whether each of `groups` is a favourite of the user at the same index."""
        first, second = self.favourites(users).T
        is_favourite: NDArray[np.bool_] = (groups == first) | (groups == second)
        return is_favourite

    def logits(self, users: IndexArray, items: IndexArray, fits: NDArray[np.bool_] | None = None) -> FloatArray:
        """Return how much each of `users` likes the item at the same index; `fits` marks favourite groups."""
        appeal = _APPEAL * normal_traits(self.seed, _APPEAL_STREAM, items)
        leaning = _LEANING * normal_traits(self.seed, _LEANING_STREAM, users)
        is_wanted = self.fits(users, self.groups(items)) if fits is None else fits
        return appeal + leaning + self.fit * is_wanted


def chance(logits: FloatArray) -> FloatArray:
    """Compute the logistic function."""
    return 1.0 / (1.0 + np.exp(-logits))


def _number(count: int, uniforms: FloatArray) -> IndexArray:
    # A uniform number just below 1 may round up to `count`.
    return np.minimum((uniforms * count).astype(np.int64), count - 1)
