# SPDX-License-Identifier: Apache-2.0
"""How tensors travel between ranks: by the backend of their device, or through host memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Protocol

import torch
from torch import Tensor, distributed

_LOOK = timedelta(seconds=0.2)
"""Time between looks at what other ranks tell, in a wait for a collective."""


class Work:
    """A collective that has begun.

    Args:
        work: That of the process group.
        sent: What it reads, which is kept as long.
        copied: Tensor that its result in host memory, the second one, is copied to; None if it is there.
    """

    def __init__(self, work: distributed.Work, sent: Tensor, copied: tuple[Tensor, Tensor] | None = None) -> None:
        self._work = work
        self._sent = sent
        self._copied = copied

    @property
    def is_done(self) -> bool:
        """Whether it has ended."""
        return self._work.is_completed()

    def wait(self, look: Callable[[], object]) -> None:
        """Wait until it is done.

        Args:
            look: Function that is called now and then meanwhile; what it raises ends the wait.

        Raises:
            RuntimeError: The collective has failed.
        """
        # The host does not wait for a device: what is launched afterwards does, there.
        while self._sent.is_cpu:
            try:
                self._work.wait(_LOOK)
                break
            except RuntimeError:  # also at the end of each of these times
                if self._work.is_completed():
                    self._work.wait()  # raises what has failed
                    break
            look()
        else:
            self._work.wait()
        if self._copied is not None:
            out, here = self._copied
            out.copy_(here)


class Transport(Protocol):
    """Collectives of a process group on tensors of any device."""

    def all_reduce_(self, values: Tensor, reduction: distributed.ReduceOp.RedOpType) -> Work:
        """Begin to replace `values` on every rank by their reduction."""

    def all_to_all(self, out: Tensor, values: Tensor, received: Sequence[int], sent: Sequence[int]) -> Work:
        """Begin to send bytes to all ranks, and to write those of all ranks to `out`.

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

    def all_reduce_(self, values: Tensor, reduction: distributed.ReduceOp.RedOpType) -> Work:
        """Begin to replace values; see `Transport.all_reduce_`."""
        return Work(distributed.all_reduce(values, reduction, group=self._group, async_op=True), values)

    def all_to_all(self, out: Tensor, values: Tensor, received: Sequence[int], sent: Sequence[int]) -> Work:
        """Begin to send bytes; see `Transport.all_to_all`."""
        work = distributed.all_to_all_single(out, values, list(received), list(sent), group=self._group, async_op=True)
        return Work(work, values)


class StagedTransport:
    """Tensors of a device go through host memory and by gloo, such as those of ranks that share one GPU.

    NCCL refuses two ranks on one GPU. Every collective waits for the device.

    Args:
        group: The process group.
    """

    def __init__(self, group: distributed.ProcessGroup) -> None:
        self._group = group

    def all_reduce_(self, values: Tensor, reduction: distributed.ReduceOp.RedOpType) -> Work:
        """Begin to replace values; see `Transport.all_reduce_`."""
        # The tensor itself where it is in host memory already, which is reduced in place then.
        here = values.cpu()
        work = distributed.all_reduce(here, reduction, group=self._group, async_op=True)
        return Work(work, here, None if here is values else (values, here))

    def all_to_all(self, out: Tensor, values: Tensor, received: Sequence[int], sent: Sequence[int]) -> Work:
        """Begin to send bytes; see `Transport.all_to_all`."""
        # Written to `out` directly where that is in host memory: there is nothing to copy.
        source, here = values.cpu(), out if out.is_cpu else torch.empty(out.shape, dtype=out.dtype)
        work = distributed.all_to_all_single(here, source, list(received), list(sent), group=self._group, async_op=True)
        return Work(work, source, None if here is out else (out, here))
