# SPDX-License-Identifier: Apache-2.0
"""The memory of requests: what counts, who waits for it, and who is refused, over every transport."""

import gzip
import json
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import httpx
import pytest

from terarec.errors import ConfigError
from terarec.serve import request_memory
from terarec.serve.api import InferenceApi
from terarec.serve.grpc.conversion import infer_message
from terarec.serve.grpc.service import GrpcService
from terarec.serve.json_codec import encode
from terarec.serve.protocol import InferRequest, ServerBusyError
from terarec.serve.request_memory import RequestMemory, memory_of_json
from terarec.spec import ServingSpec
from terarec.spec.serving_options import ServedModelOptions
from tests.serve.conftest import TrainedRun
from tests.serve.held_models import held_models
from tests.serve.http.serving import served
from tests.serve.test_models import request_of
from tests.waiting import PATIENCE, wait_for

MIB = 2**20


def test_what_does_not_fit_is_refused_until_others_are_released(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_memory, "_LEAST_BYTES", MIB)
    memory = RequestMemory(1)
    first, second, other = (memory.hold(waits=False) for _ in range(3))
    first.take(MIB - 100_000)
    for _ in range(5):
        second.take(10_000)  # little is not counted,
    with pytest.raises(ServerBusyError):
        second.take(60_000)  # but with what it had before
    first.release()
    second.take(60_000)
    with pytest.raises(ServerBusyError):
        other.take(50 * MIB)
    second.release()
    other.take(50 * MIB)  # one that is alone fits


def test_large_requests_wait_and_leave_the_room_of_others() -> None:
    memory = RequestMemory(MIB)
    first, second, other = memory.hold(waits=True), memory.hold(waits=True), memory.hold(waits=False)
    first.take(100 * MIB)
    with ThreadPoolExecutor() as pool:
        waiting, left = pool.submit(second.take, MIB), memory.hold(waits=True)
        leaving = pool.submit(left.take, MIB)
        other.take(MIB)
        left.release()  # its client has gone
        with pytest.raises(ServerBusyError):
            leaving.result(PATIENCE)
        assert not waiting.done()
        first.release()
        waiting.result(PATIENCE)
    assert second.num_bytes == MIB


def test_large_requests_wait_for_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_memory, "_WAIT_SECONDS", 0.01)
    memory = RequestMemory(MIB)
    memory.hold(waits=True).take(100 * MIB)
    with pytest.raises(ServerBusyError):
        memory.hold(waits=True).take(MIB)


BODIES: dict[str, Any] = {
    "integers": list(range(1000, 9000)),
    "numbers": [value / 7 for value in range(8000)],
    "texts": [f"{value:x}" for value in range(300, 8000)],
    "long": ["x" * 5000] * 10,
    "wide": ["x" * 5000 + "\N{SLIGHTLY SMILING FACE}"] * 10,
    "lists": [[] for _ in range(8000)],
    "pairs": [[1000 + value, 2000 + value] for value in range(4000)],
    "objects": [{} for _ in range(8000)],
    "fields": [{f"n{value}": 7000 + value, f"m{value}": ""} for value in range(2000)],
}


@pytest.mark.parametrize("is_ascii", [True, False])
@pytest.mark.parametrize("name", BODIES)
def test_the_memory_of_json_is_no_less_than_python_takes(name: str, is_ascii: bool) -> None:
    body = json.dumps(BODIES[name], ensure_ascii=is_ascii, separators=(",", ":")).encode()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        parsed = json.loads(body)
        taken = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert parsed
    assert taken <= memory_of_json(body) + 10_000


def long_request(trained: TrainedRun, length: int) -> InferRequest:
    """A request of one record with a long text, which the workflow does not take for a category."""
    request = request_of(trained, 0, 1)
    long = {"C1": ["x" * length]}
    return replace(request, inputs=tuple(one._replace(data=long.get(one.name, one.data)) for one in request.inputs))


def test_messages_of_grpc_that_wait_hold_bounded_memory(trained: TrainedRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_memory, "_LEAST_BYTES", MIB)
    with held_models(trained.path, ServedModelOptions(), monkeypatch) as (models, gate):
        service = GrpcService(InferenceApi(models, max_request_bytes=100_000), 1024)
        message = infer_message(long_request(trained, 100_000), "dlrm").SerializeToString()
        small = infer_message(request_of(trained, 0, 1), "dlrm").SerializeToString()
        others = [service.infer(small).scored]
        wait_for(lambda: gate.num_batches == 1)
        scored = [service.infer(message).scored for _ in range(20)]
        refused = [future for future in scored if future.done()]
        waiting = [future for future in scored if not future.done()]
        assert (len(waiting), len(refused)) == (5, 15)  # a message takes twice its bytes
        assert all(isinstance(future.exception(), ServerBusyError) for future in refused)
        assert waiting.pop().cancel()  # who leaves gives its memory back
        waiting.append(service.infer(message).scored)
        assert service.infer(message).scored.done()
        others += [service.infer(small).scored for _ in range(20)]
        gate.open()
        assert all(future.result(PATIENCE) for future in others)
        assert all(type(future.exception(PATIENCE)) is ConfigError for future in waiting)
        assert type(service.infer(message).scored.exception(PATIENCE)) is ConfigError


def test_compressed_bodies_of_http_count_by_their_content(trained: TrainedRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_memory, "_LARGE", 2)
    monkeypatch.setattr(request_memory, "_WAIT_SECONDS", 0.05)
    spec = ServingSpec(max_request_bytes=200_000)
    with (
        held_models(trained.path, ServedModelOptions(), monkeypatch) as (models, gate),
        served(models, spec) as server,
        ThreadPoolExecutor() as pool,
    ):

        def post(request: InferRequest) -> int:
            headers = {"Content-Encoding": "gzip", "Content-Type": "application/json"}
            url = f"{server.url}/v2/models/dlrm/infer"
            return httpx.post(
                url, content=gzip.compress(encode(request)), headers=headers, timeout=PATIENCE
            ).status_code

        answers = [pool.submit(post, long_request(trained, 150_000)) for _ in range(3)]
        wait_for(lambda: any(answer.done() for answer in answers))
        gate.open()
        assert sorted(answer.result(PATIENCE) for answer in answers) == [400, 400, 503]
        assert post(long_request(trained, 150_000)) == 400
        assert post(request_of(trained, 0, 1)) == 200
