# SPDX-License-Identifier: Apache-2.0
"""The instruction sets of the compiled kernels, and what must not depend on them."""

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from terarec.kernels.cpu import host

SETS = [*host.instruction_sets(), "wide"]

Result = TypeVar("Result")


def on_every_host(call: Callable[[], Result], threads: Sequence[int]) -> list[Result]:
    """Return the results of `call` on each instruction set with each of these numbers of threads."""
    before, results = torch.get_num_threads(), []
    try:
        for name in SETS:
            for count in threads:
                host.select(name)
                torch.set_num_threads(count)
                results.append(call())
    finally:
        host.select("auto")
        torch.set_num_threads(before)
    return results
