# SPDX-License-Identifier: Apache-2.0
"""`Ranks`: the processes that train one model together, their collectives, and the search for ranks that fail."""

from __future__ import annotations

import ctypes
import hashlib
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Literal

import torch
from torch import Tensor, distributed

from terarec.batch import share_of
from terarec.dist.control import ANSWER_TIMEOUT, ASK_AFTER, TELL_TIMEOUT, Links, Obstacle
from terarec.dist.transport import BackendTransport, StagedTransport, Transport, Work
from terarec.errors import CollectiveError, ConfigError, RunInterruptedError
from terarec.spec.checks import one_line, quoted
from terarec.spec.codec import differences

DEFAULT_TIMEOUT = 300.0
"""Seconds after which a collective that some rank does not join fails."""
_SHOWN = 5  # differences that an error names
_CHOICE_AFTER = 0.05  # seconds between questions to ranks that have not chosen yet
_CLOSE_AFTER = 1.0  # seconds in which collectives that nobody has waited for may end

Reduction = Literal["sum", "max", "min"]
_REDUCTIONS = {
    "sum": distributed.ReduceOp.SUM,
    "max": distributed.ReduceOp.MAX,
    "min": distributed.ReduceOp.MIN,
}


class PendingResult:
    """Future result of a collective that has begun.

    Args:
        result: Tensor that it writes to.
        finish: Function that waits until it has done so; None if it has.
        sent: Tensor that it reads until then, which is kept as long.
    """

    def __init__(
        self, result: Tensor, finish: Callable[[], object] | None = None, *, sent: Tensor | None = None
    ) -> None:
        self._result = result
        self._finish = finish
        self._sent = sent

    def wait(self) -> Tensor:
        """Wait for the result and return it.

        Raises:
            CollectiveError: The collective has failed.
        """
        if self._finish is not None:
            self._finish()
            # The backend reads what was sent until here, so its memory must not be used for something else before.
            self._finish = self._sent = None
        return self._result


