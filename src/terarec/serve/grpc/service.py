# SPDX-License-Identifier: Apache-2.0
"""The remote procedures of the Open Inference Protocol v2 over `InferenceApi`, apart from what carries them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from functools import partial
from typing import Any, NamedTuple, TypeAlias

from google.protobuf import json_format
from google.protobuf.message import DecodeError
from typing_extensions import override

from terarec.errors import ConfigError, TerarecError
from terarec.serve.api import InferenceApi
from terarec.serve.binary_codec import RegionsTooLargeError, layout_reader
from terarec.serve.calls import Call
from terarec.serve.grpc.conversion import infer_request, infer_response, parameters
from terarec.serve.grpc.messages import METHODS, SERVICE, head_of, message_class
from terarec.serve.protocol import (
    MOST_CALL_BYTES,
    InferResponse,
    RequestedOutput,
    RequestTooLargeError,
    ServerBusyError,
    UnknownModelError,
    error_code,
)
from terarec.serve.request_layouts import RequestLayouts
from terarec.serve.request_memory import SMALL_BYTES, TYPED_FACTOR, HeldMemory, LargeRequestError
from terarec.serve.shared_memory import SharedMemory
from terarec.spec.checks import one_line
from terarec.user_code import describe, place_of

_LOGGER = logging.getLogger(__name__)

Metadata: TypeAlias = Iterable[tuple[str, str | bytes]]
"""Headers of a call; names are in lower case."""

_FINAL = "triton_final_response"
"""Parameter of the last response to a request of a stream; here each request has one response."""


class PendingInference:
    """A request that is being answered, without its inputs: a client may read answers late.

    Attributes:
        call: What those who watch get to know of it; None where nobody does.
        scored: Its response; `cancel` drops the request from the queue.
        outputs: What it wants, once it is read.
        request_id: Its id, also of one that cannot be read; "" for none.

    Args:
        memory: Regions in which it may want its outputs.
        call: As above.
    """

    scored: Future[InferResponse]
    outputs: Sequence[RequestedOutput] = ()
    request_id = ""

    def __init__(self, memory: SharedMemory | None, call: Call | None) -> None:
        self._memory = memory
        self.call = call

    def response(self) -> bytes:
        """Wait for the response, and return its ModelInferResponse.

        Raises:
            CancelledError: It was dropped.
            Exception: What is wrong with it; `failure_of` has what the client gets.
        """
        encoded: bytes = self._message().SerializeToString()
        return encoded

    def stream_response(self) -> bytes:
        """Return what `response` returns as a ModelStreamInferResponse."""
        message = self._message()
        message.parameters[_FINAL].bool_param = True
        encoded: bytes = _StreamResponse(infer_response=message).SerializeToString()
        return encoded

    def stream_failure(self, failure: Failure) -> bytes:
        """Return the ModelStreamInferResponse with an error, which ends the request and not the stream."""
        message = _StreamResponse(error_message=failure.message)
        message.infer_response.id = self.request_id
        encoded: bytes = message.SerializeToString()
        return encoded

    def _message(self) -> Any:
        return infer_response(self.scored.result(), self.outputs, self._memory)


class _LargeAnswer(Future[InferResponse]):
    """The response to a message that is read in its turn. `cancel` drops the message, or the request in the queue.

    Who cancels it and who lets it follow the request may be two threads: each sets its own mark before it looks at that
    of the other.

    Args:
        body: The message.
    """

    def __init__(self, body: bytes) -> None:
        super().__init__()
        self._body = body
        self._scored: Future[InferResponse] | None = None

    def take_body(self) -> bytes:
        """Return the message, which is kept no longer; nothing of one that was dropped."""
        body, self._body = self._body, b""
        return body

    def follow(self, scored: Future[InferResponse]) -> None:
        """Take the response of the request that was made of the message, once it is there."""
        self._scored = scored
        if self.cancelled():
            scored.cancel()
        scored.add_done_callback(self._copy)

    def fail(self, error: Exception) -> None:
        """End with an error, unless it was cancelled."""
        if self.set_running_or_notify_cancel():
            self.set_exception(error)

    @override
    def cancel(self) -> bool:
        is_cancelled = super().cancel()
        if is_cancelled:
            self._body = b""
            scored = self._scored
            if scored is not None:
                scored.cancel()
        return is_cancelled

    def _copy(self, scored: Future[InferResponse]) -> None:
        self._scored = None
        if scored.cancelled():
            self.cancel()
        elif self.set_running_or_notify_cancel():
            error = scored.exception()
            if error is None:
                self.set_result(scored.result())
            else:
                self.set_exception(error)


class Failure(NamedTuple):
    """What a client gets for an error.

    Attributes:
        code: Name of the status code, such as "NOT_FOUND".
        message: One line.
        reason: Kind of the error, for logs.
    """

    code: str
    message: str
    reason: str


def failure_of(error: BaseException) -> Failure:
    """Return what a client gets for an error; the traceback of one that is not the client's goes to the log."""
    if isinstance(error, CancelledError):
        return Failure("CANCELLED", "the request was cancelled", "client_left")
    if isinstance(error, TerarecError):
        _, code, reason = error_code(error)
        return Failure(code, one_line(str(error)), reason)
    _LOGGER.error("a call failed", exc_info=error)
    message = f"internal error: {type(error).__name__}" if place_of(error) is None else describe(error)
    return Failure("INTERNAL", one_line(message), "internal")


