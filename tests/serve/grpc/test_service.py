# SPDX-License-Identifier: Apache-2.0
"""Requests that cannot be read, apart from any library."""

from typing import Any

import numpy as np
import pytest

from terarec.errors import ConfigError
from terarec.serve import ServedModels
from terarec.serve.api import InferenceApi
from terarec.serve.binary_codec import DTYPES, encode_elements
from terarec.serve.columns import ColumnReader
from terarec.serve.grpc.conversion import infer_request
from terarec.serve.grpc.messages import head_of, message_class
from terarec.serve.grpc.service import GrpcService, PendingInference, failure_of
from terarec.serve.protocol import ServerBusyError
from terarec.serve.session import InputColumn
from tests.errors import at


def pending_of(models: ServedModels, **fields: Any) -> PendingInference:
    message = message_class("ModelInferRequest")(model_name="dlrm", id="7")
    contents = {name: fields.pop(name) for name in list(fields) if name.endswith("_contents")}
    message.inputs.add(name="I1", shape=[1], contents=contents, **fields)
    return GrpcService(InferenceApi(models), 8).infer(message.SerializeToString())


def test_an_error_of_a_stream_has_the_id_of_its_request(models: ServedModels) -> None:
    pending = pending_of(models, datatype="FP8")
    with pytest.raises(ConfigError, check=at("inputs[0].datatype")) as caught:
        pending.response()
    answer = message_class("ModelStreamInferResponse").FromString(pending.stream_failure(failure_of(caught.value)))
    assert answer.infer_response.id == "7"
    assert answer.error_message.startswith("inputs[0].datatype: got 'FP8'")


@pytest.mark.parametrize("is_masked", [False, True])
def test_nan_at_the_end_of_a_list_is_an_item_in_every_form(is_masked: bool) -> None:
    """Among typed contents, and beside a mask, it was taken for padding."""
    reader = ColumnReader((InputColumn(name="prices", kind="number", hotness=None),), max_batch=8)
    request = message_class("ModelInferRequest")
    values, mask = np.array([1.0, np.nan], np.float32), np.array([False, False])
    lists = []
    for is_raw in (True, False):
        message = request()
        for name, datatype, array in (("prices", "FP32", values), ("prices.missing", "BOOL", mask))[: 1 + is_masked]:
            contents = {"fp32_contents" if datatype == "FP32" else "bool_contents": array.tolist()}
            message.inputs.add(name=name, datatype=datatype, shape=[1, 2], contents=None if is_raw else contents)
            if is_raw:
                message.raw_input_contents.append(array.tobytes())
        lists.append(reader(infer_request(message)).columns["prices"])
    for found in lists:
        np.testing.assert_array_equal(found, [[1.0, np.nan]])


def test_elements_of_another_datatype_are_not_passed_over(models: ServedModels) -> None:
    pending = pending_of(models, datatype="FP32", fp32_contents=[1.0], int_contents=[3])
    with pytest.raises(ConfigError, check=at("inputs[0].contents.int_contents", "expected them in fp32_contents")):
        pending.response()


MANY = 40_000
VALUES: dict[str, tuple[str, list[Any]]] = {
    "BOOL": ("bool_contents", [number % 3 == 0 for number in range(MANY)]),
    "INT8": ("int_contents", [number % 256 - 128 for number in range(MANY)]),
    "INT64": ("int64_contents", [number * 10**14 for number in range(MANY)]),
    "UINT64": ("uint64_contents", [2**64 - 1 - number for number in range(MANY)]),
    "FP32": ("fp32_contents", [number / 4 if number % 5 else float("nan") for number in range(MANY)]),
    "FP64": ("fp64_contents", [number / 7 for number in range(MANY)]),
    "BYTES": ("bytes_contents", [f"\u00e9{number}".encode() if number % 3 else b"" for number in range(MANY)]),
}


def typed(datatype: str, values: list[Any]) -> Any:
    message = message_class("ModelInferRequest")(model_name="dlrm")
    message.inputs.add(name="c", datatype=datatype, shape=[len(values)], contents={VALUES[datatype][0]: values})
    return message


@pytest.mark.parametrize("datatype", VALUES)
def test_many_values_one_by_one_are_those_of_raw_contents(datatype: str) -> None:
    values = VALUES[datatype][1]
    message = message_class("ModelInferRequest")(model_name="dlrm")
    message.inputs.add(name="c", datatype=datatype, shape=[MANY])
    texts = [text.decode() for text in values] if datatype == "BYTES" else values
    message.raw_input_contents.append(
        encode_elements(texts if datatype == "BYTES" else np.array(values, DTYPES[datatype]), datatype)
    )
    one, other = infer_request(typed(datatype, values)).inputs[0], infer_request(message).inputs[0]
    assert type(one.data) is type(other.data)
    if isinstance(one.data, np.ndarray):
        np.testing.assert_array_equal(one.data, other.data)
        assert one.data.dtype == other.data.dtype
    else:
        assert one.data == other.data


@pytest.mark.parametrize(("datatype", "fault"), [("INT8", 300), ("FP32", float("inf")), ("BYTES", b"\xff")])
def test_the_place_of_a_fault_among_many_values_is_named(datatype: str, fault: Any) -> None:
    values = [*VALUES[datatype][1]]
    values[33_000] = fault
    with pytest.raises(ConfigError, check=at(f"inputs[0].contents.{VALUES[datatype][0]}[33000]")):
        infer_request(typed(datatype, values))


def test_the_head_of_a_message_is_known_before_it_is_parsed() -> None:
    message = typed("INT8", [1, 2, 3])
    assert head_of(message.SerializeToString()) == ("", False)
    message.id = "seven"
    message.parameters["priority"].int64_param = 2
    assert head_of(message.SerializeToString()) == ("seven", False)
    message.raw_input_contents.append(b"123")
    body = message.SerializeToString()
    assert head_of(body) == ("seven", True)
    for end in range(len(body)):
        head_of(body[:end])
    assert head_of(b"\xff" * 100) == ("", False)


def test_a_large_message_that_is_refused_keeps_its_id(models: ServedModels) -> None:
    api = InferenceApi(models, max_request_bytes=100_000)
    message = typed("INT8", [1] * 90_000)
    message.id = "7"
    with api.messages.hold() as others:
        others.take(400_000)
        pending = GrpcService(api, 8).infer(message.SerializeToString())
        with pytest.raises(ServerBusyError):
            pending.response()
    assert pending.request_id == "7"
