# SPDX-License-Identifier: Apache-2.0
"""`RequestLayouts`: what was read of earlier requests, so that a client's next one need not be read in full."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from terarec.serve.protocol import Elements, InferRequest, RequestedOutput, Tensor

BINARY_SIZE = "binary_data_size"
"""Parameter of a tensor whose bytes follow the JSON."""

_NO_PARAMETERS: Mapping[str, Any] = {}
_MOST_BYTES = 1 << 14
_MOST_LAYOUTS = 256
# In valid JSON these bytes are a field and its number: within a text the quotation marks would have backslashes.
_SIZES = re.compile(rb'"binary_data_size":(0|[1-9][0-9]{0,17})(?=[,}])')
_ID = re.compile(rb'\{"id":"([^"\\\x00-\x1f]*)",')  # where stock clients write it


class _Layout(NamedTuple):
    """A request without its id and the elements of its tensors.

    Attributes:
        tensors: Of each tensor name, datatype, shape, and what reads its elements.
        outputs: The requested outputs.
        parameters: Parameters of the request.
    """

    tensors: tuple[tuple[str, str, tuple[int, ...], Callable[[bytes], Elements]], ...]
    outputs: tuple[RequestedOutput, ...]
    parameters: Mapping[str, Any]


class RequestLayouts:
    """Requests by the bytes that describe their tensors, without the elements. Thread-safe.

    A client's requests differ in elements and ids alone. Of one record of 39 columns, reading the description takes two
    thirds of the time of decoding. What is wrong with the bytes of a tensor is left to the usual way of reading, which
    says so. `_layouts` is read and changed by single operations of a dict.

    Args:
        reader: Returns what reads the elements of a tensor: its datatype, number of elements, place -> its bytes ->
            elements.
    """

    def __init__(self, reader: Callable[[str, int, str], Callable[[bytes], Elements]]) -> None:
        self._reader = reader
        self._layouts: dict[bytes, _Layout] = {}

    def __len__(self) -> int:
        """Return the number of descriptions."""
        return len(self._layouts)

    def read(self, description: bytes, request_id: str | None, raw: Sequence[bytes]) -> InferRequest | None:
        """Return a request; None where it has to be read the usual way.

        Args:
            description: What describes it, without id and elements.
            request_id: Its id.
            raw: Bytes of each tensor.
        """
        layout = self._layouts.get(description)
        if layout is None or len(raw) != len(layout.tensors):
            return None
        # `_make` would take another call for each.
        make, none = tuple.__new__, _NO_PARAMETERS
        try:
            inputs = tuple(
                [
                    make(Tensor, (name, datatype, shape, read(content), none))
                    for (name, datatype, shape, read), content in zip(layout.tensors, raw, strict=True)
                ]
            )
        except (ValueError, struct.error):  # a `ConfigError`, too
            return None
        return InferRequest(inputs=inputs, outputs=layout.outputs, id=request_id, parameters=layout.parameters)

    def remember(self, description: bytes, request: InferRequest) -> None:
        """Remember a request with this description, all tensors of which are raw bytes."""
        if len(description) > _MOST_BYTES:
            return
        if len(self._layouts) >= _MOST_LAYOUTS:
            self._layouts.clear()
        reader = self._reader
        tensors = tuple(
            [
                (one.name, one.datatype, one.shape, reader(one.datatype, len(one.data), one.name))
                for one in request.inputs
            ]
        )
        self._layouts[description] = _Layout(tensors, request.outputs, request.parameters)


class JsonHead(NamedTuple):
    """The JSON before the bytes of tensors.

    Attributes:
        description: The JSON without the id of the request and the sizes of tensors.
        request_id: The id, if it is the first field.
        sizes: The sizes, in the order of the JSON.
    """

    description: bytes
    request_id: str | None
    sizes: list[int]

    def raw(self, content: bytes) -> list[bytes] | None:
        """Cut the bytes of each tensor out; None where there are more or fewer."""
        if sum(self.sizes) != len(content):
            return None
        begin, raw = 0, []
        for size in self.sizes:
            raw.append(content[begin : begin + size])
            begin += size
        return raw

    def describes(self, request: InferRequest) -> bool:
        """Return whether other requests with this description have the same tensors, outputs and parameters."""
        sizes = [
            tensor.parameters.get(BINARY_SIZE) if len(tensor.parameters) == 1 else None for tensor in request.inputs
        ]
        # One size for each tensor, in their order: so none is elsewhere, such as in the parameters of an output. An id
        # that is elsewhere would be part of the description.
        return sizes == self.sizes and request.id == self.request_id


def split_json(header: bytes) -> JsonHead | None:
    """Split the JSON of a request; None where it is too long, or its id is not of UTF-8."""
    if len(header) > _MOST_BYTES:
        return None
    match = _ID.match(header)
    try:
        request_id = None if match is None else match[1].decode()
    except UnicodeDecodeError:
        return None
    parts = _SIZES.split(header if match is None else header[match.end() :])
    # JSON has no byte 0, so that the description of no other JSON is the same.
    description = b"\0".join([b"" if match is None else b"id", *parts[::2]])
    return JsonHead(description, request_id, list(map(int, parts[1::2])))