class GrpcService:
    """Answers calls, whose messages are bytes. Thread-safe.

    Args:
        api: What answers.
        max_in_flight: Limit of the requests that wait or are scored.
    """

    def __init__(self, api: InferenceApi, max_in_flight: int) -> None:
        self._api = api
        self._max_in_flight = max_in_flight
        self._num_in_flight = 0
        self._layouts = RequestLayouts(layout_reader)
        self._lock = threading.Lock()  # of the number in flight
        self._calls: Mapping[str, Callable[[Any, Any], None]] = {
            "ServerLive": self._server_live,
            "ServerReady": self._server_ready,
            "ServerMetadata": self._server_metadata,
            "ModelReady": self._model_ready,
            "ModelMetadata": self._model_metadata,
            "ModelConfig": self._model_config,
            "ModelStatistics": self._model_statistics,
            "RepositoryIndex": self._repository_index,
            "RepositoryModelLoad": self._load,
            "RepositoryModelUnload": self._unload,
            "SystemSharedMemoryStatus": self._system_status,
            "SystemSharedMemoryRegister": self._system_register,
            "SystemSharedMemoryUnregister": self._system_unregister,
            "CudaSharedMemoryStatus": self._cuda_status,
            "CudaSharedMemoryRegister": self._cuda_register,
            "CudaSharedMemoryUnregister": self._cuda_unregister,
            "TraceSetting": self._trace_setting,
            "LogSettings": self._log_settings,
        }

    def begin(self, method: str, body: bytes, client: str, metadata: Metadata) -> Call | None:
        """Return the call that those who watch get to know; None where nobody does."""
        if not self._api.calls:
            return None
        headers = {name: value for name, value in metadata if isinstance(value, str)}
        return Call(
            protocol="grpc",
            method=method,
            path=f"/{SERVICE}/{method}",
            route=f"{SERVICE}/{method}",
            client=client,
            sinks=self._api.calls,
            received_bytes=len(body),
            traceparent=headers.get("traceparent", ""),
            tracestate=headers.get("tracestate", ""),
        )

    def end(self, call: Call | None, answer: bytes | Failure) -> None:
        """Count an answer that is an error, and let those who watch know how a call was answered."""
        if isinstance(answer, bytes):
            if call is not None:
                call.end("OK", sent_bytes=len(answer))
            return
        if answer.reason != "client_left":
            self._api.errors.add("grpc", answer.reason)
        if call is not None:
            call.end(answer.code, answer.reason)

    def call(self, method: str, body: bytes) -> bytes:
        """Answer a call of any method but those of inference.

        Raises:
            TerarecError: What is wrong with it; `failure_of` has what the client gets.
        """
        answer = METHODS[method].response()
        self._calls[method](parsed(method, body), answer)
        encoded: bytes = answer.SerializeToString()
        return encoded

    def server_ready(self) -> bool:
        """Return whether the server is ready."""
        return self._api.server_ready()

    def model_ready(self, name: str) -> bool:
        """Return whether a model is ready; raises `UnknownModelError`."""
        return self._api.model_ready(name)

    def infer(self, body: bytes, call: Call | None = None) -> PendingInference:
        """Let the records of a ModelInferRequest be scored; what is wrong with it fails the result.

        It does not wait: a large message, or one with much in shared memory, is read in its turn in another thread.
        """
        pending = PendingInference(self._api.memory, call)
        try:
            if len(body) > SMALL_BYTES:
                self._infer_in_turn(pending, body)
                return pending
            try:
                self._infer_at_once(pending, body)
            except (RegionsTooLargeError, LargeRequestError):
                self._infer_in_turn(pending, body)
        except Exception as error:
            pending.scored = Future()
            pending.scored.set_exception(_without_parts(error))
        return pending

    def _infer_at_once(self, pending: PendingInference, body: bytes) -> None:
        message = parsed("ModelInfer", body)
        pending.request_id = message.id
        self._take_place()
        held = self._api.requests.hold()
        try:
            held.take(_memory_of(body, has_raw=bool(message.raw_input_contents)))
            pending.scored = self._submitted(pending, message, len(body), SMALL_BYTES, held)
        except BaseException:
            self._leave_place(held)
            raise
        pending.scored.add_done_callback(partial(self._leave_place, held))

    def _infer_in_turn(self, pending: PendingInference, body: bytes) -> None:
        pending.request_id, has_raw = head_of(body)
        self._take_place()
        held, waiting = self._api.large_requests.hold(), self._api.messages.hold()
        answer = _LargeAnswer(body)
        try:
            waiting.take(len(body))
            self._api.read_in_turn(partial(self._read, pending, answer, has_raw, held, waiting))
        except BaseException:
            waiting.release()
            self._leave_place(held)
            raise
        pending.scored = answer
        answer.add_done_callback(waiting.release)
        answer.add_done_callback(partial(self._leave_place, held))

    def _read(
        self, pending: PendingInference, answer: _LargeAnswer, has_raw: bool, held: HeldMemory, waiting: HeldMemory
    ) -> None:
        """Read a message whose turn has come, and let its records be scored."""
        body = answer.take_body()
        if answer.cancelled():
            return
        try:
            held.take(_memory_of(body, has_raw=has_raw))
            scored = self._submitted(pending, parsed("ModelInfer", body), len(body), None, held)
        except Exception as error:
            answer.fail(_without_parts(error))
        else:
            answer.follow(scored)
        finally:
            waiting.release()

    def _submitted(
        self, pending: PendingInference, message: Any, num_bytes: int, most_bytes: int | None, held: HeldMemory
    ) -> Future[InferResponse]:
        """Let the records of a message be scored; it loses its contents."""
        memory, version = self._api.memory, message.model_version or None
        pending.request_id = message.id
        request = infer_request(message, memory, self._layouts, num_bytes=num_bytes, most_bytes=most_bytes, held=held)
        pending.outputs = request.outputs
        return self._api.infer(request, message.model_name, version, pending.call, held)

    def _take_place(self) -> None:
        with self._lock:
            if self._num_in_flight >= self._max_in_flight:
                limit = self._max_in_flight
                raise ServerBusyError("server", f"{limit} requests are in flight, which is the limit; try again")
            self._num_in_flight += 1

    def _leave_place(self, held: HeldMemory, _: object = None) -> None:
        held.release()
        with self._lock:
            self._num_in_flight -= 1

    def _server_live(self, _: Any, answer: Any) -> None:
        answer.live = self._api.server_live()

    def _server_ready(self, _: Any, answer: Any) -> None:
        answer.ready = self._api.server_ready()

    def _server_metadata(self, _: Any, answer: Any) -> None:
        metadata = self._api.server_metadata()
        answer.name, answer.version = metadata.name, metadata.version
        answer.extensions.extend(metadata.extensions)

    def _model_ready(self, request: Any, answer: Any) -> None:
        try:
            answer.ready = self._api.model_ready(request.name, request.version or None)
        except UnknownModelError:  # no error, as in Triton: it may be loaded later
            answer.ready = False

    def _model_metadata(self, request: Any, answer: Any) -> None:
        metadata = self._api.model_metadata(request.name, request.version or None)
        answer.name, answer.platform = metadata.name, metadata.platform
        answer.versions.extend(metadata.versions)
        for field, tensors in ((answer.inputs, metadata.inputs), (answer.outputs, metadata.outputs)):
            for tensor in tensors:
                field.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)

    def _model_config(self, request: Any, answer: Any) -> None:
        config = self._api.model_config(request.name, request.version or None)
        json_format.ParseDict(config, answer.config)

    def _model_statistics(self, request: Any, answer: Any) -> None:
        statistics = self._api.statistics(request.name or None, request.version or None)
        json_format.ParseDict(statistics, answer)

    def _repository_index(self, request: Any, answer: Any) -> None:
        for model in self._api.repository_index(ready_only=request.ready):
            answer.models.add(name=model.name, version=model.version, state=model.state, reason=model.reason)

    def _load(self, request: Any, _: Any) -> None:
        self._api.repository_load(request.model_name, parameters(request.parameters))

    def _unload(self, request: Any, _: Any) -> None:
        self._api.repository_unload(request.model_name, parameters(request.parameters))

    def _system_status(self, request: Any, answer: Any) -> None:
        for region in self._api.shared_memory_status(request.name or None):
            answer.regions[region.name].name = region.name
            answer.regions[region.name].key = region.key
            answer.regions[region.name].offset = region.offset
            answer.regions[region.name].byte_size = region.byte_size

    def _system_register(self, request: Any, _: Any) -> None:
        self._api.shared_memory_register(request.name, request.key, request.offset, request.byte_size)

    def _system_unregister(self, request: Any, _: Any) -> None:
        self._api.shared_memory_unregister(request.name or None)

    def _cuda_status(self, _: Any, __: Any) -> None:
        """Answer that there are none, as Triton does without a GPU."""

    def _cuda_register(self, request: Any, _: Any) -> None:
        self._api.cuda_shared_memory_register(request.name)

    _cuda_unregister = _cuda_status

    def _trace_setting(self, request: Any, answer: Any) -> None:
        # An entry without a value asks for the default.
        wanted = {name: list(setting.value) or None for name, setting in request.settings.items()}
        for name, value in self._api.trace_setting(request.model_name or None, wanted).items():
            answer.settings[name].value.extend(value if isinstance(value, list) else [value])

    def _log_settings(self, request: Any, answer: Any) -> None:
        for name, value in self._api.log_settings(parameters(request.settings)).items():
            kind = {bool: "bool_param", int: "uint32_param"}.get(type(value), "string_param")
            setattr(answer.settings[name], kind, value)


def _memory_of(body: bytes, *, has_raw: bool) -> int:
    # Raw contents stay bytes, of which the request has a copy; values one by one become objects.
    return len(body) * (2 if has_raw else TYPED_FACTOR)


def _without_parts(error: Exception) -> Exception:
    """Return an error without its traceback and context, which would hold all that was parsed."""
    if isinstance(error, TerarecError):
        error.__traceback__ = error.__context__ = None
    return error


_StreamResponse = message_class("ModelStreamInferResponse")


def parsed(method: str, body: bytes) -> Any:
    """Return the message of a call.

    Raises:
        RequestTooLargeError: More bytes than `MOST_CALL_BYTES`, but for inference.
        ConfigError: The bytes are none.
    """
    kind = METHODS[method].request
    if method != "ModelInfer" and len(body) > MOST_CALL_BYTES:
        raise RequestTooLargeError("the message", f"got {len(body)} bytes, expected at most {MOST_CALL_BYTES}")
    try:
        return kind.FromString(body)
    except DecodeError:
        raise ConfigError("the message", f"got {len(body)} bytes that are no {kind.DESCRIPTOR.name}") from None
