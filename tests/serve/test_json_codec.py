# SPDX-License-Identifier: Apache-2.0
"""The JSON form of the protocol: what is read, what is written, how each mistake is reported."""

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from terarec.errors import ConfigError
from terarec.serve import json_codec
from terarec.serve.json_codec import (
    check_elements,
    decode_infer_request,
    decode_infer_response,
    decode_model_metadata,
    encode,
    float32_elements,
)
from terarec.serve.protocol import (
    DATATYPES,
    InferRequest,
    InferResponse,
    ModelMetadata,
    RequestedOutput,
    ServerMetadata,
    Tensor,
    TensorMetadata,
)
from tests.errors import at

TENSOR = {"name": "I1", "shape": [2], "datatype": "FP32", "data": [1.5, None]}


def body(**fields: object) -> bytes:
    return json.dumps(fields).encode()


def with_tensor(**fields: object) -> bytes:
    return body(inputs=[TENSOR, {**TENSOR, **fields}])


def test_a_request_is_read_whole() -> None:
    request = decode_infer_request(
        body(
            id="r1",
            inputs=[TENSOR, {"name": "C1", "shape": [2, 1], "datatype": "BYTES", "data": [["a"], [""]]}],
            outputs=[{"name": "score", "parameters": {"binary_data": False}}],
            parameters={"priority": 1},
        )
    )
    assert request.id == "r1"
    assert [tensor.name for tensor in request.inputs] == ["I1", "C1"]
    assert request.inputs[0].data == [1.5, None]
    assert request.inputs[1].shape == (2, 1)
    assert request.inputs[1].data == ["a", ""]
    assert request.outputs == (RequestedOutput(name="score", parameters={"binary_data": False}),)
    assert request.parameters == {"priority": 1}


def test_nested_and_flat_data_are_the_same() -> None:
    flat = decode_infer_request(with_tensor(shape=[2, 3], data=[1, 2, 3, 4, 5, 6]))
    nested = decode_infer_request(with_tensor(shape=[2, 3], data=[[1, 2, 3], [4, 5, 6]]))
    assert flat.inputs[1].data == nested.inputs[1].data


def test_integers_beyond_float32_stay_whole() -> None:
    request = decode_infer_request(with_tensor(data=[16_777_217, 2**60]))
    assert request.inputs[1].data == [16_777_217, 2**60]


