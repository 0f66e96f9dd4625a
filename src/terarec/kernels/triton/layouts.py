"""Layout arrays on the device: copied once for each device and layout."""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from terarec.kernels.contract import MAX, MEAN, NONE, SQRTN


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceLayout:
    """What launchers and kernels know of a layout.

    Attributes:
        array: the layout array on the device.
        is_pooled: whether it pools.
        is_scaled: whether a bag's sum is divided.
        has_max: whether a bag is pooled by its maximum.
    """

    array: Tensor
    is_pooled: bool
    is_scaled: bool
    has_max: bool


_held: MutableMapping[Tensor, dict[torch.device, DeviceLayout]] = WeakIdKeyDictionary()


def on_device(layout: Tensor, device: torch.device) -> DeviceLayout:
    """`layout`, which does not change, on `device`."""
    by_device = _held.setdefault(layout, {})
    if device not in by_device:
        codes = set(layout[:, 2].tolist())
        by_device[device] = DeviceLayout(
            array=layout.to(device).contiguous(),
            is_pooled=NONE not in codes,
            is_scaled=bool(codes & {MEAN, SQRTN}),
            has_max=MAX in codes,
        )
    return by_device[device]