class Ranks:
    """The processes that train one model together; without arguments one process alone, whose collectives do nothing.

    A collective that fails raises `CollectiveError` with its name and `step`.

    Attributes:
        rank: Number of this process, 0 to `size` - 1.
        size: Number of processes R.
        hosts: Host name of each rank.
        step: Number of the step, for errors; the trainer sets it.
        sent_bytes: Bytes that this rank has sent to others, by collective.

    Args:
        group: Process group of `torch.distributed`.
        hosts: Host name of each rank.
        timeout: Seconds after which a collective fails, for errors.
        links: Connections to all processes, by which they tell what keeps a collective from its end.
        members: Numbers of these ranks among all processes; empty for all.
        is_staged: Whether tensors of a device travel through host memory.
        backend: Backends of the group; None for those of the process group of all processes.
        name: Name of the group, the same on all of its ranks.
        family: All groups of this process, to which this one is added.
    """

    def __init__(
        self,
        group: distributed.ProcessGroup | None = None,
        *,
        hosts: Sequence[str] = ("",),
        timeout: float = DEFAULT_TIMEOUT,
        links: Links | None = None,
        members: Sequence[int] = (),
        is_staged: bool = False,
        backend: str | None = None,
        name: str = "all",
        family: list[Ranks] | None = None,
    ) -> None:
        self._group = group
        self._name = name
        self._num_subsets = 0
        self._works: set[Work] = set()
        self._family = [] if family is None else family
        self._family.append(self)
        self._backend = backend
        self._is_staged = is_staged
        self._transport: Transport | None = None
        if group is not None:
            self._transport = StagedTransport(group) if is_staged else BackendTransport(group)
        self._links = links
        self._members = tuple(members) or tuple(range(len(hosts)))
        self._timeout = timeout
        self.rank = 0 if group is None else distributed.get_rank(group)
        self.size = 1 if group is None else distributed.get_world_size(group)
        self.hosts = tuple(hosts)
        self.step = 0
        self.sent_bytes: Counter[str] = Counter()

    @property
    def nodes(self) -> tuple[int, ...]:
        """Number of each rank's machine, counted in the order of the ranks."""
        numbers: dict[str, int] = {}
        return tuple(numbers.setdefault(host, len(numbers)) for host in self.hosts)

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which prints and writes for all ranks."""
        return self.rank == 0

    def all_reduce_(self, what: str, values: Tensor, reduction: Reduction = "sum") -> Tensor:
        """Replace `values` on every rank by their sum, maximum or minimum over the ranks, and return them."""
        return self.begin_all_reduce_(what, values, reduction).wait()

    def begin_all_reduce_(self, what: str, values: Tensor, reduction: Reduction = "sum") -> PendingResult:
        """Begin an `all_reduce_`; all ranks begin their collectives in the same order."""
        transport = self._transport
        if transport is None:
            return PendingResult(values)
        # The bytes of a ring all-reduce, for any algorithm of the backend.
        self.sent_bytes[what] += 2 * (self.size - 1) * values.nbytes // self.size
        return PendingResult(values, self._begin(what, lambda: transport.all_reduce_(values, _REDUCTIONS[reduction])))

    def all_to_all(self, what: str, values: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """Send parts of `values` to all ranks and return those that came from them, in the order of the ranks.

        Args:
            what: Name of the collective.
            values: [n]: ``sent[0]`` elements for rank 0, then those for rank 1, ...
            sent: Elements for each rank.
            received: Elements from each rank.
        """
        return self.begin_all_to_all(what, values, sent, received).wait()

    def begin_all_to_all(
        self, what: str, values: Tensor, sent: Sequence[int], received: Sequence[int]
    ) -> PendingResult:
        """Begin an `all_to_all`; all ranks begin their collectives in the same order."""
        transport = self._transport
        if transport is None:
            return PendingResult(values)
        out = values.new_empty(sum(received))
        # As bytes, since a backend does not take all types.
        width = values.element_size()
        self.sent_bytes[what] += width * (sum(sent) - sent[self.rank])
        source = values.contiguous().view(torch.uint8)
        bytes_received, bytes_sent = ([width * count for count in counts] for counts in (received, sent))
        finish = self._begin(
            what, lambda: transport.all_to_all(out.view(torch.uint8), source, bytes_received, bytes_sent)
        )
        return PendingResult(out, finish, sent=source)

    def gather(self, what: str, data: Any) -> list[Any]:
        """Return the JSON data of every rank, in their order, on every rank."""
        if self._group is None:
            return [data]
        # As JSON: `all_gather_object` of torch unpickles what the others sent.
        text = torch.frombuffer(bytearray(json.dumps(data).encode()), dtype=torch.uint8)
        return [json.loads(part.numpy().tobytes()) for part in self.gather_rows(what, text)]

    def gather_rows(self, what: str, values: Tensor) -> list[Tensor]:
        """Return the rows ``[n, ...]`` of every rank, of any number each, in their order, on every rank."""
        if self._group is None:
            return [values]
        # Not an all_gather, whose parts have one size.
        sizes = torch.zeros(self.size, dtype=torch.int64)
        sizes[self.rank] = values.shape[0]  # known in host memory, wherever the rows are
        counts = self.all_reduce_(what, sizes).tolist()
        width = values.shape[1:].numel()
        flat = values.contiguous().flatten()
        everything = self.all_to_all(
            what, flat.repeat(self.size), [flat.numel()] * self.size, [count * width for count in counts]
        )
        return list(torch.split(everything.view(sum(counts), *values.shape[1:]), counts))

    def share(self, count: int, rank: int | None = None) -> slice:
        """Return a rank's part of `count` samples: parts are equal except for one sample. None means this rank."""
        return share_of(count, self.rank if rank is None else rank, self.size)

    def joined(self, what: str, values: Tensor, count: int, rows: Sequence[int] | None = None) -> Tensor:
        """Return ``[count, ...]``, of which this rank has the rows of its `share`, on every rank.

        Args:
            what: Name of the collective.
            values: [n, ...], the rows of this rank.
            count: Rows of all ranks.
            rows: Rows of each rank where these are not the shares.
        """
        if self._group is None:
            return values
        # A rank without samples has no row to take the width of, and has to expect those of the others.
        width = values[:1].numel() if values.shape[0] else values.new_empty(1, *values.shape[1:]).numel()
        if rows is None:
            shares = [self.share(count, rank) for rank in range(self.size)]
            rows = [part.stop - part.start for part in shares]
        received = [rows_of_rank * width for rows_of_rank in rows]
        flat = values.contiguous().flatten().repeat(self.size)
        return self.all_to_all(what, flat, [values.numel()] * self.size, received).view(count, *values.shape[1:])

    def on_first(self, what: str, call: Callable[[], None]) -> None:
        """Call a function on rank 0 only, and wait for it.

        Raises:
            CollectiveError: The call failed on rank 0; raised on the other ranks. Rank 0 raises the original error.
        """
        failure: Exception | None = None
        if self.is_first:
            try:
                call()
            except Exception as error:
                failure = error
        # Rank 0 reports whether it failed before it raises, or the others would wait for it until the timeout.
        failures = self.gather(what, None if failure is None else one_line(str(failure)))
        if failure is not None:
            raise failure
        if failures[0] is not None:
            raise CollectiveError(f"failed on rank 0: {failures[0]}", collective=what, step=self.step, rank=0)

    @contextmanager
    def telling(self) -> Iterator[None]:
        """Tell the other ranks what an exception in it ends on this one: their collectives end at once, and name it.

        All ranks enter it together. Nothing is told of signals, by which all of them end.
        """
        if self._links is None:
            yield
            return
        with self._links.notes.attempt() as is_outermost:
            try:
                yield
            except RunInterruptedError:
                raise
            # Also of Ctrl-C in an interactive session, which goes on.
            except BaseException as error:
                if is_outermost:
                    is_cause = not isinstance(error, CollectiveError)
                    self._links.notes.fail(one_line(f"{type(error).__name__}: {error}"), is_cause=is_cause)
                    # Of what another rank has caused, this one does not wait long for that.
                    seconds = TELL_TIMEOUT if is_cause else ANSWER_TIMEOUT
                    self._links.tell(self._members, timeout=min(seconds, self._timeout))
                raise

    def barrier(self, what: str) -> None:
        """Wait until all ranks are here."""
        self.all_reduce_(what, torch.zeros(1))

    def agree(self, what: str, flag: bool) -> bool:
        """Return whether `flag` is true on all ranks."""
        return bool(self.all_reduce_(what, torch.tensor([int(flag)]), "min").item())

    def register(self, what: str) -> str:
        """Return a name for choices of `choose`; all ranks call it in the same order."""
        return what if self._links is None else self._links.notes.register(what)

    def choose(self, what: str, number: int, *, is_used: bool) -> None:
        """Say whether this rank uses a lookup that all ranks have begun, or drops it; they have to do the same.

        A rank that uses it only notes that. One that drops it asks the others, by messages: they need not come, as to a
        collective.

        Args:
            what: A name of `register`.
            number: Number of the lookup, from 1 on. The others come to its choice without a further collective.
            is_used: Whether this rank uses it.

        Raises:
            CollectiveError: Some ranks use it and others drop it; or one fails, does not answer, or does not come to it
                in time.
        """
        links = self._links
        if links is None:
            return
        notes = links.notes
        notes.choose(what, number, is_used=is_used)
        end = time.monotonic() + self._timeout
        asked: Sequence[int] = () if is_used else self._members
        while True:
            absent = self._absent(asked)
            if notes.has_obstacles and (obstacle := notes.divided(self._members)):
                raise self._blocked(what, obstacle)
            asked = [] if is_used else notes.undecided(self._members, what, number)
            if not asked:
                return
            if failed := [state for state in notes.failures(asked) if notes.is_in_attempt]:
                raise self._blocked(what, Obstacle(rank=failed[0].rank, problem=f"has failed: {failed[0].failure}"))
            if absent or time.monotonic() > end:
                late = ", ".join(str(self._members.index(member)) for member in asked)
                raise self._failed(what, RuntimeError(f"rank {self.rank} waits for the choice of {late}"), absent)
            time.sleep(_CHOICE_AFTER)

    def check_same(self, what: str, data: Mapping[str, Any]) -> None:
        """Check that JSON data are the same on all ranks.

        Only digests travel unless they differ.

        Raises:
            CollectiveError: The data of a rank differ from those of rank 0; the message has the fields and values.
        """
        # Keys are sorted, since a dictionary may have been filled in another order on each rank.
        digest = hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()
        if len(set(self.gather(f"check of {what}", digest))) == 1:
            return
        texts = self.gather(f"check of {what}", data)
        faults = [
            ((rank, path), f"rank {rank} has {path} = {quoted(mine)}, rank 0 has {quoted(first)}")
            for rank, other in enumerate(texts)
            for path, first, mine in differences(texts[0], other)
        ]
        more = f"; and {len(faults) - _SHOWN} further differences" if len(faults) > _SHOWN else ""
        raise CollectiveError(
            f"{'; '.join(text for _, text in faults[:_SHOWN])}{more}; expected the same on all ranks",
            collective=f"check of {what}",
            step=self.step,
            differences=tuple(place for place, _ in faults),
        )

    def subset(self, members: Sequence[int], backend: str | None = None) -> Ranks | None:
        """Return a group of some of these ranks, and None on the others; all ranks have to call it.

        Args:
            members: Their numbers.
            backend: Backends of the group, as of `torch.distributed`; None for those of this one.

        Raises:
            ConfigError: No ranks, or ranks that are not there.
        """
        if not members or len(set(members)) < len(members) or not set(members) <= set(range(self.size)):
            raise ConfigError("members", f"got {list(members)}, expected distinct ranks from 0 to {self.size - 1}")
        if self._group is None:
            return self
        # All ranks have to call it, members or not.
        self._num_subsets += 1
        backend = backend or self._backend
        group = distributed.new_group(list(members), timeout=timedelta(seconds=self._timeout), backend=backend)
        if self.rank not in members:
            return None
        return Ranks(
            group,
            hosts=[self.hosts[member] for member in members],
            timeout=self._timeout,
            links=self._links,
            members=[self._members[member] for member in members],
            is_staged=self._is_staged,
            backend=backend,
            name=f"{self._name}.{self._num_subsets}",
            family=self._family,
        )

    def twin(self, backend: str | None = None) -> Ranks:
        """Return the same ranks with an order of collectives of its own, for another thread or device.

        Args:
            backend: Backends of its group; None for those of this one. All ranks call this.
        """
        twin = self.subset(range(self.size), backend)
        assert twin is not None, "it has all ranks"
        twin.sent_bytes = self.sent_bytes
        return twin

    def close(self) -> None:
        """Leave the group. Further collectives fail."""
        if self._links is not None:
            self._links.close()
        # Groups of `subset` end with the process group, so that a second `close` finds none.
        if self._group is None or not distributed.is_initialized():
            return
        end = time.monotonic() + _CLOSE_AFTER
        while is_pending := any(not work.is_done for ranks in self._family for work in list(ranks._works)):
            if time.monotonic() > end:
                break
            time.sleep(_CHOICE_AFTER)
        if is_pending:
            # A rank does not join them. At its end a group of gloo waits for them, up to its timeout: it stays.
            for ranks in self._family:
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(ranks._group))
        distributed.destroy_process_group()

    def _begin(self, what: str, call: Callable[[], Work]) -> Callable[[], None]:
        """Begin a collective; return a function that waits for it."""
        assert self._links is not None, "a group has links"
        notes = self._links.notes
        if notes.has_obstacles:
            self._look(what, notes.order(self._name).number + 1)
        work: Work = self._run(what, call)
        number = notes.begin(self._name, what)
        self._works = {other for other in self._works if not other.is_done} | {work}
        return lambda: self._wait(what, work, number)

    def _wait(self, what: str, work: Work, number: int) -> None:
        """Wait for a collective, and look meanwhile whether all ranks join it."""
        begin = time.monotonic()

        def look() -> None:
            self._look(what, number)
            if time.monotonic() - begin > ASK_AFTER and self._links is not None:
                self._links.watch(self._members[(self.rank + 1) % self.size])

        self._run(what, lambda: work.wait(look))
        self._works.discard(work)

    def _look(self, what: str, number: int) -> None:
        """Raise the error of a collective that will not end, if a rank has told why.

        Args:
            what: Its name.
            number: Its number in this group.
        """
        assert self._links is not None, "a group has links"
        notes = self._links.notes
        obstacle = notes.obstacle(self._members, self._name, number)
        if obstacle is not None and not obstacle.is_cause:
            # Another rank has seen that one does not join it, and ends; which one, this rank may see for itself.
            if absent := self._absent(self._members):
                raise self._failed(what, RuntimeError(f"rank {obstacle.rank} {obstacle.problem}"), absent)
            obstacle = notes.obstacle(self._members, self._name, number)
        if obstacle is not None:
            raise self._blocked(what, obstacle)

    def _run(self, what: str, collective: Callable[[], Any]) -> Any:
        try:
            return collective()
        except CollectiveError:
            raise
        # The errors of torch's stores and backends (DistError) are RuntimeErrors, and gloo raises plain ones, too.
        except RuntimeError as error:
            assert self._links is not None, "a group has links"
            notes = self._links.notes
            absent: Mapping[int, str] = {}
            # What the rank that fails has told; then what those tell that live.
            for asked in ((), self._members):
                absent = self._absent(asked)
                obstacle = notes.obstacle(self._members, self._name)
                if obstacle is not None and (obstacle.is_cause or (asked and not absent)):
                    raise self._blocked(what, obstacle) from None
            raise self._failed(what, error, absent) from None

    def _blocked(self, what: str, obstacle: Obstacle) -> CollectiveError:
        """Return the error of a collective that a rank does not join, as one has told."""
        rank = self._members.index(obstacle.rank)
        return CollectiveError(
            f"rank {rank} ({self.hosts[rank]}) {obstacle.problem}",
            collective=what,
            step=self.step,
            rank=rank,
            pairs=((self.rank, rank),) if obstacle.is_silent else (),
        )

    def _failed(self, what: str, error: RuntimeError, absent: Mapping[int, str]) -> CollectiveError:
        """Return the error of a collective that failed here, with the ranks that do not answer."""
        return failed_collective(
            what, error, rank=self.rank, hosts=self.hosts, absent=absent, timeout=self._timeout, step=self.step
        )

    def _absent(self, asked: Sequence[int]) -> dict[int, str]:
        """Ask ranks for their states; return those that do not answer, and why.

        Args:
            asked: Their numbers among all processes.
        """
        if self._links is None or not asked:
            return {}
        absent = self._links.unreachable(asked, timeout=min(ANSWER_TIMEOUT, self._timeout))
        return {self._members.index(member): reason for member, reason in absent.items()}


def failed_collective(
    what: str,
    error: RuntimeError,
    *,
    rank: int,
    hosts: Sequence[str],
    absent: Mapping[int, str],
    timeout: float,
    step: int = 0,
) -> CollectiveError:
    """Return the error of a collective that failed on a rank, with the ranks that do not answer it, and why."""
    reason = one_line(str(error).encode("ascii", "ignore").decode().strip())
    states = "; ".join(f"rank {other} ({hosts[other]}) does not answer: {why}" for other, why in absent.items())
    return CollectiveError(
        f"failed on rank {rank} of {len(hosts)} ({hosts[rank]}): "
        f"{states or 'all ranks answer, but not all have joined it in time'} ({reason}); expected all ranks to join it "
        f"within {timeout:g} s",
        collective=what,
        step=step,
        rank=rank,
        pairs=tuple((rank, other) for other in absent),
    )