MALFORMED = {
    "no JSON": (b"{", "line 1 column 2: "),
    "no UTF-8": (b'{"id": "\xff"}', "byte 8: not UTF-8"),
    "NaN": (b'{"inputs": [NaN]}', "the body: got NaN, which is not JSON; write null"),
    "deep": (b"[" * 100_000, "nested too deeply"),
    "digits": (b"9" * 5_000, "too many digits"),
    "no object": (b"[]", "the body: got [], expected an object"),
    "no inputs": (b"{}", "the body: field 'inputs' is missing"),
    "unknown field": (body(inputs=[], instances=[]), "the body: unknown field 'instances', expected inputs, outputs"),
    "inputs": (body(inputs={}), "inputs: got {}, expected a list of tensors"),
    "id": (body(inputs=[], id=7), "id: got 7, expected a string"),
    "id of no Unicode": (body(inputs=[], id="\ud800"), "id: got '\\ud800', expected a string of valid Unicode"),
    "parameters": (body(inputs=[], parameters=[]), "parameters: got [], expected an object"),
    "output": (body(inputs=[], outputs=["score"]), "outputs[0]: got 'score', expected an object"),
    "output name": (body(inputs=[], outputs=[{}]), "outputs[0]: field 'name' is missing"),
    "tensor": (body(inputs=[3]), "inputs[0]: got 3, expected an object"),
    "tensor field": (with_tensor(dtype="x"), "inputs[1]: unknown field 'dtype', expected name, shape, datatype, data"),
    "no data": (body(inputs=[{"name": "a", "shape": [0], "datatype": "BYTES"}]), "inputs[0]: field 'data' is missing"),
    "name": (with_tensor(name=None), "inputs[1].name: got null, expected a string"),
    "datatype": (with_tensor(datatype="float"), "inputs[1].datatype: got 'float', expected one of BOOL, INT64"),
    "datatype list": (with_tensor(datatype=[]), "inputs[1].datatype: got [], expected one of"),
    "shape": (with_tensor(shape=2), "inputs[1].shape: got 2, expected a list of sizes"),
    "negative size": (with_tensor(shape=[-1]), "inputs[1].shape[0]: got -1, expected an integer from 0 to"),
    "bool size": (with_tensor(shape=[True]), "inputs[1].shape[0]: got true, expected an integer from 0 to"),
    "data": (with_tensor(data="ab"), "inputs[1].data: got 'ab', expected a list"),
    "count": (with_tensor(data=[1]), "inputs[1].data: got 1 elements, expected 2 for shape [2]"),
    "rows": (with_tensor(shape=[2, 1], data=[[1]]), "inputs[1].data: got 1 rows, expected 2 for shape [2, 1]"),
    "row": (with_tensor(shape=[2, 1], data=[[1], 2]), "inputs[1].data[1]: got 2, expected a list as the rows before"),
    "row count": (with_tensor(shape=[2, 1], data=[[1], []]), "inputs[1].data[1]: got 0 elements, expected 1"),
    "string": (with_tensor(data=[1, "2"]), "inputs[1].data[1]: got '2', expected a finite number or null for FP32"),
    "infinite": (with_tensor().replace(b"1.5, null]}]", b"1e999, 1]}]"), "inputs[1].data[0]: got inf, expected a"),
    "huge": (with_tensor(data=[10**400, 1]), "inputs[1].data[0]: got 1000000000"),
    "bool": (with_tensor(data=[1, True]), "inputs[1].data[1]: got true, expected a finite number"),
    "float": (with_tensor(datatype="INT64", data=[1, 1.5]), "inputs[1].data[1]: got 1.5, expected an integer that"),
    "range": (with_tensor(datatype="UINT8", data=[1, 256]), "inputs[1].data[1]: got 256, expected an integer that"),
    "number": (with_tensor(datatype="BYTES", data=["a", 1]), "inputs[1].data[1]: got 1, expected a string of valid"),
    "surrogate": (with_tensor(datatype="BYTES", data=["a", "\ud800"]), "inputs[1].data[1]: got '\\ud800', expected"),
    "depth": (with_tensor(datatype="BYTES", data=["a", ["b"]]), "inputs[1].data[1]: got ['b'], expected a string"),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_a_malformed_request_is_reported_in_one_line(case: str) -> None:
    request, expected = MALFORMED[case]
    with pytest.raises(ConfigError) as caught:
        decode_infer_request(request)
    message = str(caught.value)
    assert expected in message
    assert "\n" not in message
    assert len(message) < 250


@given(
    st.binary(max_size=60)
    | st.recursive(st.none() | st.booleans() | st.integers() | st.text(), st.lists).map(
        lambda value: json.dumps({"inputs": value}).encode()
    )
)
def test_any_bytes_are_read_or_rejected(data: bytes) -> None:
    try:
        decode_infer_request(data)
    except ConfigError as error:
        assert "\n" not in str(error)  # noqa: PT017


@given(st.lists(st.none() | st.floats(allow_nan=False, allow_infinity=False), max_size=20))
def test_numbers_survive_the_way_there_and_back(values: list[float | None]) -> None:
    tensor = Tensor(name="I1", datatype="FP64", shape=(len(values),), data=check_elements(values, "FP64", "values"))
    read = decode_infer_request(encode(InferRequest(inputs=(tensor,), id="7")))
    assert read.inputs[0].data == values
    assert read.id == "7"


@given(st.lists(st.none() | st.text(st.characters(exclude_categories=["Cs"])), max_size=20))
def test_strings_survive_the_way_there_and_back(values: list[str | None]) -> None:
    tensor = Tensor(name="C1", datatype="BYTES", shape=(len(values), 1), data=check_elements(values, "BYTES", "values"))
    read = decode_infer_request(encode(InferRequest(inputs=(tensor,))))
    assert read.inputs[0].data == values


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), max_size=20))
def test_scores_keep_their_bits(values: list[float]) -> None:
    scores = np.array(values, dtype=np.float32)
    tensor = Tensor(name="score", datatype="FP32", shape=(len(values), 1), data=float32_elements(scores))
    read = decode_infer_response(encode(InferResponse(model_name="m", model_version="1", outputs=(tensor,))))
    assert np.array_equal(np.array(read.outputs[0].data, dtype=np.float32), scores)


