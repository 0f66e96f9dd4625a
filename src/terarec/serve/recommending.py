# SPDX-License-Identifier: Apache-2.0
"""Recommendations over a transport: their messages, their counters, and what answers them."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeAlias, get_args

from terarec.errors import ConfigError
from terarec.serve.json_codec import check_brackets, decode_object
from terarec.serve.request_memory import HeldMemory
from terarec.serve.statistics import DURATION_BOUNDS_NS
from terarec.spec import checks
from terarec.spec.checks import quoted

ItemKey: TypeAlias = int | str
Outcome = Literal["success", "rejected", "expired", "cancelled", "error"]
OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)
STAGES = ("retrieve", "rank", "request")
"""Stages of a request: from its arrival to its candidates, from these to their scores, and the whole."""

_FIELDS = ("users", "k", "candidates", "exclude", "allow", "parameters", "id")


@dataclass(frozen=True, kw_only=True, slots=True)
class RecommendRequest:
    """Users for whom items are wanted.

    Attributes:
        users: Raw column -> its B values.
        k: Items for a user.
        candidates: Items that are retrieved for the ranking model; None for the server's number.
        exclude: Keys of the items that a user is not to get, for each user; None for none.
        allow: Keys of the only items that may be recommended; None for all.
        parameters: ``priority`` and ``timeout`` (microseconds), and values that choose between versions.
        id: Returned with the answer.
    """

    users: Mapping[str, list[Any]]
    k: int = 10
    candidates: int | None = None
    exclude: Sequence[Sequence[ItemKey]] | None = None
    allow: Sequence[ItemKey] | None = None
    parameters: Mapping[str, Any] = field(default_factory=dict)
    id: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoringVersion:
    """The version of a model that had a part in an answer, and the training steps of its weights."""

    model: str
    version: str
    step: int


@dataclass(frozen=True, kw_only=True, slots=True)
class RecommendAnswer:
    """Items for B users, the best first.

    Attributes:
        items: Keys of the items of each user, integers or texts.
        scores: The score of each: of the ranking model, or the logit of the retrieval model where there is none.
        retrieval: What retrieved the candidates.
        ranking: What ranked them; None for the order of the candidates.
        id: That of the request.
    """

    items: list[list[object]]
    scores: list[list[float]]
    retrieval: ScoringVersion
    ranking: ScoringVersion | None
    id: str | None


def decode_recommend_request(body: bytes | bytearray) -> RecommendRequest:
    """Read a request from its JSON.

    Raises:
        RequestTooLargeError: More lists or objects than a body may hold.
        ConfigError: Not JSON, or a field that is unknown, missing or mistyped.
    """
    check_brackets(body)
    fields = decode_object(body, most=None)
    for name in fields:
        if name not in _FIELDS:
            expected = ", ".join(_FIELDS)
            raise ConfigError("the body", f"unknown field {quoted(name, is_json=True)}, expected {expected}")
    users = _typed(fields.get("users"), dict, "users", "an object with a list of values for each column")
    for name, values in users.items():
        _typed(values, list, f"users.{name}", "a list of values, one for each user")
    exclude, allow, candidates, found_id = (fields.get(name) for name in ("exclude", "allow", "candidates", "id"))
    if exclude is not None:
        for place, keys in enumerate(_typed(exclude, list, "exclude", "a list of keys for each user")):
            _check_keys(keys, f"exclude[{place}]")
    if allow is not None:
        _check_keys(allow, "allow")
    return RecommendRequest(
        users=users,
        k=_count(fields.get("k", 10), "k"),
        candidates=None if candidates is None else _count(candidates, "candidates"),
        exclude=exclude,
        allow=allow,
        parameters=_typed(fields.get("parameters", {}), dict, "parameters", "an object"),
        id=None if found_id is None else _typed(found_id, str, "id", "a string"),
    )


def _typed(value: Any, kind: type, where: str, expected: str) -> Any:
    if not isinstance(value, kind):
        raise ConfigError(where, f"got {quoted(value, is_json=True)}, expected {expected}")
    return value


def _check_keys(keys: Any, where: str) -> None:
    # Sets of types, since a body may have millions of keys.
    if set(map(type, _typed(keys, list, where, "a list of keys"))) <= {int, str}:
        return
    place = next(place for place, key in enumerate(keys) if type(key) not in (int, str))
    got = quoted(keys[place], is_json=True)
    raise ConfigError(f"{where}[{place}]", f"got {got}, expected the key of an item, an integer or a string")


def _count(value: Any, name: str) -> int:
    number: int = checks.argument(name, value, checks.integer(1, checks.MOST_BATCH))
    return number


@dataclass(frozen=True, kw_only=True, slots=True)
class RecommendationStatistics:
    """Counters of recommendations since the server began.

    Attributes:
        requests: Requests by `Outcome`.
        users: Users that got an answer.
        durations: Stage of `STAGES` -> requests that were answered within each of `DURATION_BOUNDS_NS` and above the
            bound before, and a last number for those beyond all bounds.
        times_ns: Stage -> sum of these durations.
        items: Items of the present index.
    """

    requests: Mapping[str, int]
    users: int
    durations: Mapping[str, Sequence[int]]
    times_ns: Mapping[str, int]
    items: int


class RecommendationCounter:
    """Counts for `RecommendationStatistics`. Thread-safe; `_lock` guards every attribute."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._requests: dict[str, int] = dict.fromkeys(OUTCOMES, 0)
        self._users = 0
        self._durations = {stage: [0] * (len(DURATION_BOUNDS_NS) + 1) for stage in STAGES}
        self._times_ns = dict.fromkeys(STAGES, 0)

    def add(self, outcome: Outcome, *, users: int, times_ns: Mapping[str, int]) -> None:
        """Count a request, and, where it was answered, its users and the durations of its stages."""
        with self._lock:
            self._requests[outcome] += 1
            self._users += users
            for stage, spent in times_ns.items():
                self._durations[stage][bisect_left(DURATION_BOUNDS_NS, spent)] += 1
                self._times_ns[stage] += spent

    def read(self, *, items: int) -> RecommendationStatistics:
        """Return the counters."""
        with self._lock:
            return RecommendationStatistics(
                requests=dict(self._requests),
                users=self._users,
                durations={stage: tuple(counts) for stage, counts in self._durations.items()},
                times_ns=dict(self._times_ns),
                items=items,
            )


class RecommendationService(Protocol):
    """Answers requests for recommendations."""

    def take(self, request: RecommendRequest, held: HeldMemory) -> None:
        """Count the memory of the candidates of a request, before there are any; raise `ServerBusyError` for none."""

    async def recommend(self, request: RecommendRequest) -> RecommendAnswer:
        """Return items for users, and count what that takes; a call that is cancelled leaves the queues."""

    def statistics(self) -> RecommendationStatistics:
        """Return the counters of the requests."""
