# SPDX-License-Identifier: Apache-2.0
"""The JSON form of the protocol's messages.

Bodies are parsed by orjson where it is installed, which takes a fifth of the time of Python's parser. Whatever it does
not take, or what is wrong, goes through Python's, which says where the mistake is; so both accept the same.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import math
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any, NoReturn, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from terarec.errors import ConfigError
from terarec.serve.protocol import (
    DATATYPES,
    FLOATS,
    INTEGER_BITS,
    MOST_CALL_BYTES,
    Elements,
    InferRequest,
    InferResponse,
    ModelMetadata,
    RequestedOutput,
    RequestTooLargeError,
    Tensor,
    TensorMetadata,
)
from terarec.serve.request_layouts import LaidOutTensors, RequestLayouts
from terarec.spec.checks import is_unicode, quoted
from terarec.spec.codec import RepeatedFieldError, TooDeepError, parse_json

try:
    import orjson
except ModuleNotFoundError:  # a client alone needs no further library
    orjson = None  # type: ignore[assignment]


def check_elements(values: Elements, datatype: str, where: str, begin: int = 0) -> Elements:
    """Return `values`, which must fit `datatype`.

    Args:
        values: The elements.
        datatype: A datatype of the protocol.
        where: Place of the tensor, for errors.
        begin: Elements of the tensor before them.

    Raises:
        ConfigError: A value of another type or out of range, as ``<where>[<index>]``.
    """
    if not _fit(values, datatype):
        index = next(index for index, value in enumerate(values) if not _fit((value,), datatype))
        raise ConfigError(
            f"{where}[{begin + index}]", f"got {quoted(values[index], is_json=True)}, expected {_accepted(datatype)}"
        )
    return values


def float32_elements(values: npt.NDArray[np.float32]) -> list[float]:
    """Return `values` as the shortest decimals that read back as the same float32, which halves the JSON."""
    # NumPy prints a float32 by its own shortest digits, Python those of the float64 that it becomes.
    shortest: list[float] = values.reshape(-1).astype(str).astype(np.float64).tolist()
    return shortest


def _fit(values: Elements, datatype: str) -> bool:
    if len(values) == 1:  # of a request of one record, of which there are many
        value = values[0]
        if type(value) is float and datatype in FLOATS:
            return math.isfinite(value)
        if type(value) is str:
            return datatype == "BYTES" and is_unicode(value)
    # Sets of types rather than a check of each element: the loop is in C. `type` tells True, which is an int, from 1.
    types = set(map(type, values)) - {type(None)}
    # A missing value fits every datatype: it is the workflow that fills or rejects it.
    known = [value for value in values if value is not None]
    if datatype == "BYTES":
        # Joined, so that one call checks all texts.
        return types <= {str} and is_unicode("".join(known))
    if datatype == "BOOL":
        return types <= {bool}
    if datatype in FLOATS:
        return types <= {int, float} and _are_finite(known)
    signed, bits = INTEGER_BITS[datatype]
    low, high = (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if signed else (0, (1 << bits) - 1)
    return types <= {int} and (not known or (min(known) >= low and max(known) <= high))


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


_REQUEST_FIELDS = ("inputs", "outputs", "id", "parameters")
_TENSOR_FIELDS = ("name", "shape", "datatype", "data", "parameters")
_OUTPUT_FIELDS = ("name", "parameters")
_TENSOR_NAMES = frozenset(_TENSOR_FIELDS)
_NUM_FIELDS = len(_TENSOR_FIELDS) - 1  # of a tensor without parameters
_KNOWN = frozenset(DATATYPES)
_NONE: Mapping[str, Any] = {}

MAX_LISTS = 4_000_000
"""Most ``[`` of a request: one for each of 65,536 records in 60 columns. Python takes 88 bytes for an empty list."""

MAX_OBJECTS = 500_000
"""Most ``{`` of a request. Python takes 240 bytes for a small object."""

MAX_DIMENSIONS = 32
"""Longest shape, as in NumPy 1. The product of the sizes of a longer one can take minutes."""


ReadElements: TypeAlias = Callable[[Mapping[str, Any], str, int, str], Elements | None]
"""Reads the elements of a tensor that are not in the JSON: its fields, datatype, number of elements, place -> elements.

None for a tensor whose elements are in its field ``data``. Called once for each input, in their order."""


def decode_infer_request(
    body: bytes | bytearray,
    elements_elsewhere: Callable[[], ReadElements] | None = None,
    layouts: RequestLayouts | None = None,
) -> InferRequest:
    """Read an inference request.

    Args:
        body: Its JSON.
        elements_elsewhere: Begins to read elements that are not in the JSON, for each pass over it; None where all are.
        layouts: Tensors that were read before; None to read each anew.

    Raises:
        RequestTooLargeError: More lists or objects than `MAX_LISTS` and `MAX_OBJECTS`.
        ConfigError: Not JSON, or a field that is unknown, missing, mistyped or does not fit its shape.
    """
    check_brackets(body)

    def read(data: Any) -> InferRequest:
        _check_fields(data, "", _REQUEST_FIELDS, required=("inputs",))
        inputs = _list(data["inputs"], "inputs", "a list of tensors")
        outputs = _list(data.get("outputs", []), "outputs", "a list of objects with a name")
        read_elements = None if elements_elsewhere is None else elements_elsewhere()
        tensors: Sequence[Tensor] | None = None if layouts is None else _known_tensors(inputs, layouts)
        if tensors is None:
            tensors = tuple(_tensor(item, f"inputs[{index}]", read_elements) for index, item in enumerate(inputs))
            if layouts is not None and not any(tensor.parameters for tensor in tensors):
                layouts.remember_tensors(tensors)
        return InferRequest(
            inputs=tensors,
            outputs=tuple(_requested_output(item, f"outputs[{index}]") for index, item in enumerate(outputs)),
            id=None if data.get("id") is None else _text(data["id"], "id"),
            parameters=_object(data.get("parameters", {}), "parameters"),
        )

    return _decode(body, read)


def check_brackets(body: bytes | bytearray) -> None:
    """Reject a request whose lists or objects would take too much memory.

    Raises:
        RequestTooLargeError: More than `MAX_LISTS` or `MAX_OBJECTS`.
    """
    # Before parsing, since Python's objects are what takes the memory. Brackets inside texts count, too, which may
    # reject a request that would fit, and never lets one through that does not.
    for bracket, limit, things in ((b"[", MAX_LISTS, "lists"), (b"{", MAX_OBJECTS, "objects")):
        if body.count(bracket) > limit:
            raise RequestTooLargeError("the body", f"got more than {limit} {things}, send fewer records at a time")


def decode_infer_response(body: bytes) -> InferResponse:
    """Read an inference response, of this server or of another that speaks the protocol."""

    def read(value: Any) -> InferResponse:
        data = _object(value, "the response")
        outputs = _list(data.get("outputs"), "outputs", "a list of tensors")
        return InferResponse(
            model_name=_text(data.get("model_name"), "model_name"),
            model_version=_text(data.get("model_version", ""), "model_version"),
            outputs=tuple(_tensor(item, f"outputs[{index}]", None) for index, item in enumerate(outputs)),
            id=data.get("id"),
            parameters=_object(data.get("parameters", {}), "parameters"),
        )

    return _decode(body, read)


def decode_model_metadata(body: bytes) -> ModelMetadata:
    """Read a model's metadata, of this server or of another that speaks the protocol."""

    def read(value: Any) -> ModelMetadata:
        data = _object(value, "the metadata")
        return ModelMetadata(
            name=_text(data.get("name"), "name"),
            versions=tuple(_list(data.get("versions", []), "versions", "a list of strings")),
            platform=_text(data.get("platform"), "platform"),
            inputs=_tensor_metadata(data.get("inputs"), "inputs"),
            outputs=_tensor_metadata(data.get("outputs"), "outputs"),
        )

    return _decode(body, read)


def decode_object(body: bytes | bytearray, *, most: int | None = MOST_CALL_BYTES) -> Mapping[str, Any]:
    """Read an object of other calls; an empty body is an empty object.

    Args:
        body: Its JSON.
        most: Limit of its bytes, which are parsed where they arrive; None where the caller has checked what is in them.

    Raises:
        RequestTooLargeError: More bytes.
        ConfigError: No object in JSON.
    """
    if most is not None and len(body) > most:
        raise RequestTooLargeError("the body", f"got {len(body)} bytes, expected at most {most} for this call")
    return _decode(body, lambda data: _object(data, "the body")) if body.strip() else {}


def encode(message: object) -> bytes:
    """Write a message as JSON; optional fields that are empty are left out."""
    plain = _plain(message)
    if orjson is not None:
        try:
            return orjson.dumps(plain, option=orjson.OPT_SERIALIZE_NUMPY)
        except TypeError:  # an integer of more than 64 bits
            pass
    # NaN is no JSON; a score that is NaN must fail here rather than at the client.
    return json.dumps(plain, allow_nan=False, separators=(",", ":"), default=_listed).encode()


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return {name: _plain(item) for name, item in value._asdict().items() if name != "parameters" or item}
    if dataclasses.is_dataclass(value):
        # Not `dataclasses.asdict`, which copies every element of the data.
        plain = {item.name: _plain(getattr(value, item.name)) for item in dataclasses.fields(value)}
        empty = ("id", "outputs", "parameters")
        return {name: item for name, item in plain.items() if name not in empty or item}
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return json_elements(value)


def json_elements(elements: Elements) -> Any:
    """Return elements of a tensor as `encode` takes them."""
    if isinstance(elements, np.ndarray) and elements.dtype.kind == "f" and not np.isfinite(elements).all():
        raise ValueError("got NaN or infinity, which is not JSON")  # orjson would write null
    return elements.to_pylist() if isinstance(elements, pa.Array) else elements


def _listed(value: Any) -> Any:
    return float32_elements(value) if value.dtype == np.float32 else value.tolist()


Message = TypeVar("Message")


def _decode(body: bytes | bytearray, read: Callable[[Any], Message]) -> Message:
    """Parse `body`, and read the message that it holds."""
    is_collecting = gc.isenabled()
    # The garbage collector would walk millions of new lists again and again: three quarters of the time, during which
    # the interpreter's lock keeps the event loop from answering others.
    gc.disable()
    try:
        data = _parse_fast(body)
    finally:
        if is_collecting:
            gc.enable()
    if data is not None:
        try:
            return read(data)
        except RequestTooLargeError:
            raise
        except ConfigError:  # Python's parser has all digits of the value that is wrong
            pass
    return read(_parse(body))


def _parse_fast(body: bytes | bytearray) -> Any:
    """Return the message in `body`; None where its parser does not take it, or might take what Python's rejects."""
    if orjson is None:
        return None
    try:
        data = orjson.loads(body)
    except orjson.JSONDecodeError:
        return None
    # orjson keeps the last one of fields of the same name. There is a colon behind each name; more colons than names
    # are repeated names, or colons in texts, which Python's parser tells apart.
    names = _num_fields(data)
    if body.count(b":") == names:
        return data
    # Texts have quotation marks before a colon only behind a backslash. White space there is rare.
    has_space = any(body.count(space) for space in (b" :", b"\t:", b"\r:", b"\n:"))
    return data if not has_space and body.count(b'":') == names else None


def _num_fields(data: Any) -> int:
    """Return the number of fields of a message, its tensors, and their parameters; none of objects elsewhere."""
    if not isinstance(data, dict):
        return 0
    count = len(data)
    for value in data.values():
        if isinstance(value, dict):
            count += len(value)
        elif isinstance(value, list):
            for item in value:
                if isinstance(item, dict):
                    parameters = item.get("parameters")
                    count += len(item) + (len(parameters) if isinstance(parameters, dict) else 0)
    return count


def _parse(body: bytes | bytearray) -> Any:
    is_collecting = gc.isenabled()
    gc.disable()
    try:
        return parse_json(body, parse_constant=_reject_constant)
    except json.JSONDecodeError as error:
        raise ConfigError(f"line {error.lineno} column {error.colno}", f"{error.msg}, expected JSON") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"byte {error.start}", "not UTF-8, expected JSON") from None
    except ConfigError:
        raise
    except RepeatedFieldError as error:
        raise ConfigError("the body", str(error)) from None
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
def _tensor(data: Any, where: str, read_elements: ReadElements | None) -> Tensor:
    tensor = _plain_tensor(data, where, read_elements)
    return _checked_tensor(data, where, read_elements) if tensor is None else tensor


def _known_tensors(items: list[Any], layouts: RequestLayouts) -> LaidOutTensors | None:
    """Return tensors that differ from earlier ones in their elements alone; None for others, or where one is wrong."""
    try:
        shapes, data = [item["shape"] for item in items], [item["data"] for item in items]
        forms = [(item["name"], item["datatype"], tuple(shape)) for item, shape in zip(items, shapes, strict=True)]
        layout = layouts.layout(tuple(forms))
    except (KeyError, TypeError):  # a field that is missing, or of another type
        return None
    if layout is None or set(map(len, items)) != {_NUM_FIELDS} or set(map(type, [*shapes, *data])) != {list}:
        return None
    # `type`, because True and 1.0 are equal to 1.
    if not set(map(type, chain.from_iterable(shapes))) <= {int} or tuple(map(len, data)) != layout.counts:
        return None
    # Elements nested in lists are of another type than those of any datatype.
    for datatype, places in layout.places.items():
        if not _fit(list(chain.from_iterable([data[place] for place in places])), datatype):
            return None
    return LaidOutTensors(layout, data)


def _plain_tensor(data: Any, where: str, read_elements: ReadElements | None) -> Tensor | None:
    """Return a tensor as clients write it; None for one that is wrong, or nested, which `_checked_tensor` tells apart.

    A request of one record has dozens of tensors: the texts of errors that are not raised would take most of its time.
    """
    if type(data) is not dict or not _TENSOR_NAMES.issuperset(data):
        return None
    name, datatype, shape, values = data.get("name"), data.get("datatype"), data.get("shape"), data.get("data")
    if type(name) is not str or type(datatype) is not str or datatype not in _KNOWN or type(shape) is not list:
        return None
    if len(shape) == 1:
        count = shape[0]
    elif len(shape) == 2 and type(shape[0]) is type(shape[1]) is int and shape[0] >= 0 and shape[1] >= 0:
        count = shape[0] * shape[1]
    else:
        return None
    if type(count) is not int or not 0 <= count < 2**31:
        return None
    parameters = data.get("parameters", _NONE)
    if type(parameters) is not dict:
        return None
    elements = None
    if parameters and read_elements is not None:
        elements = read_elements(data, datatype, count, where)
    if elements is None:
        # Elements nested in lists are of another type than those of any datatype.
        if type(values) is not list or len(values) != count or not _fit(values, datatype):
            return None
        elements = values
    return Tensor._make((name, datatype, tuple(shape), elements, parameters))


def _checked_tensor(data: Any, where: str, read_elements: ReadElements | None) -> Tensor:
    _check_fields(data, where, _TENSOR_FIELDS, required=_TENSOR_FIELDS[:3])
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
    parameters = _object(data.get("parameters", {}), f"{where}.parameters")
    elements = None if read_elements is None else read_elements(data, datatype, math.prod(shape), where)
    if elements is None:
        _check_fields(data, where, _TENSOR_FIELDS, required=_TENSOR_FIELDS[:4])
        flat = _flatten(_list(data["data"], f"{where}.data", "a list"), shape, f"{where}.data")
        elements = check_elements(flat, datatype, f"{where}.data")
    return Tensor(
        name=_text(data["name"], f"{where}.name"),
        datatype=datatype,
        shape=tuple(shape),
        data=elements,
        parameters=parameters,
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
    if not isinstance(data, str) or not is_unicode(data):
        raise ConfigError(where, f"got {quoted(data, is_json=True)}, expected a string of valid Unicode")
    return data
