"""Which implementation of a kernel runs.

"auto" takes the first that runs on the device; taking a later one than the first is logged once, with the reason.
An implementation that is asked for by name runs or raises `KernelError`.
"""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from terarec.errors import KernelError

_LOGGER = logging.getLogger(__name__)

IMPLEMENTATIONS = ("cpu", "ref")
"""Packages of ``terarec.kernels``, the fastest first. Each has every module that `OPS` names."""
OPS = {
    "bag_lookup": "bag_lookup",
    "row_update_": "row_update",
    "allocate_rows": "rows",
    "reserve_rows": "rows",
    "fill_rows": "rows",
    "fill_keyed_rows": "rows",
    "HashIndex": "hash_index",
}
"""Op, which is the name of a function or a class -> its module."""
_DEVICES = {"cpu": ("cpu",), "ref": None}  # device types that an implementation runs on; None: any


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """An implementation and why it was chosen.

    Attributes:
        implementation: its name.
        why: one line for people: what makes it run, or what keeps the faster ones from it.
    """

    implementation: str
    why: str


@functools.cache
def available() -> dict[str, str]:
    """Every implementation -> "" if it runs in this process, else the reason why it does not."""
    reasons = {}
    for name in IMPLEMENTATIONS:
        try:
            for module in OPS.values():
                _module(name, module)
        except (ImportError, KernelError) as error:
            reasons[name] = str(error)
        else:
            reasons[name] = ""
    return reasons


@functools.cache
def active(op: str, device: str) -> Choice:
    """What "auto" takes for `op` on a device type such as "cpu" or "cuda".

    Raises:
        KernelError: an unknown op.
    """
    _check_op(op)
    refusals: list[str] = []
    for name in IMPLEMENTATIONS:
        refusal = _refusal(name, device)
        if not refusal:
            return Choice(implementation=name, why="; ".join(refusals) or f"the fastest on {device}")
        refusals.append(f"{name}: {refusal}")
    raise KernelError(f"{op} on {device}: {'; '.join(refusals)}")


@functools.cache
def choose(op: str, device: str, implementation: str = "auto") -> Callable[..., Any]:
    """The function that runs `op` on a device type.

    Raises:
        KernelError: an unknown op or implementation, or one asked for by name that cannot run here.
    """
    _check_op(op)
    if implementation == "auto":
        choice = active(op, device)
        if choice.implementation != IMPLEMENTATIONS[0]:
            _LOGGER.warning("%s on %s runs the %s kernel (%s)", op, device, choice.implementation, choice.why)
        implementation = choice.implementation
    elif implementation not in IMPLEMENTATIONS:
        names = ", ".join(map(repr, ("auto", *IMPLEMENTATIONS)))
        raise KernelError(f"implementation: got {implementation!r}, expected one of {names}")
    elif refusal := _refusal(implementation, device):
        raise KernelError(f"{op}: implementation {implementation!r} cannot run on {device}: {refusal}")
    function: Callable[..., Any] = getattr(_module(implementation, OPS[op]), op)
    return function


def _check_op(op: str) -> None:
    if op not in OPS:
        raise KernelError(f"op: got {op!r}, expected one of {', '.join(OPS)}")


def _refusal(name: str, device: str) -> str:
    """Why an implementation does not run on a device type; empty if it does."""
    devices = _DEVICES[name]
    if devices is not None and device not in devices:
        return f"runs on {', '.join(devices)}, not on {device}"
    return available()[name]


def _module(implementation: str, module: str) -> ModuleType:
    return importlib.import_module(f"terarec.kernels.{implementation}.{module}")
