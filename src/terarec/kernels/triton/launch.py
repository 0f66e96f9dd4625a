# SPDX-License-Identifier: Apache-2.0
"""Shared parts of the launchers: device, status of a call, sizes of tiles, layouts on the device, random streams."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass
from typing import ParamSpec, TypeVar

import torch
import triton
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from terarec.kernels.contract import ANY_ROWS, MAX, MEAN, NONE, SQRTN, BadKeyError, bad_offsets
from terarec.kernels.triton.device.lookup import NOTHING

P = ParamSpec("P")
Result = TypeVar("Result")


_INTERPRETER = threading.RLock()
"""Triton's interpreter replaces functions of `triton.language` while a kernel runs, which no other thread may see."""


def on_its_device(launcher: Callable[P, Result]) -> Callable[P, Result]:
    """Return `launcher` with the device of its first argument as the current one; on the CPU one call at a time."""

    @functools.wraps(launcher)
    def there(*args: P.args, **kwargs: P.kwargs) -> Result:
        if args[0].device.type == "cpu":  # type: ignore[attr-defined]
            with _INTERPRETER:
                return launcher(*args, **kwargs)
        with torch.cuda.device_of(args[0]):  # type: ignore[no-untyped-call]
            return launcher(*args, **kwargs)

    return there


def new_status(device: torch.device) -> Tensor:
    """Return the status of a call without a fault."""
    # The faults are minima, so that the first one is reported for any order of the programs.
    return torch.full((2,), NOTHING.value, dtype=torch.int64, device=device)


def raise_if_bad(status: Tensor, keys: Tensor, offsets: Tensor, layout: Tensor, gradient: int = 0) -> None:
    """Wait for the kernels, read the status back and raise its error.

    Args:
        status: int64[2].
        keys: int64[N] of the call.
        offsets: int64[S * B + 1] of the call.
        layout: Its layout array.
        gradient: Number of the `KernelGradient` that the call is for.

    Raises:
        BadKeyError: A key outside its table.
        ConfigError: Offsets that decrease or do not cover the keys.
    """
    # The only wait of a call: kernels write their findings to device memory, and this copies 16 bytes back.
    index, position = status.tolist()
    # Offsets first: keys cannot be located by offsets that are wrong.
    if index != NOTHING.value:
        raise bad_offsets(index, int(offsets[index]), keys.shape[0])
    if position != NOTHING.value:
        batch_size = (offsets.shape[0] - 1) // layout.shape[0]
        # Every B-th offset ends a feature, so the number of ends up to the position is the number of the feature.
        feature = int((offsets[::batch_size][1:] <= position).sum())
        raise BadKeyError(feature, position, int(keys[position]), int(layout[feature, 1]), gradient)


def check_no_bags(keys: Tensor, offsets: Tensor) -> None:
    """Raise `ConfigError` unless the offsets of a call without bags, for which no kernel runs, are those of no keys."""
    if int(offsets[0]) != 0 or keys.shape[0]:
        raise bad_offsets(0, int(offsets[0]), keys.shape[0])


_LOOKUP_ELEMENTS = 4096
"""At four warps 32 numbers a thread, which keeps eight loads of 16 bytes in flight; 126 registers on sm_90."""
_UPDATE_ELEMENTS = 2048
"""Weights, two states and the gradient: at 4096 ptxas gives Adam 255 registers and spills some (sm_90)."""
_MOST_ROWS = 128
_MOST_COLUMNS = 256


UNFUSED = {"enable_fp_fusion": False}
"""Option of kernels that add products: each product is rounded, as by torch, where ranks compute with the same numbers.

The compiler may otherwise make one instruction of a product and a sum, in some forms of a kernel and not in others.
"""


def whole_rows(width: int) -> tuple[int, int]:
    """Return (rows, columns) of a tile that holds whole rows of `width` numbers."""
    # Tiles of Triton have sides that are powers of two; the mask `column < WIDTH` cuts the rest off.
    columns = triton.next_power_of_2(width)
    return max(1, min(_MOST_ROWS, _UPDATE_ELEMENTS // columns)), columns


def parts_of_rows(width: int) -> tuple[int, int]:
    """Return (rows, columns) of a tile that may hold a part of the columns of rows of `width` numbers."""
    columns = min(_MOST_COLUMNS, triton.next_power_of_2(width))
    return min(_MOST_ROWS, _LOOKUP_ELEMENTS // columns), columns


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceLayout:
    """A layout for launchers and kernels.

    Attributes:
        array: The layout array on the device.
        is_pooled: Whether it pools.
        is_scaled: Whether a bag's sum is divided.
        has_max: Whether a bag is pooled by its maximum.
        is_checked: Whether a key may be bad, so that the host has to know.
    """

    array: Tensor
    is_pooled: bool
    is_scaled: bool
    has_max: bool
    is_checked: bool


# Weak and by identity: copies go with their layout, and == of tensors compares elements.
_layouts: MutableMapping[Tensor, dict[torch.device, DeviceLayout]] = WeakIdKeyDictionary()


def layout_on_device(layout: Tensor, device: torch.device) -> DeviceLayout:
    """Return `layout`, which does not change, on `device`."""
    by_device = _layouts.setdefault(layout, {})
    if device not in by_device:
        codes = set(layout[:, 2].tolist())
        by_device[device] = DeviceLayout(
            array=layout.to(device).contiguous(),
            is_pooled=NONE not in codes,
            is_scaled=bool(codes & {MEAN, SQRTN}),
            has_max=MAX in codes,
            is_checked=any(rows < ANY_ROWS for rows in layout[:, 1].tolist()),
        )
    return by_device[device]


_MASK = 2**64 - 1
_STEP = 0x9E3779B97F4A7C15


def table_stream(seed: int) -> int:
    """Return ``mix(seed)``, from which a table's initial values come, as int64."""
    return _signed(_mix(seed & _MASK))


def step_stream(seed: int, step: int) -> int:
    """Return ``mix(mix(seed) + step * STEP)``, from which the roundings of an update come, as int64."""
    return _signed(_mix((_mix(seed & _MASK) + step * _STEP) & _MASK))


def _mix(bits: int) -> int:
    bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EB & _MASK
    return bits ^ (bits >> 31)


def _signed(bits: int) -> int:
    # As int64: Triton compiles another kernel for an argument of 2^63 or more, which it types uint64.
    return bits - 2**64 if bits >= 2**63 else bits
