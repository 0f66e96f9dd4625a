# SPDX-License-Identifier: Apache-2.0
"""Waits of the host for copies, each of which the simulated device misses where it is left out."""

from __future__ import annotations

import importlib
from functools import partial

import pytest
import torch

from tests.on_device import Case
from tests.simulated_device.device import cpu_without_wait

_SESSIONS = "tests.serve.device_cases"
REACHED_BY = {
    "terarec.train.evaluation": ("tests.models.device_cases", "model over dynamic tables"),
    "terarec.checkpoint.state": ("tests.checkpoint.device_cases", "a state of the device comes back to the bit"),
    "terarec.ps.group_cache": (_SESSIONS, "caches on the device"),
    "terarec.serve.session": (_SESSIONS, "sessions with every kind of numbers"),
}
"""Module that copies to the host -> the module of cases, and the case that comes to the copy."""


def a_missing_wait_is_reported(module: str, device: torch.device) -> None:
    cases, name = REACHED_BY[module]
    case: Case = importlib.import_module(cases).CASES[name]

    def run() -> None:
        case(device)
        torch.get_device_module(device).synchronize()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "cpu", cpu_without_wait(module))
        with pytest.raises(RuntimeError, match="the host uses memory that stream 0 writes"):
            run()


CASES: dict[str, Case] = {f"no wait in {module}": partial(a_missing_wait_is_reported, module) for module in REACHED_BY}
