# SPDX-License-Identifier: Apache-2.0
"""Requests whose JSON was read before equal those that are read anew, whatever differs from the earlier ones."""

import dataclasses
import json
import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from terarec.errors import ConfigError, TerarecError
from terarec.serve.binary_codec import decode_binary_request, layout_reader
from terarec.serve.protocol import InferRequest, Tensor
from terarec.serve.request_layouts import RequestLayouts
from tests.errors import at

NUMBERS = {"FP32": "f", "INT64": "q", "UINT8": "B", "BOOL": "?"}


def body_of(
    columns: dict[str, tuple[str, list[Any]]], request_id: str | None = None, **fields: object
) -> tuple[bytes, int]:
    """A request as stock clients write it: the id first, no white space, bytes behind the JSON."""
    tensors, raw = [], b""
    for name, (datatype, values) in columns.items():
        if datatype == "BYTES":
            content = b"".join(struct.pack("<I", len(text.encode())) + text.encode() for text in values)
        else:
            content = struct.pack(f"<{len(values)}{NUMBERS[datatype]}", *values)
        size = {"binary_data_size": len(content)}
        tensors.append({"name": name, "shape": [len(values)], "datatype": datatype, "parameters": size})
        raw += content
    message = {} if request_id is None else {"id": request_id}
    header = json.dumps({**message, "inputs": tensors, **fields}, separators=(",", ":")).encode()
    return header + raw, len(header)


def read(layouts: RequestLayouts | None, body: bytes, header_bytes: int | None) -> InferRequest | str:
    try:
        request = decode_binary_request(body, header_bytes, None, layouts)
    except TerarecError as error:
        return str(error)
    # Where the bytes of a tensor were is of no interest any more.
    return dataclasses.replace(request, inputs=tuple(tensor._replace(parameters={}) for tensor in request.inputs))


TEXTS = st.text(max_size=4)
COLUMNS = st.fixed_dictionaries(
    {
        "x": st.tuples(st.just("FP32"), st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=1)),
        "n": st.tuples(st.sampled_from(["INT64", "UINT8"]), st.lists(st.integers(0, 255), min_size=1, max_size=2)),
        "s": st.tuples(st.just("BYTES"), st.lists(TEXTS, min_size=1, max_size=3)),
        'q":5,': st.tuples(st.just("BOOL"), st.lists(st.booleans(), min_size=1, max_size=1)),
    }
)
FIELDS = st.sampled_from(
    [
        {},
        {"parameters": {"priority": 1}},
        {"outputs": [{"name": "score", "parameters": {"binary_data": True}}]},
        {"outputs": [{"name": "score", "parameters": {"binary_data_size": 8}}]},
        {"parameters": {"binary_data_size": 4}},
        {"parameters": {"text": '"binary_data_size":7}'}},
    ]
)


@given(
    requests=st.lists(st.tuples(COLUMNS, st.none() | TEXTS, FIELDS), min_size=2, max_size=4),
    changes=st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 255)), max_size=3),
)
def test_requests_equal_those_that_are_read_anew(
    requests: list[tuple[dict[str, tuple[str, list[Any]]], str | None, dict[str, object]]],
    changes: list[tuple[int, int]],
) -> None:
    layouts = RequestLayouts(layout_reader)
    bodies = [body_of(columns, request_id, **fields) for columns, request_id, fields in requests]
    damaged = bytearray(bodies[0][0])
    for place, value in changes:
        damaged[place % len(damaged)] = value
    for body, header_bytes in [*bodies, *bodies, (bytes(damaged), bodies[0][1])]:
        assert read(layouts, body, header_bytes) == read(None, body, header_bytes)


def test_other_sizes_and_ids_are_of_one_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    layouts = RequestLayouts(layout_reader)
    columns: dict[str, tuple[str, list[Any]]] = {"x": ("FP32", [1.5]), "s": ("BYTES", ["a"])}
    read(layouts, *body_of(columns, "first"))
    monkeypatch.setattr("terarec.serve.binary_codec.decode_infer_request", None)  # it is not needed any more
    request = decode_binary_request(
        *body_of({"x": ("FP32", [-2.0]), "s": ("BYTES", ["\u00e9cru"])}, "second"), None, layouts
    )
    assert request.id == "second"
    assert [tensor.data for tensor in request.inputs] == [[-2.0], ["\u00e9cru"]]


OLD = b'[1] 1.5 "a" FP32 BYTES "x" shape'.split()
NEW = b"""[true] [1.0] [-1] [2] [1,1] [] [[1]] 1 NaN 1e400 null true "b" "\\ud800" "y" UINT8 BOOL Shape
"x","parameters":{} "x","data":[1]""".split()
JSON_CHANGES = st.lists(st.tuples(st.sampled_from(OLD), st.sampled_from(NEW)), max_size=2)


@given(changes=st.lists(JSON_CHANGES, min_size=1, max_size=4))
def test_elements_in_json_equal_those_that_are_read_anew(changes: list[list[tuple[bytes, bytes]]]) -> None:
    tensors = [
        {"name": "x", "shape": [1], "datatype": "FP32", "data": [1.5]},
        {"name": "s", "shape": [1], "datatype": "BYTES", "data": ["a"]},
        {"name": "t", "shape": [1, 2], "datatype": "BYTES", "data": [None, "a"]},
    ]
    plain = json.dumps({"inputs": tensors}, separators=(",", ":")).encode()
    layouts = RequestLayouts(layout_reader)
    for change in [[], [], *changes, [], *changes]:
        body = plain
        for old, new in change:
            body = body.replace(old, new, 1)
        assert read(layouts, body, None) == read(None, body, None)


def test_layouts_are_bounded() -> None:
    layouts = RequestLayouts(layout_reader)
    for number in range(1000):
        read(layouts, *body_of({f"x{number}": ("FP32", [0.0])}))
    assert len(layouts) <= 256
    long: dict[str, tuple[str, list[Any]]] = {f"x{number}": ("FP32", [0.0]) for number in range(1000)}
    before = len(layouts)
    read(layouts, *body_of(long))
    assert len(layouts) == before


def test_messages_of_grpc_are_of_one_layout() -> None:
    pytest.importorskip("google.protobuf", reason="the extra 'serve' is not installed")
    from terarec.serve.grpc.conversion import infer_message, infer_request

    layouts = RequestLayouts(layout_reader)
    requests = [
        InferRequest(
            inputs=(
                Tensor(name="x", datatype="FP32", shape=(1,), data=[number]),
                Tensor(name="s", datatype="BYTES", shape=(2, 1), data=["a" * index, "\u00e9"]),
            ),
            id=None if index == 1 else f"id {index}",
            parameters={"priority": 2},
        )
        for index, number in enumerate((1.5, -2.0, 0.25))
    ]
    for request in requests:
        assert infer_request(infer_message(request, "m", "1"), layouts=layouts) == request
        assert len(layouts) == 1
    broken = infer_message(requests[0], "m", "1")
    broken.raw_input_contents[0] = b"\0"
    with pytest.raises(ConfigError, check=at("raw_input_contents[0]", "got 1 bytes")):
        infer_request(broken, layouts=layouts)
