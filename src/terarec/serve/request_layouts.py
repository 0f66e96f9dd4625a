# SPDX-License-Identifier: Apache-2.0
"""`RequestLayouts`: what was read of earlier requests, so that a client's next one need not be read in full."""

from __future__ import annotations

import functools
import math
import re
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias, overload

from typing_extensions import override

from terarec.serve.protocol import Elements, InferRequest, RequestedOutput, Tensor

BINARY_SIZE = "binary_data_size"
"""Parameter of a tensor whose bytes follow the JSON."""

ReadLayout: TypeAlias = Callable[[Sequence[bytes]], Sequence[Elements]]
"""Reads the elements of the tensors of a layout from the bytes of each. For other bytes than those of so many elements
it raises `ValueError` or `struct.error`."""

_NO_PARAMETERS: Mapping[str, Any] = {}
_MOST_BYTES = 1 << 14
_MOST_LAYOUTS = 256
_MOST_ELEMENTS = 4096  # of a layout in JSON: those of larger requests are read tensor by tensor, in less memory
# In valid JSON these bytes are a field and its number: within a text the quotation marks would have backslashes.
_SIZES = re.compile(rb'"binary_data_size":(0|[1-9][0-9]{0,17})(?=[,}])')
_ID = re.compile(rb'\{"id":"([^"\\\x00-\x1f]*)",')  # where stock clients write it


TensorForms: TypeAlias = tuple[tuple[str, str, tuple[int, ...]], ...]
"""Name, datatype and shape of each tensor of a request."""


class InputLayout:
    """Names, datatypes and shapes of the tensors of a request. Equal to itself alone, so that it is found fast.

    Attributes:
        forms: Name, datatype and shape of each tensor, in their order.
        counts: Number of elements of each.
        places: Datatype -> the places of its tensors.
    """

    __slots__ = ("counts", "forms", "places")

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self.forms: TensorForms = tuple([(tensor.name, tensor.datatype, tensor.shape) for tensor in tensors])
        self.counts = tuple([math.prod(shape) for _, _, shape in self.forms])
        self.places: dict[str, list[int]] = {}
        for place, (_, datatype, _) in enumerate(self.forms):
            self.places.setdefault(datatype, []).append(place)


class LaidOutTensors(Sequence[Tensor]):
    """Tensors of a known layout, of which one is made where somebody asks for it. Equal to a tuple of the same ones.

    Attributes:
        layout: The layout.
        data: Elements of each tensor, as many as the layout says.
    """

    __slots__ = ("data", "layout")

    def __init__(self, layout: InputLayout, data: Sequence[Elements]) -> None:
        self.layout = layout
        self.data = data

    @override
    def __len__(self) -> int:
        return len(self.data)

    @overload
    def __getitem__(self, index: int) -> Tensor: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[Tensor, ...]: ...

    @override
    def __getitem__(self, index: int | slice) -> Tensor | tuple[Tensor, ...]:
        if isinstance(index, slice):
            return tuple(self)[index]
        return Tensor._make((*self.layout.forms[index], self.data[index], _NO_PARAMETERS))

    @override
    def __eq__(self, other: object) -> bool:
        return tuple(self) == (tuple(other) if isinstance(other, LaidOutTensors) else other)

    @override
    def __repr__(self) -> str:
        return repr(tuple(self))


class _Known(NamedTuple):
    """A request without its id and the elements of its tensors.

    Attributes:
        layout: Its tensors.
        read: Reads their elements from the bytes of each.
        outputs: The requested outputs.
        parameters: Parameters of the request.
    """

    layout: InputLayout
    read: ReadLayout
    outputs: tuple[RequestedOutput, ...]
    parameters: Mapping[str, Any]


class RequestLayouts:
    """Requests by the bytes that describe their tensors, without the elements. Thread-safe.

    A client's requests differ in elements and ids alone. Of one record of 39 columns, reading the description takes two
    thirds of the time of decoding, and what is done for one tensor after the other most of the rest. What is wrong with
    the bytes of a tensor is left to the usual way of reading, which says so. `_known` and `_layouts` are read and
    changed by single operations of a dict.

    Args:
        reader: Returns what reads the elements of the tensors of a layout from the bytes of each.
    """

    def __init__(self, reader: Callable[[InputLayout], ReadLayout]) -> None:
        self._reader = reader
        self._known: dict[bytes, _Known] = {}
        self._layouts: dict[TensorForms, InputLayout] = {}

    def __len__(self) -> int:
        """Return the number of descriptions."""
        return len(self._known)

    def read(self, description: bytes, request_id: str | None, raw: Sequence[bytes]) -> InferRequest | None:
        """Return a request; None where it has to be read the usual way.

        Args:
            description: What describes it, without id and elements.
            request_id: Its id.
            raw: Bytes of each tensor.
        """
        known = self._known.get(description)
        if known is None or len(raw) != len(known.layout.forms):
            return None
        try:
            inputs = LaidOutTensors(known.layout, known.read(raw))
        except (ValueError, struct.error):  # a `ConfigError`, too
            return None
        return InferRequest(inputs=inputs, outputs=known.outputs, id=request_id, parameters=known.parameters)

    def remember(self, description: bytes, request: InferRequest) -> None:
        """Remember a request with this description, all tensors of which are raw bytes."""
        if len(description) > _MOST_BYTES:
            return
        if len(self._known) >= _MOST_LAYOUTS:
            self._known.clear()
        layout = InputLayout(request.inputs)
        self._known[description] = _Known(layout, self._reader(layout), request.outputs, request.parameters)

    def layout(self, forms: TensorForms) -> InputLayout | None:
        """Return the layout of tensors that were remembered; None for others."""
        return self._layouts.get(forms)

    def remember_tensors(self, tensors: Sequence[Tensor]) -> None:
        """Remember the layout of tensors with few elements."""
        if sum(len(tensor.name) + 8 * len(tensor.shape) + 1 for tensor in tensors) > _MOST_BYTES:
            return
        if sum(len(tensor.data) for tensor in tensors) > _MOST_ELEMENTS:
            return
        if len(self._layouts) >= _MOST_LAYOUTS:
            self._layouts.clear()
        layout = InputLayout(tensors)
        self._layouts[layout.forms] = layout


class JsonHead(NamedTuple):
    """The JSON before the bytes of tensors.

    Attributes:
        description: The JSON without the id of the request and the sizes of tensors.
        sizes: The sizes, in the order of the JSON.
        request_id: The id, if it is the first field.
    """

    description: bytes
    sizes: tuple[int, ...]
    request_id: str | None

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
        return tuple(sizes) == self.sizes and request.id == self.request_id


def split_json(header: bytes) -> JsonHead | None:
    """Split the JSON of a request; None where it is too long, or its id is not of UTF-8."""
    if len(header) > _MOST_BYTES:
        return None
    match = _ID.match(header)
    if match is None:
        return JsonHead(*_without_sizes(header), None)
    try:
        return JsonHead(*_without_sizes(header[match.end() :], b"id"), match[1].decode())
    except UnicodeDecodeError:
        return None


# Requests of one client have a few combinations of sizes, such as those of texts that are missing.
@functools.lru_cache(maxsize=512)
def _without_sizes(header: bytes, prefix: bytes = b"") -> tuple[bytes, tuple[int, ...]]:
    """Return what describes the tensors, and their sizes."""
    parts = _SIZES.split(header)
    # JSON has no byte 0, so that the description of no other JSON is the same.
    return b"\0".join([prefix, *parts[::2]]), tuple(map(int, parts[1::2]))
