"""Messages <-> the JSON form of the Open Inference Protocol v2. Each error names the path in the document."""

from __future__ import annotations

import dataclasses
import gc
import json
import math
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, NoReturn

from terarec.errors import ConfigError
from terarec.serve.elements import DATATYPES, check_elements
from terarec.serve.messages import (
    InferRequest,
    InferResponse,
    ModelMetadata,
    RequestedOutput,
    RequestTooLargeError,
    Tensor,
    TensorMetadata,
)
from terarec.spec.codec import TooDeepError, parse_json
from terarec.spec.quoting import quoted

_REQUEST_FIELDS = ("inputs", "outputs", "id", "parameters")
_TENSOR_FIELDS = ("name", "shape", "datatype", "data", "parameters")
_OUTPUT_FIELDS = ("name", "parameters")

MAX_LISTS = 4_000_000
"""Most ``[`` of a request: one for each of 65,536 records in 60 columns. Python takes 88 bytes for an empty list."""

MAX_OBJECTS = 500_000
"""Most ``{`` of a request. Python takes 240 bytes for a small object."""

MAX_DIMENSIONS = 32
"""Longest shape, as in NumPy 1. The product of the sizes of a longer one can take minutes."""


def decode_infer_request(body: bytes | bytearray) -> InferRequest:
    """Read an inference request.

    Raises:
        RequestTooLargeError: more lists or objects than `MAX_LISTS` and `MAX_OBJECTS`.
        ConfigError: not JSON, or a field that is unknown, missing, mistyped or does not fit its shape.
    """
    for bracket, limit, things in ((b"[", MAX_LISTS, "lists"), (b"{", MAX_OBJECTS, "objects")):
        if body.count(bracket) > limit:
            raise RequestTooLargeError(f"the body: got more than {limit} {things}, send fewer records at a time")
    data = _parse(body)
    _check_fields(data, "", _REQUEST_FIELDS, required=("inputs",))
    inputs = _list(data["inputs"], "inputs", "a list of tensors")
    outputs = _list(data.get("outputs", []), "outputs", "a list of objects with a name")
    return InferRequest(
        inputs=tuple(_tensor(item, f"inputs[{index}]") for index, item in enumerate(inputs)),
        outputs=tuple(_requested_output(item, f"outputs[{index}]") for index, item in enumerate(outputs)),
        id=None if data.get("id") is None else _text(data["id"], "id"),
        parameters=_object(data.get("parameters", {}), "parameters"),
    )


def decode_infer_response(body: bytes) -> InferResponse:
    """Read an inference response, of this server or of another that speaks the protocol."""
    data = _object(_parse(body), "the response")
    outputs = _list(data.get("outputs"), "outputs", "a list of tensors")
    return InferResponse(
        model_name=_text(data.get("model_name"), "model_name"),
        model_version=_text(data.get("model_version", ""), "model_version"),
        outputs=tuple(_tensor(item, f"outputs[{index}]") for index, item in enumerate(outputs)),
        id=data.get("id"),
    )


def decode_model_metadata(body: bytes) -> ModelMetadata:
    """Read a model's metadata, of this server or of another that speaks the protocol."""
    data = _object(_parse(body), "the metadata")
    return ModelMetadata(
        name=_text(data.get("name"), "name"),
        versions=tuple(_list(data.get("versions", []), "versions", "a list of strings")),
        platform=_text(data.get("platform"), "platform"),
        inputs=_tensor_metadata(data.get("inputs"), "inputs"),
        outputs=_tensor_metadata(data.get("outputs"), "outputs"),
    )


def encode(message: object) -> bytes:
    """Write a message as JSON; optional fields that are empty are left out."""
    return json.dumps(_plain(message), allow_nan=False, separators=(",", ":")).encode()


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        plain = {item.name: _plain(getattr(value, item.name)) for item in dataclasses.fields(value)}
        empty = ("id", "outputs", "parameters")
        return {name: item for name, item in plain.items() if item or name not in empty}
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return value


