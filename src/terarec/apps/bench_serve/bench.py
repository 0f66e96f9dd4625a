# SPDX-License-Identifier: Apache-2.0
"""Measures a server under loads of several protocols, sizes and levels, of real records or of synthetic ones."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from urllib.parse import quote

import numpy as np
import pyarrow as pa

from terarec.apps.bench_serve.contact import Contact, GrpcContact, HttpContact, ServerClock
from terarec.apps.bench_serve.figures import LoadFigures, ServerTimes
from terarec.apps.bench_serve.http_sender import HttpAddress
from terarec.apps.bench_serve.load import Pace
from terarec.apps.bench_serve.processes import Target, measure
from terarec.errors import ConfigError
from terarec.serve.binary_codec import encode_elements
from terarec.serve.client import request_tensors
from terarec.serve.json_codec import encode
from terarec.serve.padding import LENGTHS, MISSING
from terarec.serve.protocol import INTEGER_BITS, InferRequest, ModelMetadata, Tensor, TensorMetadata
from terarec.spec.bench_serving import LoadSpec
from terarec.spec.dataset import MISSING_KEY

_MOST_BYTES = 256 * 2**20
"""Bytes of the requests that are prepared at once; beyond them there are fewer different ones."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """A measurement that was made, or begins.

    Attributes:
        place: Its number, from 0.
        total: Number of all measurements.
        figures: What was measured; None at the begin.
        errors: Reason -> number of requests that failed.
    """

    place: int
    total: int
    figures: LoadFigures | None = None
    errors: dict[str, int] = field(default_factory=dict)


class ServingBench:
    """Loads on one model of a server.

    Args:
        spec: What is measured.
        url: URL of HTTP; None for a server of gRPC alone.
        grpc_address: ``HOST:PORT`` of gRPC; None for a server of HTTP alone.
        records: Raw records, in columns of the names of the model's inputs; None for synthetic ones.

    Raises:
        ConfigError: A protocol without its address, or records that lack a column.
        InferenceError: The server cannot be reached, or does not serve the model.
        MissingDependencyError: The library of gRPC is not installed.
    """

    def __init__(
        self, spec: LoadSpec, url: str | None = None, grpc_address: str | None = None, records: pa.Table | None = None
    ) -> None:
        for protocol in spec.protocols:
            if (grpc_address if protocol == "grpc" else url) is None:
                raise ConfigError("protocols", f"got {protocol!r} without the address of a server that speaks it")
        self._spec = spec
        self._http = None if url is None else HttpAddress(url)
        self._url = url
        self._grpc_address = grpc_address
        contact: Contact
        if url is not None:
            contact = HttpContact(url, spec)
        else:
            assert grpc_address is not None
            contact = GrpcContact(grpc_address, spec)
        metadata = contact.metadata()
        self._tensors = synthetic_records(metadata, spec) if records is None else file_records(metadata, records)
        self._lists = list_columns(metadata)
        self._clock = ServerClock(contact, spec.model)

    def run(self) -> Iterator[Cell]:
        """Measure one after the other; each is given before and after."""
        spec = self._spec
        levels: Sequence[tuple[int | None, float | None]] = [(None, rate) for rate in spec.rates] or [
            (clients, None) for clients in spec.concurrency
        ]
        total = len(spec.protocols) * len(spec.sizes) * len(levels)
        place = 0
        for protocol in spec.protocols:
            for records in spec.sizes:
                bodies = self._bodies(protocol, records)
                for clients, rate in levels:
                    yield Cell(place=place, total=total)
                    figures, errors = self._measure(protocol, records, bodies, clients, rate)
                    yield Cell(place=place, total=total, figures=figures, errors=errors)
                    place += 1

    def _bodies(self, protocol: str, records: int) -> list[bytes]:
        bodies: list[bytes] = []
        for number in range(self._spec.bodies):
            requests = [InferRequest(inputs=tuple(self._tensors(number, records)))]
            if protocol == "grpc":
                bodies += grpc_bodies(requests, self._spec, self._lists)
            else:
                assert self._http is not None
                bodies += http_bodies(requests, self._http, self._spec, self._lists, is_json=protocol == "json")
            if sum(map(len, bodies)) > _MOST_BYTES:
                break
        return bodies

    def _measure(
        self, protocol: str, records: int, bodies: Sequence[bytes], clients: int | None, rate: float | None
    ) -> tuple[LoadFigures, dict[str, int]]:
        spec = self._spec
        is_grpc = protocol == "grpc"
        address = self._grpc_address if is_grpc else self._url
        assert address is not None
        target = Target(
            address=address, is_grpc=is_grpc, headers=dict(spec.headers), timeout_seconds=spec.timeout_seconds
        )
        connections = spec.max_connections if clients is None else clients
        before: list[ServerTimes | None] = []
        measured = measure(
            target,
            bodies,
            Pace(clients=connections, rate=rate, seconds=spec.seconds, seed=spec.seed),
            warmup_seconds=spec.warmup_seconds,
            processes=spec.processes,
            cores=spec.cores,
            ready=lambda: before.append(self._clock.read()),
        )
        after = self._clock.read()
        server = None if after is None or before[0] is None else after.since(before[0])
        figures = LoadFigures.of(
            measured,
            server,
            protocol=protocol,
            records=records,
            clients=clients,
            rate=rate,
            seconds=spec.seconds,
            processes=min(spec.processes, connections),
        )
        return figures, dict(measured.errors)


_WORDS = 1000  # different texts of a synthetic column
_MISSING_VALUES: Mapping[str, float | str] = {
    **dict.fromkeys(("FP16", "FP32", "FP64"), math.nan),
    "BYTES": "",
    "INT64": MISSING_KEY,
}
"""Datatype -> the value of a missing element, where there is one."""

_NUMBERS = 100  # synthetic numbers are below


def synthetic_records(metadata: ModelMetadata, spec: LoadSpec) -> Callable[[int, int], list[Tensor]]:
    """Return a function that makes the tensors of a request from its number and its number of records.

    Numbers are small integers, texts are eight hexadecimal digits, and both have few frequent values and many rare
    ones. Lists of free length have `LoadSpec.list_length` items.
    """

    def tensors(number: int, records: int) -> list[Tensor]:
        draws = np.random.default_rng([spec.seed, number])
        return [_synthetic(column, records, spec.list_length, draws) for column in columns]

    columns = _columns(metadata)
    return tensors


def _columns(metadata: ModelMetadata) -> list[TensorMetadata]:
    """Return the inputs without those that say something about others; of Triton's models they are inputs, too."""
    names = {column.name for column in metadata.inputs}
    suffixes = (MISSING, LENGTHS)
    return [
        column
        for column in metadata.inputs
        if not any(column.name.endswith(suffix) and column.name.removesuffix(suffix) in names for suffix in suffixes)
    ]


