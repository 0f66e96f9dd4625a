# SPDX-License-Identifier: Apache-2.0
"""The requests of a load, ready to be sent: of real records, or of synthetic ones made from the model's inputs."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from urllib.parse import quote

import numpy as np
import pyarrow as pa

from terarec.apps.bench_serve.http_sender import HttpAddress
from terarec.errors import ConfigError
from terarec.serve.binary_codec import encode_elements
from terarec.serve.client import request_tensors
from terarec.serve.json_codec import encode
from terarec.serve.protocol import INTEGER_BITS, Elements, InferRequest, ModelMetadata, Tensor, TensorMetadata
from terarec.spec.bench_serving import LoadSpec

_WORDS = 1000  # different texts of a synthetic column
_NUMBERS = 100  # synthetic numbers are below


def synthetic_records(metadata: ModelMetadata, spec: LoadSpec) -> Callable[[int, int], list[Tensor]]:
    """Return a function that makes the tensors of a request from its number and its number of records.

    Numbers are small integers, texts are eight hexadecimal digits, and both have few frequent values and many rare
    ones. Lists of free length have `LoadSpec.list_length` items.
    """

    def tensors(number: int, records: int) -> list[Tensor]:
        draws = np.random.default_rng([spec.seed, number])
        return [_synthetic(column, records, spec.list_length, draws) for column in metadata.inputs]

    return tensors


def _synthetic(column: TensorMetadata, records: int, list_length: int, draws: np.random.Generator) -> Tensor:
    # The first size is the number of records, if it is free; the others are lengths of lists.
    sizes = [records if place == 0 else list_length for place in range(len(column.shape))]
    shape = tuple(size if size >= 0 else free for size, free in zip(column.shape, sizes, strict=True))
    ranks = (draws.pareto(1.0, math.prod(shape)) * 3).clip(0, 1e9).astype(np.int64)
    if column.datatype == "BYTES":
        # A multiplier that spreads the ranks: neighbours share no digits.
        data = [f"{int(rank) % _WORDS * 2654435761 % 2**32:08x}" for rank in ranks]
        return Tensor(name=column.name, datatype="BYTES", shape=shape, data=data)
    kinds = {"BOOL": "bool", "FP16": "float16", "FP32": "float32", "FP64": "float64"}
    if column.datatype in INTEGER_BITS:
        kinds[column.datatype] = column.datatype.lower()
    if column.datatype not in kinds:
        raise ConfigError(
            f"input {column.name!r}", f"got {column.datatype}, expected records in a file for such a model"
        )
    values = (ranks % _NUMBERS).astype(kinds[column.datatype])
    return Tensor(name=column.name, datatype=column.datatype, shape=shape, data=values)


def file_records(metadata: ModelMetadata, table: pa.Table) -> Callable[[int, int], list[Tensor]]:
    """Return a function that makes the tensors of a request of rows of a table, which follow each other.

    Raises:
        ConfigError: It has no rows, or lacks a column.
    """
    if not table.num_rows:
        raise ConfigError("--records", "got no rows, expected at least one")
    for column in metadata.inputs:
        if column.name not in table.column_names:
            names = ", ".join(table.column_names)
            raise ConfigError("--records", f"got no column {column.name!r}, expected it among {names}")

    def tensors(number: int, records: int) -> list[Tensor]:
        rows = (np.arange(records) + number * records) % table.num_rows
        part = table.take(rows)
        return request_tensors(metadata.inputs, {column.name: part.column(column.name) for column in metadata.inputs})

    return tensors


def http_bodies(
    requests: Sequence[InferRequest], address: HttpAddress, spec: LoadSpec, *, is_json: bool
) -> list[bytes]:
    """Return complete requests over HTTP."""
    version = f"/versions/{quote(spec.version, safe='')}" if spec.version else ""
    path = f"/v2/models/{quote(spec.model, safe='')}{version}/infer"
    bodies = []
    for request in requests:
        if is_json:
            headers, body = {"Content-Type": "application/json"}, encode(request)
        else:
            headers, body = _binary_request(request)
        bodies.append(address.request(path, {**headers, **spec.headers}, body))
    return bodies


def _binary_request(request: InferRequest) -> tuple[dict[str, str], bytes]:
    """Return the headers and the body of a request whose tensors are bytes behind its JSON."""
    raw = [encode_elements(_numbers(tensor), tensor.datatype) for tensor in request.inputs]
    heads = [
        {
            "name": tensor.name,
            "datatype": tensor.datatype,
            "shape": list(tensor.shape),
            "parameters": {"binary_data_size": len(content)},
        }
        for tensor, content in zip(request.inputs, raw, strict=True)
    ]
    header = encode({"inputs": heads, "parameters": {"binary_data_output": True}})
    headers = {"Content-Type": "application/octet-stream", "Inference-Header-Content-Length": str(len(header))}
    return headers, b"".join((header, *raw))


def _numbers(tensor: Tensor) -> Elements:
    """Return the elements of a tensor; a missing number that may be NaN is that."""
    if tensor.datatype.startswith("FP") and isinstance(tensor.data, list):
        return [math.nan if value is None else value for value in tensor.data]
    return tensor.data


def grpc_bodies(requests: Sequence[InferRequest], spec: LoadSpec) -> list[bytes]:
    """Return messages of gRPC."""
    from terarec.serve.grpc.conversion import infer_message

    bodies = []
    for request in requests:
        inputs = tuple(tensor._replace(data=_numbers(tensor)) for tensor in request.inputs)
        message = infer_message(dataclasses.replace(request, inputs=inputs), spec.model, spec.version)
        bodies.append(message.SerializeToString())
    return bodies
