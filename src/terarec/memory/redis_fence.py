# SPDX-License-Identifier: Apache-2.0
"""`RedisFence`: which state the rows of a table on a server are of, written beside them and read with them."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

from terarec.errors import StaleRowsError
from terarec.memory.redis_server import RedisServer, Request, request, request_on
from terarec.memory.redis_users import RedisUsers, users_of
from terarec.spec.checks import is_count

LEASE_SECONDS = 60
"""After which a writer that wrote no row of its change counts as dead."""


class _Mark(NamedTuple):
    """What stands beside the rows.

    Attributes:
        number: Number of the change: later changes of a table on a server have higher ones. 0 where nothing stands.
        state: Name of the state that the change leads to.
        is_whole: Whether all of its rows are there.
    """

    number: int = 0
    state: str = ""
    is_whole: bool = True

    @property
    def order(self) -> tuple[int, bool]:
        """Place among the marks that one process writes."""
        return self.number, self.is_whole

    @classmethod
    def read(cls, value: bytes | None) -> _Mark:
        number, _, state = (value or b"").decode(errors="replace").partition(" ")
        if not is_count(number):
            return cls()  # nothing, or what another program wrote: no state of ours
        return cls(int(number), state.removeprefix(">"), not state.startswith(">"))

    def written(self) -> bytes:
        return f"{self.number} {'' if self.is_whole else '>'}{self.state}".encode()


class RedisFence:
    """Notices that rows on a server are not of the state that this process left them in. Implements `Fence`.

    A server may come back with rows of an earlier time: restarted from a snapshot, or replaced by a replica that lags.
    It then has the mark of that time, too, since all that a node holds is of one time. Another process may also have
    changed the rows. Until `begin` is called for the first time, any rows are as good, and nothing is read or compared.

    The mark of a partition is the string ``hps_et{TAG/pP}s``, on the node of its rows. A single server needs only that
    of partition 0. During a change, ``hps_et{TAG/p0}w`` stands beside it: a lease, which the writer extends while it
    writes rows and which ends by itself. A mark of an incomplete change without a lease is of a writer that died. The
    sorted set ``hps_et{TAG/p0}u`` has the processes that have the table.

    Attributes:
        takes_later: Whether lookups take rows that another process changed to another state, as nothing else has any.
        is_shared: Whether several processes may change the rows.
    """

    def __init__(self, server: RedisServer, names: Sequence[str], users: RedisUsers) -> None:
        self._server, self._users = server, users
        self._names = tuple(names)
        self.takes_later, self.is_shared = False, True
        # Guards the two below in changes, which are replaced as a whole, so that lookups read them without it.
        self._lock = threading.Lock()
        self._mark: _Mark | None = None
        # What stood there before `_mark`, as long as it is not known that this stands there; else `_mark`.
        self._former: _Mark | None = None
        # Whether `reset` found the rows of its state, and whether some have been written or erased since.
        self._repeats = self._has_written = False
        self._is_reset = False  # whether `reset` began the present change
        # Ids of the servers' processes during a change: one that restarts may keep the mark and lose later rows.
        self._runs: list[str] = []
        # What lookups may find: more than one value while a change is under way.
        self._accepted: frozenset[bytes] | None = None
        self._lease = f"{self._names[0][:-1]}w"
        self._leased = 0.0  # time of the last extension, by a clock that only rises

    @property
    def state(self) -> str:
        """Name of the state that the rows are of; "" for none, or one without a name."""
        mark = self._mark
        return mark.state if mark is not None and mark.is_whole else ""

    @property
    def accepted(self) -> frozenset[bytes] | None:
        """The marks that a lookup which begins now may find; None for any. See `check`."""
        return self._accepted

    def requests(self, partitions: Sequence[int]) -> list[Request]:
        """Return the commands that read the marks of partitions, to be sent after those that read their rows.

        So rows that changed before they were read have a mark that is compared after the change.
        """
        if self._accepted is None:
            return []
        wanted = sorted(set(partitions)) if self._server.is_cluster else [0]
        return [request(self._names[number], b"GET") for number in wanted]

    def check(self, accepted: frozenset[bytes] | None, replies: Sequence[Any]) -> None:
        """Compare replies to `requests`.

        Args:
            accepted: `accepted` when the lookup began.
            replies: The marks.
        """
        if accepted is None:
            return
        for value in replies:
            if value not in accepted and value not in (self._accepted or ()):
                mark = _Mark.read(value)
                is_good = self._is_written_since(accepted, mark) or self._is_alike(mark)
                if not (is_good or (self.takes_later and self._is_later(mark))):
                    raise self._error(mark)

    def compare(self) -> None:
        """Read the marks now; see `Fence.compare`."""
        mark = self._mark
        if mark is not None:
            self._compared(mark)

    def begin(self, state: str | None, through: Collection[str] = ()) -> bool:
        """Mark the rows as changing; see `Fence.begin`."""
        with self._lock:
            known = self._mark
            mark = self._read() if known is None else self._compared(known, (*through, state))
            if state and mark.is_whole and mark.state == state and mark.order > (known or _Mark()).order:
                self._take(mark)
                return True
            # The rest of a change would be missing for ever, unless this one has it. Where another process has begun
            # it is not known.
            is_contained = state in (None, mark.state) or (mark == known and mark.state in through)
            if not mark.is_whole and not is_contained:
                raise self._error(mark)
            # Rows of a part of a change are of no state, unless it is made again.
            before = mark.state if mark.is_whole else ""
            begun = _Mark(mark.number + 1, before if state is None else state, is_whole=False)
            self._is_reset = False
            self._begin(begun, mark, mark.written())
            return False

    def reset(self, state: str | None) -> bool:
        """Mark the rows as changing, whatever they are; see `Fence.reset`."""
        with self._lock:
            mark = self._read()
            known = self._mark or mark
            # Above both, so that other processes see a later change.
            number = max(mark.number, known.number) + 1
            begun = _Mark(number, known.state if state is None else state, is_whole=False)
            self._is_reset = True
            self._repeats, self._has_written = mark.number > 0 and mark.is_whole and mark.state == begun.state, False
            self._begin(begun, mark)
            return mark.number > 0 and not self._repeats

    def _begin(self, begun: _Mark, former: _Mark, *also_accepted: bytes) -> None:
        self._accepted = frozenset((begun.written(), *also_accepted))
        self._mark, self._former, self._runs = begun, former, self._read_runs()
        # The lease first: without one, the mark would be of a dead writer.
        self._extend()
        self._write(begun)
        self._former = begun

    def _take(self, mark: _Mark) -> None:
        self._mark = self._former = mark
        self._accepted = frozenset((mark.written(),))

    def extend(self) -> None:
        """Extend the lease; see `Fence.extend`."""
        self._has_written = True
        mark, pause = self._mark, time.monotonic() - self._leased
        if mark is None or mark.is_whole or pause < LEASE_SECONDS / 3:
            return
        with self._lock:
            self._extend()
            if pause >= LEASE_SECONDS and (now := self._read()) != mark:
                raise self._error(now)

    def _extend(self) -> None:
        self._leased = time.monotonic()
        self._server.run([request(self._lease, b"SET", b"1", b"PX", b"%d" % round(1000 * LEASE_SECONDS))])

    def is_abandoned(self) -> bool:
        """Return whether a change stands there whose writer died; errors are those of `adopt`."""
        # The mark after the lease: a change that ends between the two is whole by then.
        (leased,) = self._server.run([request(self._lease, b"EXISTS")])
        return not leased and not self._read().is_whole

    def give_up(self) -> bool:
        """End a change that failed; see `Fence.give_up`."""
        with self._lock:
            mark = self._mark
            if mark is None or self._read() != mark:  # this process has changed nothing, or another one has since
                return False
        if not mark.is_whole:
            # What was written is what stood there before, if it has a name; two states without one may differ.
            if self._repeats and (mark.state or not self._has_written):
                self.end()
            else:
                self._server.run([request(self._lease, b"UNLINK")])
        return not self._repeats

    def leave(self) -> bool:
        """Note that this process needs the rows no more; see `Fence.leave`."""
        return self._users.leave(users_of(self._names[0]))

    def remove(self) -> None:
        """Remove the marks; see `Fence.remove`."""
        with self._lock:
            self._mark = self._former = self._accepted = None
            self._server.run([request(name, b"UNLINK") for name in (*self._names, self._lease)])

    def end(self) -> None:
        """Mark the rows as whole; see `Fence.end`."""
        with self._lock:
            begun = self._mark
            assert begun is not None, "begin comes before"
            mark = self._read()
            whole = begun._replace(is_whole=True)
            # Another process may have made the same change, and have completed it.
            if mark not in (begun, whole) or self._read_runs() != self._runs:
                raise self._error(mark)
            self._accepted = frozenset((begun.written(), whole.written()))
            self._write(whole)
            # Lookups that are under way compare with what was accepted when they began.
            self._take(whole)
            self._server.run([request(self._lease, b"UNLINK")])

    def adopt(self, *states: str | None) -> bool:
        """Take over rows that another process changed; see `Fence.adopt`."""
        with self._lock:
            mark, known = self._read(), self._mark or _Mark()
            wanted = [known.state if state is None else state for state in states]
            # An earlier mark of the same name may be of rows before later changes without a name.
            if not mark.is_whole or mark.state not in wanted or mark.number < known.number:
                return False
            self._take(mark)
            return True

    def _asked(self) -> tuple[str, ...]:
        return self._names if self._server.is_cluster else self._names[:1]

    def _read(self) -> _Mark:
        """Return the earliest of all marks."""
        replies = self._server.run([request(name, b"GET") for name in self._asked()])
        return min((_Mark.read(value) for value in replies), key=lambda mark: mark.order)

    def _read_runs(self) -> list[str]:
        replies = self._server.run([request_on(name, b"INFO", b"server") for name in self._asked()])
        lines = [str(reply, errors="replace").splitlines() for reply in replies]
        return [next((line for line in some if line.startswith("run_id:")), "") for some in lines]

    def _compared(self, mark: _Mark, states: Collection[str | None] = ()) -> _Mark:
        """Return the mark that stands there: `mark`, or one of a complete change to its state, or to one of `states`.

        Of rows that were to be filled anew, a part may be missing until that has been done.
        """
        now = self._read()
        # After an error it is not known which of its own marks a change has left.
        if now in (mark, self._former):
            if self._is_reset and now == mark and not now.is_whole:
                raise self._error(now)
            return now
        is_known = now.order >= mark.order and now.state in (mark.state, *states)
        if not is_known or not (now.is_whole or self._is_all_there_is(now)):
            raise self._error(now)
        return now

    def _is_all_there_is(self, mark: _Mark) -> bool:
        """Return whether nothing has better rows than a part of a change without a name, whose writer died."""
        return self.takes_later and not mark.state and self.is_abandoned()

    def _is_written_since(self, accepted: frozenset[bytes], mark: _Mark) -> bool:
        """Return whether this process wrote a mark after those that a lookup accepted when it began.

        A lookup may read between the begin and the end of a change, or of several, and compare after them.
        """
        earliest = min(_Mark.read(value).order for value in accepted)
        return earliest < mark.order <= (self._mark or _Mark()).order

    def _is_later(self, mark: _Mark) -> bool:
        return mark.number > (self._mark or _Mark()).number

    def _is_alike(self, mark: _Mark) -> bool:
        """Return whether another process changed rows without another state, as updates without a name do."""
        return self._is_later(mark) and mark.state == (self._mark or _Mark()).state

    def _write(self, mark: _Mark) -> None:
        self._server.run([request(name, b"SET", mark.written()) for name in self._asked()])

    def _error(self, mark: _Mark) -> StaleRowsError:
        mine = self._mark or _Mark()
        is_later = self._is_later(mark) and (mark.is_whole or not self.is_abandoned())
        got = f"{'later' if is_later else 'earlier'} rows ({mark.written().decode()})" if mark.number else "no mark"
        problem = f"got {got}, expected those of {mine.written().decode()}"
        return StaleRowsError(f"redis {self._server.spec.address}", self._names[0], problem, is_later=is_later)
