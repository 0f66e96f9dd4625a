# SPDX-License-Identifier: Apache-2.0
"""The processor of this machine, by name."""

from __future__ import annotations

import functools
import platform
import re
from pathlib import Path

_CPUINFO = Path("/proc/cpuinfo")


@functools.cache
def processor_name() -> str:
    """Return the name of the processor from the system, or its architecture where the system has none."""
    model = _field("model name")
    return model or platform.processor() or platform.machine()


@functools.cache
def processor_generation() -> str:
    """Return the name with family and model, which distinguish processors of one name, where the system has them."""
    family, model = _field("cpu family"), _field("model")
    return f"{processor_name()} (family {family} model {model})" if family and model else processor_name()


def amd_family() -> int:
    """Return the family of an AMD processor; 0 for others."""
    return int(_field("cpu family") or 0) if _field("vendor_id") == "AuthenticAMD" else 0


def _field(name: str) -> str | None:
    text = _CPUINFO.read_text() if _CPUINFO.is_file() else ""
    match = re.search(rf"^{name}\s*:\s*(.+)$", text, re.MULTILINE)
    return match[1].strip() if match else None