def _parse(body: bytes | bytearray) -> Any:
    is_collecting = gc.isenabled()
    # The garbage collector would walk millions of new lists again and again: three quarters of the time, during which
    # the interpreter's lock keeps the event loop from answering others.
    gc.disable()
    try:
        return parse_json(body, parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        raise ConfigError(f"line {error.lineno} column {error.colno}: {error.msg}, expected JSON") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"byte {error.start} is not UTF-8, expected JSON") from None
    except ConfigError:
        raise
    except TooDeepError:
        raise ConfigError("the body is nested too deeply, expected an inference request in JSON") from None
    except ValueError:  # Python refuses to read an integer of more than 4,300 digits
        raise ConfigError("the body holds a number of too many digits") from None
    finally:
        if is_collecting:
            gc.enable()


def _refuse_constant(token: str) -> NoReturn:
    raise ConfigError(f"the body holds {token}, which is not JSON; write null for a missing number")


def _tensor(data: Any, where: str) -> Tensor:
    _check_fields(data, where, _TENSOR_FIELDS, required=_TENSOR_FIELDS[:4])
    datatype = data["datatype"]
    if not isinstance(datatype, str) or datatype not in DATATYPES:
        raise ConfigError(
            f"{where}.datatype: got {quoted(datatype, is_json=True)}, expected one of {', '.join(DATATYPES)}"
        )
    shape = _list(data["shape"], f"{where}.shape", "a list of sizes such as [2, 1]")
    if len(shape) > MAX_DIMENSIONS:
        raise ConfigError(f"{where}.shape: got {len(shape)} dimensions, expected at most {MAX_DIMENSIONS}")
    for index, size in enumerate(shape):
        if type(size) is not int or not 0 <= size < 2**63:
            got = quoted(size, is_json=True)
            raise ConfigError(f"{where}.shape[{index}]: got {got}, expected an integer from 0 to 2^63 - 1")
    elements = _flatten(_list(data["data"], f"{where}.data", "a list"), shape, f"{where}.data")
    return Tensor(
        name=_text(data["name"], f"{where}.name"),
        datatype=datatype,
        shape=tuple(shape),
        data=check_elements(elements, datatype, f"{where}.data"),
        parameters=_object(data.get("parameters", {}), f"{where}.parameters"),
    )


def _flatten(data: list[Any], shape: Sequence[int], where: str) -> list[Any]:
    """Row-major elements of `data`, which is flat already or nested as `shape` says."""
    if len(shape) > 1 and data and isinstance(data[0], list):
        if len(data) != shape[0]:
            raise ConfigError(f"{where}: got {len(data)} rows, expected {shape[0]} for shape {quoted(list(shape))}")
        rows = [
            _flatten(_list(row, f"{where}[{index}]", "a list as the rows before it"), shape[1:], f"{where}[{index}]")
            for index, row in enumerate(data)
        ]
        return list(chain.from_iterable(rows))
    if len(data) != math.prod(shape):
        raise ConfigError(
            f"{where}: got {len(data)} elements, expected {quoted(math.prod(shape))} for shape {quoted(list(shape))}"
        )
    return data


def _requested_output(data: Any, where: str) -> RequestedOutput:
    _check_fields(data, where, _OUTPUT_FIELDS, required=("name",))
    parameters = _object(data.get("parameters", {}), f"{where}.parameters")
    return RequestedOutput(name=_text(data["name"], f"{where}.name"), parameters=parameters)


def _tensor_metadata(data: Any, where: str) -> tuple[TensorMetadata, ...]:
    tensors = [_object(item, f"{where}[{index}]") for index, item in enumerate(_list(data, where, "a list"))]
    return tuple(
        TensorMetadata(name=item["name"], datatype=item["datatype"], shape=tuple(item["shape"])) for item in tensors
    )


def _check_fields(data: Any, where: str, known: Sequence[str], *, required: Sequence[str]) -> None:
    place = where or "the body"
    for name in _object(data, place):
        if name not in known:
            raise ConfigError(f"{place}: unknown field {quoted(name, is_json=True)}, expected {', '.join(known)}")
    for name in required:
        if name not in data:
            raise ConfigError(f"{place}: field {name!r} is missing, expected {', '.join(required)}")


def _object(data: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(data, dict):
        raise ConfigError(f"{where}: got {quoted(data, is_json=True)}, expected an object")
    return data


def _list(data: Any, where: str, expected: str) -> list[Any]:
    if not isinstance(data, list):
        raise ConfigError(f"{where}: got {quoted(data, is_json=True)}, expected {expected}")
    return data


def _text(data: Any, where: str) -> str:
    if not isinstance(data, str):
        raise ConfigError(f"{where}: got {quoted(data, is_json=True)}, expected a string")
    return data
