# SPDX-License-Identifier: Apache-2.0
"""Callbacks that show a training: points every few steps for TensorBoard and MLflow, and a progress bar."""

from __future__ import annotations

import logging
import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from typing_extensions import override

from terarec.errors import ConfigError, MissingDependencyError
from terarec.metrics.means import Throughput
from terarec.reports.text import Bar, metric_text
from terarec.spec import RunSpec, to_data
from terarec.train.evaluation import Evaluation
from terarec.train.trainer import Callback, Trainer

if TYPE_CHECKING:
    from rich.console import Console


LOG_EVERY = 10
"""Steps between training points: hundreds of points for a run of thousands of steps, at some 10 us a line."""

Point = dict[str, float | int]


class PointLogger(Callback):
    """A callback that calls `log_training` with a point of the training every few steps.

    A training point has ``step``, ``samples``, ``epoch``, ``loss`` (mean over the steps since the last point),
    ``samples_per_second`` (over the same steps, without the time of evaluations and of saving), ``seconds`` (of
    training since the start or resume, evaluations left out), ``lr`` of the layers and ``rows_lr`` of the tables.
    """

    is_for_first_rank = True

    def __init__(self, every: int = LOG_EVERY) -> None:
        self.every = every
        self._throughput = Throughput()
        self._losses: list[Tensor] = []
        self._samples_logged = 0
        self._seconds = 0.0
        self._evaluation_seconds = self._saving_seconds = 0.0

    def log_training(self, point: Point) -> None:
        """Write a training point."""
        raise NotImplementedError

    @override
    def on_start(self, trainer: Trainer) -> None:
        self._samples_logged = trainer.samples
        self._saving_seconds = trainer.saving_seconds
        self._throughput.reset()

    @override
    def on_step(self, trainer: Trainer) -> None:
        if trainer.last_loss is not None:
            self._losses.append(trainer.last_loss)  # on the model's device: a GPU is not waited for
        if trainer.step % self.every == 0:
            self._log(trainer)

    @override
    def on_evaluation(self, trainer: Trainer, evaluation: Evaluation) -> None:
        self._evaluation_seconds += evaluation.seconds

    @override
    def on_end(self, trainer: Trainer) -> None:
        self._log(trainer)

    def _log(self, trainer: Trainer) -> None:
        if not self._losses:
            return
        # One copy for all losses since the last point: each `item` would wait for a GPU.
        losses = torch.stack(self._losses).tolist()
        seconds = self._throughput.seconds - self._evaluation_seconds
        self._seconds += seconds
        # Saving may take longer than the few steps of a last point.
        steps_seconds = max(seconds - (trainer.saving_seconds - self._saving_seconds), 1e-9)
        point: Point = {
            "step": trainer.step,
            "samples": trainer.samples,
            "epoch": trainer.epoch,
            "loss": sum(losses) / len(losses),
            "samples_per_second": (trainer.samples - self._samples_logged) / steps_seconds,
            "seconds": self._seconds,
        }
        for name, optimizer in (("lr", trainer.optimizers.dense), ("rows_lr", trainer.optimizers.rows)):
            if optimizer is not None:
                point[name] = float(optimizer.param_groups[0]["lr"])
        self._losses.clear()
        self._samples_logged = trainer.samples
        self._evaluation_seconds = 0.0
        self._saving_seconds = trainer.saving_seconds
        self._throughput.reset()
        self.log_training(point)


