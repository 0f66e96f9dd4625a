"""Number formats of the dense layers' matrix products."""

from __future__ import annotations

import functools
import logging
import re
from pathlib import Path
from typing import Literal

import torch

Precision = Literal["fp32", "bf16"]

_logger = logging.getLogger(__name__)
_CPUINFO = Path("/proc/cpuinfo")
_BF16_UNITS = {"avx512_bf16", "amx_bf16", "bf16"}  # x86, x86, Arm


def autocast(precision: Precision) -> torch.autocast:
    """The context of a forward pass: matrix products in bfloat16 for "bf16", everything as it is for "fp32"."""
    return torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "bf16")


@functools.cache
def warn_if_slow(precision: Precision) -> None:
    """Log, once, if this processor multiplies in `precision` slower than in float32."""
    if precision == "bf16" and not _has_bf16_units():
        _logger.warning(
            "precision 'bf16': this processor has neither AVX512-BF16 nor AMX and emulates bfloat16; "
            "'fp32' is faster here"
        )


@functools.cache
def mixed_precision() -> Precision:
    """The format of matrix products for those who ask for 16 bits where these are faster: logged, once, where not."""
    if _has_bf16_units():
        return "bf16"
    _logger.warning(
        "mixed precision: this processor has neither AVX512-BF16 nor AMX and emulates bfloat16; staying with 'fp32'"
    )
    return "fp32"


def _has_bf16_units() -> bool:
    """Whether /proc/cpuinfo names such a unit; True where there is no such file to ask."""
    if not _CPUINFO.exists():
        return True
    flags = re.search(r"^(?:flags|Features)\s*:(.*)$", _CPUINFO.read_text(), re.MULTILINE)
    return flags is None or not _BF16_UNITS.isdisjoint(flags[1].split())
