# SPDX-License-Identifier: Apache-2.0
"""Elements as bytes: what is read, what is rejected, and that arbitrary bytes do neither harm nor more."""

import json
import struct
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from terarec.errors import ConfigError, TerarecError
from terarec.serve.binary_codec import (
    DTYPES,
    decode_binary_request,
    decode_elements,
    encode_binary_response,
    encode_elements,
    layout_reader,
)
from terarec.serve.json_codec import decode_object
from terarec.serve.protocol import DATATYPES, Elements, InferRequest, InferResponse, RequestedOutput, Tensor
from terarec.serve.request_layouts import InputLayout
from tests.errors import at

MANY = 129  # elements from which on they are decoded to arrays
COUNTS = (0, 1, 7, MANY, 1_000)


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("datatype", DTYPES)
@pytest.mark.parametrize("skipped", [0, 1])
def test_numbers_keep_their_bits(datatype: str, count: int, skipped: int) -> None:
    values = np.random.default_rng(7).integers(0, 2, count).astype(DTYPES[datatype])
    raw = memoryview(b"x" * skipped + encode_elements(values, datatype))[skipped:]
    for read in (decode_elements(raw, datatype, count, "a"), by_layout(bytes(raw), datatype, values)):
        assert np.array_equal(np.array(read, dtype=DTYPES[datatype]), values)


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=6), max_size=3 * MANY))
def test_texts_survive_the_way_there_and_back(texts: list[str]) -> None:
    raw = encode_elements(texts, "BYTES")
    assert list_of(decode_elements(raw, "BYTES", len(texts), "a")) == texts
    assert list_of(by_layout(raw, "BYTES", texts)) == texts


def by_layout(raw: bytes, datatype: str, data: Elements) -> Elements:
    """Return what is read of the bytes of a tensor as that of a known layout."""
    layout = InputLayout([Tensor(name="a", datatype=datatype, shape=(len(data),), data=data)])
    return layout_reader(layout)([raw])[0]


def list_of(elements: Any) -> list[Any]:
    return elements.to_pylist() if isinstance(elements, pa.Array) else list(elements)


@pytest.mark.parametrize("size", [0, 1, 8])
@pytest.mark.parametrize("count", COUNTS)
def test_texts_of_one_length(size: int, count: int) -> None:
    texts = [f"{index:08x}"[8 - size :] if size else "" for index in range(count)]
    assert list_of(decode_elements(encode_elements(texts, "BYTES"), "BYTES", count, "a")) == texts


@pytest.mark.parametrize("many", [False, True])
@pytest.mark.parametrize(
    ("raw", "where", "problem"),
    [
        (b"\x01\0\0\0a", "a[N]", "got fewer bytes"),
        (b"\x01\0\0\0a\x02\0\0\0b", "a[N]", "got fewer bytes"),
        (b"\x01\0\0\0a\xff\xff\xff\xffb", "a[N]", "got fewer bytes"),
        (b"\x01\0\0\0a\x01\0\0\0bc", "a", "behind the last"),
        (b"\x01\0\0\0a\x02\0\0\0\xff\xfe", "a[N]", "valid Unicode"),
        (b"\x01\0\0\0a\x03\0\0\0\xed\xa0\x80", "a[N]", "valid Unicode"),
    ],
)
def test_damaged_texts_are_named(raw: bytes, where: str, problem: str, many: bool) -> None:
    before = MANY if many else 0
    with pytest.raises(ConfigError, check=at(where.replace("N", str(before + 1)), problem)):
        decode_elements(b"\x02\0\0\0xy" * before + raw, "BYTES", before + 2, "a")


def test_a_flag_is_0_or_1() -> None:
    with pytest.raises(ConfigError, check=at("a[1]", "got 2")):
        decode_elements(b"\x01\x02", "BOOL", 2, "a")


@given(st.binary(max_size=4 * MANY), st.sampled_from(DATATYPES), st.integers(0, 2 * MANY))
def test_any_bytes_are_read_or_rejected(raw: bytes, datatype: str, count: int) -> None:
    try:
        elements = decode_elements(raw, datatype, count, "a")
    except ConfigError as error:
        assert "\n" not in str(error)  # noqa: PT017
        return
    assert len(elements) == count
    again = encode_elements(elements, datatype)
    # The bits of a NaN may change on the way through Python's numbers.
    np.testing.assert_array_equal(list_of(decode_elements(again, datatype, count, "a")), list_of(elements))
    assert len(again) == len(raw)


