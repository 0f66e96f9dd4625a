# SPDX-License-Identifier: Apache-2.0
"""Requests and responses of HTTP, apart from their bytes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import TypeAlias
from urllib.parse import parse_qs

from terarec.errors import ConfigError, TerarecError
from terarec.serve.calls import Call
from terarec.serve.json_codec import encode
from terarec.serve.protocol import ServerBusyError, UnauthenticatedError, UnsupportedContentError, error_code
from terarec.spec.checks import one_line, quoted
from terarec.user_code import describe, place_of

JSON = "application/json"


@dataclass(slots=True)
class Request:
    """A request.

    Attributes:
        method: Method, such as "POST".
        path: Path without the query, percent-encoded as the client sent it.
        query: What follows the question mark.
        headers: Lower-case name -> value; values of one name are joined by a comma.
        body: Body, complete once a handler is called.
        peer: Address of the client; "" if it is not known.
        is_admin: Whether it came over the address of administrators.
        variables: Values of the variables in the route's path.
        call: What those who watch get to know of it; None where nobody does.
    """

    method: str
    path: str
    query: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes | bytearray = b""
    peer: str = ""
    is_admin: bool = False
    variables: Mapping[str, str] = field(default_factory=dict)
    call: Call | None = None

    def parameters(self) -> dict[str, list[str]]:
        """Return the parameters of the query."""
        return parse_qs(self.query, keep_blank_values=True, max_num_fields=100)


@dataclass(slots=True)
class Response:
    """A response.

    Attributes:
        body: Body.
        status: Status.
        media_type: Value of Content-Type; "" for a response without a body.
        headers: Further headers.
        reason: Kind of an error, for logs; it is not sent.
    """

    body: bytes = b""
    status: int = 200
    media_type: str = JSON
    headers: Mapping[str, str] = field(default_factory=dict)
    reason: str = ""

    @property
    def is_last(self) -> bool:
        """True if the connection ends with it."""
        return self.headers.get("Connection") == "close"


def check_content_type(request: Request, *others: str) -> None:
    """Check the type of a body before it is received.

    Raises:
        UnsupportedContentError: It is neither JSON nor one of `others`.
    """
    accepted = (JSON, *others)
    content_type = request.headers.get("content-type", JSON).split(";")[0].strip().lower()
    # Stock clients send no Content-Type. A page of another origin could send other types without being asked.
    if content_type not in accepted:
        raise UnsupportedContentError("Content-Type", f"got {quoted(content_type)}, expected {' or '.join(accepted)}")


Handler: TypeAlias = Callable[[Request], Awaitable[Response]]
"""Answers a request. It is cancelled if the client leaves."""


class RouteError(ConfigError):
    """No route for the path, or not with this method.

    Attributes:
        status: Status of the response.
        allowed: Methods of the path.
    """

    def __init__(self, *parts: object, status: int, allowed: tuple[str, ...] = ()) -> None:
        super().__init__(*parts)
        self.status = status
        self.allowed = allowed


def json_response(message: object) -> Response:
    """Return a message as JSON."""
    return Response(encode(message))


def error_response(error: BaseException) -> Response:
    """Return an error as one line of JSON, as Triton does."""
    if isinstance(error, RouteError):
        headers = {"Allow": ", ".join(error.allowed)} if error.allowed else {}
        reason = "not_found" if error.status == HTTPStatus.NOT_FOUND else "method_not_allowed"
        return error_line(error.status, str(error), reason, headers)
    if isinstance(error, TerarecError):
        status, _, reason = error_code(error)
        headers = {}
        # After half a body it is unknown where the next request begins.
        if status == HTTPStatus.REQUEST_TIMEOUT:
            headers["Connection"] = "close"
        if isinstance(error, ServerBusyError):
            headers["Retry-After"] = "1"
        if isinstance(error, UnauthenticatedError):
            headers["WWW-Authenticate"] = "Bearer"
        return error_line(status, str(error), reason, headers)
    # An error of our own or of a user's code: the traceback goes to the log, one line to the client.
    text = f"internal error: {type(error).__name__}" if place_of(error) is None else describe(error)
    return error_line(500, text, "internal")


def error_line(status: int, text: str, reason: str, headers: Mapping[str, str] | None = None) -> Response:
    """Return a response with an error's text, in one line."""
    return Response(encode({"error": one_line(text)}), status, headers=headers or {}, reason=reason)
