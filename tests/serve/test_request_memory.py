# SPDX-License-Identifier: Apache-2.0
"""The memory of requests: what counts, who waits for it, and who is refused, over every transport."""

import gzip
import json
import threading
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import httpx
import numpy as np
import pytest

from terarec.errors import ConfigError
from terarec.serve import request_memory
from terarec.serve.api import InferenceApi
from terarec.serve.columns import ColumnReader
from terarec.serve.grpc.conversion import infer_message
from terarec.serve.grpc.service import GrpcService
from terarec.serve.json_codec import encode
from terarec.serve.models import ServedModels
from terarec.serve.protocol import InferRequest, ServerBusyError, Tensor, UnknownModelError
from terarec.serve.request_memory import UNCOUNTED_BYTES, RequestMemory, memory_of_json, request_memories
from terarec.serve.session import InputColumn
from terarec.spec import ServingSpec
from terarec.spec.serving_options import ServedModelOptions
from tests.errors import at
from tests.serve.conftest import TrainedRun
from tests.serve.held_models import held_models
from tests.serve.http.serving import Served, served
from tests.serve.test_models import request_of
from tests.waiting import PATIENCE, wait_for

MIB = 2**20


def test_what_does_not_fit_is_refused_until_others_are_released(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_memory, "_LEAST_BYTES", MIB)
    memory, _ = request_memories(1)
    first, second, other = (memory.hold() for _ in range(3))
    first.take(MIB // 2)
    second.take(MIB // 2 - 100_000)
    second, beside = memory.hold(), second
    for _ in range(5):
        second.take(10_000)  # little is not counted,
    with pytest.raises(ServerBusyError):
        second.take(60_000)  # but with what it had before
    beside.release()
    second.take(60_000)
    with pytest.raises(ServerBusyError, check=at("server", "the request needs 524288 bytes, and")):
        other.take(50 * MIB)
    first.release()
    other.take(50 * MIB)  # one of any size fits beside others, of half the limit


def test_large_requests_wait_and_leave_the_room_of_others() -> None:
    usual, memory = request_memories(MIB)
    first, second, other = memory.hold(), memory.hold(), usual.hold()
    first.take(100 * MIB)
    with ThreadPoolExecutor() as pool:
        waiting, left = pool.submit(second.take, MIB), memory.hold()
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
    _, memory = request_memories(MIB)
    memory.hold().take(100 * MIB)
    with pytest.raises(ServerBusyError):
        memory.hold().take(MIB)


def test_requests_wait_for_their_turn_and_for_room_together() -> None:
    """Of ten large ones in the queue of the parser, the last would have waited ten times as long."""
    seconds = 100 * PATIENCE
    memory = RequestMemory(MIB, MIB, seconds)
    memory.hold().take(MIB)
    with ThreadPoolExecutor() as pool, memory.hold() as late:
        assert late.deadline is not None
        late.deadline -= seconds  # while others were parsed
        assert type(pool.submit(late.take, MIB).exception(PATIENCE)) is ServerBusyError


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


SHOP = (InputColumn(name="price", kind="number"), InputColumn(name="tags", kind="integer", hotness=None))


@pytest.mark.parametrize("form", ["repeated", "absent", "lists", "empty lists", "masked"])
def test_columns_that_are_made_of_tensors_count(form: str) -> None:
    """Few bytes of a message became many of columns, which a request holds while it waits."""
    count = 20_000
    prices, tags = np.arange(count, dtype=np.int8), np.arange(1000, 1000 + count)
    price = Tensor(name="price", datatype="INT8", shape=(count,), data=prices)
    inputs = {
        "repeated": (price, Tensor(name="tags", datatype="INT64", shape=(1, 1), data=[7])),
        "absent": (price,),
        "lists": (price, Tensor(name="tags", datatype="INT64", shape=(count, 1), data=tags)),
        "empty lists": (price, Tensor(name="tags", datatype="INT64", shape=(count, 0), data=[])),
        "masked": (
            Tensor(name="price", datatype="INT64", shape=(count,), data=tags),
            Tensor(name="price.missing", datatype="BOOL", shape=(count,), data=[False] * count),
        ),
    }[form]
    reader = ColumnReader(SHOP, max_batch=count, absent_is_missing=True)
    held = RequestMemory(100 * MIB, 100 * MIB).hold()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        read = reader(InferRequest(inputs=inputs), held)
        taken = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert read.num_records == count
    assert 8 * count <= taken <= held.num_bytes + 10_000 <= 3 * taken


def test_the_columns_of_a_request_are_refused_where_others_hold_the_memory(models: ServedModels) -> None:
    api, count = InferenceApi(models), 1000
    message = InferRequest(
        inputs=tuple(
            Tensor(
                name=one.name,
                datatype=one.datatype,
                shape=(1 if place else count,),
                data=[None] * (1 if place else count),
            )
            for place, one in enumerate(models.get("dlrm").metadata.inputs)
        )
    )
    with api.requests.hold() as others, api.requests.hold() as other:
        others.take(2**30)
        other.take(2**30)
        held = api.requests.hold()
        held.take(UNCOUNTED_BYTES)
        with pytest.raises(ServerBusyError, check=at("server", "the request needs")):
            api.infer(message, "dlrm", held=held)


def test_what_is_answered_holds_no_inputs(models: ServedModels, trained: TrainedRun) -> None:
    """Answers of a stream that its client reads late held their requests, also those that were refused."""
    service = GrpcService(InferenceApi(models), 8)
    one = request_of(trained, 0, 1)
    records = tuple(tensor._replace(shape=(500,), data=[*tensor.data] * 500) for tensor in one.inputs)
    valid = infer_message(replace(one, inputs=records), "dlrm").SerializeToString()
    invalid = infer_message(long_request(trained, 200_000), "dlrm").SerializeToString()
    unknown = infer_message(long_request(trained, 200_000), "none").SerializeToString()
    pending = [service.infer(message) for message in (valid, invalid, unknown)]
    assert [type(each.scored.exception(PATIENCE)) for each in pending] == [type(None), ConfigError, UnknownModelError]
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for message in (valid, invalid, unknown) * 4:
            pending.append(service.infer(message))
            pending[-1].scored.exception(PATIENCE)
        wait_for(lambda: tracemalloc.get_traced_memory()[0] - before < len(valid))
    finally:
        tracemalloc.stop()


def post_compressed(server: Served, request: InferRequest) -> int:
    headers = {"Content-Encoding": "gzip", "Content-Type": "application/json"}
    url = f"{server.url}/v2/models/dlrm/infer"
    return httpx.post(url, content=gzip.compress(encode(request)), headers=headers, timeout=PATIENCE).status_code


def test_short_compressed_bodies_are_not_behind_large_ones(models: ServedModels, trained: TrainedRun) -> None:
    with served(models) as server, ThreadPoolExecutor() as pool:
        with server.api.large_requests.hold() as others:
            others.take(2**40)
            large = pool.submit(post_compressed, server, long_request(trained, 150_000))
            wait_for(lambda: any(thread.name.startswith("parse") for thread in threading.enumerate()))
            assert post_compressed(server, request_of(trained, 0, 1)) == 200
            assert not large.done()
        assert large.result(PATIENCE) == 400


def test_compressed_bodies_of_http_count_by_their_content(trained: TrainedRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_memory, "_LARGE", 2)
    monkeypatch.setattr(request_memory, "_WAIT_SECONDS", 0.05)
    spec = ServingSpec(max_request_bytes=200_000)
    with (
        held_models(trained.path, ServedModelOptions(), monkeypatch) as (models, gate),
        served(models, spec) as server,
        ThreadPoolExecutor() as pool,
    ):
        post = partial(post_compressed, server)
        answers = [pool.submit(post, long_request(trained, 150_000)) for _ in range(3)]
        wait_for(lambda: any(answer.done() for answer in answers))
        gate.open()
        assert sorted(answer.result(PATIENCE) for answer in answers) == [400, 400, 503]
        assert post(long_request(trained, 150_000)) == 400
        assert post(request_of(trained, 0, 1)) == 200
