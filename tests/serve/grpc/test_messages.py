# SPDX-License-Identifier: Apache-2.0
"""The messages against those of Triton's own client: names, numbers and types."""

from collections.abc import Iterator
from typing import Any

import pytest
from tritonclient.grpc import model_config_pb2, service_pb2

from terarec.serve.grpc import messages

# Of a model's configuration only what this server says of its own; its clients skip what is absent.
PARTS = (
    "ModelConfig",
    "ModelInput",
    "ModelOutput",
    "ModelInstanceGroup",
    "ModelWarmup",
    "ModelDynamicBatching",
    "ModelEnsembling",
    "ModelEnsembling.Step",
)


def all_messages(file: Any) -> Iterator[Any]:
    waiting = list(file.message_types_by_name.values())
    while waiting:
        message = waiting.pop()
        waiting += message.nested_types
        yield message


def facts(message: Any) -> set[tuple[object, ...]]:
    """Everything of a message that is on the wire or in the names of attributes."""
    return {
        (
            field.name,
            field.number,
            field.type,
            field.is_repeated,
            None if field.message_type is None else field.message_type.full_name,
            None if field.message_type is None else field.message_type.GetOptions().map_entry,
            None if field.enum_type is None else field.enum_type.full_name,
            None if field.containing_oneof is None else field.containing_oneof.name,
        )
        for field in message.fields
    }


THEIRS = {
    message.full_name: message
    for file in (service_pb2.DESCRIPTOR, model_config_pb2.DESCRIPTOR)
    for message in all_messages(file)
}
# Those of health checks are of another service, whose test compares bytes.
OURS = {
    message.full_name: message
    for message in all_messages(messages.message_class("ModelInferRequest").DESCRIPTOR.file)
    if not message.full_name.startswith("inference.HealthCheck")
}


def test_all_messages_of_the_service_are_there() -> None:
    service = {message.full_name for message in all_messages(service_pb2.DESCRIPTOR)}
    assert service <= set(OURS) <= set(THEIRS)


@pytest.mark.parametrize("name", sorted(OURS))
def test_fields_are_those_of_triton(name: str) -> None:
    ours, theirs = facts(OURS[name]), facts(THEIRS[name])
    if name.removeprefix("inference.") in PARTS:
        assert ours <= theirs
    else:
        assert ours == theirs


def test_enumerations_are_those_of_triton() -> None:
    ours = {
        field.enum_type.full_name: {value.name: value.number for value in field.enum_type.values}
        for message in OURS.values()
        for field in message.fields
        if field.enum_type is not None
    }
    theirs = {
        field.enum_type.full_name: {value.name: value.number for value in field.enum_type.values}
        for message in THEIRS.values()
        for field in message.fields
        if field.enum_type is not None
    }
    assert set(ours) == {
        "inference.DataType",
        "inference.ModelInstanceGroup.Kind",
        "inference.ModelQueuePolicy.TimeoutAction",
    }
    assert all(values == theirs[name] for name, values in ours.items())


def test_methods_are_those_of_triton() -> None:
    service = service_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"]
    assert service.full_name == messages.SERVICE
    theirs = {
        method.name: (method.input_type.full_name, method.output_type.full_name, method.client_streaming)
        for method in service.methods
    }
    assert {
        name: (method.request.DESCRIPTOR.full_name, method.response.DESCRIPTOR.full_name, method.is_stream)
        for name, method in messages.METHODS.items()
    } == theirs
    assert all(method.client_streaming == method.server_streaming for method in service.methods)


def test_bytes_are_read_by_the_client() -> None:
    """A message of the table and one of the client are the same bytes."""
    request = messages.message_class("ModelInferRequest")(model_name="dlrm", id="7")
    request.inputs.add(name="I1", datatype="FP32", shape=[2, 1])
    request.parameters["priority"].uint64_param = 2**63
    request.raw_input_contents.append(b"\0" * 8)
    theirs = service_pb2.ModelInferRequest.FromString(request.SerializeToString())
    assert (theirs.inputs[0].name, list(theirs.inputs[0].shape)) == ("I1", [2, 1])
    assert theirs.parameters["priority"].uint64_param == 2**63
    assert type(request).FromString(theirs.SerializeToString()) == request
