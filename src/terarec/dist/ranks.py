# SPDX-License-Identifier: Apache-2.0
"""`Ranks`: the processes that train one model together, their collectives, and the search for ranks that fail."""

from __future__ import annotations

import hashlib
import json
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, Literal

import torch
from torch import Tensor, distributed

from terarec.batch import share_of
from terarec.dist.transport import BackendTransport, StagedTransport, Transport
from terarec.errors import CollectiveError, ConfigError, RunInterruptedError
from terarec.spec.checks import one_line, quoted
from terarec.spec.codec import differences

DEFAULT_TIMEOUT = 300.0
"""Seconds after which a collective that some rank does not join fails."""
_SHOWN = 5  # differences that an error names
ANSWER_TIMEOUT = 3.0  # seconds within which a rank answers where a collective has failed
TELL_TIMEOUT = 10.0
"""Seconds within which a rank takes the message of one that fails; more than for an answer, as nobody asks again."""
_CALLERS = 16  # connections that a rank opens at once
TOKEN_BYTES = 4
MESSAGE_BYTES = 1 << 16
"""Most bytes of the message by which a rank tells another one why it fails."""
_ANSWER_AFTER = 0.2  # seconds between attempts to reach a rank that refuses: it may be about to listen

Reduction = Literal["sum", "max", "min"]
_REDUCTIONS = {
    "sum": distributed.ReduceOp.SUM,
    "max": distributed.ReduceOp.MAX,
    "min": distributed.ReduceOp.MIN,
}


class Failures:
    """Why ranks have failed, as they have told this one.

    They belong to an attempt, such as a run: what all ranks begin together, and what a later one does not hear of.

    Attributes:
        attempt: Number of the present attempt, the same on all ranks.

    Args:
        size: Number of ranks.
    """

    def __init__(self, size: int) -> None:
        self.attempt = 0
        self._size = size
        self._depth = 0
        self._told: dict[int, tuple[int, str]] = {}

    def note(self, message: bytes) -> None:
        """Note the message of a rank; drop what is none, as anyone can connect."""
        with suppress(ValueError, RecursionError):
            match json.loads(message):
                case {"rank": int(rank), "attempt": int(attempt), "problem": str(problem)} if 0 <= rank < self._size:
                    self._told.pop(rank, None)  # of an earlier attempt, whose place in the order it would keep
                    self._told[rank] = attempt, one_line(problem)

    def of(self, ranks: Sequence[int]) -> dict[int, str]:
        """Return those of `ranks` that have failed in the present attempt, the first to tell first, and why."""
        told = dict(self._told)  # threads may add to it
        return {rank: why for rank, (attempt, why) in told.items() if attempt == self.attempt and rank in ranks}

    @contextmanager
    def counted(self) -> Iterator[bool]:
        """Begin an attempt, unless one is under way; give whether this one is new."""
        self._depth += 1
        self.attempt += self._depth == 1
        try:
            yield self._depth == 1
        finally:
            self._depth -= 1


