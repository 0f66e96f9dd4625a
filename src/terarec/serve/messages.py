"""What a client and a server say to each other: the Open Inference Protocol v2, apart from any transport.

`terarec.serve.json_form` writes and reads these messages as JSON.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from terarec.errors import ConfigError, TerarecError
from terarec.serve.elements import Elements


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
        datatype: One of `terarec.serve.elements.DATATYPES`.
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
                f"tensor {self.name!r}: got {len(self.data)} elements, "
                f"expected {math.prod(self.shape)} for shape {list(self.shape)}"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestedOutput:
    """An output that a request wants."""

    name: str
    parameters: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class InferRequest:
    """Records to score.

    Attributes:
        inputs: One tensor per raw column of the model.
        outputs: What is wanted; none means all.
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
    """What an input or output looks like; -1 in the shape is the number of records B, which the request chooses."""

    name: str
    datatype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelMetadata:
    """What a model takes and gives."""

    name: str
    versions: tuple[str, ...]
    platform: str
    inputs: tuple[TensorMetadata, ...]
    outputs: tuple[TensorMetadata, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerMetadata:
    """What a server is; the extensions are those of the protocol that it knows."""

    name: str
    version: str
    extensions: tuple[str, ...] = ()