class ProgressBar(Callback):
    """Steps, loss and samples a second, redrawn in place; one line per evaluation stays.

    Args:
        console: Console to draw on; stderr by default. Where it is not a terminal, only evaluations are printed.
    """

    is_for_first_rank = True

    def __init__(self, console: Console | None = None) -> None:
        from rich.console import Console  # imported here, so that training without a bar does not need rich

        self.console = console or Console(stderr=True)
        self._bar = Bar(self.console, "training", "steps")

    @override
    def on_start(self, trainer: Trainer) -> None:
        self._bar.move(trainer.step, trainer.total_steps)
        self._bar.start()

    @override
    def on_step(self, trainer: Trainer) -> None:
        if not self._bar.is_drawn:
            return
        rate = self._bar.speed * trainer.spec.batch_size
        remark = f"loss {trainer.loss:.4f}  {rate:,.0f} samples/s"
        self._bar.move(trainer.step, trainer.total_steps, words=f"epoch {trainer.last_epoch}", remark=remark)

    @override
    def on_evaluation(self, trainer: Trainer, evaluation: Evaluation) -> None:
        values = dict(evaluation.results.overall.values)
        # The one of a label, too, where evaluations are compared by it.
        values.setdefault(trainer.early_stopping.monitor, evaluation.value(trainer.early_stopping.monitor))
        metrics = ", ".join(f"{name} {metric_text(value)}" for name, value in values.items())
        best = ", the best so far" if trainer.early_stopping.best_step == trainer.step else ""
        self.console.print(
            f"step {trainer.step:,}: {metrics}{best} ({evaluation.rows:,} rows in {evaluation.seconds:.1f} s)",
            highlight=False,
        )

    @override
    def on_end(self, trainer: Trainer) -> None:
        self._bar.stop()


_CURVES = {
    "loss": "train/loss",
    "samples_per_second": "train/samples_per_second",
    "lr": "lr/layers",
    "rows_lr": "lr/tables",
}
"""Entry of a training point -> name of its curve."""

_MOST_PARAMS = 100
"""Most parameters of one call of MLflow."""

_logger = logging.getLogger(__name__)


def has_tensorboard() -> bool:
    """Return whether the package of TensorBoard is installed."""
    return find_spec("tensorboard") is not None


class TensorBoardLogger(PointLogger):
    """Writes the curves of a run as events of TensorBoard.

    The curves are ``train/loss``, ``train/samples_per_second``, ``lr/layers``, ``lr/tables``, ``<split>/<metric>``, and
    ``<split>/<metric>/<label>`` with several labels.

    Args:
        directory: Directory of the events; events after the step at which training starts are hidden.
        split: Name of the validation split.
        every: Steps between training points.

    Raises:
        MissingDependencyError: TensorBoard is not installed.
    """

    def __init__(self, directory: Path, split: str, every: int = LOG_EVERY) -> None:
        super().__init__(every)
        # TensorBoard loads TensorFlow where it is installed, unless it finds this name of its own. Not needed here, it
        # takes seconds, and a process in which it was loaded first crashes when it loads Triton.
        sys.modules.setdefault("tensorboard.compat.notf", ModuleType("tensorboard.compat.notf"))
        try:
            # Here and not in `on_start`: a missing package is an error before the training begins.
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise MissingDependencyError(
                "TensorBoard", "not installed, expected pip install 'terarec[tensorboard]'"
            ) from error
        self._make: Any = SummaryWriter
        self._directory, self._split = directory, split
        self._writer: Any = None

    @override
    def on_start(self, trainer: Trainer) -> None:
        super().on_start(trainer)
        # A killed run may have written events after its checkpoint; without a step there are none to hide.
        purge = trainer.step + 1 if trainer.step else None
        self._writer = self._make(log_dir=str(self._directory), purge_step=purge)

    @override
    def log_training(self, point: Point) -> None:
        for name, curve in _CURVES.items():
            if name in point:
                self._writer.add_scalar(curve, point[name], point["step"])

    @override
    def on_evaluation(self, trainer: Trainer, evaluation: Evaluation) -> None:
        super().on_evaluation(trainer, evaluation)
        for curve, value in evaluation_curves(evaluation, self._split):
            self._writer.add_scalar(curve, value, trainer.step)

    @override
    def on_end(self, trainer: Trainer) -> None:
        if self._writer is not None:
            super().on_end(trainer)
            self._writer.close()
            self._writer = None


