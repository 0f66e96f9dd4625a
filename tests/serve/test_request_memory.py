# SPDX-License-Identifier: Apache-2.0
"""The memory of requests: what counts, who waits for it, and who is refused, over every transport."""

import contextlib
import gzip
import json
import threading
import time
import tracemalloc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import httpx
import numpy as np
import pytest

from terarec.errors import ConfigError
from terarec.serve import InferenceSession, ServedModel, request_memory
from terarec.serve.api import InferenceApi
from terarec.serve.columns import ColumnReader
from terarec.serve.grpc.conversion import infer_message
from terarec.serve.grpc.service import GrpcService
from terarec.serve.json_codec import encode
from terarec.serve.models import ServedModels
from terarec.serve.protocol import InferRequest, ServerBusyError, Tensor, UnknownModelError
from terarec.serve.request_memory import (
    TYPED_FACTOR,
    UNCOUNTED_BYTES,
    LargeRequestError,
    RequestMemory,
    memory_of_json,
    request_memories,
)
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
    several = [memory.hold() for _ in range(4)]
    for each in several:
        each.take(MIB // 4 - 25_000)
    held, other = memory.hold(), memory.hold()
    for _ in range(5):
        held.take(10_000)  # little is not counted,
    with pytest.raises(ServerBusyError, check=at("server", "the request needs 110000 bytes, and")) as caught:
        held.take(60_000)  # but with what it had before
    assert type(caught.value) is ServerBusyError
    several.pop().release()
    held.take(60_000)
    with pytest.raises(LargeRequestError):  # whatever is free: large ones have their own room
        other.take(MIB // 4 + 1)


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
    memory = RequestMemory(MIB, wait_seconds=seconds)
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
    monkeypatch.setattr(request_memory, "_LARGE", 6)
    with held_models(trained.path, ServedModelOptions(), monkeypatch) as (models, gate):
        api = InferenceApi(models, max_request_bytes=100_000)
        service = GrpcService(api, 1024)
        message = infer_message(long_request(trained, 90_000), "dlrm").SerializeToString()
        small = infer_message(request_of(trained, 0, 1), "dlrm").SerializeToString()
        others = [service.infer(small).scored]
        wait_for(lambda: gate.num_batches == 1)
        waiting = []
        for number in range(1, 4):  # a message takes twice its bytes
            waiting.append(service.infer(message).scored)
            wait_for(lambda number=number: models.get("dlrm").num_waiting == number)
        scored = [service.infer(message).scored for _ in range(20)]
        refused = [future for future in scored if future.done()]
        assert len(refused) == 16  # four wait to be read, for the room of others
        assert all(type(future.exception()) is ServerBusyError for future in refused)
        unread = [future for future in scored if not future.done()]
        assert unread.pop().cancel()  # who leaves gives its place back
        unread.append(service.infer(message).scored)
        assert service.infer(message).scored.done()
        assert waiting.pop().cancel()
        wait_for(lambda: models.get("dlrm").num_waiting == 3)  # with the next one
        others += [service.infer(small).scored for _ in range(20)]
        gate.open()
        assert all(future.result(PATIENCE) for future in others)
        assert all(type(future.exception(PATIENCE)) is ConfigError for future in (*waiting, *unread))
        assert type(service.infer(message).scored.exception(PATIENCE)) is ConfigError
        wait_for(lambda: api.large_requests.num_bytes == api.messages.num_bytes == 0)


def typed_message(trained: TrainedRun, length: int) -> bytes:
    """A message of one record, whose values come one by one, of so many bytes."""
    request = request_of(trained, 0, 1)
    message = infer_message(replace(request, id=None, inputs=()), "dlrm")
    for one in request.inputs:
        item = message.inputs.add(name=one.name, datatype=one.datatype, shape=one.shape)
        if one.datatype == "BYTES":
            item.contents.bytes_contents.extend(text.encode() for text in one.data)
        else:
            item.contents.fp32_contents.extend(float("nan") if value is None else value for value in one.data)
    message.parameters["long"].string_param = "x" * (length - message.ByteSize() - 30)
    body: bytes = message.SerializeToString()
    assert length - 60 < len(body) <= length
    return body


def test_values_that_come_one_by_one_count_in_full(trained: TrainedRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """The longest message counted less than half of what it held, and a second one came into memory beside it."""
    with held_models(trained.path, ServedModelOptions(), monkeypatch) as (models, gate):
        api = InferenceApi(models, max_request_bytes=200_000)
        service, body = GrpcService(api, 8), typed_message(trained, 200_000)
        first = service.infer(body).scored
        wait_for(lambda: gate.num_batches == 1)
        assert api.large_requests.num_bytes >= 0.99 * TYPED_FACTOR * 200_000
        second = service.infer(body).scored
        wait_for(lambda: api.messages.num_bytes > 0)
        assert models.get("dlrm").num_waiting == 0  # it waits for room, and is not refused
        assert not second.done()
        gate.open()
        assert first.result(PATIENCE).outputs
        assert second.result(PATIENCE).outputs


@pytest.fixture
def long_batches(session: InferenceSession) -> Iterator[ServedModels]:
    """A model that takes requests of many records."""
    with ServedModels() as models:
        models.install(ServedModel(session, name="dlrm"))
        yield models


def test_small_messages_that_become_large_wait_for_their_turn(long_batches: ServedModels, trained: TrainedRun) -> None:
    """They counted as half of what others have, whatever they took."""
    api = InferenceApi(long_batches)
    api.requests = RequestMemory(2**20, large_bytes=2**18)
    request = request_of(trained, 0, 1)
    count = 10_000
    numbers = np.zeros(count, np.int8)
    repeated = replace(
        request,
        inputs=tuple(
            one._replace(datatype="INT8", shape=(count,), data=numbers) if one.name == "I1" else one
            for one in request.inputs
        ),
    )
    service = GrpcService(api, 8)
    message = infer_message(repeated, "dlrm").SerializeToString()
    assert len(message) < 2**16
    is_free = threading.Event()
    api.read_in_turn(is_free.wait)
    scored = service.infer(message).scored
    assert not scored.done()
    is_free.set()
    assert scored.result(PATIENCE).outputs[0].shape == (count, 1)


def test_columns_wait_for_room_in_the_turn_of_their_body(long_batches: ServedModels, trained: TrainedRun) -> None:
    """A body that had waited for the parser was refused at once where its columns had no room."""
    request, count = request_of(trained, 0, 1), 20_000
    texts = [f"{number:08x}" for number in range(count)]
    repeated = replace(
        request,
        inputs=tuple(one._replace(shape=(count,), data=texts) if one.name == "C1" else one for one in request.inputs),
    )
    body = encode(repeated)
    with served(long_batches) as server, ThreadPoolExecutor() as pool:
        memory = server.api.large_requests
        with memory.hold() as others:
            # Room for what is parsed, and not for the columns with one value, which are repeated.
            others.take(request_memory._LARGE * ServingSpec().max_request_bytes - memory_of_json(body) - 100_000)
            held = memory.num_bytes
            answer = pool.submit(
                httpx.post,
                f"{server.url}/v2/models/dlrm/infer",
                content=body,
                headers={"Content-Type": "application/json"},
                timeout=PATIENCE,
            )
            wait_for(lambda: memory.num_bytes > held or answer.done())
            time.sleep(0.2)
            assert not answer.done()
        assert answer.result(PATIENCE).status_code == 200
        wait_for(lambda: memory.num_bytes == 0)


def test_a_client_that_leaves_while_its_body_is_read_is_not_scored(
    trained: TrainedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit, is_reading, is_gone = ServedModels.submit, threading.Event(), threading.Event()

    def late(self: ServedModels, *args: Any) -> Any:
        is_reading.set()
        assert is_gone.wait(PATIENCE)
        return submit(self, *args)

    with held_models(trained.path, ServedModelOptions(), monkeypatch) as (models, gate), served(models) as server:
        small = encode(request_of(trained, 0, 1))
        url, headers = f"{server.url}/v2/models/dlrm/infer", {"Content-Type": "application/json"}
        with ThreadPoolExecutor() as pool:
            other = pool.submit(httpx.post, url, content=small, headers=headers, timeout=PATIENCE)
            wait_for(lambda: gate.num_batches == 1)
            monkeypatch.setattr(ServedModels, "submit", late)
            with server.connect() as client:
                body = encode(long_request(trained, 150_000))
                head = f"POST /v2/models/dlrm/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
                client.sendall(head.encode() + b"Content-Type: application/json\r\n\r\n" + body)
                assert is_reading.wait(PATIENCE)
            wait_for(lambda: server.api.large_requests.num_bytes == 0)
            is_gone.set()
            wait_for(lambda: models.get("dlrm").statistics().failed.get("cancelled", 0) == 1)
            gate.open()
            assert other.result(PATIENCE).status_code == 200


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
    held = RequestMemory(100 * MIB).hold()
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
    with contextlib.ExitStack() as stack:
        for _ in range(8):
            stack.enter_context(api.requests.hold()).take(2**25)
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
