# SPDX-License-Identifier: Apache-2.0
"""Servers of gRPC on free ports, in threads of this process, and Triton's own client."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any

import numpy as np
import pytest
from tritonclient import grpc as triton

from terarec.serve.api import InferenceApi
from terarec.serve.grpc.server import GrpcServer
from terarec.serve.models import ServedModels
from terarec.serve.shared_memory import SharedMemory
from terarec.spec import ServingSpec
from tests.serve.conftest import DENSE
from tests.waiting import PATIENCE

LIBRARIES = ("grpcio", "native")


@contextmanager
def serving(api: InferenceApi, **changes: Any) -> Iterator[str]:
    """Serve `api` while this lasts; give the address."""
    server = GrpcServer(ServingSpec(grpc_port=0, **changes))
    server.start(api)
    try:
        yield f"127.0.0.1:{server.port}"
    finally:
        server.stop(PATIENCE)


@pytest.fixture(scope="session")
def api(models: ServedModels) -> Iterator[InferenceApi]:
    with closing(SharedMemory(2**25)) as memory:
        yield InferenceApi(models, memory=memory)


@pytest.fixture(scope="session", params=LIBRARIES)
def address(request: pytest.FixtureRequest, api: InferenceApi) -> Iterator[str]:
    """Address of a server by each of the libraries."""
    with serving(api, grpc_library=request.param) as found:
        yield found


@pytest.fixture
def client(address: str) -> Iterator[triton.InferenceServerClient]:
    with closing(triton.InferenceServerClient(address)) as found:
        yield found


def tensors(records: dict[str, list[Any]], make: Callable[[str, list[int], str], Any] = triton.InferInput) -> list[Any]:
    """`records` as inputs of Triton's client; a missing number is NaN."""
    inputs = []
    for name, values in records.items():
        is_number = name in DENSE
        tensor = make(name, [len(values)], "FP32" if is_number else "BYTES")
        if is_number:
            array = np.array([np.nan if value is None else value for value in values], dtype=np.float32)
        else:
            array = np.array([value.encode() for value in values], dtype=np.object_)
        tensor.set_data_from_numpy(array)
        inputs.append(tensor)
    return inputs
