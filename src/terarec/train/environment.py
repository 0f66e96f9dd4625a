"""What a training ran on, for its log, its report and ``terarec doctor``."""

from __future__ import annotations

from typing import Any

import torch

import terarec
from terarec.errors import KernelError
from terarec.kernels.registry import OPS, active
from terarec.spec import TrainingSpec
from terarec.train.devices import describe_device


def describe_environment(device: torch.device, training: TrainingSpec) -> dict[str, Any]:
    """Return where and how a training runs, as JSON data.

    It has ``device``, ``threads`` (of the CPU), ``precision``, ``compile`` (whether the layers are compiled),
    ``kernels`` (op -> implementation), ``torch`` and ``terarec`` (versions).
    """
    return {
        "device": describe_device(device),
        "threads": torch.get_num_threads(),
        "precision": training.precision,
        "compile": training.compile,
        "kernels": active_kernels(device.type),
        "torch": torch.__version__,
        "terarec": terarec.__version__,
    }


def active_kernels(device: str) -> dict[str, str]:
    """Return the implementation that runs each op on a device type; ops that nothing runs there are left out."""
    found = {}
    for op in OPS:
        try:
            found[op] = active(op, device).implementation
        except KernelError:
            continue
    return found
