# SPDX-License-Identifier: Apache-2.0
"""Messages of gRPC <-> messages of `terarec.serve.protocol`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from terarec.errors import ConfigError
from terarec.etl.workflow.raw_values import SMALL_ROWS
from terarec.serve.binary_codec import DTYPES, RegionReader, decode_elements, encode_elements, write_region
from terarec.serve.grpc.messages import message_class
from terarec.serve.json_codec import MAX_DIMENSIONS, check_elements
from terarec.serve.protocol import (
    DATATYPES,
    FLOATS,
    Elements,
    InferRequest,
    InferResponse,
    RequestedOutput,
    Tensor,
)
from terarec.serve.request_layouts import RequestLayouts
from terarec.serve.request_memory import HeldMemory
from terarec.serve.shared_memory import SharedMemory
from terarec.spec.checks import quoted

_REGION = "shared_memory_region"
"""Parameter of a tensor whose elements are in shared memory and not in the message."""

_CONTENTS = {
    "BOOL": "bool_contents",
    "INT8": "int_contents",
    "INT16": "int_contents",
    "INT32": "int_contents",
    "INT64": "int64_contents",
    "UINT8": "uint_contents",
    "UINT16": "uint_contents",
    "UINT32": "uint_contents",
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    "BYTES": "bytes_contents",
}
"""Datatype -> the field of a tensor's contents that holds its elements; FP16 and BF16 are sent as raw bytes."""

_PART = 1 << 14  # values of a message that are converted at once

_ModelInferRequest = message_class("ModelInferRequest")
_ModelInferResponse = message_class("ModelInferResponse")


def infer_request(
    message: Any,
    memory: SharedMemory | None = None,
    layouts: RequestLayouts | None = None,
    *,
    num_bytes: int = 0,
    most_bytes: int | None = None,
    held: HeldMemory | None = None,
) -> InferRequest:
    """Return the request of a ModelInferRequest.

    Args:
        message: The message, which loses its raw contents and its id.
        memory: Registered regions; None where shared memory is not allowed.
        layouts: Requests that were read before; None to read each anew.
        num_bytes: Length of the message, to which the bytes in shared memory are added.
        most_bytes: As in `RegionReader`.
        held: As in `RegionReader`.

    Raises:
        RegionsTooLargeError: More bytes in shared memory than are accepted.
        ServerBusyError: Other requests hold the memory that it needs.
        UnsupportedError: Shared memory that is not allowed.
        ConfigError: Elements that are missing, given twice, or do not fit datatype and shape.
    """
    raw, request_id = list(message.raw_input_contents), message.id or None
    description = b""
    if raw and layouts is not None:
        message.ClearField("raw_input_contents")
        message.ClearField("id")
        description = message.SerializeToString(deterministic=True)
        known = layouts.read(description, request_id, raw)
        if known is not None:
            return known
    contents = _Contents(raw, RegionReader(memory, num_bytes, most_bytes, held))
    inputs = tuple(_tensor(item, contents, f"inputs[{index}]") for index, item in enumerate(message.inputs))
    contents.check_end()
    request = InferRequest(
        inputs=inputs,
        outputs=tuple(
            RequestedOutput(name=item.name, parameters=parameters(item.parameters)) for item in message.outputs
        ),
        id=request_id,
        parameters=parameters(message.parameters),
    )
    # Inputs in shared memory have parameters that say where.
    if description and layouts is not None and not any(tensor.parameters for tensor in inputs):
        layouts.remember(description, request)
    return request


