"""The one progress bar: of commands, of preparation and of training."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

_REFRESH_PER_SECOND = 4  # a redraw takes about a millisecond of the cores that work


class Bar:
    """A bar that is redrawn in place and disappears at the end; nothing is drawn where the console is no terminal.

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
        """Whether the bar is shown."""
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
