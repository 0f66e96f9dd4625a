"""Loggers for other programs: TensorBoard and MLflow. Their packages are imported where one is made."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from terarec.errors import ConfigError, MissingDependencyError
from terarec.spec import RunSpec, to_data
from terarec.train.evaluation import Evaluation
from terarec.train.points import LOG_EVERY, Point, PointLogger
from terarec.train.trainer import Trainer

_CURVES = {
    "loss": "train/loss",
    "samples_per_second": "train/samples_per_second",
    "lr": "lr/layers",
    "rows_lr": "lr/tables",
}
"""Entry of a training point -> name of its curve."""

_MOST_PARAMS = 100
"""What MLflow takes in one call."""

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
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise MissingDependencyError("TensorBoard: pip install 'terarec[tensorboard]'") from error
        self._make: Any = SummaryWriter
        self._directory, self._split = directory, split
        self._writer: Any = None

    def on_start(self, trainer: Trainer) -> None:
        """Open a file of events."""
        super().on_start(trainer)
        purge = trainer.step + 1 if trainer.step else None
        self._writer = self._make(log_dir=str(self._directory), purge_step=purge)

    def log_training(self, point: Point) -> None:
        """Write a point of each training curve."""
        for name, curve in _CURVES.items():
            if name in point:
                self._writer.add_scalar(curve, point[name], point["step"])

    def on_evaluation(self, trainer: Trainer, evaluation: Evaluation) -> None:
        """Write a point of each metric."""
        super().on_evaluation(trainer, evaluation)
        for curve, value in evaluation_curves(evaluation, self._split):
            self._writer.add_scalar(curve, value, trainer.step)

    def on_end(self, trainer: Trainer) -> None:
        """Write what is left and close the file."""
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
            raise MissingDependencyError("MLflow: pip install 'terarec[mlflow]'") from error
        if uri.partition(":")[0] == "file" or "://" not in uri:
            # MLflow refuses directories unless this says that they are meant, which who names one does.
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

    def on_start(self, trainer: Trainer) -> None:
        """Begin a run of MLflow with the settings as its parameters."""
        super().on_start(trainer)
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
            raise ConfigError(f"mlflow: {self._uri}: {error}, expected the URI of a tracking server") from error
        self._client = client

    def log_training(self, point: Point) -> None:
        """Send a point of each training curve."""
        self._send({curve: point[name] for name, curve in _CURVES.items() if name in point}, int(point["step"]))

    def on_evaluation(self, trainer: Trainer, evaluation: Evaluation) -> None:
        """Send a point of each metric."""
        super().on_evaluation(trainer, evaluation)
        self._send(dict(evaluation_curves(evaluation, self._split)), trainer.step)

    def on_finish(self, trainer: Trainer) -> None:
        """Remember that the training is whole."""
        self._status = "FINISHED"

    def on_interrupt(self, trainer: Trainer) -> None:
        """Remember that the training was stopped."""
        self._status = "KILLED"

    def on_end(self, trainer: Trainer) -> None:
        """Send what is left and end MLflow's run."""
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
    found = evaluation.results.overall
    for metric, value in found.values.items():
        if math.isfinite(value):
            yield f"{split}/{metric}", value
    if len(found.labels) > 1:
        for label, of_label in found.labels.items():
            for metric, value in of_label.values.items():
                if math.isfinite(value):
                    yield f"{split}/{metric}/{label}", value


def _flat(data: Mapping[str, Any], parent: str = "") -> Iterator[tuple[str, str]]:
    """Dotted path, without characters that MLflow refuses, and text of each setting."""
    for name, value in data.items():
        path = f"{parent}{name}"
        if isinstance(value, Mapping):
            yield from _flat(value, f"{path}.")
        else:
            yield re.sub(r"[^\w. :/-]", "_", path), str(value)