def parameters(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the values of a map of InferParameter or ModelRepositoryParameter; one without a value is left out."""
    # Most requests have none, and an empty map is cheap to tell.
    if not fields:
        return {}
    chosen = {name: (value, value.WhichOneof("parameter_choice")) for name, value in fields.items()}
    return {name: getattr(value, kind) for name, (value, kind) in chosen.items() if kind is not None}


def set_parameters(fields: Any, values: Mapping[str, Any]) -> None:
    """Fill a map of InferParameter."""
    for name, value in values.items():
        if isinstance(value, bool):
            fields[name].bool_param = value
        elif isinstance(value, int):
            fields[name].int64_param = value
        elif isinstance(value, float):
            fields[name].double_param = value
        else:
            fields[name].string_param = str(value)


class _Contents:
    """Reads the elements of a request's inputs, one after the other."""

    def __init__(self, raw: Sequence[bytes], regions: RegionReader) -> None:
        self._raw = raw
        self._is_raw = len(raw) > 0
        self._num_read = 0
        self._regions = regions

    def read(self, item: Any, values: Mapping[str, Any], count: int, where: str) -> Elements:
        datatype = item.datatype
        if _REGION in values:
            return self._regions.read(values, datatype, count, where)
        if not self._is_raw:
            return _typed_elements(item, count, f"{where}.contents")
        if item.HasField("contents"):
            raise ConfigError(f"{where}.contents", "got them beside raw_input_contents, expected one of both")
        place = self._num_read
        if place == len(self._raw):
            raise ConfigError("raw_input_contents", f"got {place}, expected one for each input of the request")
        self._num_read += 1
        return decode_elements(self._raw[place], datatype, count, f"raw_input_contents[{place}]")

    def check_end(self) -> None:
        """Check that all contents belong to an input."""
        got, expected = len(self._raw), self._num_read
        if got > expected:
            raise ConfigError("raw_input_contents", f"got {got}, expected {expected} for the inputs of the request")


def _tensor(item: Any, contents: _Contents, where: str) -> Tensor:
    datatype, shape = item.datatype, tuple(item.shape)
    if datatype not in DATATYPES:
        raise ConfigError(f"{where}.datatype", f"got {quoted(datatype)}, expected one of {', '.join(DATATYPES)}")
    if len(shape) > MAX_DIMENSIONS:
        raise ConfigError(f"{where}.shape", f"got {len(shape)} dimensions, expected at most {MAX_DIMENSIONS}")
    if shape and min(shape) < 0:
        raise ConfigError(f"{where}.shape", f"got {quoted(list(shape))}, expected no negative size")
    values = parameters(item.parameters)
    data = contents.read(item, values, math.prod(shape), where)
    return Tensor(name=item.name, datatype=datatype, shape=shape, data=data, parameters=values)


def _typed_elements(item: Any, count: int, where: str) -> Elements:
    field = _CONTENTS.get(item.datatype)
    if field is None:
        raise ConfigError(where, f"got {item.datatype}, expected it in raw_input_contents")
    others = [other.name for other, _ in item.contents.ListFields() if other.name != field]
    if others:
        raise ConfigError(f"{where}.{others[0]}", f"got elements for {item.datatype}, expected them in {field}")
    values, where = getattr(item.contents, field), f"{where}.{field}"
    if len(values) != count:
        got, shape = len(values), quoted(list(item.shape))
        raise ConfigError(where, f"got {got} elements, expected {count} for shape {shape}")
    if count <= SMALL_ROWS or item.datatype == "BOOL":
        return _plain_elements(values, 0, item.datatype, where)
    # A part at a time, so that few values are objects at once, which take up to 40 times their bytes in the message.
    parts = (
        _plain_elements(values[begin : begin + _PART], begin, item.datatype, where) for begin in range(0, count, _PART)
    )
    if item.datatype == "BYTES":
        return pa.concat_arrays([pa.array(part, type=pa.large_string()) for part in parts])
    array = np.empty(count, DTYPES[item.datatype])
    for place, part in enumerate(parts):
        array[place * _PART : place * _PART + len(part)] = part
    return array


def _plain_elements(values: Sequence[Any], begin: int, datatype: str, where: str) -> list[Any]:
    """Return values of a message, of which `begin` are before them."""
    if datatype == "BYTES":
        return [_text(value, f"{where}[{begin + index}]") for index, value in enumerate(values)]
    elements = list(values)
    # NaN is a missing number, as in raw contents; JSON, whose check this is, has no such number.
    numbers = [None if value != value else value for value in elements] if datatype in FLOATS else elements
    check_elements(numbers, datatype, where, begin)
    return elements


def _text(value: bytes, where: str) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError:
        raise ConfigError(where, f"got {quoted(value)}, expected UTF-8") from None


def infer_response(
    response: InferResponse, outputs: Sequence[RequestedOutput], memory: SharedMemory | None = None
) -> Any:
    """Return the ModelInferResponse of a response: elements as raw bytes, as Triton answers.

    Args:
        response: The response.
        outputs: Those of its request, which may want them in shared memory.
        memory: As for `infer_request`.

    Raises:
        UnsupportedError: Shared memory that is not allowed.
        ConfigError: Shared memory that is not there, or too small.
    """
    message = _ModelInferResponse(
        model_name=response.model_name, model_version=response.model_version, id=response.id or ""
    )
    set_parameters(message.parameters, response.parameters)
    wanted = {output.name: output.parameters for output in outputs}
    for output in response.outputs:
        item = message.outputs.add(name=output.name, datatype=output.datatype, shape=output.shape)
        content = encode_elements(output.data, output.datatype)
        form = wanted.get(output.name, {})
        if _REGION in form:
            write_region(memory, form, content, f"outputs {output.name!r}")
            placed = {name: value for name, value in form.items() if name.startswith("shared_memory_")}
            set_parameters(item.parameters, {**placed, "shared_memory_byte_size": len(content)})
            content = b""  # its place is kept: clients find contents by the number of the output
        message.raw_output_contents.append(content)
    return message


def infer_message(request: InferRequest, model: str, version: str = "") -> Any:
    """Return the ModelInferRequest of a request: elements as raw bytes.

    Raises:
        ConfigError: A missing element, which bytes have none for.
    """
    message = _ModelInferRequest(model_name=model, model_version=version, id=request.id or "")
    set_parameters(message.parameters, request.parameters)
    for tensor in request.inputs:
        item = message.inputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
        set_parameters(item.parameters, tensor.parameters)
        message.raw_input_contents.append(encode_elements(tensor.data, tensor.datatype))
    for output in request.outputs:
        set_parameters(message.outputs.add(name=output.name).parameters, output.parameters)
    return message
