# SPDX-License-Identifier: Apache-2.0
"""The health service, by the bytes of its messages: field 1 is the name of a service, or the status."""

from __future__ import annotations

from contextlib import closing

import grpc
import pytest

from terarec.serve.api import InferenceApi
from terarec.serve.models import ServedModels
from tests.serve.grpc.conftest import LIBRARIES, serving
from tests.waiting import PATIENCE

SERVING, NOT_SERVING, SERVICE_UNKNOWN = b"\x08\x01", b"\x08\x02", b"\x08\x03"
CHECK, WATCH = "/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch"


def asks(name: str) -> bytes:
    return bytes([0x0A, len(name)]) + name.encode() if name else b""


def test_checks(address: str) -> None:
    with closing(grpc.insecure_channel(address)) as channel:
        check = channel.unary_unary(CHECK)
        for name in ("", "inference.GRPCInferenceService", "dlrm"):
            assert check(asks(name), timeout=PATIENCE) == SERVING
        for body, code in ((asks("other"), "NOT_FOUND"), (b"\xff", "INVALID_ARGUMENT")):
            with pytest.raises(grpc.RpcError) as caught:
                check(body, timeout=PATIENCE)
            assert caught.value.code().name == code


@pytest.mark.parametrize("library", LIBRARIES)
def test_who_watches_sees_the_drain_and_does_not_hold_the_end_up(models: ServedModels, library: str) -> None:
    api = InferenceApi(models)
    with serving(api, grpc_library=library, grpc_max_streams=2) as address:
        channel = grpc.insecure_channel(address)
        watch = channel.unary_stream(WATCH)
        states, unknown = watch(asks("dlrm"), timeout=PATIENCE), watch(asks("other"), timeout=PATIENCE)
        assert (next(states), next(unknown)) == (SERVING, SERVICE_UNKNOWN)
        with pytest.raises(grpc.RpcError) as caught:
            next(watch(b"", timeout=PATIENCE))
        assert caught.value.code().name == "UNAVAILABLE"
        api.is_draining = True
        assert next(states) == NOT_SERVING
    # The server has stopped, which waits for calls in flight as long as the timeout of these.
    assert list(states) == list(unknown) == []
    channel.close()
