# SPDX-License-Identifier: Apache-2.0
"""Number formats of the dense layers' matrix products."""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import torch

Precision = Literal["fp32", "bf16", "fp16"]

CPU = torch.device("cpu")

_logger = logging.getLogger(__name__)
_CPUINFO = Path("/proc/cpuinfo")
_TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_UNITS: Mapping[Precision, set[str]] = {  # flags of x86 and of Arm
    "bf16": {"avx512_bf16", "amx_bf16", "bf16"},
    "fp16": {"avx512_fp16", "amx_fp16", "asimdhp"},
}


def autocast(precision: Precision, device: torch.device = CPU) -> torch.autocast:
    """Return the autocast context of a forward pass on `device`: products in `precision`, disabled for "fp32"."""
    is_narrow = precision != "fp32"
    return torch.autocast(device.type, dtype=_TYPES[precision] if is_narrow else None, enabled=is_narrow)


# Cached, so that a session, a trainer and an exporter of one process log the line once between them.
@functools.cache
def warn_if_slow(precision: Precision, device: torch.device = CPU) -> None:
    """Log, once, if `device` is a processor that multiplies in `precision` slower than in float32."""
    if precision != "fp32" and device.type == "cpu" and not _has_units(precision):
        _logger.warning(
            "precision %r: this processor has no unit for it and emulates it; 'fp32' is faster here", precision
        )


def fast_precisions(device: torch.device) -> list[Precision]:
    """Return the precisions in which `device` multiplies without emulation."""
    if device.type == "cuda":
        # By default torch answers yes for GPUs before Ampere, which emulate it.
        has_bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
        return ["fp32", "bf16", "fp16"] if has_bf16 else ["fp32", "fp16"]
    return ["fp32", *(precision for precision in _UNITS if _has_units(precision))]


def mixed_precision(device: torch.device, *, loss_scale: float = 1.0) -> Precision:
    """Return the format of matrix products when 16 bits are requested.

    On a GPU that is fp16 where the loss is scaled, which fp16's small range needs and bf16's does not, or where the
    GPU has no bf16, and bf16 otherwise. On a processor it is bf16 where that is faster than fp32: logged, once, where
    it is not.
    """
    if device.type == "cpu":
        return _processors_mixed_precision()
    if loss_scale == 1.0 and torch.cuda.is_bf16_supported(including_emulation=False):
        return "bf16"
    return "fp16"


@functools.cache
def _processors_mixed_precision() -> Precision:
    if _has_units("bf16"):
        return "bf16"
    _logger.warning(
        "mixed precision: this processor has neither AVX512-BF16 nor AMX and emulates bfloat16; staying with 'fp32'"
    )
    return "fp32"


def _has_units(precision: Precision) -> bool:
    """Return whether /proc/cpuinfo names a unit for `precision`; True where there is no such file to ask."""
    if not _CPUINFO.exists():
        return True
    # x86 lists its units after "flags", Arm after "Features".
    flags = re.search(r"^(?:flags|Features)\s*:(.*)$", _CPUINFO.read_text(), re.MULTILINE)
    return flags is None or not _UNITS[precision].isdisjoint(flags[1].split())
