# SPDX-License-Identifier: Apache-2.0
"""The Open Inference Protocol v2: its messages, apart from their bytes and any transport, and its errors."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple, Self, TypeAlias

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from terarec.errors import ConfigError, FormatError, TerarecError

Elements: TypeAlias = Sequence[Any] | NDArray[Any] | pa.LargeStringArray
"""Elements in row-major order: a list, in which None is a missing value, a flat NumPy array, or texts of Arrow.

JSON numbers are not rounded to the width that a floating datatype names: a raw value that is an integer beyond 2^24
must reach the workflow exactly, as it did when the data set was prepared.
"""

INTEGER_BITS: Mapping[str, tuple[bool, int]] = {
    f"{'' if signed else 'U'}INT{bits}": (signed, bits) for signed in (True, False) for bits in (64, 32, 16, 8)
}
"""Integer datatype -> whether it is signed, and its width."""

FLOATS = ("FP32", "FP64", "FP16", "BF16")
"""Floating datatypes."""

DATATYPES = ("BOOL", *INTEGER_BITS, *FLOATS, "BYTES")


class NotFoundError(ConfigError):
    """There is nothing of that name."""


class UnknownModelError(NotFoundError):
    """No model of that name or version is served."""


MOST_CALL_BYTES = 65536
"""Limit of the message of a call that sends no records, such as of the index of the repository."""


class RequestTooLargeError(ConfigError):
    """A request holds more bytes or more records than the server takes."""


class RequestTimeoutError(ConfigError):
    """A request did not arrive in time."""


class UnsupportedContentError(ConfigError):
    """A request is written in a form that the server does not read."""


class UnsupportedError(ConfigError):
    """A request uses a part of the protocol that this server does not have."""


class UnauthenticatedError(ConfigError):
    """A call needs a token that the request does not have."""


class ForbiddenError(ConfigError):
    """A call is not allowed from where the request comes."""


class UnavailableError(TerarecError, RuntimeError):
    """The server cannot do this in its present state."""


class ServerBusyError(UnavailableError):
    """The server holds as many requests as it takes at once; the client may try again."""


class DeadlineError(UnavailableError):
    """A request waited for longer than it allows, and was dropped."""


class ErrorCode(NamedTuple):
    """What a transport answers with.

    Attributes:
        http: Status of HTTP.
        grpc: Name of the status code of gRPC.
        reason: What logs and metrics call it; the text of an error may quote values of a client.
    """

    http: int
    grpc: str
    reason: str


_ERROR_CODES: tuple[tuple[type[TerarecError], ErrorCode], ...] = (
    (UnauthenticatedError, ErrorCode(401, "UNAUTHENTICATED", "unauthenticated")),
    (ForbiddenError, ErrorCode(403, "PERMISSION_DENIED", "forbidden")),
    (NotFoundError, ErrorCode(404, "NOT_FOUND", "not_found")),
    (RequestTimeoutError, ErrorCode(408, "DEADLINE_EXCEEDED", "receive_timeout")),
    (RequestTooLargeError, ErrorCode(413, "RESOURCE_EXHAUSTED", "too_large")),
    (UnsupportedContentError, ErrorCode(415, "INVALID_ARGUMENT", "unsupported_content")),
    (UnsupportedError, ErrorCode(501, "UNIMPLEMENTED", "unsupported")),
    (ConfigError, ErrorCode(400, "INVALID_ARGUMENT", "invalid")),
    (FormatError, ErrorCode(400, "INVALID_ARGUMENT", "invalid")),
    (ServerBusyError, ErrorCode(503, "UNAVAILABLE", "busy")),
    (DeadlineError, ErrorCode(503, "UNAVAILABLE", "deadline")),
    (UnavailableError, ErrorCode(503, "UNAVAILABLE", "unavailable")),
)
"""Subclasses before their bases, so that the first match is the nearest class. The codes are Triton's, where it has
such an error; a request that waited for too long is UNAVAILABLE there, too."""


def error_code(error: BaseException) -> ErrorCode:
    """Return the code of an exception that a call raised; that of an internal error for one that is not listed."""
    return next(
        (code for kind, code in _ERROR_CODES if isinstance(error, kind)), ErrorCode(500, "INTERNAL", "internal")
    )


class _TensorFields(NamedTuple):
    name: str
    datatype: str
    shape: tuple[int, ...]
    data: Elements
    parameters: Mapping[str, Any]


_NO_PARAMETERS: Mapping[str, Any] = MappingProxyType({})


class Tensor(_TensorFields):
    """A named tensor.

    A tuple, since a request of one record has one for each column: `_make` takes the fields without looking at them.

    Attributes:
        name: Name of the model's input or output.
        datatype: One of `terarec.serve.protocol.DATATYPES`.
        shape: Sizes of its dimensions.
        data: ``prod(shape)`` elements in row-major order.
        parameters: What the protocol's extensions say of it.
    """

    __slots__ = ()

    def __new__(
        cls,
        *,
        name: str,
        datatype: str,
        shape: tuple[int, ...],
        data: Elements,
        parameters: Mapping[str, Any] = _NO_PARAMETERS,
    ) -> Self:
        """Check the number of elements; raise `ConfigError` if the shape has another one."""
        if len(data) != math.prod(shape):
            raise ConfigError(
                f"tensor {name!r}", f"got {len(data)} elements, expected {math.prod(shape)} for shape {list(shape)}"
            )
        return super().__new__(cls, name, datatype, shape, data, parameters)


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
        parameters: ``priority`` and ``timeout`` (microseconds), as in Triton; others are ignored.
    """

    inputs: Sequence[Tensor]
    outputs: tuple[RequestedOutput, ...] = ()
    id: str | None = None
    parameters: Mapping[str, Any] = field(default_factory=dict)

    @property
    def num_records(self) -> int:
        """Number of records; some columns may have one value for all of them."""
        return max((tensor.shape[0] for tensor in self.inputs if tensor.shape), default=0)

    @property
    def num_bytes(self) -> int:
        """About the memory of the elements of its inputs."""
        return sum(_num_bytes(tensor.data) for tensor in self.inputs)


def _num_bytes(data: Elements) -> int:
    if isinstance(data, np.ndarray) and data.dtype != np.object_:
        return int(data.nbytes)
    return int(data.nbytes) if isinstance(data, pa.Array) else sum(map(sys.getsizeof, data))


@dataclass(frozen=True, kw_only=True, slots=True)
class InferResponse:
    """The scores of one request.

    Attributes:
        model_name, model_version: The version of the model that scored it.
        outputs: The scores.
        id: That of the request.
        parameters: ``step``, the training steps of the weights that scored it.
    """

    model_name: str
    model_version: str
    outputs: tuple[Tensor, ...]
    id: str | None = None
    parameters: Mapping[str, Any] = field(default_factory=dict)


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
