# SPDX-License-Identifier: Apache-2.0
"""Selection of the implementation of a kernel.

"auto" selects the first that runs on the device; a fallback to a later one is logged once, with the reason. An
implementation that is requested by name runs or raises `KernelError`. ``TERAREC_KERNELS`` prefers another one.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from types import ModuleType
from typing import Any, Self

import torch

from terarec.errors import KernelError
from terarec.kernels.environment import IMPLEMENTATIONS, forced_implementation, triton_interprets

_LOGGER = logging.getLogger(__name__)


class Op(StrEnum):
    """An op: the name of the function or class that runs it.

    Attributes:
        module: Module of each implementation that may define the name.
    """

    module: str

    def __new__(cls, name: str, module: str) -> Self:
        """Make a member."""
        self = str.__new__(cls, name)
        self._value_ = name
        self.module = module
        return self

    LOOKUP_FITS = "lookup_fits", "bag_lookup"
    BAG_LOOKUP = "bag_lookup", "bag_lookup"
    QUANTIZED_BAG_LOOKUP = "quantized_bag_lookup", "bag_lookup"
    ROW_DOTS = "row_dots", "bag_lookup"
    ROW_UPDATE = "row_update_", "row_update"
    ROW_GRADIENT_NORM = "row_gradient_norm", "row_update"
    ALLOCATE_ROWS = "allocate_rows", "rows"
    RESERVE_ROWS = "reserve_rows", "rows"
    FILL_ROWS = "fill_rows", "rows"
    FILL_KEYED_ROWS = "fill_keyed_rows", "rows"
    HASH_INDEX = "HashIndex", "hash_index"
    ROWS_AT_MOST = "rows_at_most", "rows"
    MASK_GRADIENT = "mask_gradient", "dense"
    HAS_PAIR_DOTS = "has_pair_dots", "dense"
    PAIR_DOTS = "pair_dots", "dense"
    PAIR_GRADIENTS = "pair_gradients", "dense"
    SLOT_MAP = "SlotMap", "slots"
    ROW_SET = "RowSet", "slots"
    GATHER_ROWS = "gather_rows", "slots"
    SCATTER_ROWS = "scatter_rows", "slots"
    TOUCH_MAPS = "touch_maps", "slots"
    ADMIT_MAPS = "admit_maps", "slots"
    GATHER_FROM = "gather_from", "slots"


_DEVICES = {"triton": ("cuda",), "cpu": ("cpu",), "ref": None}  # types that an implementation runs on; None: any


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """An implementation and why it was chosen.

    Attributes:
        implementation: Its name.
        why: One line for people: what makes it run, or what keeps the faster ones from it.
    """

    implementation: str
    why: str


@functools.cache
def available() -> dict[str, str]:
    """Return every implementation -> "" if it runs in this process, else the reason why it does not."""
    return {name: _loading_fault(name) for name in IMPLEMENTATIONS}


@functools.cache
def active(op: Op, device: str, among: tuple[str, ...] = IMPLEMENTATIONS) -> Choice:
    """Return the choice of "auto".

    Args:
        op: The op.
        device: Device type, such as "cpu" or "cuda".
        among: Implementations that support the arguments of the call.

    Raises:
        KernelError: An unknown op, or ``TERAREC_KERNELS`` names an implementation that does not load.
    """
    op = _known(op)
    # Read here, inside the cache: the variable counts as it is at the first choice of an op.
    forced = forced_implementation()
    if forced is not None:
        if reason := available()[forced]:
            raise KernelError("TERAREC_KERNELS", f"got {forced!r}, which does not run here: {reason}")
        # The variable prefers: ops that this implementation lacks run by the fastest that has them.
        if not _obstacle_by_name(op, forced, device, among):
            return Choice(implementation=forced, why="set by TERAREC_KERNELS")
    obstacles: list[str] = []
    for name in IMPLEMENTATIONS:
        obstacle = _obstacle(op, name, device, among)
        if not obstacle:
            is_fastest = name == _fastest_for(device)
            return Choice(implementation=name, why=f"the fastest on {device}" if is_fastest else "; ".join(obstacles))
        obstacles.append(f"{name}: {obstacle}")
    raise KernelError(f"{op} on {device}", f"{'; '.join(obstacles)}")


@functools.cache
def choose(
    op: Op, device: str | torch.device, implementation: str = "auto", among: tuple[str, ...] = IMPLEMENTATIONS
) -> Callable[..., Any]:
    """Return the function that runs `op`.

    Args:
        op: The op.
        device: Device, or a device type.
        implementation: "auto", or one of `IMPLEMENTATIONS` by name.
        among: Implementations that support the arguments of the call.

    Raises:
        KernelError: An unknown op or implementation, or one requested by name that cannot run here.
    """
    # The cache has an entry for devices, too: reading the type of one takes as long as the rest of this call.
    if isinstance(device, torch.device):
        return choose(op, device.type, implementation, among)
    op = _known(op)
    if implementation == "auto":
        choice = active(op, device, among)
        # Once for each op and device, since `choose` caches what it returns.
        if choice.implementation != _fastest_for(device):
            _LOGGER.warning("%s on %s runs the %s kernel (%s)", op, device, choice.implementation, choice.why)
        implementation = choice.implementation
    elif implementation not in IMPLEMENTATIONS:
        names = ", ".join(map(repr, ("auto", *IMPLEMENTATIONS)))
        raise KernelError("implementation", f"got {implementation!r}, expected one of {names}")
    elif obstacle := _obstacle_by_name(op, implementation, device, among):
        raise KernelError(op, f"implementation {implementation!r} cannot run on {device}: {obstacle}")
    function: Callable[..., Any] = getattr(_module(implementation, op.module), op)
    return function


def _known(name: str) -> Op:
    op = next((op for op in Op if op == name), None)
    if op is None:
        raise KernelError("op", f"got {name!r}, expected one of {', '.join(Op)}")
    return op


def _fastest_for(device: str) -> str | None:
    """Return the implementation made for a device type; None if that type has none of its own."""
    return next((name for name in IMPLEMENTATIONS if device in (_DEVICES[name] or ())), None)


def _obstacle(op: Op, name: str, device: str, among: tuple[str, ...]) -> str:
    """Return why an implementation does not run an op on a device type; empty if it does."""
    devices = _DEVICES[name]
    if devices is not None and device not in devices:
        return f"runs on {', '.join(devices)}, not on {device}"
    return _lack(op, name, among)


def _obstacle_by_name(op: Op, name: str, device: str, among: tuple[str, ...]) -> str:
    """Return `_obstacle` for an implementation requested by name: Triton may then interpret its kernels on the CPU."""
    if name == "triton" and device == "cpu" and triton_interprets():
        return _lack(op, name, among)
    return _obstacle(op, name, device, among)


def _lack(op: Op, name: str, among: tuple[str, ...]) -> str:
    """Return why an implementation does not run an op on any device; empty if it does."""
    if reason := available()[name]:
        return reason
    # By attribute: an implementation has an op if its module defines the name, so there is no second list to maintain.
    if not hasattr(_module(name, op.module), op):
        return "it has no such op"
    return "" if name in among else "it does not support these arguments"


def _loading_fault(name: str) -> str:
    """Return why an implementation does not load; load Triton only where it can run, since that takes long."""
    if name == "triton":
        if importlib.util.find_spec("triton") is None:
            return "Triton is not installed"
        if not (torch.cuda.is_available() or triton_interprets()):
            return "no CUDA device is there"
        # Two copies of LLVM: that of Triton, loaded second, ends the process.
        if "tensorflow" in sys.modules and "triton" not in sys.modules:
            return "TensorFlow was loaded before it, which would end the process"
    try:
        # All modules at once: an implementation that half loads would fail later, in the middle of a run.
        for op in Op:
            _module(name, op.module)
    except (ImportError, KernelError) as error:
        return str(error)
    return ""


def _module(implementation: str, module: str) -> ModuleType | None:
    """Return a module; None if the implementation has none of its ops."""
    path = f"terarec.kernels.{implementation}.{module}"
    # Not by catching a failed import: that of a module that is there is a fault, whose text `doctor` shows.
    return importlib.import_module(path) if importlib.util.find_spec(path) else None
