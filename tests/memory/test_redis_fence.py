# SPDX-License-Identifier: Apache-2.0
"""Marks beside rows on a server: which ones a lookup may find that changes have overtaken."""

from pathlib import Path

import pytest

from terarec.errors import StaleRowsError
from terarec.memory.redis_fence import RedisFence
from terarec.memory.redis_server import RedisServer
from tests.ps.redis_processes import needs_redis, running


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
