# SPDX-License-Identifier: Apache-2.0
"""HugeCTR's package `hps_torch`, and its module `hps_torch.lookup_layer`: lookups in a parameter server."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from terarec.hugectr.inference.hps import LookupLayer

__all__ = ["LookupLayer"]

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        # On first use: `python -m terarec.hugectr` imports the package for every script, and torch takes seconds.
        if name not in __all__:
            raise AttributeError(f"hps_torch has no {name!r}, expected LookupLayer")
        return getattr(importlib.import_module("terarec.hugectr.inference.hps"), name)