class MLflowLogger(PointLogger):
    """Writes settings and curves of a run to MLflow: a server, or a directory of this machine.

    The names of the curves are those of `TensorBoardLogger`, with "_at_" for the "@" of a metric. A server that fails
    while the training runs is a warning, and nothing more is sent to it.

    Args:
        uri: Tracking URI, such as "http://host:5000", "file:///path" or a path.
        spec: The run, whose settings are logged as parameters.
        name: Name of MLflow's run.
        experiment: Name of MLflow's experiment.
        every: Steps between training points.

    Raises:
        MissingDependencyError: MLflow is not installed.
    """

    def __init__(
        self, uri: str, spec: RunSpec, name: str, *, experiment: str = "terarec", every: int = LOG_EVERY
    ) -> None:
        super().__init__(every)
        try:
            import mlflow
        except ImportError as error:
            raise MissingDependencyError("MLflow", "not installed, expected pip install 'terarec[mlflow]'") from error
        if uri.partition(":")[0] == "file" or "://" not in uri:
            # MLflow rejects directories unless this variable allows them; naming one is that permission.
            import mlflow.environment_variables as variables

            allowed = getattr(variables, "MLFLOW_ALLOW_FILE_STORE", None)
            if allowed is not None and not allowed.is_set():
                allowed.set(True)
        self._mlflow: Any = mlflow
        self._uri, self._spec, self._name, self._experiment = uri, spec, name, experiment
        self._split = spec.training.eval_split or ""
        self._client: Any = None
        self._run = ""
        self._status = "FAILED"

    @override
    def on_start(self, trainer: Trainer) -> None:
        super().on_start(trainer)
        # Until `on_finish` or `on_interrupt` says otherwise.
        self._status = "FAILED"
        try:
            client = self._mlflow.MlflowClient(tracking_uri=self._uri)
            known = client.get_experiment_by_name(self._experiment)
            experiment = client.create_experiment(self._experiment) if known is None else known.experiment_id
            tags = {"first_step": str(trainer.step), "device": str(trainer.device)}
            self._run = client.create_run(experiment, run_name=self._name, tags=tags).info.run_id
            params = [self._mlflow.entities.Param(name, text) for name, text in _flat(to_data(self._spec))]
            for start in range(0, len(params), _MOST_PARAMS):
                client.log_batch(self._run, params=params[start : start + _MOST_PARAMS])
        except Exception as error:  # of the network, the store or MLflow itself
            raise ConfigError("mlflow", f"{self._uri}: {error}, expected the URI of a tracking server") from error
        # Set last: without it nothing is sent, also by the `on_end` that follows an error.
        self._client = client

    @override
    def log_training(self, point: Point) -> None:
        self._send({curve: point[name] for name, curve in _CURVES.items() if name in point}, int(point["step"]))

    @override
    def on_evaluation(self, trainer: Trainer, evaluation: Evaluation) -> None:
        super().on_evaluation(trainer, evaluation)
        self._send(dict(evaluation_curves(evaluation, self._split)), trainer.step)

    @override
    def on_finish(self, trainer: Trainer) -> None:
        self._status = "FINISHED"

    @override
    def on_interrupt(self, trainer: Trainer) -> None:
        self._status = "KILLED"

    @override
    def on_end(self, trainer: Trainer) -> None:
        super().on_end(trainer)
        if self._client is not None:
            self._try(lambda: self._client.set_terminated(self._run, status=self._status))
            self._client = None

    def _send(self, values: Mapping[str, float], step: int) -> None:
        if self._client is None:
            return
        now = self._mlflow.utils.time.get_current_time_millis()
        metrics = [
            self._mlflow.entities.Metric(name.replace("@", "_at_"), value, now, step) for name, value in values.items()
        ]
        self._try(lambda: self._client.log_batch(self._run, metrics=metrics))

    def _try(self, send: Callable[[], object]) -> None:
        try:
            send()
        except Exception as error:  # a training of hours is worth more than its curves elsewhere
            _logger.warning("mlflow: %s: %s; nothing more is sent there", self._uri, error)
            self._client = None


def evaluation_curves(evaluation: Evaluation, split: str) -> Iterator[tuple[str, float]]:
    """Yield the name of a curve and its value for each metric, and with several labels for each metric of a label."""
    results = evaluation.results.overall
    for metric, value in results.values.items():
        if math.isfinite(value):
            yield f"{split}/{metric}", value
    if len(results.labels) > 1:
        for label, of_label in results.labels.items():
            for metric, value in of_label.values.items():
                if math.isfinite(value):
                    yield f"{split}/{metric}/{label}", value


def _flat(data: Mapping[str, Any], parent: str = "") -> Iterator[tuple[str, str]]:
    """Return each setting as its dotted path, without characters that MLflow rejects, and its text."""
    for name, value in data.items():
        path = f"{parent}{name}"
        if isinstance(value, Mapping):
            yield from _flat(value, f"{path}.")
        else:
            yield re.sub(r"[^\w. :/-]", "_", path), str(value)
