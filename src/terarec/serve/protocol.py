"""The Open Inference Protocol v2: its messages, apart from any transport, and their JSON form."""

from __future__ import annotations

import dataclasses
import gc
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NoReturn, TypeAlias

import numpy as np
import numpy.typing as npt

from terarec.errors import ConfigError, TerarecError
from terarec.spec.checks import quoted
from terarec.spec.codec import TooDeepError, parse_json

Elements: TypeAlias = Sequence[Any]
"""Elements in row-major order; None is a missing value.

JSON numbers are not rounded to the width that a floating datatype names: a raw value that is an integer beyond 2^24
must reach the workflow exactly, as it did when the data set was prepared.
"""

INTEGER_BITS: Mapping[str, tuple[bool, int]] = {
    f"{'' if signed else 'U'}INT{bits}": (signed, bits) for signed in (True, False) for bits in (64, 32, 16, 8)
}
"""Integer datatype -> whether it is signed, and its width."""

DATATYPES = ("BOOL", *INTEGER_BITS, "FP16", "FP32", "FP64", "BYTES")


def check_elements(values: Elements, datatype: str, where: str) -> Elements:
    """Return `values`, which must fit `datatype`.

    Raises:
        ConfigError: A value of another type or out of range, as ``<where>[<index>]``.
    """
    if not _fit(values, datatype):
        index = next(index for index, value in enumerate(values) if not _fit((value,), datatype))
        raise ConfigError(
            f"{where}[{index}]", f"got {quoted(values[index], is_json=True)}, expected {_accepted(datatype)}"
        )
    return values


def float32_elements(values: npt.NDArray[np.float32]) -> list[float]:
    """Return `values` as the shortest decimals that read back as the same float32, which halves the JSON."""
    # NumPy prints a float32 by its own shortest digits, Python those of the float64 that it becomes.
    shortest: list[float] = values.reshape(-1).astype(str).astype(np.float64).tolist()
    return shortest


def _fit(values: Elements, datatype: str) -> bool:
    # Sets of types rather than a check of each element: the loop is in C. `type` tells True, which is an int, from 1.
    types = set(map(type, values)) - {type(None)}
    # A missing value fits every datatype: it is the workflow that fills or rejects it.
    known = [value for value in values if value is not None]
    if datatype == "BYTES":
        # Joined, so that one call checks all texts.
        return types <= {str} and _is_unicode("".join(known))
    if datatype == "BOOL":
        return types <= {bool}
    if datatype.startswith("FP"):
        return types <= {int, float} and _are_finite(known)
    signed, bits = INTEGER_BITS[datatype]
    low, high = (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if signed else (0, (1 << bits) - 1)
    return types <= {int} and (not known or (min(known) >= low and max(known) <= high))


def _is_unicode(text: str) -> bool:
    """Return whether `text` has no lone surrogates, which JSON can spell and UTF-8 cannot."""
    try:
        return text.isascii() or bool(text.encode())
    except UnicodeEncodeError:
        return False


def _are_finite(numbers: Sequence[float]) -> bool:
    try:
        return all(map(math.isfinite, numbers))
    except OverflowError:  # an integer beyond float64
        return False


def _accepted(datatype: str) -> str:
    if datatype in INTEGER_BITS:
        return f"an integer that fits {datatype}, or null"
    names = {"BYTES": "a string of valid Unicode", "BOOL": "true or false"}
    return f"{names.get(datatype, 'a finite number')} or null for {datatype}"


class UnknownModelError(ConfigError):
    """No model of that name or version is served."""


class RequestTooLargeError(ConfigError):
    """A request holds more bytes or more records than the server takes."""


class RequestTimeoutError(ConfigError):
    """A request did not arrive in time."""


class ServerBusyError(TerarecError, RuntimeError):
    """The server holds as many requests as it takes at once; the client may try again."""


class UnsupportedContentError(ConfigError):
    """A request is written in a form that the server does not read."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tensor:
    """A named tensor.

    Attributes:
        name: Name of the model's input or output.
        datatype: One of `terarec.serve.protocol.DATATYPES`.
        shape: Sizes of its dimensions.
        data: ``prod(shape)`` elements in row-major order; None is a missing value.
    """

    name: str
    datatype: str
    shape: tuple[int, ...]
    data: Elements
    parameters: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if len(self.data) != math.prod(self.shape):
            raise ConfigError(
                f"tensor {self.name!r}",
                f"got {len(self.data)} elements, expected {math.prod(self.shape)} for shape {list(self.shape)}",
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestedOutput:
    """A requested output."""

    name: str
    parameters: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class InferRequest:
    """Records to score.

    Attributes:
        inputs: One tensor per raw column of the model.
        outputs: Requested outputs; none means all.
        id: Returned with the answer, to match answers with requests.
    """

    inputs: tuple[Tensor, ...]
    outputs: tuple[RequestedOutput, ...] = ()
    id: str | None = None
    parameters: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class InferResponse:
    """The scores of one request."""

    model_name: str
    model_version: str
    outputs: tuple[Tensor, ...]
    id: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorMetadata:
    """Description of an input or output; -1 in the shape is the number of records B, which the request chooses."""

    name: str
    datatype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelMetadata:
    """Inputs and outputs of a model."""

    name: str
    versions: tuple[str, ...]
    platform: str
    inputs: tuple[TensorMetadata, ...]
    outputs: tuple[TensorMetadata, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerMetadata:
    """Description of a server, with the extensions of the protocol that it supports."""

    name: str
    version: str
    extensions: tuple[str, ...] = ()


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
        RequestTooLargeError: More lists or objects than `MAX_LISTS` and `MAX_OBJECTS`.
        ConfigError: Not JSON, or a field that is unknown, missing, mistyped or does not fit its shape.
    """
    # Before parsing, since Python's objects are what takes the memory. Brackets inside texts count, too, which may
    # reject a request that would fit, and never lets one through that does not.
    for bracket, limit, things in ((b"[", MAX_LISTS, "lists"), (b"{", MAX_OBJECTS, "objects")):
        if body.count(bracket) > limit:
            raise RequestTooLargeError("the body", f"got more than {limit} {things}, send fewer records at a time")
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
    # NaN is no JSON; a score that is NaN must fail here rather than at the client.
    return json.dumps(_plain(message), allow_nan=False, separators=(",", ":")).encode()


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        # Not `dataclasses.asdict`, which copies every element of the data.
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
        return parse_json(body, parse_constant=_reject_constant)
    except json.JSONDecodeError as error:
        raise ConfigError(f"line {error.lineno} column {error.colno}", f"{error.msg}, expected JSON") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"byte {error.start}", "not UTF-8, expected JSON") from None
    except ConfigError:
        raise
    except TooDeepError:
        raise ConfigError("the body", "nested too deeply, expected an inference request in JSON") from None
    except ValueError:  # Python does not parse an integer of more than 4,300 digits
        raise ConfigError("the body", "got a number of too many digits, expected at most 4300") from None
    finally:
        if is_collecting:
            gc.enable()


