"""Layout arrays on the device: copied once for each device and layout."""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from terarec.errors import KernelError
from terarec.kernels.contract import MEAN, NONE, SUM


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceLayout:
    """What launchers and kernels know of a layout.

    Attributes:
        array: the layout array on the device.
        is_plain: whether every bag is summed, or none pooled, so that no key's gradient is scaled.
    """

    array: Tensor
    is_plain: bool


_held: MutableMapping[Tensor, dict[torch.device, DeviceLayout]] = WeakIdKeyDictionary()


def on_device(layout: Tensor, device: torch.device) -> DeviceLayout:
    """`layout`, which does not change, on `device`.

    Raises:
        KernelError: a pooling that these kernels lack.
    """
    by_device = _held.setdefault(layout, {})
    if device not in by_device:
        lacking = set(layout[:, 2].tolist()) - {SUM, MEAN, NONE}
        if lacking:
            raise KernelError(f"layout: got the pooling codes {sorted(lacking)}, expected {SUM}, {MEAN} or {NONE}")
        by_device[device] = DeviceLayout(
            array=layout.to(device).contiguous(), is_plain=bool(((layout[:, 2] == SUM) | (layout[:, 2] == NONE)).all())
        )
    return by_device[device]
