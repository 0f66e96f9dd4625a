# SPDX-License-Identifier: Apache-2.0
"""A process group of the simulated device, whose collectives end when they are waited for, as NCCL's do on a GPU.

Until then what they write is not there, and what they read must not change. Tensors travel by gloo.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, distributed
from torch.distributed import ProcessGroupGloo, Store  # type: ignore[attr-defined]

BACKEND = "simulated_ccl"
_NOT_THERE = 0x7F
"""Each byte of a result before it is waited for: as floats NaN or huge, as counts and keys out of all ranges."""


class SimulatedGroup(distributed.ProcessGroup):
    """The collectives that terarec uses, on tensors of the simulated device and of the host.

    Args:
        group: Group of gloo.
    """

    def __init__(self, group: ProcessGroupGloo) -> None:
        super().__init__(group.rank(), group.size())
        self._group = group

    def allreduce(self, tensors: list[Tensor], opts: Any) -> _Collective:
        """Reduce the tensors over the ranks."""
        return _Collective(tensors, tensors, lambda out, _: self._group.allreduce(out, opts).wait())

    def all_to_all_single(
        self, out: Tensor, values: Tensor, received: list[int], sent: list[int], opts: Any
    ) -> _Collective:
        """Send parts of `values` to all ranks."""
        return _Collective(
            [out],
            [values],
            lambda there, here: self._group.alltoall_base(there[0], here[0], received, sent, opts).wait(),
        )

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        """Return the name of the backend."""
        return BACKEND


class _Collective(distributed.Work):
    """A collective whose results come when it is waited for.

    Args:
        out: Tensors that it writes.
        values: Tensors that it reads.
        run: Function that runs it on tensors in host memory: those that it writes, and those that it reads.
    """

    def __init__(
        self, out: list[Tensor], values: list[Tensor], run: Callable[[list[Tensor], list[Tensor]], Any]
    ) -> None:
        super().__init__()
        self._kept = (out, values)  # whose memory the tensors below have
        self._out, self._values = _in_memory(out), _in_memory(values)
        self._sent = [tensor.clone() for tensor in self._values]
        # As on a GPU, all ranks may begin their collectives before any of them waits.
        self._results = [tensor.clone() for tensor in self._out]
        run(self._results, self._sent)
        self._is_in_place = out is values
        for tensor in self._out:
            tensor.view(torch.uint8).fill_(_NOT_THERE)

    def wait(self, timeout: timedelta = timedelta()) -> bool:
        """Write the results.

        Raises:
            RuntimeError: What it reads has changed meanwhile.
        """
        changed = (
            []
            if self._is_in_place
            else [
                mine
                for mine, sent in zip(self._values, self._sent, strict=True)
                if not torch.equal(_bytes(mine), _bytes(sent))
            ]
        )
        if changed:
            raise RuntimeError(
                "a tensor was changed while a collective read it, expected no write before it is waited for"
            )
        for tensor, result in zip(self._out, self._results, strict=True):
            tensor.copy_(result)
        return True


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


def _in_memory(tensors: list[Tensor]) -> list[Tensor]:
    return [torch.ops.simulated_device.on_host(tensor) for tensor in tensors]


def _created(store: Store, rank: int, size: int, timeout: timedelta) -> SimulatedGroup:
    return SimulatedGroup(ProcessGroupGloo(store, rank, size, timeout=timeout))


def register_group(device: str) -> None:
    """Let process groups of a device, by its type, be of this kind."""
    distributed.Backend.register_backend(BACKEND, _created, devices=["cpu", device])
