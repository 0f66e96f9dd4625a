# SPDX-License-Identifier: Apache-2.0
"""Evaluation of a model on a stream of batches: scores and metrics."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, NamedTuple

import pyarrow as pa
import torch
from torch import Tensor, nn

from terarec.batch import Batch, Jagged, column, slice_samples
from terarec.closer import stream
from terarec.dist.ranks import Ranks
from terarec.metrics import MetricSet, find_metric
from terarec.metrics.means import Throughput
from terarec.metrics.metric_set import Results
from terarec.metrics.samples import NamesOfIds
from terarec.models.contract import device_of, logits_of, training_loss
from terarec.nn.objectives import BinaryObjective, Objective, untrained_labels
from terarec.nn.precision import Precision, autocast
from terarec.reports.text import metric_text
from terarec.spec import DatasetSpec, TrainingSpec
from terarec.spec.codec import finite_data
from terarec.spec.dataset import MISSING_KEY
from terarec.train.devices import copied_ahead, share_of_reader
from terarec.train.ranks_step import loss_share

_logger = logging.getLogger(__name__)


def described_by(batches: object) -> DatasetSpec | None:
    """Return the columns of batches that a reader yields; None for those of others, such as batches in a list."""
    spec = getattr(batches, "spec", None)
    return spec if isinstance(spec, DatasetSpec) else None


def known_values(batch: Batch, name: str, dataset: DatasetSpec | None) -> pa.Array:
    """Return the values of a column as `terarec.batch.column` finds it, the keys of missing values as null.

    Args:
        batch: The batch.
        name: Name of the column.
        dataset: What says which key that is; None for `MISSING_KEY`.

    Raises:
        ConfigError: See `column`.
    """
    values = column(batch, name)
    if not isinstance(values, Tensor):
        return values
    keys = values.cpu().numpy()
    return pa.array(keys, mask=keys == (MISSING_KEY if dataset is None else dataset.missing_key(name)))


class BatchOutputs(NamedTuple):
    """A batch and the model's outputs for it.

    Attributes:
        batch: The batch, on the CPU.
        logits: Logits float32[B, C], on the CPU.
        loss: Mean loss of the batch; None where it was not requested.
    """

    batch: Batch
    logits: Tensor
    loss: float | None


@stream
def score(
    model: nn.Module,
    batches: Iterable[Batch],
    precision: Precision = "fp32",
    *,
    objective: Objective | None = None,
    ranks: Ranks | None = None,
    columns: Sequence[str] = (),
) -> Generator[BatchOutputs, None, None]:
    """Yield the logits of each of `batches`, with the model in evaluation mode.

    The mode that the model had before is restored when the stream ends or is closed.

    Args:
        model: A model as `terarec.models.contract` describes it.
        batches: The batches.
        precision: Precision of the dense layers' matrix products.
        objective: Loss of models that have none of their own; None for no losses.
        ranks: Processes that score together: each the same batches, of which it scores its share, or its own samples of
            them, if a reader takes a share; None for this alone.
        columns: Columns that the yielded batches have where they are joined from the samples of ranks, as
            `known_values`.

    Raises:
        ConfigError: A model that gives no logits, or a graph with a label that no loss reads.
    """
    was_training, device, described = model.training, device_of(model), described_by(batches)
    is_share = share_of_reader(batches) is not None
    model.eval()
    try:
        # The model reads the copy on the device, metrics the batch in host memory.
        with closing(copied_ahead(((batch, batch) for batch in batches), device)) as copies:
            for there, batch in copies:
                if ranks is None or ranks.size == 1:
                    yield BatchOutputs(batch, *_forward(model, there, precision, objective))
                elif is_share:
                    outputs = BatchOutputs(batch, *_forward(model, there, precision, objective))
                    arrays = {name: known_values(batch, name, described) for name in columns}
                    yield _of_all(ranks, outputs, model, objective, arrays)
                else:
                    yield BatchOutputs(batch, *_forward_on_ranks(model, there, precision, objective, ranks))
    finally:
        model.train(was_training)


@torch.no_grad()
def _forward(
    model: nn.Module, batch: Batch, precision: Precision, objective: Objective | None
) -> tuple[Tensor, float | None]:
    """Return the logits, on the CPU, and the loss if there is an `objective`."""
    with autocast(precision, batch.label.device):
        output = model(batch)
        loss = None if objective is None else float(training_loss(model, output, batch, objective))
    # Metrics compute in NumPy, which has no bfloat16.
    return logits_of(model, output).float().cpu(), loss


def _forward_on_ranks(
    model: nn.Module, batch: Batch, precision: Precision, objective: Objective | None, ranks: Ranks
) -> tuple[Tensor, float | None]:
    """Return the logits of all samples and their mean loss; each rank computes those of its share."""
    total, part = batch.batch_size, ranks.share(batch.batch_size)
    logits, loss = _forward(model, slice_samples(batch, part.start, part.stop), precision, objective)
    # All ranks take part in the collectives, those without a sample of the batch, too.
    joined = ranks.joined("scores of an evaluation", logits, total)
    if loss is None or objective is None:
        return joined, None
    own = loss * loss_share(model, objective, part.stop - part.start, total) if part.stop > part.start else 0.0
    return joined, float(ranks.all_reduce_("loss of an evaluation", torch.tensor([own], dtype=torch.float64)))


def _of_all(
    ranks: Ranks, own: BatchOutputs, model: nn.Module, objective: Objective | None, columns: Mapping[str, pa.Array]
) -> BatchOutputs:
    """Return the samples of all ranks with their logits, in the order of the ranks, and the mean loss of all.

    The batch has labels, weights and `columns` alone.
    """
    batch, size = own.batch, own.batch.batch_size
    # As columns of one tensor, so that one collective sends them all.
    parts = [own.logits, batch.label.float(), *([] if batch.weight is None else [batch.weight.float()[:, None]])]
    rows = torch.cat(ranks.gather_rows("samples of an evaluation", torch.cat(parts, dim=1)))
    logits, label, *weight = torch.split(rows, [part.shape[1] for part in parts], dim=1)
    metadata: dict[str, pa.Array] = {}
    if columns:
        rows_of_rank = pa.record_batch(columns)
        # Arrow columns as bytes, since collectives exchange tensors; the stream keeps their types.
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, rows_of_rank.schema) as out:
            out.write_batch(rows_of_rank)
        content = torch.frombuffer(bytearray(sink.getvalue()), dtype=torch.uint8)
        tables = [
            pa.ipc.open_stream(part.numpy()).read_all()
            for part in ranks.gather_rows("columns of an evaluation", content)
        ]
        metadata = {name: pa.concat_tables(tables)[name].combine_chunks() for name in columns}
    joined = Batch(
        dense=rows.new_empty(len(rows), 0),
        label=label,
        sparse=Jagged(names=(), keys=torch.empty(0, dtype=torch.int64), offsets=torch.zeros(1, dtype=torch.int64)),
        weight=weight[0][:, 0] if weight else None,
        metadata=metadata,
    )
    if own.loss is None or objective is None:
        return BatchOutputs(joined, logits, None)
    # The mean loss of no samples would be NaN, and with it the sum of all ranks.
    part = own.loss * loss_share(model, objective, size, len(rows)) if size else 0.0
    total = ranks.all_reduce_("loss of an evaluation", torch.tensor([part], dtype=torch.float64))
    return BatchOutputs(joined, logits, float(total))


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """Results of an `Evaluator`.

    Attributes:
        results: The metrics, per label and per slice where there are several.
        rows: Samples scored.
        seconds: Wall-clock time, reading included.
        samples_per_second: Rows / seconds.
        untrained: Labels of weight 0, which means over the labels leave out.
    """

    results: Results
    rows: int
    seconds: float
    samples_per_second: float
    untrained: tuple[str, ...] = ()

    def __str__(self) -> str:
        """Return the metrics and the speed in one line, such as "auc=0.78031, rows=1000, ..."."""
        values = [f"{name}={metric_text(value)}" for name, value in self.results.overall.values.items()]
        return ", ".join([*values, f"rows={self.rows}", f"samples_per_second={self.samples_per_second:,.0f}"])

    def value(self, metric: str) -> float:
        """Return a metric, or that of a label (``auc/click``); NaN where it is undefined or was not computed."""
        return self.results.value(metric)

    @property
    def auc(self) -> float:
        """Area under the ROC curve, the mean over labels; NaN if a label has one class only."""
        return self.value("auc")

    @property
    def logloss(self) -> float:
        """Mean cross entropy in nats; NaN without samples."""
        return self.value("logloss")

    def to_json(self) -> dict[str, Any]:
        """Return all values as JSON data, None for NaN.

        "labels" and "slices" are there only where there are several, "untrained_labels" where there are some, and
        "calibration" where scores are probabilities.
        """
        content = self.results.to_json()
        data: dict[str, Any] = {
            **finite_data(self.results.overall.values),
            "rows": self.rows,
            "seconds": self.seconds,
            "samples_per_second": self.samples_per_second,
        }
        if len(self.results.overall.labels) > 1:
            data["labels"] = content["labels"]
        if self.untrained:
            data["untrained_labels"] = list(self.untrained)
        curves = {name: label.calibration for name, label in self.results.overall.labels.items()}
        calibration = {name: curve.to_json() for name, curve in curves.items() if curve is not None}
        if calibration:
            data["calibration"] = calibration
        if self.results.slices:
            data["slices"] = content["slices"]
        return data


class Evaluator:
    """Computes metrics of a model over a stream of batches; names each metric that has no value once, as a warning.

    Attributes:
        metrics: Names of the metrics.
        untrained: Labels of weight 0, which means over the labels leave out.
        monitors: Names by which evaluations can be compared: the metrics, and ``metric/LABEL`` for each label.

    Args:
        objective: Loss and scores of the model; binary cross entropy by default.
        metrics: Names of the metrics; empty for the objective's.
        labels: Names of the labels; numbers by default.
        group: Column by which "gauc" and ranking metrics group samples.
        slices: Columns for whose values metrics are computed, too.
        precision: Precision of the dense layers' matrix products.
        ranks: Processes that evaluate together and all find the metrics of all samples; None for this alone.
        names: Names of the ids in slice columns; None to report the ids.

    A label of weight 0 in the objective is not trained, and left out of means over the labels.
    """

    def __init__(
        self,
        objective: Objective | None = None,
        *,
        metrics: Sequence[str] = (),
        labels: Sequence[str] = (),
        group: str | None = None,
        slices: Sequence[str] = (),
        precision: Precision = "fp32",
        ranks: Ranks | None = None,
        names: NamesOfIds | None = None,
    ) -> None:
        self._ranks, self._names = ranks, names
        self._objective: Objective = objective or BinaryObjective()
        self.metrics = tuple(metrics) or self._objective.default_metrics
        self._labels, self._group, self._slices, self._precision = tuple(labels), group, tuple(slices), precision
        self.untrained = untrained_labels(self._objective, self._labels)
        # The mean loss of a batch belongs to no label.
        of_labels = [metric for metric in self.metrics if find_metric(metric).reads != "loss"]
        self.monitors = (*self.metrics, *(f"{metric}/{label}" for label in self._labels for metric in of_labels))
        self._undefined: set[str] = set()
        # Invalid settings raise here, before the first evaluation.
        self._reads_loss = "loss" in self._new_set(1).reads

    @classmethod
    def of(
        cls,
        training: TrainingSpec,
        objective: Objective | None,
        labels: Sequence[str],
        *,
        ranks: Ranks | None = None,
        names: NamesOfIds | None = None,
    ) -> Evaluator:
        """Create the evaluator of a training's settings.

        Args:
            training: Metrics, group, slices and precision.
            objective: Loss and scores of the model; None for binary cross entropy.
            labels: Names of the labels; numbers for none.
            ranks: Processes that evaluate together; None for this alone.
            names: Names of the ids in slice columns; None to report the ids.
        """
        return cls(
            objective,
            metrics=training.metrics,
            labels=labels,
            group=training.group,
            slices=training.slices,
            precision=training.precision,
            ranks=ranks,
            names=names,
        )

    def evaluate(
        self, model: nn.Module, batches: Iterable[Batch], *, progress: Callable[[int], None] | None = None
    ) -> Evaluation:
        """Score `batches` with `model` in evaluation mode, where its parameters are.

        Args:
            model: A model as `terarec.models.contract` describes it.
            batches: The batches, such as a `terarec.data.Reader`.
            progress: Function called after every batch with the samples scored so far; what it raises ends the
                evaluation.

        Raises:
            ConfigError: A logit that is NaN, a label outside what a metric takes, a model that gives no logits, or a
                column that the batches do not hold.
        """
        metrics: MetricSet | None = None
        # By attributes: a model whose own loss only orders samples says so.
        is_calibrated = getattr(self._objective, "gives_probabilities", False) and getattr(
            model, "gives_probabilities", True
        )
        to_calibrated = getattr(self._objective, "calibrated_logits", None)
        throughput, described = Throughput(), described_by(batches)
        objective = self._objective if self._reads_loss else None
        # Closed at once where `progress` raises: the model's mode must not wait for the garbage collector.
        columns = self._new_set(1).columns
        scored = score(model, batches, self._precision, objective=objective, ranks=self._ranks, columns=columns)
        with closing(scored):
            for batch, logits, loss in scored:
                # The number of labels is known from the first batch only.
                if metrics is None:
                    metrics = self._new_set(batch.label.shape[1], calibration=is_calibrated)
                metrics.update(
                    labels=batch.label,
                    logits=logits if to_calibrated is None else to_calibrated(logits),
                    scores=self._objective.scores(logits) if "scores" in metrics.reads else None,
                    weights=batch.weight,
                    columns={name: known_values(batch, name, described) for name in metrics.columns},
                    loss=loss,
                )
                throughput.update(batch.batch_size)
                if progress is not None:
                    progress(throughput.samples)
        if metrics is None:
            metrics = self._new_set(1)
        results = metrics.compute()
        self._warn_of_undefined(results)
        seconds = throughput.seconds
        return Evaluation(
            results=results,
            rows=throughput.samples,
            seconds=seconds,
            samples_per_second=throughput.samples / seconds,
            untrained=self.untrained,
        )

    def _warn_of_undefined(self, results: Results) -> None:
        if self._ranks is not None and not self._ranks.is_first:
            return
        by_reason: dict[str, list[str]] = {}
        for name, reason in results.undefined().items():
            if name not in self._undefined:
                self._undefined.add(name)
                by_reason.setdefault(reason, []).append(name)
        for reason, names in by_reason.items():
            _logger.warning("undefined in an evaluation, neither better nor worse: %s (%s)", ", ".join(names), reason)

    def _new_set(self, num_labels: int, *, calibration: bool = False) -> MetricSet:
        labels = self._labels or tuple(map(str, range(num_labels)))
        return MetricSet(
            self.metrics,
            labels,
            group=self._group,
            slices=self._slices,
            names=self._names,
            untrained=self.untrained,
            calibration=calibration,
        )


def evaluate(model: nn.Module, batches: Iterable[Batch], *, precision: Precision = "fp32") -> Evaluation:
    """Compute AUC and logloss of a model of binary labels; `Evaluator` computes other metrics, too."""
    return Evaluator(precision=precision).evaluate(model, batches)