def list_columns(metadata: ModelMetadata) -> frozenset[str]:
    """Return the names of the inputs that have lists."""
    return frozenset(column.name for column in _columns(metadata) if column.shape[1:] not in ((), (1,)))


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
    """Return a function that makes the tensors of a request of rows of a table, which follow each other."""
    if not table.num_rows:
        raise ConfigError("--records", "got no rows, expected at least one")
    columns = [column.name for column in _columns(metadata)]
    for name in columns:
        if name not in table.column_names:
            names = ", ".join(table.column_names)
            raise ConfigError("--records", f"got no column {name!r}, expected it among {names}")
    inputs = {column.name for column in metadata.inputs}
    masked = {name for name in columns if name + MISSING in inputs}

    def tensors(number: int, records: int) -> list[Tensor]:
        rows = (np.arange(records) + number * records) % table.num_rows
        part = table.take(rows)
        made = request_tensors(metadata.inputs, {name: part.column(name) for name in columns})
        # A server that describes these inputs, as Triton does, has no null in JSON either.
        return _without_missing(made, masked) if masked else made

    return tensors


def http_bodies(
    requests: Sequence[InferRequest], address: HttpAddress, spec: LoadSpec, lists: Collection[str], *, is_json: bool
) -> list[bytes]:
    """Return complete requests over HTTP; `lists` are the columns of lists."""
    version = f"/versions/{quote(spec.version, safe='')}" if spec.version else ""
    path = f"/v2/models/{quote(spec.model, safe='')}{version}/infer"
    bodies = []
    for request in requests:
        if is_json:
            headers, body = {"Content-Type": "application/json"}, encode(request)
        else:
            headers, body = _binary_request(request, lists)
        bodies.append(address.request(path, {**headers, **spec.headers}, body))
    return bodies


def _binary_request(request: InferRequest, lists: Collection[str]) -> tuple[dict[str, str], bytes]:
    """Return the headers and the body of a request whose tensors are bytes behind its JSON."""
    tensors = _without_missing(request.inputs, lists)
    raw = [encode_elements(tensor.data, tensor.datatype) for tensor in tensors]
    heads = [
        {
            "name": tensor.name,
            "datatype": tensor.datatype,
            "shape": list(tensor.shape),
            "parameters": {"binary_data_size": len(content)},
        }
        for tensor, content in zip(tensors, raw, strict=True)
    ]
    header = encode({"inputs": heads, "parameters": {"binary_data_output": True}})
    headers = {"Content-Type": "application/octet-stream", "Inference-Header-Content-Length": str(len(header))}
    return headers, b"".join((header, *raw))


def _without_missing(tensors: Iterable[Tensor], masked: Collection[str]) -> list[Tensor]:
    """Return tensors that bytes can hold, in which a value stands for what is missing, or a further tensor says so.

    Args:
        tensors: The tensors.
        masked: Columns of which the further tensor does: those of lists, where such values are items and no padding.
    """
    made: list[Tensor] = []
    for tensor in tensors:
        if isinstance(tensor.data, list) and None in tensor.data:
            value = None if tensor.name in masked else _MISSING_VALUES.get(tensor.datatype)
            if value is None:
                mask = [item is None for item in tensor.data]
                made.append(Tensor(name=tensor.name + MISSING, datatype="BOOL", shape=tensor.shape, data=mask))
                value = "" if tensor.datatype == "BYTES" else 0
            tensor = tensor._replace(data=[value if item is None else item for item in tensor.data])
        made.append(tensor)
    return made


def grpc_bodies(requests: Sequence[InferRequest], spec: LoadSpec, lists: Collection[str]) -> list[bytes]:
    """Return messages of gRPC; `lists` are the columns of lists."""
    from terarec.serve.grpc.conversion import infer_message

    bodies = []
    for request in requests:
        request = dataclasses.replace(request, inputs=tuple(_without_missing(request.inputs, lists)))
        message = infer_message(request, spec.model, spec.version)
        bodies.append(message.SerializeToString())
    return bodies
