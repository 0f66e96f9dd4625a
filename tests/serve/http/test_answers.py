# SPDX-License-Identifier: Apache-2.0
"""`Answers`: results of threads in an event loop: all arrive, with few wake-ups, and a wait may be given up."""

import asyncio
import threading
from concurrent.futures import Future

import pytest

from terarec.serve.http.answers import Answers
from tests.waiting import PATIENCE


def test_all_answers_of_several_threads_arrive() -> None:
    async def wait() -> list[int]:
        answers, pending = Answers(), [Future[int]() for _ in range(300)]
        waits = asyncio.gather(*(answers.of(future) for future in pending))
        await asyncio.sleep(0)

        def resolve(begin: int) -> None:
            for number in range(begin, len(pending), 3):
                pending[number].set_result(number)

        threads = [threading.Thread(target=resolve, args=(begin,)) for begin in range(3)]
        for thread in threads:
            thread.start()
        return await asyncio.wait_for(waits, PATIENCE)

    assert asyncio.run(wait()) == list(range(300))


def test_the_loop_is_woken_once_for_the_answers_of_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    async def wait() -> int:
        loop, answers, pending, calls = asyncio.get_running_loop(), Answers(), [Future[int]() for _ in range(64)], []
        waits = [asyncio.create_task(answers.of(future)) for future in pending]
        await asyncio.sleep(0)
        wake = loop.call_soon_threadsafe
        monkeypatch.setattr(loop, "call_soon_threadsafe", lambda call: (calls.append(call), wake(call)))
        for future in pending:
            future.set_result(1)
        assert sum(await asyncio.gather(*waits)) == 64
        return len(calls)

    assert asyncio.run(wait()) == 1


def test_a_failure_is_raised_and_a_wait_that_is_given_up_cancels() -> None:
    async def wait() -> None:
        answers, failed, left = Answers(), Future[int](), Future[int]()
        waits = [asyncio.create_task(answers.of(future)) for future in (failed, left)]
        await asyncio.sleep(0)
        failed.set_exception(ValueError("wrong"))
        waits[1].cancel()
        with pytest.raises(ValueError, match="wrong"):
            await waits[0]
        with pytest.raises(asyncio.CancelledError):
            await waits[1]
        assert left.cancelled()
        await asyncio.sleep(0)  # what has arrived of it is dropped
        assert await answers.of(resolved()) is None

    asyncio.run(wait())


def resolved() -> Future[None]:
    future = Future[None]()
    future.set_result(None)
    return future
