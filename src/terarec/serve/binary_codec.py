# SPDX-License-Identifier: Apache-2.0
"""Elements of tensors as bytes: Triton's binary extension over HTTP, raw contents over gRPC, shared memory.

Numbers are little-endian, in row-major order. Of texts each has its length, 4 bytes, and then its UTF-8.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from terarec.errors import ConfigError
from terarec.etl.columns import texts_of
from terarec.etl.workflow.raw_values import SMALL_ROWS
from terarec.etl.workflow.record_program import make_getter
from terarec.kernels.cpu.encoding import InvalidValueError, cut_texts
from terarec.serve.json_codec import ReadElements, decode_infer_request, encode, json_elements
from terarec.serve.protocol import (
    Elements,
    InferRequest,
    InferResponse,
    RequestTooLargeError,
    UnsupportedError,
)
from terarec.serve.request_layouts import BINARY_SIZE, InputLayout, ReadLayout, RequestLayouts, split_json
from terarec.serve.request_memory import HeldMemory
from terarec.serve.shared_memory import SharedMemory
from terarec.spec.checks import quoted

DTYPES: Mapping[str, np.dtype[Any]] = {
    "BOOL": np.dtype(np.bool_),
    **{f"INT{bits}": np.dtype(f"<i{bits // 8}") for bits in (8, 16, 32, 64)},
    **{f"UINT{bits}": np.dtype(f"<u{bits // 8}") for bits in (8, 16, 32, 64)},
    **{f"FP{bits}": np.dtype(f"<f{bits // 8}") for bits in (16, 32, 64)},
}
"""Datatype -> NumPy's, of all but texts and BF16, which NumPy does not have."""

BINARY, BINARY_OUTPUT = "binary_data", "binary_data_output"
"""Parameters of an output, and of a request for all, that want the elements as bytes."""

_LENGTH = struct.Struct("<I")
_CODES = {"BOOL": "?", "FP16": "e", "FP32": "f", "FP64": "d"} | {
    f"{sign}INT{8 * 2**power}": code
    for sign, codes in (("", "bhiq"), ("U", "BHIQ"))
    for power, code in enumerate(codes)
}
"""Datatype -> its letter in `struct`."""
_FEW = 64  # elements up to which struct is faster than NumPy


def decode_elements(raw: bytes | bytearray | memoryview, datatype: str, count: int, where: str) -> Elements:
    """Return the elements of a tensor.

    Args:
        raw: Their bytes.
        datatype: Datatype of the tensor.
        count: Number of elements.
        where: Place of the tensor, for errors.

    Returns:
        A list of few elements, an array of many, as the workflow encodes them fastest. NaN is a missing number.
    """
    if datatype == "BYTES":
        texts = _text_array(raw, count) if count > SMALL_ROWS else None
        return _texts(raw, count, where) if texts is None else texts
    _check_num_bytes(len(raw), datatype, count, where)
    if datatype == "BF16":  # the upper half of a float32
        datatype, raw = "FP32", (np.frombuffer(raw, dtype="<u2").astype("<u4") << 16).tobytes()
    if datatype == "BOOL":
        flags = np.frombuffer(raw, dtype=np.uint8)
        if flags.size and flags.max() > 1:
            raise ConfigError(f"{where}[{int(np.argmax(flags > 1))}]", f"got {flags.max()}, expected 0 or 1 for BOOL")
    if count <= _FEW:
        return list(_few(datatype, count).unpack(raw))
    values = np.frombuffer(raw, dtype=DTYPES[datatype])
    return values if count > SMALL_ROWS and datatype != "BOOL" else values.tolist()


def _check_num_bytes(got: int, datatype: str, count: int, where: str) -> None:
    """Check the number of bytes of elements that are no texts."""
    size = count * (2 if datatype == "BF16" else DTYPES[datatype].itemsize)
    if got != size:
        raise ConfigError(where, f"got {got} bytes, expected {size} for {count} elements of {datatype}")


