"""A progress bar for people."""

from __future__ import annotations

from typing import TYPE_CHECKING

from terarec.train.callback import Callback
from terarec.train.evaluation import Evaluation
from terarec.train.trainer import Trainer

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import TaskID

_REFRESH_PER_SECOND = 4  # a redraw takes about a millisecond of the cores that train


class ProgressBar(Callback):
    """Steps, loss, samples a second and the last AUC, redrawn in place; one line per evaluation stays.

    Args:
        console: where to draw; stderr by default. Where that is no terminal only the evaluations are printed.
    """

    def __init__(self, console: Console | None = None) -> None:
        from rich.console import Console  # here, so that who trains without a bar needs no rich
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self.console = console or Console(stderr=True)
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}"),
            TimeRemainingColumn(),
            console=self.console,
            refresh_per_second=_REFRESH_PER_SECOND,
            transient=True,
            disable=not self.console.is_terminal,
        )
        self._task: TaskID | None = None

    def on_start(self, trainer: Trainer) -> None:
        """Draw the empty bar."""
        self._task = self._bar.add_task("training", total=trainer.total_steps, completed=trainer.step, figures="")
        self._bar.start()

    def on_step(self, trainer: Trainer) -> None:
        """Move on."""
        if self._task is None or self._bar.disable:
            return
        steps_per_second = self._bar.tasks[0].speed or 0.0
        rate = steps_per_second * trainer.spec.batch_size
        self._bar.update(
            self._task,
            completed=trainer.step,
            description=f"epoch {trainer.last_epoch}",
            figures=f"loss {trainer.loss:.4f}  {rate:,.0f} samples/s",
        )

    def on_evaluation(self, trainer: Trainer, evaluation: Evaluation) -> None:
        """Print the figures."""
        self._bar.console.print(
            f"step {trainer.step:,}: AUC {evaluation.auc:.5f}, logloss {evaluation.logloss:.5f} "
            f"({evaluation.rows:,} rows in {evaluation.seconds:.1f} s)",
            highlight=False,
        )

    def on_end(self, trainer: Trainer) -> None:
        """Take the bar away."""
        self._bar.stop()
