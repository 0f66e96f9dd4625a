# SPDX-License-Identifier: Apache-2.0
"""The paths of the Open Inference Protocol v2 and of Triton's extensions, on an `InferenceApi`."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple, TypeVar

from terarec.errors import ConfigError, TerarecError
from terarec.serve.access import Access
from terarec.serve.api import InferenceApi
from terarec.serve.binary_codec import (
    RegionsTooLargeError,
    decode_binary_request,
    encode_binary_response,
    layout_reader,
)
from terarec.serve.http.answers import Answers
from terarec.serve.http.compression import check_encoding, compress, decompress
from terarec.serve.http.messages import JSON, Handler, Request, Response, check_content_type, json_response
from terarec.serve.http.routes import Route, Routes
from terarec.serve.json_codec import decode_object
from terarec.serve.protocol import InferRequest, InferResponse, RequestTooLargeError
from terarec.serve.request_layouts import RequestLayouts
from terarec.serve.request_memory import FEW_BYTES, SMALL_BYTES, HeldMemory, LargeRequestError, memory_of_json
from terarec.spec.checks import is_count, quoted

Result = TypeVar("Result")

_HEADER_BYTES = "inference-header-content-length"
_OCTETS = "application/octet-stream"
_CONTROL_THREADS = 4


class _Submitted(NamedTuple):
    """A request, and its answer to come."""

    request: InferRequest
    answer: Future[InferResponse]


class ApiRoutes:
    """Answers the requests of the protocol. Work that takes longer than a look-up leaves the event loop for a thread.

    Args:
        api: The calls.
        max_request_bytes: Limit of the bytes of a body, also of one that is decompressed.
    """

    def __init__(self, api: InferenceApi, max_request_bytes: int) -> None:
        self._api = api
        self._max_request_bytes = max_request_bytes
        self._layouts = RequestLayouts(layout_reader)
        self._answers = Answers()
        self._control = ThreadPoolExecutor(_CONTROL_THREADS, "control")

    def routes(self) -> Routes:
        """Return the table of paths."""
        routes = Routes(
            Route("GET", "/v2", self._server_metadata, "index"),
            Route("GET", "/v2/health/live", self._live, "open"),
            Route("GET", "/v2/health/ready", self._ready, "open"),
            Route("GET", "/v2/models/stats", self._statistics, "index"),
            Route("POST", "/v2/repository/index", self._index, "index"),
        )
        for model in ("/v2/models/{name}", "/v2/models/{name}/versions/{version}"):
            routes.add(Route("GET", model, self._model_metadata, "index", self._check_model))
            routes.add(Route("GET", f"{model}/ready", self._model_ready, "open", self._check_model))
            routes.add(Route("GET", f"{model}/config", self._model_config, "index", self._check_model))
            routes.add(Route("GET", f"{model}/stats", self._statistics, "index", self._check_model))
            routes.add(Route("POST", f"{model}/infer", self._infer, "use", self._check_infer))
        for call, handler in (("load", self._load), ("unload", self._unload)):
            routes.add(Route("POST", f"/v2/repository/models/{{name}}/{call}", handler, "admin"))
        for path in ("/v2/trace/setting", "/v2/models/{name}/trace/setting"):
            routes.add(Route("GET", path, self._trace_setting, "index"))
            routes.add(Route("POST", path, self._trace_setting, "admin"))
        routes.add(Route("GET", "/v2/logging", self._log_settings, "index"))
        routes.add(Route("POST", "/v2/logging", self._log_settings, "admin"))
        self._add_shared_memory(routes, "system", self._region_status, self._register, self._unregister)
        self._add_shared_memory(routes, "cuda", _no_regions, self._register_cuda, _nothing)
        return routes

    @contextlib.asynccontextmanager
    async def read(
        self, request: Request, decode: Callable[[bytes | bytearray, HeldMemory], Result]
    ) -> AsyncIterator[Result]:
        """Give what the body of a request says; a large one is decoded in its turn, in the thread for that.

        Args:
            request: The request.
            decode: Function that reads a body, and counts the memory of what is made of it until the block ends.
        """
        is_small = self._is_small(request)
        async with contextlib.AsyncExitStack() as stack:
            try:
                decoded = await stack.enter_async_context(self._reading(request, decode, is_small=is_small))
            except LargeRequestError:
                decoded = await stack.enter_async_context(self._reading(request, decode, is_small=False))
            yield decoded

    @contextlib.asynccontextmanager
    async def _reading(
        self, request: Request, decode: Callable[[bytes | bytearray, HeldMemory], Result], *, is_small: bool
    ) -> AsyncIterator[Result]:
        with self._hold(is_small) as held:

            def read() -> Result:
                return decode(self._content(request, held), held)

            yield read() if is_small else await self._answers.of(self._api.read_in_turn(read))

    def close(self) -> None:
        """End the threads, without waiting for what they do."""
        self._control.shutdown(wait=False, cancel_futures=True)

    @staticmethod
    def _add_shared_memory(routes: Routes, kind: str, status: Handler, register: Handler, unregister: Handler) -> None:
        root = f"/v2/{kind}sharedmemory"
        access: Access = "use"
        routes.add(Route("GET", f"{root}/status", status, access))
        routes.add(Route("GET", f"{root}/region/{{region}}/status", status, access))
        routes.add(Route("POST", f"{root}/region/{{region}}/register", register, access))
        routes.add(Route("POST", f"{root}/unregister", unregister, access))
        routes.add(Route("POST", f"{root}/region/{{region}}/unregister", unregister, access))

    # The server.
    async def _server_metadata(self, _: Request) -> Response:
        return json_response(self._api.server_metadata())

    async def _live(self, _: Request) -> Response:
        return json_response({"live": self._api.server_live()})

    async def _ready(self, _: Request) -> Response:
        is_ready = self._api.server_ready()
        response = json_response({"ready": is_ready})
        response.status = 200 if is_ready else 503
        return response

    async def _trace_setting(self, request: Request) -> Response:
        settings = decode_object(request.body) if request.method == "POST" else {}
        return json_response(self._api.trace_setting(request.variables.get("name"), settings))

    async def _log_settings(self, request: Request) -> Response:
        return json_response(self._api.log_settings(decode_object(request.body) if request.method == "POST" else {}))

    # Models.
    def _check_model(self, request: Request) -> None:
        self._api.models.get(**request.variables)

    async def _model_metadata(self, request: Request) -> Response:
        return json_response(self._api.model_metadata(**request.variables))

    async def _model_ready(self, request: Request) -> Response:
        is_ready = self._api.model_ready(**request.variables)
        response = json_response({"name": request.variables["name"], "ready": is_ready})
        response.status = 200 if is_ready else 503
        return response

    async def _model_config(self, request: Request) -> Response:
        return json_response(self._api.model_config(**request.variables))

    async def _statistics(self, request: Request) -> Response:
        return json_response(self._api.statistics(**request.variables))

    async def _index(self, request: Request) -> Response:
        body = decode_object(request.body)
        call = partial(self._api.repository_index, ready_only=body.get("ready") is True)
        # Not in `_control`, where loads wait: who asks wants to see them.
        states = await asyncio.to_thread(call) if self._api.models.loader is not None else call()
        return json_response([state._asdict() for state in states])

    async def _load(self, request: Request) -> Response:
        return await self._controlled(self._api.repository_load, request)

    async def _unload(self, request: Request) -> Response:
        return await self._controlled(self._api.repository_unload, request)

    async def _controlled(self, call: Callable[[str, Mapping[str, Any]], None], request: Request) -> Response:
        parameters = decode_object(request.body).get("parameters", {})
        if not isinstance(parameters, dict):
            raise ConfigError("parameters", f"got {quoted(parameters, is_json=True)}, expected an object")
        await self._in_thread(self._control, partial(call, request.variables["name"], parameters))
        return Response()

    # Inference.
    def _check_infer(self, request: Request) -> None:
        """Reject what the server does not read before the body is received."""
        self._check_model(request)
        check_content_type(request, *((_OCTETS,) if _HEADER_BYTES in request.headers else ()))
        check_encoding(request.headers.get("content-encoding", ""))

    async def _infer(self, request: Request) -> Response:
        is_small = self._is_small(request)
        try:
            return await self._scored(request, is_small=is_small)
        except (RegionsTooLargeError, LargeRequestError):
            if not is_small:
                raise
        return await self._scored(request, is_small=False)

    async def _scored(self, request: Request, *, is_small: bool) -> Response:
        with self._hold(is_small) as held:
            submit = partial(self._submitted, request, held, SMALL_BYTES if is_small else None)
            # Its columns, too, are made in its turn, where it waits for room.
            decoded, pending = submit() if is_small else await self._submitted_in_turn(submit)
            scored = await self._answers.of(pending)
            body, header_bytes = encode_binary_response(scored, decoded, self._api.memory)
        return _infer_response(body, header_bytes, request.headers.get("accept-encoding", ""))

    def _is_small(self, request: Request) -> bool:
        """Return whether a body is parsed at once; a compressed one is replaced by its content if that is short."""
        if len(request.body) > SMALL_BYTES:
            return False
        encoding = request.headers.get("content-encoding")
        if encoding is not None:
            try:
                request.body = decompress(request.body, encoding, min(SMALL_BYTES, self._max_request_bytes))
            except RequestTooLargeError:
                return False
            request.headers = {**request.headers, "content-encoding": ""}
        return True

    def _hold(self, is_small: bool) -> HeldMemory:
        return (self._api.requests if is_small else self._api.large_requests).hold()

    async def _submitted_in_turn(self, submit: Callable[[], _Submitted]) -> _Submitted:
        reading = self._api.read_in_turn(submit)
        try:
            return await self._answers.of(reading)
        except asyncio.CancelledError:
            reading.add_done_callback(_drop)  # the client has left while it was read
            raise

    def _submitted(self, request: Request, held: HeldMemory, most_bytes: int | None) -> _Submitted:
        try:
            return self._submit(request, held, most_bytes)
        except TerarecError as error:
            # Tracebacks and contexts hold all that was parsed until the garbage collector finds them.
            error.__context__ = None
            raise error.with_traceback(None) from None

    def _submit(self, request: Request, held: HeldMemory, most_bytes: int | None) -> _Submitted:
        header_bytes = _header_bytes(request)
        body = self._content(request, held, header_bytes)
        decoded = decode_binary_request(body, header_bytes, self._api.memory, self._layouts, most_bytes, held)
        return _Submitted(decoded, self._api.infer(decoded, **request.variables, call=request.call, held=held))

    def _content(self, request: Request, held: HeldMemory, json_bytes: int | None = None) -> bytes | bytearray:
        """Return the body of a request, once there is room for what is in it."""
        body = decompress(request.body, request.headers.get("content-encoding", ""), self._max_request_bytes)
        if len(body) > FEW_BYTES:
            is_all = json_bytes is None or json_bytes >= len(body)
            held.take(memory_of_json(body if is_all else body[:json_bytes]) + (0 if is_all else 2 * len(body)))
        return body

    @staticmethod
    async def _in_thread(pool: ThreadPoolExecutor, call: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(pool, call)

    # Shared memory.
    async def _region_status(self, request: Request) -> Response:
        regions = self._api.shared_memory_status(request.variables.get("region"))
        return json_response(
            [
                {"name": item.name, "key": item.key, "offset": item.offset, "byte_size": item.byte_size}
                for item in regions
            ]
        )

    async def _register(self, request: Request) -> Response:
        fields = decode_object(request.body)
        key = fields.get("key")
        if not isinstance(key, str):
            raise ConfigError("key", f"got {quoted(key, is_json=True)}, expected a string")
        offset, size = _num_bytes(fields, "offset", 0), _num_bytes(fields, "byte_size")
        self._api.shared_memory_register(request.variables["region"], key, offset, size)
        return Response()

    async def _unregister(self, request: Request) -> Response:
        self._api.shared_memory_unregister(request.variables.get("region"))
        return Response()

    async def _register_cuda(self, request: Request) -> Response:
        self._api.cuda_shared_memory_register(request.variables["region"])
        return Response()


def _drop(reading: Future[_Submitted]) -> None:
    if not reading.cancelled() and reading.exception() is None:
        reading.result().answer.cancel()


def _num_bytes(fields: Mapping[str, Any], name: str, default: int | None = None) -> int:
    value = fields.get(name, default)
    # `type`, because True is an integer.
    if type(value) is not int:
        raise ConfigError(name, f"got {quoted(value, is_json=True)}, expected a number of bytes")
    return value


async def _no_regions(_: Request) -> Response:
    return json_response([])


async def _nothing(_: Request) -> Response:
    return Response()


def _header_bytes(request: Request) -> int | None:
    text = request.headers.get(_HEADER_BYTES)
    if text is None:
        return None
    if not is_count(text):
        raise ConfigError("Inference-Header-Content-Length", f"got {quoted(text)}, expected a number of bytes")
    return int(text)


def _infer_response(body: bytes, header_bytes: int | None, accepted: str) -> Response:
    headers = {} if header_bytes is None else {"Inference-Header-Content-Length": str(header_bytes)}
    body, encoding = compress(body, accepted)
    if encoding:
        headers["Content-Encoding"] = encoding
    return Response(body, media_type=JSON if header_bytes is None else _OCTETS, headers=headers)
