# SPDX-License-Identifier: Apache-2.0
"""The gRPC messages of the Open Inference Protocol v2 with Triton's extensions, and those of health checks.

They are made from a table of their fields.

Needs the extra ``serve``: protobuf.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

from terarec.errors import MissingDependencyError

try:
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
except ModuleNotFoundError as error:
    raise MissingDependencyError(error.name, "not installed, expected pip install 'terarec[serve]'") from error

SERVICE = "inference.GRPCInferenceService"
"""Full name of the service."""

MessageClass: TypeAlias = type[Any]
"""Class of a protobuf message, whose attributes are the fields of the table."""

# A message a line, then `name:number:type` for each of its fields: `[]` for repeated ones, `{T}` for a map from texts
# to T, and `|name` before the fields of which a message has one. A type with a capital letter is a message or an
# enumeration of this table.
_MESSAGES = """
ServerLiveRequest
ServerLiveResponse live:1:bool
ServerReadyRequest
ServerReadyResponse ready:1:bool
ModelReadyRequest name:1:string version:2:string
ModelReadyResponse ready:1:bool
ServerMetadataRequest
ServerMetadataResponse name:1:string version:2:string extensions:3:string[]
ModelMetadataRequest name:1:string version:2:string
ModelMetadataResponse name:1:string versions:2:string[] platform:3:string
  inputs:4:ModelMetadataResponse.TensorMetadata[] outputs:5:ModelMetadataResponse.TensorMetadata[]
ModelMetadataResponse.TensorMetadata name:1:string datatype:2:string shape:3:int64[]

InferParameter
  |parameter_choice bool_param:1:bool int64_param:2:int64 string_param:3:string double_param:4:double
  uint64_param:5:uint64
InferTensorContents bool_contents:1:bool[] int_contents:2:int32[] int64_contents:3:int64[] uint_contents:4:uint32[]
  uint64_contents:5:uint64[] fp32_contents:6:float[] fp64_contents:7:double[] bytes_contents:8:bytes[]
ModelInferRequest model_name:1:string model_version:2:string id:3:string parameters:4:{InferParameter}
  inputs:5:ModelInferRequest.InferInputTensor[] outputs:6:ModelInferRequest.InferRequestedOutputTensor[]
  raw_input_contents:7:bytes[]
ModelInferRequest.InferInputTensor name:1:string datatype:2:string shape:3:int64[] parameters:4:{InferParameter}
  contents:5:InferTensorContents
ModelInferRequest.InferRequestedOutputTensor name:1:string parameters:2:{InferParameter}
ModelInferResponse model_name:1:string model_version:2:string id:3:string parameters:4:{InferParameter}
  outputs:5:ModelInferResponse.InferOutputTensor[] raw_output_contents:6:bytes[]
ModelInferResponse.InferOutputTensor name:1:string datatype:2:string shape:3:int64[] parameters:4:{InferParameter}
  contents:5:InferTensorContents
ModelStreamInferResponse error_message:1:string infer_response:2:ModelInferResponse

ModelConfigRequest name:1:string version:2:string
ModelConfigResponse config:1:ModelConfig
ModelConfig name:1:string platform:2:string backend:17:string runtime:25:string version_policy:3:ModelVersionPolicy
  max_batch_size:4:int32 input:5:ModelInput[] output:6:ModelOutput[] instance_group:7:ModelInstanceGroup[]
  default_model_filename:8:string parameters:14:{ModelParameter} model_warmup:16:ModelWarmup[]
  model_transaction_policy:19:ModelTransactionPolicy response_cache:24:ModelResponseCache
  |scheduling_choice dynamic_batching:11:ModelDynamicBatching ensemble_scheduling:15:ModelEnsembling
ModelVersionPolicy
  |policy_choice latest:1:ModelVersionPolicy.Latest all:2:ModelVersionPolicy.All specific:3:ModelVersionPolicy.Specific
ModelVersionPolicy.Latest num_versions:1:uint32
ModelVersionPolicy.All
ModelVersionPolicy.Specific versions:1:int64[]
ModelTensorReshape shape:1:int64[]
ModelInput name:1:string data_type:2:DataType dims:4:int64[] reshape:5:ModelTensorReshape allow_ragged_batch:7:bool
  optional:8:bool
ModelOutput name:1:string data_type:2:DataType dims:3:int64[] reshape:5:ModelTensorReshape
ModelInstanceGroup name:1:string kind:4:ModelInstanceGroup.Kind count:2:int32 gpus:3:int32[]
ModelParameter string_value:1:string
ModelWarmup name:1:string batch_size:2:uint32 count:4:uint32
ModelTransactionPolicy decoupled:1:bool
ModelResponseCache enable:1:bool
ModelDynamicBatching preferred_batch_size:1:int32[] max_queue_delay_microseconds:2:uint64 preserve_ordering:3:bool
  priority_levels:4:uint64 default_priority_level:5:uint64 default_queue_policy:6:ModelQueuePolicy
