# SPDX-License-Identifier: Apache-2.0
"""A process group of the simulated device, whose collectives run on a stream of its own, as NCCL's do on a GPU.

Until they are waited for nothing may read what they write, or write what they read. Tensors travel by gloo.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, distributed
from torch.distributed import ProcessGroupGloo, Store  # type: ignore[attr-defined]

from tests.simulated_device.device import NAME

BACKEND = "simulated_ccl"


class SimulatedGroup(distributed.ProcessGroup):
    """The collectives that terarec uses, on tensors of the simulated device and of the host.

    Args:
        group: Group of gloo.
    """

    def __init__(self, group: ProcessGroupGloo) -> None:
        super().__init__(group.rank(), group.size())
        self._group = group
        self._stream = torch.Stream(NAME)

    def allreduce(self, tensors: list[Tensor], opts: Any) -> _Collective:
        """Reduce the tensors over the ranks."""
        return _Collective(self._stream, tensors, tensors, lambda out, _: self._group.allreduce(out, opts).wait())

    def all_to_all_single(
        self, out: Tensor, values: Tensor, received: list[int], sent: list[int], opts: Any
    ) -> _Collective:
        """Send parts of `values` to all ranks."""
        return _Collective(
            self._stream,
            [out],
            [values],
            lambda there, here: self._group.alltoall_base(there[0], here[0], received, sent, opts).wait(),
        )

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        """Return the name of the backend."""
        return BACKEND


class _Collective(distributed.Work):
    """A collective that runs on a stream of its group, which a wait lets the current stream wait for.

    Args:
        stream: The stream.
        out: Tensors that it writes.
        values: Tensors that it reads.
        run: Function that runs it on tensors in host memory: those that it writes, and those that it reads.
    """

    def __init__(
        self,
        stream: torch.Stream,
        out: list[Tensor],
        values: list[Tensor],
        run: Callable[[list[Tensor], list[Tensor]], Any],
    ) -> None:
        super().__init__()
        self._kept = (out, values)
        stream.wait_stream(torch.accelerator.current_stream())
        with stream:
            for tensors, is_written in ((values, False), (out, True)):
                for tensor in tensors:
                    torch.ops.simulated_device.touch(tensor, is_written)
        self._done = stream.record_event()
        run(_in_memory(out), _in_memory(values))

    def is_completed(self) -> bool:
        """Return True: what runs on the simulated device is done at once."""
        return True

    def wait(self, timeout: timedelta = timedelta()) -> bool:
        """Let the current stream wait for the results."""
        torch.accelerator.current_stream().wait_event(self._done)
        self._kept = ([], [])
        return True


def _in_memory(tensors: list[Tensor]) -> list[Tensor]:
    return [torch.ops.simulated_device.on_host(tensor) for tensor in tensors]


def _created(store: Store, rank: int, size: int, timeout: timedelta) -> SimulatedGroup:
    return SimulatedGroup(ProcessGroupGloo(store, rank, size, timeout=timeout))


def register_group(device: str) -> None:
    """Let process groups of a device, by its type, be of this kind."""
    distributed.Backend.register_backend(BACKEND, _created, devices=["cpu", device])
