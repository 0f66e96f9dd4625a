"""Where a model trains: what of a solver's ``vvgpu`` is there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """The one device of a model: its weights, its tables, the states of its optimizers and its batches are there.

    Attributes:
        device: the device.
        message: what to tell of the devices that were named and are not used; empty where all are.
    """

    device: torch.device
    message: str


def placement(vvgpu: Sequence[Sequence[int]], num_gpus: int | None = None) -> Placement:
    """The first device of `vvgpu` that is there; without one of them another GPU, without any the CPU.

    Args:
        vvgpu: numbers of GPUs, node by node.
        num_gpus: GPUs that are there; None counts them.
    """
    present = range(torch.cuda.device_count() if num_gpus is None else num_gpus)
    named = [number for node in vvgpu for number in node]
    chosen = next((number for number in named if number in present), 0)
    device = torch.device("cuda", chosen) if present else torch.device("cpu")
    if present and named == [chosen]:
        return Placement(device=device, message="")
    what = f"{len(named)} devices" if len(named) > 1 else f"GPU {named[0]}, which is not there"
    return Placement(device=device, message=f"vvgpu names {what}: training runs on {device}, with the same results")