def layout_reader(layout: InputLayout) -> ReadLayout:
    """Return what reads the elements of the tensors of a layout as `decode_elements` does, without looking at it.

    Numbers, and texts of one record, are read together: a request of one record has dozens of tensors.
    """
    numbers: list[int] = []
    texts: list[int] = []
    others: list[int] = []
    forms = [(datatype, count) for (_, datatype, _), count in zip(layout.forms, layout.counts, strict=True)]
    for place, (datatype, count) in enumerate(forms):
        if datatype in _CODES and datatype != "BOOL" and count <= _FEW:
            numbers.append(place)
        else:
            (texts if datatype == "BYTES" and count == 1 else others).append(place)
    values = [_few(*forms[place]) for place in numbers]
    sizes = [each.size for each in values]
    unpack = struct.Struct("<" + "".join(each.format[1:] for each in values)).unpack
    counts = [layout.counts[place] for place in numbers]
    spans = [slice(end - count, end) for count, end in zip(counts, accumulate(counts), strict=True)]
    pack_lengths = struct.Struct(f"<{len(texts)}I").pack
    of_numbers, of_texts = make_getter(numbers), make_getter(texts)
    order = [*numbers, *texts, *others]
    in_order = make_getter([order.index(place) for place in range(len(order))])

    def read(raw: Sequence[bytes]) -> Sequence[Elements]:
        pieces = of_numbers(raw)
        if list(map(len, pieces)) != sizes:
            raise ValueError("other sizes")
        flat = unpack(b"".join(pieces))
        data: list[Elements] = [list(flat[span]) for span in spans]
        pieces = of_texts(raw)
        if b"".join([piece[:4] for piece in pieces]) != pack_lengths(*[len(piece) - 4 for piece in pieces]):
            raise ValueError("other lengths")
        data += [[piece[4:].decode()] for piece in pieces]
        data += [decode_elements(raw[place], *forms[place], layout.forms[place][0]) for place in others]
        return in_order(data)

    return read


@functools.cache
def _few(datatype: str, count: int) -> struct.Struct:
    return struct.Struct(f"<{count}{_CODES[datatype]}")


def _text_array(raw: bytes | bytearray | memoryview, count: int) -> pa.LargeStringArray | None:
    """Return texts; None for bytes with a fault, which `_texts` names."""
    try:
        return texts_of(*cut_texts(np.frombuffer(raw, dtype=np.uint8), count))
    except InvalidValueError:
        return None


def _texts(raw: bytes | bytearray | memoryview, count: int, where: str) -> list[str]:
    content, at, end = bytes(raw), 0, len(raw)
    # Of ASCII, positions of bytes are those of characters: it is decoded once, and cut.
    whole = content.decode("ascii") if content.isascii() else None
    each = end // count if count else 0
    if whole is not None and each >= 4 and each * count == end:
        length = content[:4]
        # Most texts have one length, such as hashes.
        if length == _LENGTH.pack(each - 4) and _have_length(content, each, length):
            return [whole[at + 4 : at + each] for at in range(0, end, each)]
    texts: list[str] = []
    unpack = _LENGTH.unpack_from
    for index in range(count):
        begin = at + 4
        if begin > end:
            raise _cut_short(index, where)
        at = begin + unpack(content, at)[0]
        if at > end:
            raise _cut_short(index, where)
        if whole is not None:
            texts.append(whole[begin:at])
            continue
        try:
            texts.append(content[begin:at].decode())
        except UnicodeDecodeError:
            raise _not_unicode(content[begin:at], index, where) from None
    if at != end:
        raise _left_over(end - at, count, where)
    return texts


def _have_length(content: bytes, each: int, length: bytes) -> bool:
    """Return whether each of the texts, of `each` bytes with its length, has the length of the first."""
    return all(content[at : at + 4] == length for at in range(each, len(content), each))


def _cut_short(index: int, where: str) -> ConfigError:
    return ConfigError(f"{where}[{index}]", "got fewer bytes than its length says, expected 4 bytes of it and UTF-8")


def _left_over(rest: int, count: int, where: str) -> ConfigError:
    return ConfigError(where, f"got {rest} bytes behind the last of {count} elements, expected none")


def _not_unicode(text: bytes, index: int, where: str) -> ConfigError:
    return ConfigError(f"{where}[{index}]", f"got {quoted(text)}, expected a string of valid Unicode for BYTES")


def encode_elements(elements: Elements, datatype: str) -> bytes:
    """Return the bytes of elements, none of which is missing."""
    if datatype == "BYTES":
        texts = elements.to_pylist() if isinstance(elements, pa.Array) else list(elements)
        encoded = [_as_bytes(text) for text in texts]
        return b"".join(piece for text in encoded for piece in (_LENGTH.pack(len(text)), text))
    if not isinstance(elements, np.ndarray) and None in elements:
        raise ConfigError("data", f"got a missing element, which {datatype} has no bytes for, expected JSON")
    if datatype == "BF16":
        return _upper_halves(np.ascontiguousarray(elements, dtype="<f4")).tobytes()
    return np.ascontiguousarray(elements, dtype=DTYPES[datatype]).tobytes()