@pytest.mark.parametrize("count", [0, 3, MANY])
def test_numbers_of_16_bits_are_rounded_as_torch_does(count: int) -> None:
    values = np.random.default_rng(7).standard_normal(count).astype(np.float32)
    values[:3] = [np.inf, np.nan, 3.4e38][:count]
    rounded = torch.from_numpy(values).to(torch.bfloat16)
    raw = encode_elements(values, "BF16")
    assert raw == torch.where(rounded.isnan(), torch.nan, rounded).view(torch.int16).numpy().tobytes()
    np.testing.assert_array_equal(list_of(decode_elements(raw, "BF16", count, "a")), rounded.float().numpy())


PARAMETERS = st.sampled_from(["binary_data_size", "shared_memory_region"])
VALUES = st.integers() | st.text(max_size=3) | st.none() | st.booleans()


@given(st.data())
def test_mutated_requests_are_read_or_rejected(data: st.DataObject) -> None:
    """A request whose bytes, sizes and header length are changed somewhere: one line, and never another error."""
    numbers, texts = np.arange(3, dtype=np.float32).tobytes(), encode_elements(["a", "", "bcd"], "BYTES")
    tensors = [
        {"name": "x", "datatype": "FP32", "shape": [3], "parameters": {"binary_data_size": len(numbers)}},
        {"name": "y", "datatype": "BYTES", "shape": [3], "parameters": {"binary_data_size": len(texts)}},
        {"name": "z", "datatype": "INT64", "shape": [1], "data": [7]},
    ]
    change = data.draw(st.dictionaries(PARAMETERS, VALUES, max_size=1))
    data.draw(st.sampled_from(tensors)).setdefault("parameters", {}).update(change)  # type: ignore[attr-defined]
    header = json.dumps({"inputs": tensors}).encode()
    body = bytearray(header + numbers + texts)
    for _ in range(data.draw(st.integers(0, 3))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    length = data.draw(st.sampled_from([len(header), None]) | st.integers(-1, len(body) + 1))
    cut = data.draw(st.sampled_from([len(body)]) | st.integers(0, len(body)))
    try:
        request = decode_binary_request(body[:cut], length)
    except TerarecError as error:
        assert "\n" not in str(error)  # noqa: PT017
        return
    for tensor in request.inputs:
        assert len(tensor.data) == np.prod(tensor.shape, dtype=int)


def request_of(*tensors: dict[str, Any], raw: bytes = b"") -> InferRequest:
    header = json.dumps({"inputs": tensors}).encode()
    return decode_binary_request(header + raw, len(header))


def test_errors_name_the_tensor() -> None:
    tensor = {"name": "x", "datatype": "FP32", "shape": [1], "parameters": {"binary_data_size": 4}}
    raw = struct.pack("<f", 1.5)
    assert request_of(tensor, raw=raw).inputs[0].data == [1.5]
    with pytest.raises(ConfigError, check=at("the body", "got 1 bytes behind the last tensor")):
        request_of(tensor, raw=raw + b"x")
    with pytest.raises(ConfigError, check=at("inputs[1].parameters.binary_data_size", "at most the 0 bytes")):
        request_of(tensor, tensor | {"name": "y"}, raw=raw)
    with pytest.raises(ConfigError, check=at("inputs[0].data", "in JSON and elsewhere")):
        request_of(tensor | {"data": [1]}, raw=raw)
    with pytest.raises(ConfigError, check=at("inputs[0].data", "got 4 bytes, expected 8")):
        request_of(tensor | {"shape": [2]}, raw=raw)
    with pytest.raises(ConfigError, check=at("inputs[0]", "not allowed")):
        request_of(tensor | {"parameters": {"shared_memory_region": "r", "shared_memory_byte_size": 4}})
    with pytest.raises(ConfigError, check=at("Inference-Header-Content-Length", "got 9")):
        decode_binary_request(b"{}", 9)


def test_outputs_have_the_form_that_is_requested() -> None:
    scores = np.array([[0.25], [0.5]], dtype=np.float32)
    response = InferResponse(
        model_name="m",
        model_version="1",
        outputs=(Tensor(name="score", datatype="FP32", shape=(2, 1), data=scores.reshape(-1)),),
        id="7",
    )
    for output, default, is_binary in (
        (None, False, False),
        (None, True, True),
        (True, False, True),
        (False, True, False),
    ):
        parameters = {} if output is None else {"binary_data": output}
        outputs = () if output is None else (RequestedOutput(name="score", parameters=parameters),)
        request = InferRequest(inputs=(), outputs=outputs, parameters={"binary_data_output": default})
        body, header_bytes = encode_binary_response(response, request)
        assert (header_bytes is not None) == is_binary
        (tensor,) = decode_object(body[:header_bytes])["outputs"]
        if is_binary:
            assert body[header_bytes:] == scores.tobytes()
            assert tensor["parameters"] == {"binary_data_size": 8}
        else:
            assert tensor["data"] == [0.25, 0.5]
