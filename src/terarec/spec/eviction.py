"""Which rows a dynamic table gives up first."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from terarec.spec import checks

ScoreFunction = Callable[[Any, Any, Any], Any]
"""(keys int64[n], counts int64[n], last steps int32[n]) -> scores [n]: tensors; the lowest scores go first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LRUEviction:
    """The least recently used first. A full table gives up this `share` of its ``max_rows`` at once; made by `lru`."""

    kind: ClassVar[str] = "lru"
    share: float = 0.1

    def __post_init__(self) -> None:
        _check_share(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class LFUEviction:
    """The least frequently used first. A full table gives up this `share` of ``max_rows`` at once; made by `lfu`."""

    kind: ClassVar[str] = "lfu"
    share: float = 0.1

    def __post_init__(self) -> None:
        _check_share(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class TTLEviction:
    """Those that no training batch used in the last `steps` batches of the table; made by `ttl`.

    The table looks for them when it is full, and every ``steps * share`` batches.
    """

    kind: ClassVar[str] = "ttl"
    steps: int
    share: float = 0.1

    def __post_init__(self) -> None:
        checks.positive_int(self, "steps")
        _check_share(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoreEviction:
    """The lowest scores of a function first; made by `by_score`. Python only: a function has no place in a file."""

    kind: ClassVar[str] = "score"
    score: ScoreFunction
    share: float = 0.1

    def __post_init__(self) -> None:
        if not callable(self.score):
            checks.fail(self, "score", "a function of keys, counts and last steps")
        _check_share(self)


EvictionSpec = LRUEviction | LFUEviction | TTLEviction | ScoreEviction


def lru(*, share: float = 0.1) -> LRUEviction:
    """The least recently used rows go first."""
    return LRUEviction(share=share)


def lfu(*, share: float = 0.1) -> LFUEviction:
    """The least frequently used rows go first."""
    return LFUEviction(share=share)


def ttl(steps: int, *, share: float = 0.1) -> TTLEviction:
    """Rows that no training batch used in the last `steps` batches go."""
    return TTLEviction(steps=steps, share=share)


def by_score(score: ScoreFunction, *, share: float = 0.1) -> ScoreEviction:
    """The rows of the lowest ``score(keys, counts, last_steps)`` go first."""
    return ScoreEviction(score=score, share=share)


def _check_share(policy: object) -> None:
    checks.finite_float(policy, "share", low=0.0, high=1.0, open_low=True)