def _upper_halves(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Return float32 rounded to the nearest even number of 16 bits; NaN stays NaN."""
    bits = values.view("<u4").astype(np.uint64)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    return np.where(np.isnan(values), 0x7FC0, rounded).astype("<u2")


def _as_bytes(text: Any) -> bytes:
    if text is None:  # an empty string is a missing one
        return b""
    return text if isinstance(text, bytes) else str(text).encode()


class TensorBytes:
    """Reads the elements of a request's tensors from what follows its JSON, and from shared memory.

    Args:
        raw: Bytes behind the JSON, one tensor's after the other's.
        regions: Those of the request in shared memory.
    """

    def __init__(self, raw: memoryview, regions: RegionReader) -> None:
        self._raw = raw
        self._regions = regions
        self._at = 0

    def read(self, tensor: Mapping[str, Any], datatype: str, count: int, where: str) -> Elements | None:
        """Read the elements of a tensor, as `terarec.serve.json_codec.ReadElements`.

        Raises:
            ConfigError: Fewer bytes than the tensor says, or a size that is no integer.
        """
        parameters = tensor.get("parameters")
        if not parameters:
            return None
        region = parameters.get("shared_memory_region")
        if region is not None:
            _no_data(tensor, where)
            return self._regions.read(parameters, datatype, count, where)
        if BINARY_SIZE not in parameters:
            return None
        _no_data(tensor, where)
        size = size_parameter(parameters, BINARY_SIZE, where)
        if size > len(self._raw) - self._at:
            place = f"{where}.parameters.{BINARY_SIZE}"
            raise ConfigError(place, f"got {size}, expected at most the {len(self._raw) - self._at} bytes that follow")
        raw = self._raw[self._at : self._at + size]
        self._at += size
        return decode_elements(raw, datatype, count, f"{where}.data")

    def check_end(self) -> None:
        """Check that all bytes belong to a tensor."""
        rest = len(self._raw) - self._at
        if rest:
            raise ConfigError("the body", f"got {rest} bytes behind the last tensor, expected none")


def _no_data(tensor: Mapping[str, Any], where: str) -> None:
    if "data" in tensor:
        raise ConfigError(f"{where}.data", "got elements in JSON and elsewhere, expected one of them")


def size_parameter(parameters: Mapping[str, Any], name: str, where: str, default: int | None = None) -> int:
    """Return a parameter that is a number of bytes.

    Raises:
        ConfigError: It is missing without a `default`, or no such number.
    """
    value = parameters.get(name, default)
    # `type`, because True is an integer.
    if type(value) is not int or not 0 <= value < 2**63:
        got = quoted(value, is_json=True)
        raise ConfigError(f"{where}.parameters.{name}", f"got {got}, expected an integer from 0 to 2^63 - 1")
    return value


class RegionReader:
    """Reads the tensors that a request has in shared memory, whose bytes count as those of its body do.

    Args:
        memory: Registered regions; None where shared memory is not allowed.
        body_bytes: Bytes of the body.
        most: Limit of the bytes of body and regions, below that of `memory`; None for that one.
        held: Counts what is read; None for no limit but those.
    """

    def __init__(
        self,
        memory: SharedMemory | None,
        body_bytes: int,
        most: int | None = None,
        held: HeldMemory | None = None,
    ) -> None:
        self._memory = memory
        self._body_bytes = body_bytes
        self._most = most
        self._num_bytes = body_bytes
        self._held = held

    def begin(self) -> None:
        """Read the request from its beginning."""
        self._num_bytes = self._body_bytes

    def read(self, parameters: Mapping[str, Any], datatype: str, count: int, where: str) -> Elements:
        """Return the elements of a tensor.

        Raises:
            UnsupportedError: Shared memory is not allowed.
            RegionsTooLargeError: The tensors of the request have too many bytes; nothing was read of this one.
            ServerBusyError: Other requests hold the memory that it needs.
            ConfigError: No such region, fewer bytes, or other bytes than those of so many elements.
        """
        name, offset, size = _place(parameters, where)
        memory, place = _allowed(self._memory, where), f"{where}.data"
        # Before anything is read, since a region may be larger than the memory that there is.
        if datatype != "BYTES":
            _check_num_bytes(size, datatype, count, place)
        most = memory.max_request_bytes if self._most is None else min(memory.max_request_bytes, self._most)
        self._num_bytes += size
        if self._num_bytes > most:
            raise RegionsTooLargeError(
                place, f"got {self._num_bytes} bytes up to here, in the body and in regions, expected at most {most}"
            )
        if self._held is not None:
            self._held.take(2 * size)  # as of raw contents
        return decode_elements(memory.read(name, offset, size, where), datatype, count, place)


class RegionsTooLargeError(RequestTooLargeError):
    """A request has too many bytes in regions of shared memory."""


def write_region(memory: SharedMemory | None, parameters: Mapping[str, Any], content: bytes, where: str) -> None:
    """Write the bytes of a tensor into shared memory; errors as in `RegionReader`."""
    name, offset, size = _place(parameters, where)
    _allowed(memory, where).write(name, offset, content, size, where)


def _place(parameters: Mapping[str, Any], where: str) -> tuple[str, int, int]:
    name = parameters["shared_memory_region"]
    if not isinstance(name, str):
        got = quoted(name, is_json=True)
        raise ConfigError(f"{where}.parameters.shared_memory_region", f"got {got}, expected a string")
    size = size_parameter(parameters, "shared_memory_byte_size", where)
    return name, size_parameter(parameters, "shared_memory_offset", where, 0), size


def _allowed(memory: SharedMemory | None, where: str) -> SharedMemory:
    if memory is None:
        raise UnsupportedError(where, "shared memory is not allowed here, expected the tensor in the request")
    return memory


def decode_binary_request(
    body: bytes | bytearray,
    header_bytes: int | None,
    memory: SharedMemory | None = None,
    layouts: RequestLayouts | None = None,
    most_bytes: int | None = None,
    held: HeldMemory | None = None,
) -> InferRequest:
    """Read an inference request whose tensors may be bytes.

    Args:
        body: JSON, and then the bytes of tensors.
        header_bytes: Bytes of the JSON; None if there is nothing else.
        memory: As in `RegionReader`.
        layouts: Requests that were read before; None to read each anew.
        most_bytes: As in `RegionReader`.
        held: As in `RegionReader`.

    Raises:
        RegionsTooLargeError: More bytes in regions.
        ServerBusyError: Other requests hold the memory that it needs.
        ConfigError: As `decode_infer_request` does; or fewer or more bytes than those of the tensors.
    """
    if header_bytes is None:
        header_bytes = len(body)
    elif not 0 < header_bytes <= len(body):
        raise ConfigError(
            "Inference-Header-Content-Length", f"got {header_bytes}, expected 1 to the {len(body)} bytes of the body"
        )
    header = bytes(body[:header_bytes])
    head = split_json(header) if layouts is not None and header_bytes < len(body) else None
    if layouts is not None and head is not None:
        raw = head.raw(bytes(body[header_bytes:]))
        known = None if raw is None else layouts.read(head.description, head.request_id, raw)
        if known is not None:
            return known
    regions = RegionReader(memory, len(body), most_bytes, held)
    content, last = memoryview(body)[header_bytes:], TensorBytes(memoryview(b""), regions)

    def begin() -> ReadElements:
        nonlocal last
        last = TensorBytes(content, regions)
        regions.begin()
        return last.read

    request = decode_infer_request(header, begin, layouts)
    last.check_end()
    _check_flag(request.parameters, BINARY_OUTPUT, "")
    for index, output in enumerate(request.outputs):
        _check_flag(output.parameters, BINARY, f"outputs[{index}].")
    if layouts is not None and head is not None and head.describes(request):
        layouts.remember(head.description, request)
    return request


def _check_flag(parameters: Mapping[str, Any], name: str, where: str) -> None:
    value = parameters.get(name, False)
    if type(value) is not bool:
        raise ConfigError(f"{where}parameters.{name}", f"got {quoted(value, is_json=True)}, expected true or false")


def encode_binary_response(
    response: InferResponse, request: InferRequest, memory: SharedMemory | None = None
) -> tuple[bytes, int | None]:
    """Write an inference response, in the form in which the request wants each output.

    Returns:
        The body, and the bytes of its JSON; None if there is nothing else.

    Raises:
        UnsupportedError: Shared memory that is not allowed.
        ConfigError: Shared memory that is not there, or too small.
    """
    wanted = {output.name: output for output in request.outputs}
    are_binary = request.parameters.get(BINARY_OUTPUT, False)
    outputs: list[Mapping[str, Any]] = []
    raw: list[bytes] = []
    for tensor in response.outputs:
        output = wanted.get(tensor.name)
        head = {"name": tensor.name, "datatype": tensor.datatype, "shape": list(tensor.shape)}
        parameters = {} if output is None else output.parameters
        if "shared_memory_region" in parameters:
            content = encode_elements(tensor.data, tensor.datatype)
            write_region(memory, parameters, content, f"outputs {tensor.name!r}")
            placed = {name: value for name, value in parameters.items() if name.startswith("shared_memory_")}
            outputs.append({**head, "parameters": {**placed, "shared_memory_byte_size": len(content)}})
        elif parameters.get(BINARY, are_binary):
            content = encode_elements(tensor.data, tensor.datatype)
            raw.append(content)
            outputs.append({**head, "parameters": {BINARY_SIZE: len(content)}})
        else:
            outputs.append({**head, "data": json_elements(tensor.data)})
    message: dict[str, Any] = {"model_name": response.model_name, "model_version": response.model_version}
    if response.id:
        message["id"] = response.id
    if response.parameters:
        message["parameters"] = response.parameters
    header = encode({**message, "outputs": outputs})
    return (b"".join((header, *raw)), len(header)) if raw else (header, None)