@pytest.mark.parametrize("datatype", DATATYPES)
def test_every_datatype_is_read(datatype: str) -> None:
    values = [{"BYTES": "a", "BOOL": True}.get(datatype, 1), None]
    assert check_elements(values, datatype, "values") == values
    with pytest.raises(ConfigError, check=at("values[1]", "got []")):
        check_elements([None, []], datatype, "values")


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("bits", [8, 16, 32, 64])
def test_integers_keep_to_the_range_of_their_datatype(signed: bool, bits: int) -> None:
    datatype = f"{'' if signed else 'U'}INT{bits}"
    low, high = (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if signed else (0, 2**bits - 1)
    assert check_elements([low, high], datatype, "values") == [low, high]
    for outside in (low - 1, high + 1):
        with pytest.raises(
            ConfigError, check=at("values[1]", f"got {outside}, expected an integer that fits {datatype}")
        ):
            check_elements([0, outside], datatype, "values")


def test_empty_optional_fields_are_not_written() -> None:
    response = InferResponse(model_name="m", model_version="1", outputs=())
    assert json.loads(encode(response)) == {"model_name": "m", "model_version": "1"}
    assert json.loads(encode(ServerMetadata(name="terarec", version="1"))) == {
        "name": "terarec",
        "version": "1",
        "extensions": [],
    }


def test_model_metadata_survives_the_way_there_and_back() -> None:
    score = TensorMetadata(name="score", datatype="FP32", shape=(-1, 1))
    metadata = ModelMetadata(name="m", versions=("3",), platform="terarec_dlrm", inputs=(score,), outputs=(score,))
    assert decode_model_metadata(encode(metadata)) == metadata


def test_a_tensor_has_as_many_elements_as_its_shape() -> None:
    with pytest.raises(ConfigError, check=at("tensor 'a'")):
        Tensor(name="a", datatype="FP32", shape=(2, 3), data=[1.0])


def outcome(data: bytes) -> Any:
    try:
        request = decode_infer_request(data)
    except ConfigError as error:
        return str(error)
    # An integer beyond 64 bits, which only tensors of floats may hold, is a float already in orjson.
    return [
        (tensor.name, tensor.shape, [float(x) if is_wide(x) else (type(x), x) for x in tensor.data], tensor.parameters)
        for tensor in request.inputs
    ]


def is_wide(value: object) -> bool:
    return type(value) in (int, float) and abs(value) >= 2**63  # type: ignore[arg-type]


JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text('a":, \\{}[]\x00\ud800', max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["name", "data", "x"]), inner),
    max_leaves=6,
)
REPEATABLE = st.lists(st.tuples(st.sampled_from(["name", "shape", "datatype", "data", "parameters"]), JSON_VALUES))
SPACES = st.sampled_from(["", " ", "\t", "\n "])


@given(
    st.sampled_from([[1], [2, 1]]),
    st.lists(JSON_VALUES, min_size=1, max_size=2),
    st.sampled_from(["FP32", "INT64", "UINT64", "BYTES", "BOOL"]),
    REPEATABLE,
    SPACES,
    SPACES,
)
def test_both_parsers_read_the_same(
    shape: list[int], data: list[Any], datatype: str, more: list[tuple[str, Any]], before: str, behind: str
) -> None:
    """orjson and Python's parser accept the same requests, with the same values and the same errors."""
    fields = [("name", "a"), ("shape", shape), ("datatype", datatype), ("data", data), *more]
    colon = f"{before}:{behind}"
    tensor = ",".join(f"{json.dumps(name)}{colon}{json.dumps(value)}" for name, value in fields)
    request = f'{{"inputs"{colon}[{{{tensor}}}], "id": "a:b"}}'.encode()
    fast = outcome(request)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_codec, "orjson", None)
        assert outcome(request) == fast


@pytest.mark.parametrize(
    "text",
    [
        b'{"inputs": [], "inputs": []}',
        b'{"inputs" : [], "inputs": []}',
        b'{"inputs": [], "id": "a", "id"\t:"\\":"}',
        b'{"inputs": [{"name": "a", "shape": [1], "shape": [1], "datatype": "FP32", "data": [1]}]}',
        b'{"inputs": [], "parameters": {"x": 1, "x": 1}}',
        b'{"inputs": [], "parameters": {"x": {"y": 1, "y": 1}}}',
    ],
)
def test_a_field_that_occurs_twice_is_rejected(text: bytes) -> None:
    with pytest.raises(ConfigError, check=at("the body", "occurs twice")):
        decode_infer_request(text)


@pytest.mark.parametrize("has_orjson", [True, False])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "int8", "uint64", "bool"])
def test_arrays_are_written_as_lists(monkeypatch: pytest.MonkeyPatch, dtype: str, has_orjson: bool) -> None:
    if not has_orjson:
        monkeypatch.setattr(json_codec, "orjson", None)
    values = np.array([0, 1, 0.1, 63], dtype=dtype)
    datatype = {"b": "BOOL", "f": "FP64"}.get(values.dtype.kind, "INT64")
    tensor = Tensor(name="a", datatype=datatype, shape=(4,), data=values)
    read = decode_infer_response(encode(InferResponse(model_name="m", model_version="1", outputs=(tensor,))))
    assert np.array_equal(np.array(read.outputs[0].data, dtype=dtype), values)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_score_that_json_cannot_say_is_not_written(value: float) -> None:
    tensor = Tensor(name="a", datatype="FP32", shape=(1,), data=np.array([value], dtype=np.float32))
    with pytest.raises(ValueError, match="not JSON"):
        encode(InferResponse(model_name="m", model_version="1", outputs=(tensor,)))
