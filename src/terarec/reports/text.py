"""Numbers as text for readers, and progress bars.

The end of a number's name is its unit: ``_bytes``, ``_seconds``, ``_per_second``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

_LABELS = {
    "auc": "AUC",
    "highest_auc": "highest AUC",
    "best_auc": "best reachable AUC",
    "estimated_bytes": "estimated size",
    "estimated_seconds": "estimated time",
}
_BYTE_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_REFRESH_PER_SECOND = 4  # a redraw takes about a millisecond of the cores that work


def label(name: str) -> str:
    """Return the name of a figure for people: ``peak_memory_bytes`` -> ``peak memory``."""
    return _LABELS.get(name) or name.removesuffix("_bytes").removesuffix("_seconds").replace("_", " ")


def text(name: str, value: object) -> str:
    """Return the figure `name` with units, thousands separators and four digits."""
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if not isinstance(value, int | float):
        from terarec.spec.quoting import printable  # here, so that the list of commands loads no spec

        return printable(str(value))
    if name == "bytes" or name.endswith("_bytes"):
        return byte_text(value)
    if name == "seconds" or name.endswith("_seconds"):
        return f"{value:,.1f} s"
    if name.endswith("_per_second"):
        return f"{value:,.0f} /s"
    if name == "share" or name.endswith("_share"):
        return percent_text(value)
    if isinstance(value, int):
        # A port or a seed is a name, not a quantity.
        return str(value) if name in {"port", "seed"} else f"{value:,}"
    # Metrics such as an AUC differ in late digits; of other numbers four are read.
    return f"{value:.5f}" if 0.001 <= abs(value) < 10 or value == 0 else f"{value:,.4g}"


def byte_text(count: float) -> str:
    """Return a number of bytes in binary units: ``1610612736`` -> ``1.5 GiB``."""
    power = 0
    while abs(count) >= 1024 and power < len(_BYTE_UNITS) - 1:
        count /= 1024
        power += 1
    return f"{count:,.0f} B" if power == 0 else f"{count:,.1f} {_BYTE_UNITS[power]}"


def duration_text(seconds: float) -> str:
    """Return a time in its two largest units: ``3720`` -> ``1 h 02 min``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s" if minutes else f"{seconds:.1f} s"


def percent_text(share: float) -> str:
    """Return a share in percent: ``0.0125`` -> ``1.25 %``."""
    return f"{100 * share:.2f} %"


def number_text(number: float) -> str:
    """Return a number to four digits, without an exponent for common sizes."""
    return f"{number:,.0f}" if 1e4 <= abs(number) < 1e10 else f"{number:.4g}"


def setting_text(value: object) -> str:
    """Return a value of `terarec.spec.to_data` in words; a nested spec is its kind and its fields."""
    if isinstance(value, Mapping):
        words = [f"{name.replace('_', ' ')} {_part(held)}" for name, held in value.items() if name != "kind"]
        return ", ".join([value["kind"], *words] if "kind" in value else words) or "none"
    if isinstance(value, list):
        is_sizes = all(isinstance(item, int) for item in value)
        return ("-" if is_sizes else ", ").join(map(setting_text, value)) or "none"
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _part(value: object) -> str:
    """Return `setting_text` of what is a part of something, so that its commas are its own."""
    words = setting_text(value)
    return f"({words})" if ", " in words or (isinstance(value, Mapping) and value) else words


class Bar:
    """A progress bar, redrawn in place; it disappears at the end, and is not drawn where the console is no terminal.

    Args:
        console: Console to draw on.
        words: Description of the work.
        unit: Unit of the positions, such as "rows".
    """

    def __init__(self, console: Console, words: str, unit: str) -> None:
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.completed:,.0f} of {task.total:,.0f} " + unit),
            TextColumn("{task.fields[remark]}"),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            refresh_per_second=_REFRESH_PER_SECOND,
            disable=not console.is_terminal,
        )
        self._task = self._progress.add_task(words, total=1, remark="", visible=False)

    @property
    def is_drawn(self) -> bool:
        """True where the console is a terminal, which shows the bar."""
        return not self._progress.disable

    @property
    def speed(self) -> float:
        """Units a second; 0 while unknown."""
        return self._progress.tasks[0].speed or 0.0

    def start(self) -> None:
        """Start drawing."""
        self._progress.start()

    def stop(self) -> None:
        """Take the bar away."""
        self._progress.stop()

    def move(self, position: int, total: int, *, words: str | None = None, remark: str = "") -> None:
        """Draw the bar at `position` of `total`, with other words if given and a remark such as the rate."""
        self._progress.update(
            self._task, description=words, completed=position, total=total, remark=remark, visible=True
        )
