# SPDX-License-Identifier: Apache-2.0
"""Checks of the devices of ranks before their first collective, which would hang or fail without names."""

from __future__ import annotations

from typing import Any

import torch
from torch import distributed

from terarec.dist.ranks import Ranks
from terarec.errors import ConfigError


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
    facts, identity = _described(device)
    ranks.check_same("devices", facts | {"share_device": is_shared})
    if device.type == "cpu" or is_shared:
        return
    owners: dict[str, int] = {}
    for rank, other in enumerate(ranks.gather("devices of the ranks", identity)):
        first = owners.setdefault(f"{ranks.hosts[rank]}: {other}", rank)
        if first != rank:
            raise ConfigError(
                "device",
                f"got device {other} of {ranks.hosts[rank]} for ranks {first} and {rank}, expected one for each rank, "
                "or --share-device",
            )


def _described(device: torch.device) -> tuple[dict[str, Any], str]:
    """Return what has to be the same on all ranks, and what names the device on its machine."""
    if device.type == "cpu":
        return {"type": "cpu"}, ""
    module = torch.get_device_module(device)
    properties = module.get_device_properties(device)
    facts = {"type": device.type, "name": properties.name, "runtime": torch.version.cuda or torch.version.hip}
    if device.type == "cuda" and torch.version.cuda is not None:
        facts["driver"] = torch._C._cuda_getDriverVersion()  # type: ignore[attr-defined]
    if device.type == "cuda" and distributed.is_nccl_available():
        facts["nccl"] = list(torch.cuda.nccl.version())  # type: ignore[no-untyped-call]
    return facts, str(getattr(properties, "uuid", device))
