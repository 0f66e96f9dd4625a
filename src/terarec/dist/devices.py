# SPDX-License-Identifier: Apache-2.0
"""Checks of the devices of ranks before their first collective, which would hang or fail without names."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import distributed

from terarec.dist.ranks import Ranks
from terarec.errors import ConfigError
from terarec.spec.checks import one_line, quoted


def find_device(device: torch.device | str) -> torch.device:
    """Return a device that torch has on this machine.

    Raises:
        ConfigError: No device has this name, or torch does not find it here.
    """
    try:
        there = torch.device(device)
    except RuntimeError:  # whose message lists the kinds of all devices
        raise ConfigError("device", f"got {quoted(device)}, expected 'cpu', 'cuda' or 'cuda:N'") from None
    if there.type != "cpu":
        try:
            _properties(there)
        # A build without the kind of device, a number that is too large, or a kind without properties.
        except (RuntimeError, AssertionError, AttributeError) as error:
            raise ConfigError(
                "device",
                f"got {str(there)!r}, which torch does not find here ({one_line(str(error))}), expected a GPU of this "
                "machine, or 'cpu'",
            ) from None
    return there


def group_backend(device: torch.device, *, is_staged: bool) -> str:
    """Return the backends of a process group: gloo for host memory, and that of the device, such as NCCL.

    Args:
        device: Device of the tables.
        is_staged: Whether tensors of the device travel through host memory.

    Raises:
        ConfigError: torch has no backend for the device.
    """
    if device.type == "cpu" or is_staged:
        return "gloo"
    name = distributed.Backend.default_device_backend_map.get(device.type)
    if name is None or not distributed.is_backend_available(name):
        missing = f"its backend {name!r}" if name else "a backend"
        raise ConfigError(
            "device",
            f"got {str(device)!r} for several ranks, but torch has not {missing} for collectives there, expected a "
            "torch that has, or shared devices (--share-device), whose tensors go through host memory",
        )
    # Both: numbers that the host reads, such as those of a norm, do not go through the device.
    return f"cpu:gloo,{device.type}:{name}"


def check_devices(ranks: Ranks, device: torch.device, *, is_shared: bool) -> None:
    """Check that ranks have devices of one kind, and one each unless they share.

    Args:
        ranks: The ranks, all of which call this.
        device: Device of this one.
        is_shared: Whether ranks may share devices.

    Raises:
        CollectiveError: Ranks with devices of other kinds, other drivers, or other settings of sharing.
        ConfigError: Ranks that share a device.
    """
    ranks.check_same("devices", _facts(device) | {"share_device": is_shared})
    # Ranks of one machine share its processor.
    shared = None if device.type == "cpu" or is_shared else shared_device(ranks, device)
    if shared is not None:
        raise ConfigError(
            "device",
            f"got device {shared.name} of {ranks.hosts[shared.first]} for ranks {shared.first} and {shared.second}, "
            "expected one for each rank, or --share-device",
        )


class SharedDevice(NamedTuple):
    """A device that two ranks have.

    Attributes:
        first, second: The ranks.
        name: Its name on their machine.
    """

    first: int
    second: int
    name: str


def shared_device(ranks: Ranks, device: torch.device) -> SharedDevice | None:
    """Return the first device that two ranks have, if any; all ranks call this with theirs."""
    properties = _properties(device)
    owners: dict[tuple[str, str], int] = {}
    # By the id of the device itself: its number is 0 on each rank that may see no other.
    for rank, name in enumerate(ranks.gather("devices of the ranks", str(getattr(properties, "uuid", device)))):
        first = owners.setdefault((ranks.hosts[rank], name), rank)
        if first != rank:
            return SharedDevice(first, rank, name)
    return None


def _properties(device: torch.device) -> Any:
    """Return the properties of a device, of the type that torch has for its kind."""
    return torch.get_device_module(device).get_device_properties(device)


def _facts(device: torch.device) -> dict[str, Any]:
    """Return what has to be the same on all ranks."""
    if device.type == "cpu":
        return {"type": "cpu"}
    properties = _properties(device)
    facts = {"type": device.type, "name": properties.name, "runtime": torch.version.cuda or torch.version.hip}
    # Compared before the first collective, which would fail or hang without saying why.
    if device.type == "cuda" and torch.version.cuda is not None:
        facts["driver"] = torch._C._cuda_getDriverVersion()  # type: ignore[attr-defined]
    if device.type == "cuda" and distributed.is_nccl_available():
        facts["nccl"] = list(torch.cuda.nccl.version())  # type: ignore[no-untyped-call]
    return facts