ModelEnsembling step:1:ModelEnsembling.Step[]
ModelEnsembling.Step model_name:1:string model_version:2:int64
ModelQueuePolicy timeout_action:1:ModelQueuePolicy.TimeoutAction default_timeout_microseconds:2:uint64
  allow_timeout_override:3:bool max_queue_size:4:uint32

ModelStatisticsRequest name:1:string version:2:string
ModelStatisticsResponse model_stats:1:ModelStatistics[]
ModelStatistics name:1:string version:2:string last_inference:3:uint64 inference_count:4:uint64
  execution_count:5:uint64 inference_stats:6:InferStatistics batch_stats:7:InferBatchStatistics[]
  memory_usage:8:MemoryUsage[] response_stats:9:{InferResponseStatistics}
StatisticDuration count:1:uint64 ns:2:uint64
InferStatistics success:1:StatisticDuration fail:2:StatisticDuration queue:3:StatisticDuration
  compute_input:4:StatisticDuration compute_infer:5:StatisticDuration compute_output:6:StatisticDuration
  cache_hit:7:StatisticDuration cache_miss:8:StatisticDuration
InferBatchStatistics batch_size:1:uint64 compute_input:2:StatisticDuration compute_infer:3:StatisticDuration
  compute_output:4:StatisticDuration
InferResponseStatistics compute_infer:1:StatisticDuration compute_output:2:StatisticDuration
  success:3:StatisticDuration fail:4:StatisticDuration empty_response:5:StatisticDuration cancel:6:StatisticDuration
MemoryUsage type:1:string id:2:int64 byte_size:3:uint64

RepositoryIndexRequest repository_name:1:string ready:2:bool
RepositoryIndexResponse models:1:RepositoryIndexResponse.ModelIndex[]
RepositoryIndexResponse.ModelIndex name:1:string version:2:string state:3:string reason:4:string
ModelRepositoryParameter
  |parameter_choice bool_param:1:bool int64_param:2:int64 string_param:3:string bytes_param:4:bytes
RepositoryModelLoadRequest repository_name:1:string model_name:2:string parameters:3:{ModelRepositoryParameter}
RepositoryModelLoadResponse
RepositoryModelUnloadRequest repository_name:1:string model_name:2:string parameters:3:{ModelRepositoryParameter}
RepositoryModelUnloadResponse

SystemSharedMemoryStatusRequest name:1:string
SystemSharedMemoryStatusResponse regions:1:{SystemSharedMemoryStatusResponse.RegionStatus}
SystemSharedMemoryStatusResponse.RegionStatus name:1:string key:2:string offset:3:uint64 byte_size:4:uint64
SystemSharedMemoryRegisterRequest name:1:string key:2:string offset:3:uint64 byte_size:4:uint64
SystemSharedMemoryRegisterResponse
SystemSharedMemoryUnregisterRequest name:1:string
SystemSharedMemoryUnregisterResponse
CudaSharedMemoryStatusRequest name:1:string
CudaSharedMemoryStatusResponse regions:1:{CudaSharedMemoryStatusResponse.RegionStatus}
CudaSharedMemoryStatusResponse.RegionStatus name:1:string device_id:2:uint64 byte_size:3:uint64
CudaSharedMemoryRegisterRequest name:1:string raw_handle:2:bytes device_id:3:int64 byte_size:4:uint64
CudaSharedMemoryRegisterResponse
CudaSharedMemoryUnregisterRequest name:1:string
CudaSharedMemoryUnregisterResponse

TraceSettingRequest settings:1:{TraceSettingRequest.SettingValue} model_name:2:string
TraceSettingRequest.SettingValue value:1:string[]
TraceSettingResponse settings:1:{TraceSettingResponse.SettingValue}
TraceSettingResponse.SettingValue value:1:string[]
LogSettingsRequest settings:1:{LogSettingsRequest.SettingValue}
LogSettingsRequest.SettingValue |parameter_choice bool_param:1:bool uint32_param:2:uint32 string_param:3:string
LogSettingsResponse settings:1:{LogSettingsResponse.SettingValue}
LogSettingsResponse.SettingValue |parameter_choice bool_param:1:bool uint32_param:2:uint32 string_param:3:string

