# SPDX-License-Identifier: Apache-2.0
"""How tensors travel between ranks: by the backend of their device, or through host memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import torch
from torch import Tensor, distributed


class Transport(Protocol):
    """Collectives of a process group on tensors of any device."""

    def all_reduce_(self, values: Tensor, reduction: distributed.ReduceOp.RedOpType) -> Callable[[], object]:
        """Begin to replace `values` on every rank by their reduction; return a function that waits until they are."""

    def all_to_all(
        self, out: Tensor, values: Tensor, received: Sequence[int], sent: Sequence[int]
    ) -> Callable[[], object]:
        """Begin to send bytes to all ranks; return a function that waits until those of all ranks are in `out`.

        Args:
            out: uint8[n] to write to, on the device of `values`.
            values: uint8[m] in the order of the ranks.
            received: Bytes from each rank.
            sent: Bytes for each rank.
        """


class BackendTransport:
    """Tensors go as they are: those in host memory by gloo, those of a GPU by NCCL or RCCL.

    Waiting for a collective of a GPU does not wait for the GPU: it lets what is launched afterwards wait there.

    Args:
        group: The process group.
    """

    def __init__(self, group: distributed.ProcessGroup) -> None:
        self._group = group

    def all_reduce_(self, values: Tensor, reduction: distributed.ReduceOp.RedOpType) -> Callable[[], object]:
        """Begin to replace values; see `Transport.all_reduce_`."""
        work = distributed.all_reduce(values, reduction, group=self._group, async_op=True)
        wait: Callable[[], object] = work.wait
        return wait

    def all_to_all(
        self, out: Tensor, values: Tensor, received: Sequence[int], sent: Sequence[int]
    ) -> Callable[[], object]:
        """Begin to send bytes; see `Transport.all_to_all`."""
        work = distributed.all_to_all_single(out, values, list(received), list(sent), group=self._group, async_op=True)
        wait: Callable[[], object] = work.wait
        return wait


class StagedTransport:
    """Tensors of a device go through host memory and by gloo, such as those of ranks that share one GPU.

    NCCL refuses two ranks on one GPU. Every collective waits for the device.

    Args:
        group: The process group.
    """

    def __init__(self, group: distributed.ProcessGroup) -> None:
        self._host = BackendTransport(group)

    def all_reduce_(self, values: Tensor, reduction: distributed.ReduceOp.RedOpType) -> Callable[[], object]:
        """Begin to replace values; see `Transport.all_reduce_`."""
        # The tensor itself where it is in host memory already, which is reduced in place then.
        here = values.cpu()
        wait = self._host.all_reduce_(here, reduction)
        return wait if here is values else partial(_finish, wait, values, here, here)

    def all_to_all(
        self, out: Tensor, values: Tensor, received: Sequence[int], sent: Sequence[int]
    ) -> Callable[[], object]:
        """Begin to send bytes; see `Transport.all_to_all`."""
        # Written to `out` directly: there is nothing to copy.
        if values.is_cpu:
            return self._host.all_to_all(out, values, received, sent)
        source, here = values.cpu(), torch.empty(out.shape, dtype=out.dtype)
        return partial(_finish, self._host.all_to_all(here, source, received, sent), out, here, source)


def _finish(wait: Callable[[], object], out: Tensor, here: Tensor, _: Tensor) -> None:
    """Wait for a collective in host memory, which reads its last argument until then, and copy its result."""
    wait()
    out.copy_(here)
