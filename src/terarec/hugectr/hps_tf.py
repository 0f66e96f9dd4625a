# SPDX-License-Identifier: Apache-2.0
"""HugeCTR's package `hierarchical_parameter_server`: lookups in a parameter server for TensorFlow."""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING

from terarec.errors import MissingDependencyError

if TYPE_CHECKING:
    from terarec.hugectr.inference.tensorflow_layers import Init, LookupLayer, SparseLookupLayer

__all__ = ["Init", "LookupLayer", "SparseLookupLayer"]

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        # On first use: `python -m terarec.hugectr` imports the package for every script, and TensorFlow takes seconds.
        if name not in __all__:
            raise AttributeError(f"hierarchical_parameter_server has no {name!r}, expected {', '.join(__all__)}")
        if importlib.util.find_spec("tensorflow") is None:
            raise MissingDependencyError("tensorflow", "not installed, expected pip install 'terarec[tensorflow]'")
        return getattr(importlib.import_module("terarec.hugectr.inference.tensorflow_layers"), name)