def _reject_constant(token: str) -> NoReturn:
    raise ConfigError("the body", f"got {token}, which is not JSON; write null for a missing number")


# Read by hand rather than by `spec.codec`: elements are checked by sets of their types and not one by one, in any depth
# of lists, and a request has fields of the protocol that no spec describes.
def _tensor(data: Any, where: str) -> Tensor:
    _check_fields(data, where, _TENSOR_FIELDS, required=_TENSOR_FIELDS[:4])
    datatype = data["datatype"]
    if not isinstance(datatype, str) or datatype not in DATATYPES:
        raise ConfigError(
            f"{where}.datatype", f"got {quoted(datatype, is_json=True)}, expected one of {', '.join(DATATYPES)}"
        )
    shape = _list(data["shape"], f"{where}.shape", "a list of sizes such as [2, 1]")
    if len(shape) > MAX_DIMENSIONS:
        raise ConfigError(f"{where}.shape", f"got {len(shape)} dimensions, expected at most {MAX_DIMENSIONS}")
    for index, size in enumerate(shape):
        # `type`, because True is an instance of int.
        if type(size) is not int or not 0 <= size < 2**63:
            got = quoted(size, is_json=True)
            raise ConfigError(f"{where}.shape[{index}]", f"got {got}, expected an integer from 0 to 2^63 - 1")
    elements = _flatten(_list(data["data"], f"{where}.data", "a list"), shape, f"{where}.data")
    return Tensor(
        name=_text(data["name"], f"{where}.name"),
        datatype=datatype,
        shape=tuple(shape),
        data=check_elements(elements, datatype, f"{where}.data"),
        parameters=_object(data.get("parameters", {}), f"{where}.parameters"),
    )


def _flatten(data: list[Any], shape: Sequence[int], where: str) -> list[Any]:
    """Return the row-major elements of `data`, which is flat already or nested as `shape` says."""
    # The protocol allows both forms; the first element tells which one this is.
    if len(shape) > 1 and data and isinstance(data[0], list):
        if len(data) != shape[0]:
            raise ConfigError(where, f"got {len(data)} rows, expected {shape[0]} for shape {quoted(list(shape))}")
        rows = [
            _flatten(_list(row, f"{where}[{index}]", "a list as the rows before it"), shape[1:], f"{where}[{index}]")
            for index, row in enumerate(data)
        ]
        return list(chain.from_iterable(rows))
    if len(data) != math.prod(shape):
        raise ConfigError(
            where, f"got {len(data)} elements, expected {quoted(math.prod(shape))} for shape {quoted(list(shape))}"
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
            raise ConfigError(place, f"unknown field {quoted(name, is_json=True)}, expected {', '.join(known)}")
    for name in required:
        if name not in data:
            raise ConfigError(place, f"field {name!r} is missing, expected {', '.join(required)}")


def _object(data: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(data, dict):
        raise ConfigError(where, f"got {quoted(data, is_json=True)}, expected an object")
    return data


def _list(data: Any, where: str, expected: str) -> list[Any]:
    if not isinstance(data, list):
        raise ConfigError(where, f"got {quoted(data, is_json=True)}, expected {expected}")
    return data


def _text(data: Any, where: str) -> str:
    if not isinstance(data, str):
        raise ConfigError(where, f"got {quoted(data, is_json=True)}, expected a string")
    return data