HealthCheckRequest service:1:string
HealthCheckResponse status:1:HealthCheckResponse.ServingStatus
"""

# Values in the order of their numbers, which begin at 0.
_ENUMS = {
    "DataType": "TYPE_INVALID TYPE_BOOL TYPE_UINT8 TYPE_UINT16 TYPE_UINT32 TYPE_UINT64 TYPE_INT8 TYPE_INT16 TYPE_INT32 "
    "TYPE_INT64 TYPE_FP16 TYPE_FP32 TYPE_FP64 TYPE_STRING TYPE_BF16",
    "ModelInstanceGroup.Kind": "KIND_AUTO KIND_GPU KIND_CPU KIND_MODEL",
    "ModelQueuePolicy.TimeoutAction": "REJECT DELAY",
    "HealthCheckResponse.ServingStatus": "UNKNOWN SERVING NOT_SERVING SERVICE_UNKNOWN",
}


class Method(NamedTuple):
    """A remote procedure of the service.

    Attributes:
        request, response: Classes of its messages.
        is_stream: Whether it takes and gives any number of them.
    """

    request: MessageClass
    response: MessageClass
    is_stream: bool = False


def message_class(name: str) -> MessageClass:
    """Return the class of a message; `name` is its name in the package ``inference``, such as "ModelInferRequest"."""
    kind: MessageClass = _CLASSES[f"inference.{name}"]
    return kind


_ID, _RAW_CONTENTS = 3, 7
"""Numbers of fields of a ModelInferRequest."""


class RequestHead(NamedTuple):
    """What a ModelInferRequest says before its inputs are parsed, which may take long.

    Attributes:
        id: Its id; "" for none.
        has_raw: Whether its contents are raw.
    """

    id: str
    has_raw: bool


def head_of(body: bytes) -> RequestHead:
    """Return the head of a ModelInferRequest; of bytes that are none, what is there before the fault."""
    request_id, at = b"", 0
    while at < len(body):
        tag, at = _varint(body, at)
        kind, number = tag & 7, tag >> 3
        if number == _RAW_CONTENTS:
            return RequestHead(request_id.decode(errors="replace"), has_raw=True)
        if kind == 2:  # with its length
            length, at = _varint(body, at)
            if number == _ID:
                request_id = body[at : at + length]
            at += length
        elif kind == 0:
            _, at = _varint(body, at)
        elif kind in (1, 5):  # of 8 and of 4 bytes
            at += 8 if kind == 1 else 4
        else:
            break
    return RequestHead(request_id.decode(errors="replace"), has_raw=False)


def _varint(body: bytes, at: int) -> tuple[int, int]:
    """Return a number of 7 bits a byte, and the place behind it."""
    number = shift = 0
    while at < len(body) and shift < 70:
        byte = body[at]
        number |= (byte & 127) << shift
        shift, at = shift + 7, at + 1
        if byte < 128:
            return number, at
    return 0, len(body)


def _file() -> Any:
    """Return the description of all messages of the table."""
    file = descriptor_pb2.FileDescriptorProto(name="terarec/inference.proto", package="inference", syntax="proto3")
    places: dict[str, Any] = {}
    # Fields may go on in the next line, which is then indented.
    for line in _MESSAGES.replace("\n  ", " ").split("\n"):
        name, *fields = line.split() or [""]
        if name:
            outer, _, last = name.rpartition(".")
            place = places[outer].nested_type if outer else file.message_type
            places[name] = place.add(name=last)
            _add_fields(places[name], name, fields)
    for name, values in _ENUMS.items():
        outer, _, last = name.rpartition(".")
        enum = (places[outer] if outer else file).enum_type.add(name=last)
        for number, value in enumerate(values.split()):
            enum.value.add(name=value, number=number)
    return file


def _add_fields(message: Any, message_name: str, fields: list[str]) -> None:
    is_one_of = False
    for text in fields:
        if text.startswith("|"):
            is_one_of = True
            message.oneof_decl.add(name=text[1:])
            continue
        name, number, kind = text.split(":")
        is_map = kind.startswith("{")
        is_repeated = is_map or kind.endswith("[]")
        field = message.field.add(name=name, number=int(number), label=3 if is_repeated else 1)
        if is_one_of:
            field.oneof_index = 0
        kind = kind.strip("{}[]")
        if is_map:
            # On the wire a map is a list of messages with a key and a value.
            entry_name = "".join(part.capitalize() for part in name.split("_")) + "Entry"
            entry = message.nested_type.add(name=entry_name)
            entry.options.map_entry = True
            _set_type(entry.field.add(name="key", number=1, label=1), "string")
            _set_type(entry.field.add(name="value", number=2, label=1), kind)
            kind = f"{message_name}.{entry_name}"
        _set_type(field, kind)


def _set_type(field: Any, kind: str) -> None:
    if not kind[0].isupper():
        field.type = getattr(descriptor_pb2.FieldDescriptorProto, f"TYPE_{kind.upper()}")
        return
    is_enum = kind in _ENUMS
    field.type = getattr(descriptor_pb2.FieldDescriptorProto, "TYPE_ENUM" if is_enum else "TYPE_MESSAGE")
    field.type_name = f".inference.{kind}"


# A pool of their own: a client in the same process has messages of these names, too.
_CLASSES = message_factory.GetMessages([_file()], pool=descriptor_pool.DescriptorPool())

_UNARY = (
    "ServerLive ServerReady ServerMetadata ModelReady ModelMetadata ModelConfig ModelStatistics ModelInfer "
    "RepositoryIndex RepositoryModelLoad RepositoryModelUnload SystemSharedMemoryStatus SystemSharedMemoryRegister "
    "SystemSharedMemoryUnregister CudaSharedMemoryStatus CudaSharedMemoryRegister CudaSharedMemoryUnregister "
    "TraceSetting LogSettings"
)

METHODS = {
    **{name: Method(message_class(f"{name}Request"), message_class(f"{name}Response")) for name in _UNARY.split()},
    "ModelStreamInfer": Method(
        message_class("ModelInferRequest"), message_class("ModelStreamInferResponse"), is_stream=True
    ),
}
"""Name of each remote procedure -> its messages."""
