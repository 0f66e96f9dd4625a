"""The HTTP transport: an ASGI application that speaks the JSON form of the Open Inference Protocol v2."""

from __future__ import annotations

from functools import partial

from terarec.errors import ConfigError, FormatError, MissingDependencyError, TerarecError
from terarec.serve.json_form import decode_infer_request, encode
from terarec.serve.messages import (
    RequestTimeoutError,
    RequestTooLargeError,
    ServerBusyError,
    UnknownModelError,
    UnsupportedContentError,
)
from terarec.serve.service import InferenceService
from terarec.spec.quoting import one_line, shortened

try:
    from anyio import CapacityLimiter, to_thread
    from starlette.applications import Starlette
    from starlette.exceptions import HTTPException
    from starlette.requests import Request
    from starlette.responses import JSONResponse, Response
    from starlette.routing import Route

    from terarec.serve.intake import Intake
except ModuleNotFoundError as error:
    raise MissingDependencyError(f"serving needs {error.name}: pip install 'terarec[serve]'") from error

WORKERS = 1
"""Requests worked on at once. The model uses all cores already: with 4 connections and 1,024 Criteo records a request,
1 worker answered 46 to 54 requests a second, 2 workers 35 to 44, 4 workers 31 (2 Zen 3 cores, other work beside)."""

_STATUS: tuple[tuple[type[TerarecError], int], ...] = (
    (UnknownModelError, 404),
    (RequestTimeoutError, 408),
    (RequestTooLargeError, 413),
    (UnsupportedContentError, 415),
    (ConfigError, 400),
    (FormatError, 400),
    (ServerBusyError, 503),
    (TerarecError, 500),
)

_HEADERS = {408: {"Connection": "close"}, 503: {"Retry-After": "1"}}
"""Headers of refusals. Nobody knows where the next request begins in what comes after half a body."""


def create_app(service: InferenceService) -> Starlette:
    """The application that serves `service`; run it under any ASGI server."""
    model = "/v2/models/{name}"
    version = f"{model}/versions/{{version}}"
    transport = _Transport(service)
    routes = [
        Route("/v2", transport.server_metadata),
        Route("/v2/health/live", transport.live),
        Route("/v2/health/ready", transport.ready),
        *(Route(path, transport.model_metadata) for path in (model, version)),
        *(Route(f"{path}/ready", transport.model_ready) for path in (model, version)),
        *(Route(f"{path}/infer", transport.infer, methods=["POST"]) for path in (model, version)),
    ]
    app = Starlette(
        routes=routes,
        exception_handlers={TerarecError: _refused, HTTPException: _no_route, Exception: _broken},
    )
    app.router.redirect_slashes = False
    return app


class _Transport:
    """The endpoints. Work that takes longer than a look-up leaves the event loop for a thread."""

    def __init__(self, service: InferenceService) -> None:
        self._service = service
        self._workers = CapacityLimiter(WORKERS)
        self._intake = Intake(service.spec)

    async def server_metadata(self, _: Request) -> Response:
        return _answer(encode(self._service.server_metadata()))

    async def live(self, _: Request) -> Response:
        return JSONResponse({"live": True})

    async def ready(self, _: Request) -> Response:
        return JSONResponse({"ready": True})

    async def model_metadata(self, request: Request) -> Response:
        return _answer(encode(self._service.model_metadata(**request.path_params)))

    async def model_ready(self, request: Request) -> Response:
        metadata = self._service.model_metadata(**request.path_params)
        return JSONResponse({"name": metadata.name, "ready": True})

    async def infer(self, request: Request) -> Response:
        async with self._intake.body(request, partial(self._check, request)) as body:
            score = partial(_infer, self._service, body, **request.path_params)
            return _answer(await to_thread.run_sync(score, limiter=self._workers))

    def _check(self, request: Request) -> None:
        self._service.model_metadata(**request.path_params)
        _check_content(request)


def _infer(service: InferenceService, body: bytes | bytearray, name: str, version: str | None = None) -> bytes:
    try:
        return encode(service.infer(decode_infer_request(body), name, version))
    except TerarecError as error:
        # Tracebacks and contexts hold all that was parsed until the garbage collector finds them.
        error.__context__ = None
        raise error.with_traceback(None) from None


def _check_content(request: Request) -> None:
    """Refuse what is announced as anything but plain JSON; a request without Content-Type is taken as JSON."""
    content_type = request.headers.get("content-type", "application/json").split(";")[0].strip().lower()
    if content_type != "application/json":
        raise UnsupportedContentError(f"Content-Type: got {content_type}, expected application/json")
    if "inference-header-content-length" in request.headers:
        raise UnsupportedContentError("got binary tensor data, expected tensors in JSON")
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding != "identity":
        raise UnsupportedContentError(f"Content-Encoding: got {encoding}, expected identity")


def _answer(body: bytes) -> Response:
    return Response(body, media_type="application/json")


def _refused(_: Request, error: Exception) -> Response:
    status = next(status for kind, status in _STATUS if isinstance(error, kind))
    return JSONResponse({"error": one_line(str(error))}, status_code=status, headers=_HEADERS.get(status))


def _no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = f"{request.method} {shortened(request.url.path)}: {error.detail}"
    return JSONResponse({"error": one_line(message)}, status_code=error.status_code, headers=error.headers)


def _broken(_: Request, error: Exception) -> Response:
    """Our mistake: the traceback goes to the server's log, one line to the client."""
    return JSONResponse({"error": f"internal error: {type(error).__name__}"}, status_code=500)
