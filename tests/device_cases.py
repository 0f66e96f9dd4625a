# SPDX-License-Identifier: Apache-2.0
"""All cases that hold on every device: benchmarks/gpu.py tries them where a GPU is, and tests on the CPU.

A module of cases has ``CASES``, which maps the name of each to a function of the device that raises where it is wrong.
"""

from __future__ import annotations

import importlib

from tests.on_device import Case

MODULES = {
    "kernels": "tests.kernels.triton_cases",
    "graphs": "tests.train.graph_cases",
    "runs": "tests.train.kernel_run",
    "layers": "tests.nn.device_cases",
    "optimizers": "tests.optim.device_cases",
    "models": "tests.models.device_cases",
    "stores": "tests.storage.device_cases",
    "checkpoints": "tests.checkpoint.device_cases",
    "embeddings": "tests.embedding.device_cases",
    "hugectr": "tests.hugectr.device_cases",
    "sessions": "tests.serve.device_cases",
    "ranks": "tests.dist.device_cases",
}
"""Kind of cases -> their module."""
TESTED_ELSEWHERE = ("kernels", "graphs", "runs", "ranks")
"""Kinds that tests of their own packages try on the CPU."""
SLOW = (
    "compiled models",
    *(f"a run over {kind} in tiers tables resumed elsewhere" for kind in ("static", "dynamic")),
)
"""Cases that take seconds on the CPU."""


def cases_of(kind: str) -> dict[str, Case]:
    """Return the cases of a kind, by name."""
    cases: dict[str, Case] = importlib.import_module(MODULES[kind]).CASES
    return cases
