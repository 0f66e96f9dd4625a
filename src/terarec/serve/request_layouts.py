# SPDX-License-Identifier: Apache-2.0
"""`RequestLayouts`: the JSON of binary requests that was read before, so that a client's next request need not be."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from terarec.errors import ConfigError
from terarec.serve.protocol import Elements, InferRequest, RequestedOutput, Tensor

_SIZE = "binary_data_size"
# In valid JSON these bytes are a field and its number: within a text the quotation marks would have backslashes.
_SIZES = re.compile(rb'"binary_data_size":(0|[1-9][0-9]{0,17})(?=[,}])')
_ID = re.compile(rb'\{"id":"([^"\\\x00-\x1f]*)",')  # where stock clients write it
_MOST_BYTES = 1 << 14
_MOST_LAYOUTS = 256


class _Layout(NamedTuple):
    """A request without its id, the sizes of its tensors and their elements.

    Attributes:
        tensors: Of each tensor name, datatype, shape and number of elements.
        outputs: The requested outputs.
        parameters: Parameters of the request.
    """

    tensors: tuple[tuple[str, str, tuple[int, ...], int], ...]
    outputs: tuple[RequestedOutput, ...]
    parameters: Mapping[str, Any]


class RequestLayouts:
    """Reads binary requests whose JSON differs from that of an earlier one in sizes and in the id alone. Thread-safe.

    Of 39 columns of one record, reading and checking the JSON takes three quarters of the time of a request's decoding.
    Whatever this does not take, or what is wrong with the bytes of a tensor, goes the usual way, which also says what
    is wrong. `_layouts` is read and changed by single operations of a dict.

    Args:
        decode: Returns the elements of a tensor: its bytes, datatype, number of elements, place -> elements.
    """

    def __init__(self, decode: Callable[[bytes, str, int, str], Elements]) -> None:
        self._decode = decode
        self._layouts: dict[bytes, _Layout] = {}

    def __len__(self) -> int:
        """Return the number of layouts."""
        return len(self._layouts)

    def read(self, header: bytes, content: bytes) -> InferRequest | None:
        """Return the request of a JSON and the bytes of its tensors; None where it has to be read the usual way."""
        if len(header) > _MOST_BYTES:
            return None
        request_id, key, sizes = _parts(header)
        layout = self._layouts.get(key)
        if layout is None or len(sizes) != len(layout.tensors) or sum(sizes) != len(content):
            return None
        inputs: list[Tensor] = []
        begin = 0
        try:
            for (name, datatype, shape, count), size in zip(layout.tensors, sizes, strict=True):
                end = begin + size
                data = self._decode(content[begin:end], datatype, count, name)
                inputs.append(Tensor._make((name, datatype, shape, data, {_SIZE: size})))
                begin = end
            return InferRequest(
                inputs=tuple(inputs),
                outputs=layout.outputs,
                id=None if request_id is None else request_id.decode(),
                parameters=layout.parameters,
            )
        except (ConfigError, UnicodeDecodeError):
            return None

    def remember(self, header: bytes, request: InferRequest) -> None:
        """Remember the JSON of a request that was read, if all of its tensors are bytes behind it."""
        if len(header) > _MOST_BYTES:
            return
        request_id, key, sizes = _parts(header)
        given = [tensor.parameters.get(_SIZE) if len(tensor.parameters) == 1 else None for tensor in request.inputs]
        # One size for each tensor, in their order: so none is elsewhere, such as in the parameters of an output.
        if given != sizes or (request_id is not None and request.id != request_id.decode()):
            return
        if request_id is None and request.id is not None:
            return  # a part of the key, which each request would have for itself
        if len(self._layouts) >= _MOST_LAYOUTS:
            self._layouts.clear()
        tensors = tuple([(one.name, one.datatype, one.shape, len(one.data)) for one in request.inputs])
        self._layouts[key] = _Layout(tensors, request.outputs, request.parameters)


def _parts(header: bytes) -> tuple[bytes | None, bytes, list[int]]:
    """Return the id of a request, what is left of its JSON without id and sizes, and the sizes."""
    found = _ID.match(header)
    parts = _SIZES.split(header if found is None else header[found.end() :])
    request_id = None if found is None else found[1]
    # JSON has no byte 0, so that the key of no other JSON is the same.
    return request_id, b"\0".join([b"" if found is None else b"id", *parts[::2]]), list(map(int, parts[1::2]))