class Links:
    """The addresses at which ranks answer for as long as they live.

    Attributes:
        hosts: Host name of each rank.
        failures: Why ranks have failed, as they have told this one.

    Args:
        rank: Number of this rank.
        addresses: Address, port and host name of each rank.
        server: Socket at which this rank answers.
        failures: What the thread that answers notes failures in.
    """

    def __init__(
        self,
        rank: int,
        addresses: Sequence[tuple[str, int, str]],
        server: socket.socket,
        failures: Failures | None = None,
    ) -> None:
        self.hosts = tuple(host for _, _, host in addresses)
        self.failures = failures or Failures(len(addresses))
        self._rank = rank
        self._addresses = tuple(addresses)
        self._server = server

    def tell(self, ranks: Sequence[int], problem: str, *, timeout: float) -> None:
        """Tell other ranks that this one fails, and why; those that do not answer are left out.

        Args:
            ranks: Numbers of ranks.
            problem: Why it fails, in one line.
            timeout: Seconds within which a rank has to answer.
        """
        told = {"rank": self._rank, "attempt": self.failures.attempt, "problem": problem}
        message = json.dumps(told).encode()
        others = [other for other in ranks if other != self._rank]
        with ThreadPoolExecutor(_CALLERS) as pool:
            list(pool.map(lambda other: _tell(self._addresses[other], message, timeout), others))

    def unreachable(self, ranks: Sequence[int], *, timeout: float) -> dict[int, str]:
        """Return the ranks that do not answer this one, and the reasons.

        Args:
            ranks: Numbers of ranks.
            timeout: Seconds within which a rank has to answer.
        """
        others = [other for other in ranks if other != self._rank]
        # Concurrently: a machine that is down does not refuse, so each call to it waits for the full timeout.
        with ThreadPoolExecutor(_CALLERS) as pool:
            reasons = list(pool.map(lambda other: _call(self._addresses[other], other, timeout), others))
        return {other: reason for other, reason in zip(others, reasons, strict=True) if reason}

    def close(self) -> None:
        """Stop answering."""
        with suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits for a connection
        self._server.close()


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
        links: Connections to all processes, to find those that do not answer if a collective has failed.
        members: Numbers of these ranks among all processes; empty for all.
        is_staged: Whether tensors of a device travel through host memory.
        backend: Backends of the group; None for those of the process group of all processes.
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
    ) -> None:
        self._group = group
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
        wait = self._run(what, lambda: transport.all_reduce_(values, _REDUCTIONS[reduction]))
        return PendingResult(values, lambda: self._run(what, wait))

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
        wait = self._run(what, lambda: transport.all_to_all(out.view(torch.uint8), source, bytes_received, bytes_sent))
        return PendingResult(out, lambda: self._run(what, wait), sent=source)

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
        """Tell the other ranks what an exception in it ends on this one: errors of their collectives name it then.

        All ranks enter it together. Nothing is told of what all of them raise, such as `CollectiveError`.
        """
        if self._links is None:
            yield
            return
        with self._links.failures.counted() as is_outermost:
            try:
                yield
            except (CollectiveError, RunInterruptedError):
                raise
            except Exception as error:
                if is_outermost:
                    problem = one_line(f"{type(error).__name__}: {error}")
                    self._links.tell(self._members, problem, timeout=min(TELL_TIMEOUT, self._timeout))
                raise

    def barrier(self, what: str) -> None:
        """Wait until all ranks are here."""
        self.all_reduce_(what, torch.zeros(1))

    def agree(self, what: str, flag: bool) -> bool:
        """Return whether `flag` is true on all ranks."""
        return bool(self.all_reduce_(what, torch.tensor([int(flag)]), "min").item())

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
        if self._group is not None and distributed.is_initialized():
            distributed.destroy_process_group()

    def _run(self, what: str, collective: Callable[[], Any]) -> Any:
        try:
            return collective()
        # The errors of torch's stores and backends (DistError) are RuntimeErrors, and gloo raises plain ones, too.
        except RuntimeError as error:
            self._raise_told(what)
            raise failed_collective(
                what,
                error,
                rank=self.rank,
                hosts=self.hosts,
                absent=self._absent(),
                timeout=self._timeout,
                step=self.step,
            ) from None

    def _raise_told(self, what: str) -> None:
        """Raise the error of a collective that a rank does not join, if that rank has told why."""
        if self._links is None:
            return
        for member, problem in self._links.failures.of(self._members).items():
            rank = self._members.index(member)
            raise CollectiveError(
                f"rank {rank} ({self.hosts[rank]}) has failed: {problem}",
                collective=what,
                step=self.step,
                rank=rank,
            ) from None

    def _absent(self) -> dict[int, str]:
        """Return the ranks that do not answer, and why."""
        if self._links is None:
            return {}
        numbers = {member: rank for rank, member in enumerate(self._members)}
        absent = self._links.unreachable(self._members, timeout=min(ANSWER_TIMEOUT, self._timeout))
        return {numbers[member]: reason for member, reason in absent.items()}


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


def _tell(address: tuple[str, int, str], message: bytes, timeout: float) -> None:
    """Send a message to a rank, and wait until it has read it; do nothing if it does not answer."""
    host, port, _ = address
    with suppress(OSError), socket.create_connection((host, port), timeout=timeout) as connection:
        connection.recv(TOKEN_BYTES, socket.MSG_WAITALL)
        connection.sendall(message)
        connection.shutdown(socket.SHUT_WR)
        connection.recv(1)


def _call(address: tuple[str, int, str], other: int, timeout: float) -> str:
    """Return why the rank `other` cannot be reached; empty if it can."""
    host, port, _ = address
    end = time.monotonic() + timeout
    while True:
        try:
            # A timeout of 0 would make the socket non-blocking, and one below 0 is an error.
            with socket.create_connection((host, port), timeout=max(0.01, end - time.monotonic())) as connection:
                answer = connection.recv(TOKEN_BYTES, socket.MSG_WAITALL)
            # A port of a rank that has died may be that of another process by now.
            if int.from_bytes(answer, "little") == other and len(answer) == TOKEN_BYTES:
                return ""
            return f"something else answers at {host}:{port}"
        except ConnectionRefusedError as error:
            if time.monotonic() + _ANSWER_AFTER >= end:
                return f"{host}:{port}: {error.strerror}"
            time.sleep(_ANSWER_AFTER)
        except OSError as error:
            return f"{host}:{port}: {error.strerror or f'no answer within {timeout:g} s'}"
