# SPDX-License-Identifier: Apache-2.0
"""Time on a device: how long it works on what the host requests."""

import statistics
import time
from collections.abc import Callable

import torch


def seconds(function: Callable[[], object], device: torch.device, repeats: int = 10) -> float:
    """Return the median time of `function` after three runs to warm up, in which kernels are compiled."""
    for _ in range(3):
        function()
    times = [_once(function, device) for _ in range(repeats)]
    return statistics.median(times)


def once(function: Callable[[], object], device: torch.device) -> float:
    """Time of one run, launches and waits of the host included."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    function()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def _once(function: Callable[[], object], device: torch.device) -> float:
    if device.type != "cuda":
        return once(function, device)
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    function()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3
