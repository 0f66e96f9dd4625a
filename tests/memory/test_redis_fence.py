# SPDX-License-Identifier: Apache-2.0
"""Marks beside rows on a server: which ones a lookup may find that changes have overtaken."""

from pathlib import Path

import pytest

from terarec.errors import StaleRowsError
from terarec.memory import redis_fence
from terarec.memory.redis_fence import RedisFence
from terarec.memory.redis_server import RedisServer
from tests.ps.redis_processes import needs_redis, running
from tests.waiting import wait_for


@needs_redis
def test_a_lookup_may_find_what_changes_wrote_since_it_began(tmp_path: Path) -> None:
    """A lookup that read in the middle of a change and compared after its end let the tier go stale."""
    with running(tmp_path / "redis") as started:
        server = RedisServer(started.spec())
        fence = RedisFence(server, ["hps_et{t/p0}s"])

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

        def fence() -> RedisFence:
            return RedisFence(server, ["hps_et{t/p0}s"])

        died = fence()
        died.begin("a")
        unnamed = fence()
        unnamed.begin(None)
        with pytest.raises(StaleRowsError):
            fence().begin("b")
        unnamed.end()
        assert unnamed.state == ""
        with pytest.raises(StaleRowsError):
            died.end()
        died = fence()
        died.begin("a")
        again = fence()
        again.begin("a")
        again.end()
        assert again.state == "a"
        assert [fence().reset(state) for state in ("a", "a")] == [False, True]  # the second finds a part again
        server.close()


@needs_redis
def test_a_writer_that_wakes_after_its_lease_notices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with running(tmp_path / "redis") as started:
        server = RedisServer(started.spec())
        slow, other = (RedisFence(server, ["hps_et{t/p0}s"]) for _ in range(2))
        slow.begin("a")
        assert not other.is_abandoned()
        monkeypatch.setattr(redis_fence, "LEASE_SECONDS", 0.001)
        slow.extend()  # nobody has taken over
        wait_for(other.is_abandoned)
        other.reset("b")
        with pytest.raises(StaleRowsError):
            slow.extend()
        server.close()
