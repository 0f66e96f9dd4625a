"""How a figure reads; the end of its name tells the unit (``_bytes``, ``_seconds``, ``_per_second``)."""

from __future__ import annotations

import math

from terarec.spec.quoting import printable

_LABELS = {"auc": "AUC", "highest_auc": "highest AUC", "best_auc": "best reachable AUC"}
_BYTE_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def label(name: str) -> str:
    """``peak_memory_bytes`` -> ``peak memory``."""
    return _LABELS.get(name) or name.removesuffix("_bytes").removesuffix("_seconds").replace("_", " ")


def text(name: str, value: object) -> str:
    """`value` of the figure `name` for a person: units, thousands separators, four digits."""
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if not isinstance(value, int | float):
        return printable(str(value))
    if name == "bytes" or name.endswith("_bytes"):
        return byte_text(value)
    if name == "seconds" or name.endswith("_seconds"):
        return f"{value:,.1f} s"
    if name.endswith("_per_second"):
        return f"{value:,.0f} /s"
    if name == "share" or name.endswith("_share"):
        return f"{100 * value:.2f} %"
    if isinstance(value, int):
        # A port or a seed is a name, not a quantity.
        return str(value) if name in {"port", "seed"} else f"{value:,}"
    return f"{value:.5f}" if 0.001 <= abs(value) < 10 or value == 0 else f"{value:,.4g}"


def byte_text(count: float) -> str:
    """``1610612736`` -> ``1.5 GiB``."""
    power = 0
    while abs(count) >= 1024 and power < len(_BYTE_UNITS) - 1:
        count /= 1024
        power += 1
    return f"{count:,.0f} B" if power == 0 else f"{count:,.1f} {_BYTE_UNITS[power]}"
