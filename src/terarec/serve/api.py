# SPDX-License-Identifier: Apache-2.0
"""`InferenceApi`: the calls of the Open Inference Protocol v2 and of Triton's extensions, apart from any transport."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import terarec
from terarec.errors import ConfigError
from terarec.serve.calls import Call, CallSink
from terarec.serve.models import ModelPointers, ModelState, ServedModels
from terarec.serve.protocol import (
    InferRequest,
    InferResponse,
    ModelMetadata,
    ServerMetadata,
    TensorMetadata,
    UnavailableError,
    UnknownModelError,
    UnsupportedError,
)
from terarec.serve.request_memory import MESSAGES, HeldMemory, RequestMemory, request_memories
from terarec.serve.served_model import ServedModel
from terarec.serve.shared_memory import Region, SharedMemory
from terarec.serve.statistics import BatchCount, ErrorCounts, StageTimes
from terarec.spec import ServingSpec
from terarec.spec.checks import quoted
from terarec.spec.serving_repository import PointerSpec, PromotionSpec

EXTENSIONS = (
    "binary_tensor_data",
    "model_repository",
    "model_repository(unload_dependents)",
    "model_configuration",
    "schedule_policy",
    "system_shared_memory",
    "parameters",
    "statistics",
    "trace",
    "logging",
)
"""Extensions of the protocol, as Triton names them."""

_LOGGER = logging.getLogger("terarec")

Result = TypeVar("Result")

_TRACE: Mapping[str, Any] = {
    "trace_level": ["OFF"],
    "trace_rate": "1000",
    "trace_count": "-1",
    "log_frequency": "0",
    "trace_file": "",
    "trace_mode": "triton",
}
"""Settings of traces, of which this server has none."""


class InferenceApi:
    """The calls. Thread-safe. Each one returns its answer, or a future of it, or raises a `TerarecError`.

    Attributes:
        models: The served models.
        memory: Regions of shared memory; None where it is not allowed.
        requests: Memory of the requests of all transports.
        large_requests: Memory of those that wait for room.
        messages: Bytes of messages that wait to be read, of transports that do not count them by themselves.
        calls: Where the calls of all transports go when they have ended; none where nobody watches them.
        errors: Counts the answers that are errors, over HTTP and gRPC.
        is_draining: Whether the server is about to stop, and not ready for further requests.

    Args:
        models, memory, calls: As above.
        max_request_bytes: Limit of the bytes of a request; None for the default of `ServingSpec`.
        is_worker: Whether other processes answer the same clients, whom a call could not reach.
    """

    def __init__(
        self,
        models: ServedModels,
        *,
        memory: SharedMemory | None = None,
        calls: Sequence[CallSink] = (),
        max_request_bytes: int | None = None,
        is_worker: bool = False,
    ) -> None:
        self.models = models
        self.memory = memory
        most_bytes = max_request_bytes or ServingSpec().max_request_bytes
        self.requests, self.large_requests = request_memories(most_bytes)
        self.messages = RequestMemory(MESSAGES * most_bytes)
        # One at a time, whatever brought them: what is parsed takes many times the bytes of its text.
        self._reader = ThreadPoolExecutor(1, "parse")
        self._is_worker = is_worker
        self.calls = tuple(calls)
        self.errors = ErrorCounts()
        self.is_draining = False

    def read_in_turn(self, read: Callable[[], Result]) -> Future[Result]:
        """Call a function that reads a large request, in the thread for that, after those before it.

        Raises:
            UnavailableError: The server has ended.
        """
        try:
            return self._reader.submit(read)
        except RuntimeError:
            raise UnavailableError("server", "it is shutting down") from None

    def close(self) -> None:
        """End the thread that reads large requests, without waiting for what it does."""
        self._reader.shutdown(wait=False, cancel_futures=True)

    def server_live(self) -> bool:
        """Return whether the server answers."""
        return True

    def server_ready(self) -> bool:
        """Return whether the server takes requests."""
        return not self.is_draining

    def server_metadata(self) -> ServerMetadata:
        """Return name and version of the server, and the extensions of the protocol that it has."""
        hidden = () if self.memory is not None else ("system_shared_memory",)
        extensions = tuple(name for name in EXTENSIONS if name not in hidden)
        return ServerMetadata(name="terarec", version=terarec.__version__, extensions=extensions)

    def model_ready(self, name: str, version: str | None = None) -> bool:
        """Return whether a model takes requests.

        Raises:
            UnknownModelError: It is not served.
        """
        self.models.get(name, version)
        return not self.is_draining

    def model_metadata(self, name: str, version: str | None = None) -> ModelMetadata:
        """Return the inputs and outputs of a model, and its versions.

        Raises:
            UnknownModelError: It is not served.
        """
        metadata = self.models.get(name, version).metadata
        return dataclasses.replace(metadata, versions=self.models.versions(name))

    def model_config(self, name: str, version: str | None = None) -> Mapping[str, Any]:
        """Return the configuration of a model, in the JSON of Triton's ModelConfig.

        Raises:
            UnknownModelError: It is not served.
        """
        model = self.models.get(name, version)
        batching = model.options.batching
        queue: dict[str, Any] = {
            "preferred_batch_size": list(batching.preferred_batch_sizes),
            "max_queue_delay_microseconds": batching.max_queue_delay_microseconds,
            "priority_levels": batching.priority_levels,
            "default_priority_level": batching.default_priority_level,
            "default_queue_policy": {
                "default_timeout_microseconds": round(batching.default_timeout_seconds * 1e6),
                "allow_timeout_override": True,
                "max_queue_size": batching.max_queue_size,
            },
        }
        return {
            "name": name,
            "platform": model.metadata.platform,
            "backend": "terarec",
            "version_policy": {"specific": {"versions": [int(x) for x in self.models.versions(name) if x.isdigit()]}},
            "max_batch_size": model.options.max_batch,
            "input": [_tensor_config(tensor) for tensor in model.metadata.inputs],
            "output": [_tensor_config(tensor) for tensor in model.metadata.outputs],
            "dynamic_batching": queue,
        }

    def statistics(self, name: str | None = None, version: str | None = None) -> Mapping[str, Any]:
        """Return counters and durations of models, in the JSON of Triton.

        Args:
            name: A model; None for all.
            version: A version of it; None for all.

        Raises:
            UnknownModelError: It is not served.
        """
        if name is None:
            wanted = [(state.name, state.version) for state in self.models.index() if state.state == "READY"]
        else:
            self.models.get(name, version)
            wanted = [(name, number) for number in ([version] if version else self.models.versions(name))]
        entries = []
        for model_name, model_version in wanted:
            try:
                entries.append(_statistics(self.models.get(model_name, model_version)))
            except UnknownModelError:  # it was unloaded in the meantime
                continue
        return {"model_stats": entries}

    def repository_index(self, *, ready_only: bool = False) -> tuple[ModelState, ...]:
        """Return the states of all versions of all models; those that are ready alone with `ready_only`.

        Where clients load models, the files of the repository are read.
        """
        if self.models.loader is not None and not ready_only:
            self.models.loader.show_unloaded()
        return tuple(state for state in self.models.index() if state.state == "READY" or not ready_only)

    def repository_load(self, name: str, parameters: Mapping[str, Any]) -> None:
        """Load a model, or load it again; return once it is ready, which may take minutes.

        Raises:
            UnavailableError: The server's models are not loaded by clients.
            TerarecError: It cannot be loaded.
        """
        if self.models.loader is None:
            raise _no_control("load", name)
        self.models.loader.load(name, parameters)

    def repository_unload(self, name: str, parameters: Mapping[str, Any]) -> None:
        """Unload a model, once its requests are answered.

        Raises:
            UnavailableError: The server's models are not loaded by clients.
            TerarecError: There is no such model.
        """
        del parameters  # `unload_dependents`: no model depends on another
        if self.models.loader is None:
            raise _no_control("unload", name)
        self.models.loader.unload(name)

    def promote(self, name: str, version: int, spec: PromotionSpec) -> PointerSpec:
        """Let a version that lies in the repository answer, or a share of the requests; return the new pointer.

        This server follows at once; its index says whether the version is ready, or why it is refused.

        Raises:
            UnavailableError: The server has no model repository.
            ConfigError: No such model or version, or a share where no version answers, or where this one does.
            StorageError: Other changes of the pointer do not end, or its file cannot be written.
        """
        return self._pointers("promote", name).promote(name, version, spec)

    def roll_back(self, name: str, to: int | None = None) -> PointerSpec:
        """Take back the last promotion of a model; return the new pointer.

        Args:
            name: Name of the model.
            to: As in `terarec.serve.repository.RepositoryModel.roll_back`.

        Raises:
            UnavailableError: The server has no model repository.
            ConfigError: No such model or version, or none that answered before.
            StorageError: Other changes of the pointer do not end, or its file cannot be written.
        """
        return self._pointers("roll back", name).roll_back(name, to)

    def infer(
        self,
        request: InferRequest,
        name: str,
        version: str | None = None,
        call: Call | None = None,
        held: HeldMemory | None = None,
    ) -> Future[InferResponse]:
        """Let the records of a request be scored; see `ServedModels.submit`.

        Args:
            request: The request.
            name: Name of the model.
            version: Its version; None for the one that answers by default.
            call: The call that it came with; None where nobody watches.
            held: Counts the memory of its columns; None for no limit.

        Raises:
            UnknownModelError: The model is not served.
            RequestTooLargeError: More records than the model takes in a request.
            UnsupportedError: A sequence of requests, or classes of an output, which no model here has.
            ConfigError: An input that is unknown, missing, repeated or of the wrong type or shape.
            LargeRequestError: Its columns need the memory of a large request, which waits for its turn.
            ServerBusyError: As many requests wait as may, or hold the memory that it needs.
        """
        if call is not None:
            call.request(request, name, version)
        if request.parameters.get("sequence_id"):
            raise UnsupportedError("parameters.sequence_id", "got a sequence, expected requests without state")
        for output in request.outputs:
            if output.parameters.get("classification"):  # 0 means none, as in Triton
                raise UnsupportedError(f"outputs {output.name!r}", "classification is not supported, expected scores")
        return self.models.submit(request, name, version, call, held)

    def shared_memory_status(self, name: str | None = None) -> tuple[Region, ...]:
        """Return a region of system shared memory, or all.

        Raises:
            NotFoundError: No such region.
            UnsupportedError: Shared memory is not allowed.
        """
        return self._memory("status").status(name)

    def shared_memory_register(self, name: str, key: str, offset: int, byte_size: int) -> None:
        """Make a region of system shared memory known.

        Raises:
            ConfigError: It is known already, or is not there with that size.
            UnsupportedError: Shared memory is not allowed.
        """
        if not 0 <= offset < 2**62 or not 0 < byte_size < 2**62:
            raise ConfigError(
                f"shared memory region {quoted(name)}", f"got {byte_size} bytes at {offset}, expected at least one"
            )
        self._memory("register").register(Region(name, key, offset, byte_size))

    def shared_memory_unregister(self, name: str | None = None) -> None:
        """Forget a region of system shared memory, or all.

        Raises:
            UnsupportedError: Shared memory is not allowed.
        """
        self._memory("unregister").unregister(name)

    def cuda_shared_memory_register(self, name: str) -> None:
        """Refuse a region of CUDA shared memory, as Triton does without a GPU.

        Raises:
            ConfigError: Always.
        """
        raise ConfigError(
            "cuda shared memory", f"failed to register CUDA shared memory region: {quoted(name)}, GPUs not supported"
        )

    def trace_setting(self, name: str | None, settings: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the settings of traces, for all models or one.

        Args:
            name: A model; None for all.
            settings: Changes; None for the default of a setting.

        Raises:
            UnknownModelError: The model is not served.
            UnsupportedError: A change: this server writes no traces.
        """
        if name is not None:
            self.models.get(name)
        for setting, value in settings.items():
            if setting not in _TRACE:
                raise ConfigError("trace setting", f"got {quoted(setting)}, expected {', '.join(_TRACE)}")
            wanted = value if isinstance(value, list) or value is None else [value]
            known = _TRACE[setting]
            if wanted is not None and list(map(str, wanted)) != (known if isinstance(known, list) else [known]):
                raise UnsupportedError(f"trace setting {setting!r}", "the server does not support tracing")
        return _TRACE

    def log_settings(self, settings: Mapping[str, Any]) -> Mapping[str, Any]:
        """Change which messages are logged, and return the settings.

        Raises:
            UnavailableError: A file or a format of the log, which clients may not choose; any of several workers.
            ConfigError: A setting that is unknown or of another type.
        """
        if settings and self._is_worker:
            raise UnavailableError("log settings", "several workers serve, of which a change would reach one")
        current = _log_settings()
        for name, value in settings.items():
            if name not in current:
                raise ConfigError("log settings", f"got {quoted(name)}, expected {', '.join(current)}")
            if name in ("log_file", "log_format"):
                if value != current[name]:
                    raise UnavailableError(name, "log file location and format can not be updated through the network")
            elif name == "log_verbose_level":
                if type(value) is not int or not 0 <= value < 2**31:
                    raise ConfigError(name, f"got {quoted(value, is_json=True)}, expected an integer >= 0")
            elif type(value) is not bool:
                raise ConfigError(name, f"got {quoted(value, is_json=True)}, expected true or false")
        wanted = {**current, **settings}
        if settings:
            levels = (("log_error", logging.ERROR), ("log_warning", logging.WARNING), ("log_info", logging.INFO))
            level = logging.CRITICAL
            # Levels of Python include those above them, so that the lowest one counts.
            for name, least in levels:
                level = least if wanted[name] else level
            _LOGGER.setLevel(logging.DEBUG if wanted["log_verbose_level"] else level)
        return _log_settings()

    def _pointers(self, call: str, name: str) -> ModelPointers:
        if self.models.pointers is None:
            problem = "this server has no versions to choose from, expected a model repository"
            raise UnavailableError(f"failed to {call} {quoted(name)}", problem)
        return self.models.pointers

    def _memory(self, call: str) -> SharedMemory:
        if self.memory is None:
            raise UnsupportedError(f"shared memory {call}", "not allowed here, expected tensors in the request")
        return self.memory


