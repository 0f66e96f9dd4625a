# SPDX-License-Identifier: Apache-2.0
"""Work that repeats in a thread goes on after errors of any kind."""

import queue
import threading

import pytest

from terarec.errors import StorageError
from terarec.repeating import RepeatedCall, Repeating
from tests.waiting import PATIENCE, wait_for


class Failing(Repeating):
    def __init__(self) -> None:
        self.errors: list[Exception] = [StorageError("redis", "is gone"), OSError("no space"), ValueError("a defect")]
        super().__init__("failing", 0.001)

    def poll(self) -> int:
        if self.errors:
            raise self.errors.pop(0)
        self._is_closed.set()
        return 0


def test_errors_are_logged_and_the_work_is_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    repeating = Failing()
    wait_for(repeating._is_closed.is_set)
    repeating.close()
    assert [record.getMessage() for record in caplog.records] == [
        "failing: redis: is gone; it is tried again",
        "failing: no space; it is tried again",
        "failing: it is tried again",
    ]
    assert caplog.records[-1].exc_info is not None  # the traceback of what was not expected


def test_a_function_is_called_first_after_a_pause_of_its_own() -> None:
    calls: queue.Queue[str] = queue.Queue()
    repeated = RepeatedCall("call", lambda: calls.put(threading.current_thread().name), 10 * PATIENCE, 0.001)
    assert calls.get(timeout=PATIENCE) == "call"
    repeated.close()
    assert calls.empty()
