# SPDX-License-Identifier: Apache-2.0
"""Marks beside rows on a server: which ones a lookup may find that changes have overtaken."""

import contextlib
import itertools
import time
from pathlib import Path

import pytest

from terarec.errors import StaleRowsError, StorageError, UnreachableError
from terarec.memory import redis_fence
from terarec.memory.redis_fence import RedisFence
from terarec.memory.redis_server import RedisServer, request
from terarec.memory.redis_users import RedisUsers
from tests.ps.redis_processes import needs_redis, running
from tests.waiting import wait_for


def fence_of(server: RedisServer, tag: str = "t") -> RedisFence:
    return RedisFence(server, [f"hps_et{{{tag}/p0}}s"], RedisUsers(server, [f"hps_et{{{tag}/p0}}u"]))


@needs_redis
def test_a_lookup_may_find_what_changes_wrote_since_it_began(tmp_path: Path) -> None:
    """A lookup that read in the middle of a change and compared after its end let the tier go stale."""
    with running(tmp_path / "redis") as started:
        server = RedisServer(started.spec())
        fence = fence_of(server)

        def marks() -> list[object]:
            return server.run(fence.requests([0]))

        fence.begin("a")
        fence.end()
        before, at_a = fence.accepted, marks()
        fence.begin("b")
        in_b, during = fence.accepted, marks()
        fence.end()
        fence.check(before, during)
        after, at_b = fence.accepted, marks()
        fence.begin("c")
        fence.end()
        for accepted in (before, in_b, after):
            fence.check(accepted, at_b)
        # Rows that are older than the lookup, and others than this process wrote.
        for accepted, found in (
            (after, during),
            (after, at_a),
            (fence.accepted, at_b),
            (before, [b"9 >x"]),
            (before, [None]),
        ):
            with pytest.raises(StaleRowsError):
                fence.check(accepted, found)
        server.close()


@needs_redis
def test_a_part_of_a_change_is_of_no_state(tmp_path: Path) -> None:
    """The next writer called it the state that the one which died had begun."""
    with running(tmp_path / "redis") as started:
        server = RedisServer(started.spec())

        died = fence_of(server)
        died.begin("a")
        unnamed = fence_of(server)
        unnamed.begin(None)
        with pytest.raises(StaleRowsError):
            fence_of(server).begin("b")
        unnamed.end()
        assert unnamed.state == ""
        with pytest.raises(StaleRowsError):
            died.end()
        died = fence_of(server)
        died.begin("a")
        again = fence_of(server)
        again.begin("a")
        again.end()
        assert again.state == "a"
        assert [fence_of(server).reset(state) for state in ("a", "a")] == [False, True]  # the second finds a part again
        server.close()


@needs_redis
def test_a_writer_that_wakes_after_its_lease_notices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with running(tmp_path / "redis") as started:
        server = RedisServer(started.spec())
        slow, other = (fence_of(server) for _ in range(2))
        slow.begin("a")
        assert not other.is_abandoned()
        monkeypatch.setattr(redis_fence, "LEASE_SECONDS", 0.001)
        time.sleep(0.001)  # a lease that was just extended would last for its minute
        slow.extend()  # nobody has taken over
        wait_for(other.is_abandoned)
        other.reset("b")
        with pytest.raises(StaleRowsError):
            slow.extend()
        server.close()


@needs_redis
def test_a_change_that_another_process_has_made_is_taken_over(tmp_path: Path) -> None:
    with running(tmp_path / "redis") as started:
        server = RedisServer(started.spec())
        first, second = (fence_of(server) for _ in range(2))
        first.reset("a")
        first.end()
        assert second.adopt("a")
        assert not first.begin("b")
        for state in ("b", "c", None):  # while it is under way
            with pytest.raises(StaleRowsError, check=lambda error: error.is_later):
                second.begin(state)
        first.end()
        with pytest.raises(StaleRowsError, check=lambda error: error.is_later):
            second.begin("c")  # from another state than the rows are of
        assert second.begin("b")
        assert second.state == "b"
        assert not second.begin("c")
        server.run([request("hps_et{t/p0}w", b"UNLINK")])  # and dies
        with pytest.raises(StaleRowsError, check=lambda error: not error.is_later):
            first.begin("c")
        server.close()


@needs_redis
def test_a_change_begins_at_the_states_that_it_passes_through(tmp_path: Path) -> None:
    with running(tmp_path / "redis") as started:
        server = RedisServer(started.spec())
        first, second, third = (fence_of(server) for _ in range(3))
        first.reset("a")
        first.end()
        for fence in (second, third):
            assert fence.adopt("a")
        assert not first.begin("b")
        with pytest.raises(StaleRowsError, check=lambda error: error.is_later):  # while it is under way
            second.begin("c", ("a", "b"))
        assert not first.begin("c", ("a", "b"))  # its own, which failed
        first.end()
        with pytest.raises(StaleRowsError, check=lambda error: error.is_later):
            second.begin("d", ("a", "b"))
        assert not second.begin("d", ("a", "b", "c"))
        second.end()
        assert third.begin("d", ("a", "b", "c"))
        assert not first.adopt("a", "c")
        assert first.adopt("c", "d")
        # Of what was to be filled anew, a part is there.
        first.reset("d")
        for state in ("d", "e"):
            with pytest.raises(StaleRowsError, check=lambda error: not error.is_later):
                first.begin(state, ("d",))
        with pytest.raises(StaleRowsError):
            first.compare()
        server.close()


@needs_redis
def test_a_change_whose_marks_fail_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error between what a process remembers and what it writes made the next change one of stale rows."""
    with running(tmp_path / "redis") as started:
        server = RedisServer(started.spec())
        run = server.run
        for failing in range(8):
            fence, other = (fence_of(server, f"t{failing}") for _ in range(2))
            fence.reset("a")
            fence.end()
            calls = itertools.count()
            monkeypatch.setattr(
                server,
                "run",
                lambda commands: _fail() if next(calls) == failing else run(commands),  # noqa: B023
            )
            with contextlib.suppress(StorageError):
                fence.begin("b")
                fence.end()
            assert next(calls) == failing + 1
            fence.check(fence.accepted, run(fence.requests([0])))
            if not fence.begin("b"):
                fence.end()
            assert fence.state == "b"
            assert other.adopt("b")
        server.close()


def _fail() -> list[object]:
    raise UnreachableError("redis", "is away")


@needs_redis
def test_rows_that_loading_found_are_told_from_those_it_wrote(tmp_path: Path) -> None:
    with running(tmp_path / "redis") as started:
        server = RedisServer(started.spec())
        first, second, third = (fence_of(server) for _ in range(3))
        assert not third.give_up()  # it has written nothing
        assert not first.reset("a")
        assert first.give_up()
        first.end()
        assert not second.reset("a")
        assert not first.give_up()  # another has begun since
        assert not second.give_up()  # it found the rows there
        assert second.state == "a"
        assert third.reset("b")
        assert third.give_up()
        server.close()
