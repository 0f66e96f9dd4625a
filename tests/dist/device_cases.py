# SPDX-License-Identifier: Apache-2.0
"""Tables on ranks that are on a device, against one process on it and on the CPU: cells of `tests.dist.device_matrix`.

One rank exchanges by the backend of the device, such as NCCL, several ones share the device through host memory.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch

from tests.dist.device_matrix import IN_TIERS, TABLES, run, tiered_cases
from tests.dist.matrix import FEW_STEPS, OPTIMIZERS, PLACEMENTS, Case, rejection
from tests.on_device import Case as DeviceCase
from tests.simulated_device import device as simulated

_MODES = ("deterministic", "fp32", "pooled there", "bf16 wire")


def ranks_train_as_one_process(size: int, device: torch.device) -> None:
    """Raise unless tables on ranks of one device, placed in every way, have the weights of one process."""
    rules = list(OPTIMIZERS)
    todo = [
        Case(size=size, placement=placement, optimizer=rules[(number + mode) % len(rules)], mode=_MODES[mode])
        for number, placement in enumerate(PLACEMENTS)
        for mode in (0, 1 + number % 3)
    ]
    check([case for case in todo if not rejection(case)], device, shares_device=size > 1)


def tiers_train_as_one_process(device: torch.device) -> None:
    """Raise unless tables whose fast tier is on one device, which ranks share, have the weights of one process."""
    check(tiered_cases(), device, shares_device=True, tables=IN_TIERS)


def check(todo: list[Case], device: torch.device, *, shares_device: bool, tables: tuple[str, ...] = TABLES) -> None:
    """Run cells on the device and raise if one is missing or beyond its bound."""
    where: str | Path = device.type
    if device.type == simulated.NAME:
        assert simulated.loaded is not None, "the device is registered"
        where = simulated.loaded
    summary, _ = run(todo, FEW_STEPS, where, shares_device=shares_device, tables=tables)
    assert summary.failed == []
    assert (summary.cells, summary.missing) == (len(todo) * len(tables), 0)


CASES: dict[str, DeviceCase] = {
    "tables on one rank of a group": partial(ranks_train_as_one_process, 1),
    "tables on two ranks that share the device": partial(ranks_train_as_one_process, 2),
    "tables on four ranks that share the device": partial(ranks_train_as_one_process, 4),
    "tables in tiers on ranks that share the device": tiers_train_as_one_process,
}
