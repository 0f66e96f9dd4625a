# SPDX-License-Identifier: Apache-2.0
"""The devices of a script: those of ``vvgpu`` that this machine has, one for each process."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from terarec.dist import Ranks
from terarec.dist.devices import shared_device
from terarec.kernels.environment import launch
from terarec.nn.precision import CPU


def placement(vvgpu: Sequence[Sequence[int]], num_gpus: int | None = None) -> tuple[torch.device, str]:
    """Return the one device that a model trains on, and a message about requested devices that are not used.

    It is the first device of `vvgpu` that exists, else another GPU, else the CPU. The message is empty if that is all
    that `vvgpu` names.

    Args:
        vvgpu: Numbers of GPUs, node by node.
        num_gpus: Number of existing GPUs; None counts them.
    """
    present = range(torch.cuda.device_count() if num_gpus is None else num_gpus)
    named = [number for node in vvgpu for number in node]
    # Scripts name the GPUs of the machine that they were written for.
    chosen = next((number for number in named if number in present), 0)
    device = torch.device("cuda", chosen) if present else torch.device("cpu")
    if present and named == [chosen]:
        return device, ""
    what = f"{len(named)} devices" if len(named) > 1 else f"GPU {named[0]}, which is not there"
    return device, f"vvgpu names {what}: training runs on {device}, with the same results"


def placement_of_rank(
    vvgpu: Sequence[Sequence[int]], together: Ranks, num_gpus: int | None = None
) -> tuple[torch.device, str]:
    """Return the device of this one of several processes, and a message if they do not train on the GPUs that exist.

    GPU g of all G of `vvgpu` is that of process ``g * R // G``, which takes its first. Where a process does not have
    this number, it takes the GPU of its own number on the machine, or else the first, such as the only one that it may
    see. All processes train on CPUs unless each has a GPU of its own: NCCL refuses to share them.

    Args:
        vvgpu: Numbers of GPUs, node by node.
        together: The processes, all of which call this.
        num_gpus: Number of GPUs of this machine; None counts them.
    """
    present = range(torch.cuda.device_count() if num_gpus is None else num_gpus)
    named = [number for node in vvgpu for number in node]
    rank, size, launched = together.rank, together.size, launch()
    place = -(-rank * len(named) // size) if size <= len(named) else rank * len(named) // size
    wanted = (named[place], rank if launched is None else launched.local_rank, 0)
    chosen = next((number for number in wanted if number in present), None)
    device = CPU if chosen is None else torch.device("cuda", chosen)
    kinds = together.gather("devices of the script", device.type)
    if "cuda" not in kinds:
        return CPU, ""
    if "cpu" in kinds:
        lacking = kinds.index("cpu")
        what = f"process {lacking} ({together.hosts[lacking]}) has no GPU"
    else:
        shared = shared_device(together, device)
        if shared is None:
            return device, ""
        what = f"processes {shared.first} and {shared.second} have the same GPU of {together.hosts[shared.first]}"
    return CPU, f"{what}, and NCCL requires one for each: training runs on CPUs, with the same results"
