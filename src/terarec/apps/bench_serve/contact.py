# SPDX-License-Identifier: Apache-2.0
"""What a load asks a server besides scores: its model's inputs, and its own account of the time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from typing_extensions import override

from terarec.apps.bench_serve.figures import ServerTimes
from terarec.errors import MissingDependencyError
from terarec.serve import InferenceClient, InferenceError
from terarec.serve.protocol import ModelMetadata, TensorMetadata
from terarec.spec.bench_serving import LoadSpec


class Contact(Protocol):
    """A server, by any of its protocols. The calls are those of every server of Triton's."""

    def metadata(self) -> ModelMetadata:
        """Return the inputs of the model."""

    def config(self) -> Mapping[str, Any]:
        """Return the model's configuration as Triton writes it in JSON."""

    def statistics(self, model: str) -> Sequence[Mapping[str, Any]]:
        """Return the entries of a model in Triton's ``model_stats``."""


class HttpContact(Contact):
    """A server by HTTP."""

    def __init__(self, url: str, spec: LoadSpec) -> None:
        self._client = InferenceClient(
            url, spec.model, spec.timeout_seconds, version=spec.version, headers=spec.headers
        )

    @override
    def metadata(self) -> ModelMetadata:
        return self._client.metadata

    @override
    def config(self) -> Mapping[str, Any]:
        return self._client.config()

    @override
    def statistics(self, model: str) -> Sequence[Mapping[str, Any]]:
        return self._client.statistics(model)


class GrpcContact(Contact):
    """A server by gRPC."""

    def __init__(self, address: str, spec: LoadSpec) -> None:
        try:
            import grpc
        except ModuleNotFoundError as error:
            raise MissingDependencyError(error.name, "not installed, expected pip install 'terarec[serve]'") from error
        self._error: type[Exception] = grpc.RpcError
        self._address = address
        self._spec = spec
        self._channel = grpc.insecure_channel(address, options=[("grpc.max_receive_message_length", -1)])

    @override
    def metadata(self) -> ModelMetadata:
        model = self._call("ModelMetadata", name=self._spec.model, version=self._spec.version)
        inputs, outputs = (
            tuple(TensorMetadata(name=item.name, datatype=item.datatype, shape=tuple(item.shape)) for item in items)
            for items in (model.inputs, model.outputs)
        )
        return ModelMetadata(
            name=model.name, versions=tuple(model.versions), platform=model.platform, inputs=inputs, outputs=outputs
        )

    @override
    def config(self) -> Mapping[str, Any]:
        answer = self._call("ModelConfig", name=self._spec.model, version=self._spec.version)
        config: Mapping[str, Any] = self._json(answer.config)
        return config

    @override
    def statistics(self, model: str) -> Sequence[Mapping[str, Any]]:
        entries: list[Mapping[str, Any]] = self._json(self._call("ModelStatistics", name=model)).get("model_stats", [])
        return entries

    def _call(self, method_name: str, **fields: str) -> Any:
        from terarec.serve.grpc.messages import METHODS, SERVICE

        method = METHODS[method_name]
        call = self._channel.unary_unary(
            f"/{SERVICE}/{method_name}", method.request.SerializeToString, method.response.FromString
        )
        metadata = [(key.lower(), value) for key, value in self._spec.headers.items()]
        try:
            return call(method.request(**fields), timeout=self._spec.timeout_seconds, metadata=metadata)
        except self._error as error:
            # The library's exception is a call, too, whose methods its class does not have.
            failed: Any = error
            raise InferenceError(self._address, f"{failed.code().name}: {failed.details()}") from None

    @staticmethod
    def _json(message: Any) -> Any:
        from google.protobuf.json_format import MessageToDict

        # Zeros, too: a server that has done nothing yet has written them.
        return MessageToDict(message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)


class ServerClock:
    """The server's own account of the requests of a model; that of an ensemble is that of its stages."""

    def __init__(self, contact: Contact, model: str) -> None:
        self._contact = contact
        self._model = model
        self._models = [model, *_stages(contact)]

    def read(self) -> ServerTimes | None:
        """Return the counters; None where the server has none."""
        try:
            entries = [entry for model in self._models for entry in self._contact.statistics(model)]
        except InferenceError:  # they are an extension of the protocol
            return None
        return ServerTimes.of(entries, self._model)


def _stages(contact: Contact) -> list[str]:
    try:
        config = contact.config()
    except InferenceError:  # an extension, too
        return []
    steps = config.get("ensemble_scheduling", {}).get("step", [])
    return list(dict.fromkeys(str(step["model_name"]) for step in steps))
