# SPDX-License-Identifier: Apache-2.0
"""What ranks tell each other beside collectives: who fails, who does not answer, and who goes another way.

Each rank answers at a socket for as long as it lives. A caller sends its `State`, and gets that of the rank that it
calls. A rank that fails, or drops a lookup that all have begun, calls all others; one that waits for long calls its
neighbour; and one whose collective has failed calls all. What came is kept in `Notes`, which waits for collectives
read.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace

from terarec.spec.checks import one_line
from terarec.spec.codec import from_data, parse_json, to_data

ANSWER_TIMEOUT = 3.0
"""Seconds within which a rank answers where a collective has failed."""
TELL_TIMEOUT = 10.0
"""Seconds within which a rank takes the state of one that fails; more than for an answer, as nobody asks again."""
ASK_AFTER = 2.0
"""Seconds of a wait after which a rank asks its neighbour whether it lives."""
SILENCE = 15.0
"""Seconds without an answer after which it does not."""
_MESSAGE_BYTES = 1 << 20
_PART_BYTES = 1 << 16
_CALLERS = 16  # connections that a rank opens at once
_CALL_AGAIN = 0.2  # seconds between calls of a rank that refuses: it may be about to listen
_PAUSE = 0.05  # seconds, before a connection is accepted again after an error
_NAMES = 8  # collectives of a group that a state names
_GROUPS = 64  # groups that a state has, the last to be used
_DROPPED = 8  # dropped lookups that a state has


@dataclass(frozen=True, kw_only=True)
class Order:
    """The collectives that a rank has begun in a group.

    Attributes:
        number: How many.
        names: Names of the last of them.
    """

    number: int = 0
    names: tuple[str, ...] = ()

    def name(self, number: int) -> str | None:
        """Return the name of the collective of a number from 1 on; None if it is too long ago, or has not begun."""
        place = number - self.number + len(self.names) - 1
        return self.names[place] if 0 <= place < len(self.names) else None


@dataclass(frozen=True, kw_only=True)
class Choices:
    """What a rank has done with lookups that all ranks have begun together: it uses or drops them.

    Attributes:
        number: Number of the last one, from 1 on.
        dropped: Numbers of the last that it has dropped.
    """

    number: int = 0
    dropped: tuple[int, ...] = ()

    def uses(self, number: int) -> bool | None:
        """Return whether it uses a lookup; None if it has not chosen yet."""
        return None if number > self.number else number not in self.dropped


@dataclass(frozen=True, kw_only=True)
class State:
    """The message of ranks: what one tells of itself.

    Attributes:
        rank: Number of the rank.
        number: Number of the message: a state replaces those of lower numbers.
        attempt: Number of the attempt, such as a run, that all ranks have begun together.
        failure: The error by which it has left the attempt; empty without.
        is_cause: Whether the error is not that another rank fails.
        silent: Ranks that have not answered it in this attempt.
        orders: Group -> the collectives that it has begun there.
        choices: Name of lookups that begin early -> whether it uses them.
    """

    rank: int
    number: int = 0
    attempt: int = 0
    failure: str = ""
    is_cause: bool = True
    silent: tuple[int, ...] = ()
    orders: Mapping[str, Order] = field(default_factory=dict)
    choices: Mapping[str, Choices] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Obstacle:
    """Why a collective will not end.

    Attributes:
        rank: The rank that does not join it.
        problem: What it has done instead.
        is_cause: Whether that is not what another rank has caused.
        is_silent: Whether it does not answer.
    """

    rank: int
    problem: str
    is_cause: bool = True
    is_silent: bool = False


class Notes:
    """The state of this rank, and what the others have told it of theirs.

    Attributes:
        has_obstacles: Whether an obstacle may be known: what is read in each step.

    Args:
        rank: Number of this rank.
        size: Number of ranks.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.has_obstacles = False
        self._size = size
        self._depth = 0
        self._own = State(rank=rank)
        self._orders: dict[str, Order] = {}
        self._choices: dict[str, Choices] = {}
        self._registered: Counter[str] = Counter()
        self._others: dict[int, State] = {}
        # Threads add to the notes: those that answer, and those that have collectives of their own.
        self._lock = threading.RLock()

    @property
    def is_in_attempt(self) -> bool:
        """Whether an attempt is under way."""
        return self._depth > 0

    def message(self) -> bytes:
        """Return the state of this rank, as it is sent."""
        with self._lock:
            self._own = replace(self._own, number=self._own.number + 1)
            last = dict(list(self._orders.items())[-_GROUPS:])
            state = replace(self._own, orders=last, choices=dict(self._choices))
        return json.dumps(to_data(state)).encode()

    def take(self, message: bytes) -> int | None:
        """Note the state of a rank, and return its number; None if the message is none, as anyone can connect."""
        try:
            state = from_data(State, parse_json(message))
        except ValueError:
            return None
        if not 0 <= state.rank < self._size:
            return None
        state = replace(state, failure=one_line(state.failure))
        with self._lock:
            before = self._others.get(state.rank)
            if before is None or before.number < state.number:
                is_told = before is not None and (before.attempt, before.failure) == (state.attempt, state.failure)
                if state.failure and not is_told:
                    self._others.pop(state.rank, None)  # failures are in the order in which they were told
                self._others[state.rank] = state
            # For good: an obstacle is looked for where there may be one.
            self.has_obstacles |= bool(state.failure or state.silent or any(c.dropped for c in state.choices.values()))
        return state.rank

    def of(self, rank: int) -> State:
        """Return the last state of another rank."""
        return self._others.get(rank) or State(rank=rank)

    @contextmanager
    def attempt(self) -> Iterator[bool]:
        """Begin an attempt, unless one is under way; give whether this one is new."""
        with self._lock:
            self._depth += 1
            is_new = self._depth == 1
            if is_new:
                self._own = replace(self._own, attempt=self._own.attempt + 1, failure="", silent=())
        try:
            yield is_new
        finally:
            with self._lock:
                self._depth -= 1

    def fail(self, problem: str, *, is_cause: bool) -> None:
        """Note by which error this rank leaves the attempt."""
        with self._lock:
            self._own = replace(self._own, failure=problem, is_cause=is_cause)

    def miss(self, rank: int) -> None:
        """Note that a rank does not answer."""
        with self._lock:
            self._own = replace(self._own, silent=(*self._own.silent, rank))
            self.has_obstacles = True

    def begin(self, group: str, name: str) -> int:
        """Note that this rank has begun a collective in a group; return its number there."""
        with self._lock:
            before = self._orders.pop(group, Order())
            self._orders[group] = Order(number=before.number + 1, names=(*before.names, name)[-_NAMES:])
        return before.number + 1

    def order(self, group: str) -> Order:
        """Return the collectives that this rank has begun in a group."""
        return self._orders.get(group, Order())

    def register(self, what: str) -> str:
        """Return a name for choices; all ranks call it in the same order."""
        with self._lock:
            self._registered[what] += 1
            # Those of a model before, which another one of the same name replaces.
            self._choices.pop(self._choice_name(what, self._registered[what] - 1), None)
            return self._choice_name(what, self._registered[what])

    @staticmethod
    def _choice_name(what: str, number: int) -> str:
        return f"{what} of model {number}" if number > 1 else what

    def undecided(self, members: Sequence[int], what: str, number: int) -> list[int]:
        """Return the ranks that have not told yet whether they use a lookup."""
        with self._lock:
            return [
                member
                for member in members
                if member != self._own.rank and self.of(member).choices.get(what, Choices()).uses(number) is None
            ]

    def choose(self, what: str, number: int, *, is_used: bool) -> None:
        """Note whether this rank uses a lookup that all ranks have begun; see `Choices`."""
        with self._lock:
            dropped = self._choices.get(what, Choices()).dropped
            if not is_used:
                dropped = (*dropped, number)[-_DROPPED:]
                self.has_obstacles = True
            self._choices[what] = Choices(number=number, dropped=dropped)

    def obstacle(self, members: Sequence[int], group: str, number: int | None = None) -> Obstacle | None:
        """Return what some of the ranks have told of why a collective will not end; None if nothing.

        Args:
            members: The ranks that have to join it.
            group: Their group.
            number: Its number there; None if it has failed, in whatever attempt.
        """
        with self._lock:
            return (
                self._failed(members, group, number, is_cause=True)
                or self.divided(members)
                or self._misplaced(members, group)
                or self._silent(members)
                or self._failed(members, group, number, is_cause=False)
            )

    def _failed(self, members: Sequence[int], group: str, number: int | None, *, is_cause: bool) -> Obstacle | None:
        """Return the first rank that has told that it fails, before it began the collective."""
        for state in self.failures(members):
            begun = state.orders.get(group, Order()).number
            # What it has joined ends, whatever happened then.
            if state.is_cause == is_cause and (number is None or (self.is_in_attempt and begun < number)):
                return Obstacle(rank=state.rank, problem=f"has failed: {state.failure}", is_cause=is_cause)
        return None

    def failures(self, members: Sequence[int]) -> list[State]:
        """Return the ranks that have failed in the present attempt, the first to tell first."""
        with self._lock:
            return [
                state
                for state in self._others.values()
                if state.failure and state.attempt == self._own.attempt and state.rank in members
            ]

    def divided(self, members: Sequence[int]) -> Obstacle | None:
        """Return which ranks have dropped a lookup that others use; None if there is none."""
        with self._lock:
            choices = {member: self.of(member).choices for member in members} | {self._own.rank: self._choices}
            for what, own in self._choices.items():
                # What is longer ago than the others can have told is settled.
                for number in range(max(1, own.number - _DROPPED // 2), own.number + 1):
                    uses = {member: choices[member].get(what, Choices()).uses(number) for member in members}
                    if True in uses.values() and False in uses.values():
                        dropped, used = ([m for m in members if uses[m] is is_used] for is_used in (False, True))
                        others = f", as {_these(dropped[1:])} did," if dropped[1:] else ""
                        return Obstacle(
                            rank=dropped[0],
                            problem=f"dropped{others} what {_these(used)} looked up ({what}, number {number}): its "
                            "model read other keys than those of its batch, or another batch",
                        )
            return None

    def _misplaced(self, members: Sequence[int], group: str) -> Obstacle | None:
        """Return a rank that has begun another collective than this one in its place."""
        mine = self._orders.get(group, Order())
        for member in members:
            theirs = self.of(member).orders.get(group, Order())
            for number in range(max(1, mine.number - _NAMES), mine.number + 1):
                here, there = mine.name(number), theirs.name(number)
                if member != self._own.rank and None not in (here, there) and here != there:
                    return Obstacle(
                        rank=member,
                        problem=f"began {there!r} where rank {self._own.rank} began {here!r}",
                    )
        return None

    def _silent(self, members: Sequence[int]) -> Obstacle | None:
        """Return a rank that has not answered another one."""
        for state in (self._own, *self._others.values()):
            if state.attempt == self._own.attempt:
                for rank in state.silent:
                    if rank in members and rank != self._own.rank:
                        return Obstacle(
                            rank=rank, problem=f"has not answered rank {state.rank} for {SILENCE:g} s", is_silent=True
                        )
        return None


class Links:
    """The sockets at which ranks answer for as long as they live.

    Attributes:
        hosts: Host name of each rank, once they have met.
        notes: The state of this rank, and those of the others.

    Args:
        rank: Number of this rank.
        size: Number of ranks.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.hosts: tuple[str, ...] = ()
        self.notes = Notes(rank, size)
        self._rank = rank
        self._addresses: tuple[tuple[str, int], ...] = ()
        self._watched: set[int] = set()
        # All may call at once, before the thread below accepts the first.
        self._server = socket.create_server(("", 0), backlog=size)
        # It answers until the process ends: that is how others find out whether this rank lives. A daemon does not keep
        # the process from ending.
        threading.Thread(target=self._answer, daemon=True).start()

    @property
    def port(self) -> int:
        """The port at which this rank answers."""
        return int(self._server.getsockname()[1])

    def meet(self, addresses: Sequence[tuple[str, int, str]]) -> None:
        """Take the address, port and host name of each rank."""
        self._addresses = tuple((host, port) for host, port, _ in addresses)
        self.hosts = tuple(name for _, _, name in addresses)

    def unreachable(self, ranks: Sequence[int], *, timeout: float, is_patient: bool = True) -> dict[int, str]:
        """Exchange states with ranks, and return those that do not answer, and why.

        Args:
            ranks: Numbers of ranks.
            timeout: Seconds within which a rank has to answer.
            is_patient: Whether to call again where a rank refuses, as one that is about to listen.
        """
        others = [other for other in ranks if other != self._rank]
        # Concurrently: a machine that is down does not refuse, so each call to it waits for the full timeout.
        with ThreadPoolExecutor(_CALLERS) as pool:
            reasons = list(pool.map(lambda other: self._call(other, timeout, is_patient=is_patient), others))
        return {other: reason for other, reason in zip(others, reasons, strict=True) if reason}

    def tell(self, ranks: Sequence[int], *, timeout: float) -> None:
        """Send the state of this rank to others; those that do not answer are left out."""
        self.unreachable(ranks, timeout=timeout, is_patient=False)

    def watch(self, other: int) -> None:
        """Ask a rank in a thread of its own whether it lives, and tell all if not, unless it is being asked."""
        if other in self._watched:
            return
        self._watched.add(other)
        with suppress(RuntimeError):  # no thread is left; the collective has its own timeout
            threading.Thread(target=self._watch, args=(other,), daemon=True).start()

    def close(self) -> None:
        """Stop answering."""
        with suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits for a connection
        self._server.close()

    def _watch(self, other: int) -> None:
        if self._call(other, SILENCE, is_patient=True):
            self.notes.miss(other)
            others = [rank for rank in range(len(self._addresses)) if rank != other]
            with suppress(RuntimeError):  # the process ends
                self.tell(others, timeout=TELL_TIMEOUT)
        else:
            time.sleep(ASK_AFTER)
        self._watched.discard(other)

    def _call(self, other: int, timeout: float, *, is_patient: bool) -> str:
        """Exchange states with a rank; return why it cannot be reached, empty if it can."""
        host, port = self._addresses[other]
        end = time.monotonic() + timeout
        while True:
            try:
                # A timeout of 0 would make the socket non-blocking, and one below 0 is an error.
                left = max(0.01, end - time.monotonic())
                with socket.create_connection((host, port), timeout=left) as connection:
                    connection.sendall(self.notes.message())
                    connection.shutdown(socket.SHUT_WR)
                    answer = self.notes.take(_received(connection))
                # A port of a rank that has died may be that of another process by now.
                return "" if answer == other else f"something else answers at {host}:{port}"
            except ConnectionRefusedError as error:
                if not is_patient or time.monotonic() + _CALL_AGAIN >= end:
                    return f"{host}:{port}: {error.strerror}"
                time.sleep(_CALL_AGAIN)
            except OSError as error:
                return f"{host}:{port}: {error.strerror or f'no answer within {timeout:g} s'}"

    def _answer(self) -> None:
        """Take connections until the socket is closed."""
        while True:
            try:
                connection, _ = self._server.accept()
            except OSError:  # also of a process without a free file, which passes
                if self._server.fileno() < 0:
                    return
                time.sleep(_PAUSE)
                continue
            try:
                # Apart, as others must not wait for an answer until this caller has told all.
                threading.Thread(target=self._talk, args=(connection,), daemon=True).start()
            except RuntimeError:  # the process has no thread left
                connection.close()

    def _talk(self, connection: socket.socket) -> None:
        """Note the state that a caller tells, and answer with that of this rank."""
        with connection, suppress(OSError):
            connection.settimeout(TELL_TIMEOUT)
            if self.notes.take(_received(connection)) is not None:
                connection.sendall(self.notes.message())


def _received(connection: socket.socket) -> bytes:
    """Return what comes until its sender ends it, or until it is longer than a message."""
    message = bytearray()
    while len(message) <= _MESSAGE_BYTES and (part := connection.recv(_PART_BYTES)):
        message += part
    return bytes(message)


def _these(ranks: Sequence[int]) -> str:
    """Return ranks as a text."""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