def _no_control(call: str, name: str) -> UnavailableError:
    return UnavailableError(
        f"failed to {call} {quoted(name)}", "explicit model load / unload is not allowed, expected a model repository "
        "with explicit control",
    )  # fmt: skip


def _log_settings() -> dict[str, Any]:
    level = _LOGGER.getEffectiveLevel()
    return {
        "log_file": "",
        "log_info": level <= logging.INFO,
        "log_warning": level <= logging.WARNING,
        "log_error": level <= logging.ERROR,
        "log_verbose_level": int(level <= logging.DEBUG),
        "log_format": "default",
    }


def _tensor_config(tensor: TensorMetadata) -> Mapping[str, Any]:
    kind = "TYPE_STRING" if tensor.datatype == "BYTES" else f"TYPE_{tensor.datatype}"
    # Triton counts no dimension for the records. It has none without dimensions either: one value a record is [1],
    # which the model takes as [].
    dims = list(tensor.shape[1:])
    return {
        "name": tensor.name,
        "data_type": kind,
        **({"dims": dims} if dims else {"dims": [1], "reshape": {"shape": []}}),
    }


def _statistics(model: ServedModel) -> Mapping[str, Any]:
    numbers = model.statistics()
    count = numbers.succeeded
    stages = {name: {"count": count, "ns": nanoseconds} for name, nanoseconds in numbers.times._asdict().items()}
    return {
        "name": model.name,
        "version": model.version,
        "last_inference": numbers.last_inference_ms,
        "inference_count": numbers.records,
        "execution_count": sum(batch.count for batch in numbers.batches.values()),
        "inference_stats": {
            "success": {"count": count, "ns": numbers.success_ns},
            "fail": {"count": sum(numbers.failed.values()), "ns": numbers.fail_ns},
            **stages,
            "cache_hit": {"count": 0, "ns": 0},
            "cache_miss": {"count": 0, "ns": 0},
        },
        "batch_stats": [_batch_statistics(size, batch) for size, batch in numbers.batches.items()],
    }


def _batch_statistics(size: int, batch: BatchCount) -> Mapping[str, Any]:
    stages = (name for name in StageTimes._fields if name != "queue")
    return {"batch_size": size, **{name: {"count": batch.count, "ns": getattr(batch.times, name)} for name in stages}}
