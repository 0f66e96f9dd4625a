# SPDX-License-Identifier: Apache-2.0
"""Messages of any form: each is answered, by a status that says what is wrong with it, and the server goes on."""

from __future__ import annotations

from typing import Any

import grpc
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tritonclient.grpc import service_pb2

from terarec.serve.api import InferenceApi
from terarec.serve.grpc.messages import METHODS, SERVICE
from terarec.serve.grpc.service import GrpcService, failure_of
from terarec.serve.protocol import DATATYPES
from tests.params import examples
from tests.serve.conftest import CATEGORICAL, DENSE, TrainedRun
from tests.serve.grpc.conftest import serving, tensors
from tests.waiting import PATIENCE

CLIENT_S_FAULT = {"INVALID_ARGUMENT", "NOT_FOUND", "RESOURCE_EXHAUSTED", "UNIMPLEMENTED", "UNAVAILABLE"}
SEVERAL = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
LONG = [pytest.param(200_000, seed, marks=pytest.mark.slow) for seed in range(10, 15)]
"""Numbers of mutated requests in the long tests, a million in all, and the seeds of their changes."""


def request_of(records: dict[str, list[Any]]) -> Any:
    """A good request, as Triton's client sends it."""
    message = service_pb2.ModelInferRequest(model_name="dlrm")
    for tensor in tensors(records):
        message.inputs.append(tensor._get_tensor())
        message.raw_input_contents.append(tensor._get_content())
    return message


def outcome(service: GrpcService, body: bytes) -> str:
    """The status of a request, which must be OK or the client's fault."""
    try:
        service.infer(body).response()
        code = "OK"
    except Exception as error:
        code, body = failure_of(error).code, repr(error).encode() + body
    assert code in CLIENT_S_FAULT | {"OK"}, body
    return code


parameters = st.one_of(
    st.builds(lambda value: service_pb2.InferParameter(bool_param=value), st.booleans()),
    st.builds(lambda value: service_pb2.InferParameter(int64_param=value), st.integers(-(2**63), 2**63 - 1)),
    st.builds(lambda value: service_pb2.InferParameter(string_param=value), st.text(max_size=8)),
    st.builds(lambda value: service_pb2.InferParameter(double_param=value), st.floats()),
    st.builds(lambda value: service_pb2.InferParameter(uint64_param=value), st.integers(0, 2**64 - 1)),
)
names = st.sampled_from(
    ["priority", "timeout", "sequence_id", "shared_memory_region", "shared_memory_byte_size", "shared_memory_offset"]
)


@st.composite
def requests(draw: st.DrawFn, records: dict[str, list[Any]]) -> bytes:
    """A good request of which some parts are others."""
    message = request_of(records)
    for _ in range(draw(st.integers(1, 3))):
        place = draw(st.integers(0, len(message.inputs) - 1)) if message.inputs else 0
        change = draw(st.sampled_from(["name", "datatype", "shape", "raw", "drop", "parameter", "contents", "own"]))
        if change == "own" or not message.inputs:
            message.parameters[draw(names)].CopyFrom(draw(parameters))
        elif change == "name":
            message.inputs[place].name = draw(st.sampled_from([*DENSE, *CATEGORICAL]) | st.text(max_size=4))
        elif change == "datatype":
            message.inputs[place].datatype = draw(st.sampled_from([*DATATYPES, "", "FP8"]))
        elif change == "shape":
            sizes = st.integers(-2, 3) | st.sampled_from([2**31, 2**62, -(2**63)])
            message.inputs[place].shape[:] = draw(st.lists(sizes, max_size=3))
        elif change == "raw" and message.raw_input_contents:
            message.raw_input_contents[place % len(message.raw_input_contents)] = draw(st.binary(max_size=24))
        elif change == "drop":
            del message.inputs[place]
        elif change == "parameter":
            message.inputs[place].parameters[draw(names)].CopyFrom(draw(parameters))
        elif change == "contents":
            message.inputs[place].contents.fp32_contents.extend(draw(st.lists(st.floats(width=32), max_size=3)))
    encoded: bytes = message.SerializeToString()
    return encoded


@settings(SEVERAL, max_examples=examples(400))
@given(data=st.data())
def test_requests_with_wrong_parts_are_answered(api: InferenceApi, trained: TrainedRun, data: st.DataObject) -> None:
    outcome(GrpcService(api, 100), data.draw(requests(trained.records(0, 2))))


@settings(SEVERAL, max_examples=examples(400))
@given(
    name=st.sampled_from([name for name in METHODS if name not in ("ModelInfer", "ModelStreamInfer")]), data=st.data()
)
def test_calls_of_any_bytes_are_answered(api: InferenceApi, name: str, data: st.DataObject) -> None:
    service, reason = GrpcService(api, 100), ""
    body = data.draw(st.binary(max_size=30))
    try:
        service.call(name, body)
        code = "OK"
    except Exception as error:
        code, reason = failure_of(error).code, repr(error)
    assert code in CLIENT_S_FAULT | {"OK"}, reason


def mutated(body: bytes, draws: np.random.Generator) -> bytes:
    """`body` with some bytes changed, cut out or repeated."""
    content = bytearray(body)
    for _ in range(int(draws.integers(1, 4))):
        place = int(draws.integers(len(content)))
        kind = int(draws.integers(3))
        if kind == 0:
            content[place] = int(draws.integers(256))
        elif kind == 1:
            del content[place : place + int(draws.integers(1, 9))]
        else:
            content[place:place] = content[place : place + int(draws.integers(1, 9))]
        if not content:
            break
    return bytes(content)


@pytest.mark.parametrize(("count", "seed"), [(500, 5), *LONG])
def test_mutated_bytes_are_answered_and_harm_no_other_client(
    api: InferenceApi, trained: TrainedRun, count: int, seed: int
) -> None:
    service, draws = GrpcService(api, 100), np.random.default_rng(seed)
    good = request_of(trained.records(0, 2)).SerializeToString()
    expected = service.infer(good).response()
    codes = set()
    for number in range(count):
        codes.add(outcome(service, mutated(good, draws)))
        if number % 100 == 0:
            assert service.infer(good).response() == expected
    assert {"OK", "INVALID_ARGUMENT"} <= codes


@pytest.mark.parametrize("library", ["grpcio", "native"])
def test_mutated_bytes_over_a_connection(api: InferenceApi, trained: TrainedRun, library: str) -> None:
    draws = np.random.default_rng(6)
    good = request_of(trained.records(0, 2)).SerializeToString()
    with serving(api, grpc_library=library) as address, grpc.insecure_channel(address) as channel:
        call = channel.unary_unary(f"/{SERVICE}/ModelInfer")
        stream = channel.stream_stream(f"/{SERVICE}/ModelStreamInfer")
        expected = call(good, timeout=PATIENCE)
        bodies = [mutated(good, draws) for _ in range(100)]
        for body in bodies:
            try:
                call(body, timeout=PATIENCE)
            except grpc.RpcError as error:
                found: Any = error
                assert found.code().name in CLIENT_S_FAULT
        answers = list(stream(iter([*bodies, good]), timeout=PATIENCE))
        assert len(answers) == len(bodies) + 1
        last = service_pb2.ModelStreamInferResponse.FromString(answers[-1])
        assert last.infer_response.outputs[0].name == "score"
        assert call(good, timeout=PATIENCE) == expected
