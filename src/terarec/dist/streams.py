# SPDX-License-Identifier: Apache-2.0
"""The stream of a device on which keys of the next batch are made distinct and sent, beside the step of this one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from terarec.dist.ranks import Ranks


def has_streams(device: torch.device) -> bool:
    """Return whether work on a device runs beside the host, in streams."""
    # "meta", which has no memory, is no accelerator and has no module.
    return device.type not in ("cpu", "meta") and hasattr(torch.get_device_module(device), "Stream")


class KeyStream:
    """A stream beside that of the step, so that the host waits for numbers of keys alone and not for the step.

    Its collectives have an order of their own, or they would wait on the device for those of the step.

    Tensors that are made on it get memory of its own, which its next tensors may get as soon as the host drops these,
    even if the step still reads them. So what was made for a batch is kept until the step has read it on the device.

    Attributes:
        ranks: The ranks, for collectives on this stream.

    Args:
        device: The device.
        ranks: The ranks, all of which make one.
    """

    def __init__(self, device: torch.device, ranks: Ranks) -> None:
        self.device = device
        self.ranks = ranks.twin()
        self._stream = torch.Stream(device)
        # Numbers that do not change were made by the stream of the step.
        self._stream.wait_stream(self._of_step)
        self._kept: list[object] = []
        self._read: list[tuple[torch.Event, object]] = []

    @property
    def _of_step(self) -> torch.Stream:
        return torch.accelerator.current_stream(self.device)

    @contextmanager
    def after(self, ready: torch.Event | None) -> Iterator[None]:
        """Run what is inside on this stream, after an event, or after all that the step has begun if it is None."""
        if ready is None:
            self._stream.wait_stream(self._of_step)
        else:
            self._stream.wait_event(ready)
        with self.again():
            yield

    @contextmanager
    def again(self) -> Iterator[None]:
        """Run what is inside on this stream, after what it has begun."""
        with self._stream:
            yield

    def join(self) -> None:
        """Let the step from here on wait for what this stream has begun."""
        self._of_step.wait_stream(self._stream)

    def keep(self, tensors: object) -> None:
        """Keep what was made for the next batch, and drop what steps have read.

        The lookups of the last batch have begun, and all work of those before.
        """
        self._read = [(event, former) for event, former in self._read if not event.query()]
        self._kept.append(tensors)
        if len(self._kept) > 2:
            self._read.append((self._of_step.record_event(), self._kept.pop(0)))
