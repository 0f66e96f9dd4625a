# SPDX-License-Identifier: Apache-2.0
"""Ranks that say that they live."""

import errno
import socket
import threading

import pytest
from torch.distributed import HashStore

from terarec.dist.control import Links
from terarec.dist.joining import check_links
from terarec.errors import CollectiveError
from tests.waiting import PATIENCE


class Exhausted(socket.socket):
    """A socket that finds no free file for the first connection."""

    num_failed = 0

    def accept(self) -> tuple[socket.socket, object]:
        if not self.num_failed:
            self.num_failed = 1
            raise OSError(errno.EMFILE, "Too many open files")
        return super().accept()


@pytest.fixture
def listeners(monkeypatch: pytest.MonkeyPatch) -> list[Exhausted]:
    """The sockets that ranks listen at."""
    made: list[Exhausted] = []

    def create_server(address: tuple[str, int], *, backlog: int) -> Exhausted:
        made.append(Exhausted(socket.AF_INET, socket.SOCK_STREAM))
        made[-1].bind(address)
        made[-1].listen(backlog)
        return made[-1]

    monkeypatch.setattr(socket, "create_server", create_server)
    return made


def answering() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if "_answer" in thread.name]


def test_a_rank_answers_after_an_error_of_accept(listeners: list[Exhausted]) -> None:
    links, caller = Links(0, 2), Links(1, 2)
    caller.meet([("127.0.0.1", links.port, "host")])
    assert caller.unreachable([0], timeout=PATIENCE) == {}
    assert listeners[0].num_failed == 1
    links.close()
    caller.close()
    for thread in answering():
        thread.join(PATIENCE)
    assert answering() == []


def test_no_rank_answers_after_a_start_that_failed(listeners: list[Exhausted], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Exhausted, "num_failed", 1)
    with pytest.raises(CollectiveError, check=lambda error: error.rank == 1):
        check_links(HashStore(), 0, 2, timeout=0.1)
    assert listeners[0].fileno() < 0
    for thread in answering():
        thread.join(PATIENCE)
    assert answering() == []
