# SPDX-License-Identifier: Apache-2.0
"""Sets of metrics by name over the batches of an evaluation: overall, by label and by slice."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from terarec.errors import ConfigError
from terarec.metrics.calibration import Calibration, CalibrationCurve
from terarec.metrics.columns import FloatColumns, Integers, Values, as_columns, as_weights, mean_over_labels
from terarec.metrics.means import AverageLoss
from terarec.metrics.registry import Reads, find_metric, monitored_metric
from terarec.metrics.samples import ColumnValues, NamesOfIds, PartedSamples, SampleStore, column_array
from terarec.spec.codec import finite_data

JsonValue = None | bool | int | float | str | list["JsonValue"] | dict[str, "JsonValue"]


@dataclass(frozen=True, kw_only=True, slots=True)
class LabelValues:
    """The metrics of one label.

    Attributes:
        rows: Samples whose label is known.
        values: Metric -> value; NaN where it is undefined.
        calibration: Curve of its scores; None where it was not requested.
    """

    rows: int
    values: dict[str, float]
    calibration: CalibrationCurve | None = None

    def to_json(self) -> dict[str, JsonValue]:
        """Return the same as JSON values; None for NaN and infinity."""
        return {"rows": self.rows, "metrics": finite_data(self.values)}


@dataclass(frozen=True, kw_only=True, slots=True)
class MetricValues:
    """The metrics of some samples.

    Attributes:
        rows: Samples with a weight above 0.
        values: Metric -> mean over the labels but untrained ones; NaN where it is undefined for one of them.
        labels: Label -> its metrics; ``average_loss`` has no value for a label.
    """

    rows: int
    values: dict[str, float]
    labels: dict[str, LabelValues]

    def to_json(self) -> dict[str, JsonValue]:
        """Return the same as JSON values; None for NaN and infinity."""
        return {
            "rows": self.rows,
            "metrics": finite_data(self.values),
            "labels": {name: label.to_json() for name, label in self.labels.items()},
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class SliceValues:
    """The metrics of the samples that have one value in a column.

    Attributes:
        value: Value of the column; None for a missing value.
        metrics: Metrics of the samples.
    """

    value: str | int | float | bool | None
    metrics: MetricValues

    def to_json(self) -> dict[str, JsonValue]:
        """Return the same as JSON values; None for NaN and infinity."""
        return {"value": self.value, **self.metrics.to_json()}


@dataclass(frozen=True, kw_only=True, slots=True)
class SliceResults:
    """The metrics by the values of one column.

    Attributes:
        values: The most frequent values by falling number of samples, equal ones by value, a missing one last.
        other: Metrics of all samples with other values; None if there are none.
        other_values: Number of other values.
    """

    values: tuple[SliceValues, ...]
    other: MetricValues | None
    other_values: int

    def to_json(self) -> dict[str, JsonValue]:
        """Return the same as JSON values; None for NaN and infinity."""
        values: list[JsonValue] = [value.to_json() for value in self.values]
        other = None if self.other is None else {"distinct_values": self.other_values, **self.other.to_json()}
        return {"values": values, "other": other}


@dataclass(frozen=True, kw_only=True, slots=True)
class Results:
    """Results of `MetricSet.compute`.

    Attributes:
        overall: Metrics of all samples.
        slices: Column -> metrics by its values.
    """

    overall: MetricValues
    slices: dict[str, SliceResults]

    def __getitem__(self, metric: str) -> float:
        """Return the overall value of `metric`."""
        return self.overall.values[metric]

    def value(self, name: str) -> float:
        """Return the value of a metric, or of ``metric/LABEL``; NaN where it is undefined or was not computed."""
        metric, _, label = name.partition("/")
        of = self.overall.labels.get(label) if label else self.overall
        return math.nan if of is None else of.values.get(metric, math.nan)

    def named_values(self) -> dict[str, float]:
        """Return all values but those of slices: each metric and, with several labels, each ``metric/LABEL``."""
        labels = self.overall.labels if len(self.overall.labels) > 1 else {}
        by_label = {f"{metric}/{label}": value for label, of in labels.items() for metric, value in of.values.items()}
        return {**self.overall.values, **by_label}

    def undefined(self) -> dict[str, str]:
        """Return where metrics are undefined (NaN): ``auc``, ``auc/LABEL`` or ``auc by COLUMN`` -> the reason."""
        reasons = {
            name: f"needs {monitored_metric(name).needs}"
            for name, value in self.named_values().items()
            if math.isnan(value)
        }
        for column, of_column in self.slices.items():
            slices = [of_value.metrics.values for of_value in of_column.values]
            for metric in self.overall.values:
                count = sum(math.isnan(values[metric]) for values in slices if metric in values)
                if count:
                    reasons[f"{metric} by {column}"] = (
                        f"needs {find_metric(metric).needs}, which {count} of {len(slices)} slices lack"
                    )
        return reasons

    def to_json(self) -> dict[str, JsonValue]:
        """Return the same as JSON values; None for NaN and infinity."""
        return {
            **self.overall.to_json(),
            "slices": {name: slice_results.to_json() for name, slice_results in self.slices.items()},
        }


MAX_SLICES = 1000
"""Values of a column that are reported; the samples with other values are taken together."""


class MetricSet:
    """Metrics by name over the batches of an evaluation.

    A sample whose label is NaN does not count for that label; one with weight 0 does not count at all. Without slices
    and groups the metrics are streamed; otherwise every sample is kept, once (`SampleStore`), until `compute`.

    Args:
        metrics: Names of metrics, such as ``auc`` or ``ndcg@10`` (`metric_names`).
        labels: Names of the labels.
        slices: Columns for whose values the metrics are reported, too.
        group: Column that says which samples belong together (a user, a query); for the metrics that need groups.
        max_slices: Values of a slice column to report, the most frequent ones.
        calibration: Whether `compute` has the calibration curve of each label, whose scores are probabilities.
        names: Names of the ids in slice columns; None to report the ids.
        untrained: Labels that means over the labels leave out, since no model was trained for them.

    Raises:
        ConfigError: An unknown metric or one that occurs twice, a metric that needs groups without `group`, no label,
            or slices for which there is no metric.

    Example:
        >>> metrics = MetricSet(["auc", "logloss"], ["click"])
        >>> metrics.update(logits=np.array([[0.0], [1.0]]), labels=np.array([[0.0], [1.0]]))
        >>> metrics.compute()["auc"]
        1.0
    """

    def __init__(
        self,
        metrics: Sequence[str],
        labels: Sequence[str],
        *,
        slices: Sequence[str] = (),
        group: str | None = None,
        max_slices: int = MAX_SLICES,
        calibration: bool = False,
        names: NamesOfIds | None = None,
        untrained: Sequence[str] = (),
    ) -> None:
        for what, values in (("metrics", metrics), ("labels", labels), ("slices", slices)):
            repeated = [value for number, value in enumerate(values) if value in values[:number]]
            if repeated:
                raise ConfigError(what, f"{repeated[0]!r} occurs twice, expected distinct names")
        if not labels:
            raise ConfigError("labels", "got none, expected at least one")
        if max_slices < 1:
            raise ConfigError("max_slices", f"got {max_slices}, expected at least 1")
        self._metrics = tuple(find_metric(name) for name in metrics)
        grouped = [metric.name for metric in self._metrics if metric.needs_group]
        if grouped and group is None:
            raise ConfigError(f"metric {grouped[0]!r}", "got no group column, expected one, such as the user's id")
        self._labels, self._slices, self._max_slices = tuple(labels), tuple(slices), max_slices
        self._trained = tuple(label for label in labels if label not in untrained)
        self._group = group if grouped else None
        self._names = names
        self._calibration = Calibration() if calibration else None
        self.reset()

    @property
    def reads(self) -> frozenset[Reads]:
        """Inputs that `update` needs: "logits", "scores" and "loss" where a metric reads them."""
        of_curves: frozenset[Reads] = frozenset() if self._calibration is None else frozenset(["scores"])
        return of_curves.union(metric.reads for metric in self._metrics)

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that `update` needs."""
        group = () if self._group is None or self._group in self._slices else (self._group,)
        return (*self._slices, *group)

    def reset(self) -> None:
        """Remove all batches."""
        keeps_samples = bool(self.columns)
        self._store = SampleStore(self.columns) if keeps_samples else None
        # A metric by slice or group needs the samples; a stream would keep those of AUC a second time.
        self._streams = {
            metric.name: metric.streaming()
            for metric in self._metrics
            if metric.streaming is not None and not keeps_samples
        }
        self._loss = AverageLoss()
        if self._calibration is not None:
            self._calibration.reset()
        self._rows = 0
        self._label_rows = np.zeros(len(self._labels), np.int64)

    def update(
        self,
        *,
        labels: Values,
        logits: Values | None = None,
        scores: Values | None = None,
        weights: Values | None = None,
        columns: Mapping[str, ColumnValues] | None = None,
        loss: float | Values | None = None,
    ) -> None:
        """Add a batch of B samples.

        Args:
            labels: Labels [B, L], or [B] for one label; NaN for unknown ones.
            logits: Logits [B, L], or [B, C] for one label whose values are the numbers of C classes.
            scores: Probabilities or values, of the shape of `logits`.
            weights: Weights [B]; None for ones.
            columns: Column -> its values [B]: at least those that `columns` names.
            loss: Mean loss of the batch.

        Raises:
            ConfigError: An input that `reads` or `columns` names is missing, NaN among logits or scores, a label or
                weight that a metric does not accept, or shapes that do not match.
        """
        inputs: dict[Reads, FloatColumns] = {}
        truth: FloatColumns | None = None
        by_name: dict[Reads, Values | None] = {"logits": logits, "scores": scores}
        for name, values in by_name.items():
            if name in self.reads:
                inputs[name], truth = as_columns(
                    "MetricSet", _predictions(name, values), labels if truth is None else truth, allow_classes=True
                )
        if "loss" in self.reads:
            if loss is None:
                raise ConfigError("MetricSet.update", "got no loss, expected the mean loss of the batch")
            self._loss.update(float(loss))
        if truth is None:
            return
        if truth.shape[1] != len(self._labels):
            expected = f"{len(self._labels)}: {', '.join(self._labels)}"
            raise ConfigError("MetricSet.update", f"got {truth.shape[1]} labels, expected {expected}")
        factors = as_weights("MetricSet", weights, len(truth))
        arrays = {name: column_array(name, _column(name, columns), len(truth)) for name in self.columns}
        if factors is not None and not factors.all():
            # Left out here, as a sample of weight 0 would still take a rank among the others of its group.
            counts = factors > 0
            inputs = {name: values[counts] for name, values in inputs.items()}
            truth, factors = truth[counts], factors[counts]
            arrays = {name: array.filter(pa.array(counts)) for name, array in arrays.items()}
        self._take(inputs, truth, factors, arrays)

    def compute(self) -> Results:
        """Return the metrics of all samples since the last `reset`, by label and by slice."""
        overall, slices = self._streamed(), {}
        if self._store is not None and self._rows:
            group = None if self._group is None else self._store.column(self._group)[0]
            overall = self._by_part(np.zeros(self._rows, np.int64), 1, group)[0]
            for name in self._slices:
                parted = Slices(*self._store.column(name), self._max_slices)
                if self._names is not None:
                    parted.rename(name, self._names)
                slices[name] = parted.results(self._by_part(parted.part, parted.parts, group))
        # The loss of a batch belongs to no label and to no slice.
        loss = {metric.name: self._loss.compute() for metric in self._metrics if metric.reads == "loss"}
        values = overall.values | loss
        in_order = {metric.name: values[metric.name] for metric in self._metrics}
        curves = () if self._calibration is None else self._calibration.curves()
        # Before the first update there are no curves.
        labels = overall.labels | {
            name: replace(overall.labels[name], calibration=curve)
            for name, curve in zip(self._labels, curves, strict=False)
        }
        return Results(overall=replace(overall, values=in_order, labels=labels), slices=slices)

    def _take(
        self,
        inputs: Mapping[Reads, FloatColumns],
        labels: FloatColumns,
        weights: FloatColumns | None,
        columns: Mapping[str, pa.Array],
    ) -> None:
        if self._store is None:
            for metric in self._metrics:
                if metric.name in self._streams:
                    self._streams[metric.name].update(inputs[metric.reads], labels, weights)
        else:
            for metric in self._metrics:
                if metric.check is not None:
                    metric.check(inputs[metric.reads], labels)
            self._store.add(inputs.get("logits"), inputs.get("scores"), labels, weights, columns)
        # After the metrics, whose errors name what rejects a label.
        if self._calibration is not None:
            self._calibration.update(inputs["scores"], labels, weights)
        self._rows += len(labels)
        self._label_rows += (~np.isnan(labels)).sum(axis=0)

    def _streamed(self) -> MetricValues:
        """Return the metrics of the streams; NaN for streams without samples."""
        values: list[dict[str, float]] = [{} for _ in self._labels]
        for name, stream in self._streams.items():
            # Before the first update a stream has no labels.
            for of_label, value in zip(values, stream.per_label(), strict=False):
                of_label[name] = value
        return self._values(self._rows, self._label_rows, values)

    def _by_part(self, part: Integers, parts: int, group: Integers | None) -> list[MetricValues]:
        """Return the metrics of each part of the samples."""
        assert self._store is not None
        computed = {metric.name: metric.by_part for metric in self._metrics if metric.by_part is not None}
        values: list[list[dict[str, float]]] = [[{} for _ in self._labels] for _ in range(parts)]
        label_rows = np.zeros((len(self._labels), parts), np.int64)
        for label in range(len(self._labels)):
            samples, known = self._store.samples(label, group)
            parted = PartedSamples(samples, part[known], parts)
            label_rows[label] = np.bincount(parted.part, minlength=parts)
            for name, by_part in computed.items():
                for number, value in enumerate(by_part(parted).tolist()):
                    values[number][label][name] = value
        rows = np.bincount(part, minlength=parts)
        return [self._values(int(rows[number]), label_rows[:, number], values[number]) for number in range(parts)]

    def _values(self, rows: int, label_rows: Integers, values: Sequence[Mapping[str, float]]) -> MetricValues:
        """Return the metrics of some samples from those of each label."""
        names = [metric.name for metric in self._metrics if metric.reads != "loss"]
        labels = {
            label: LabelValues(rows=int(count), values={name: of_label.get(name, math.nan) for name in names})
            for label, count, of_label in zip(self._labels, label_rows, values, strict=True)
        }
        means = {name: mean_over_labels([labels[label].values[name] for label in self._trained]) for name in names}
        return MetricValues(rows=rows, values=means, labels=labels)


def _predictions(name: str, values: Values | None) -> Values:
    if values is None:
        raise ConfigError("MetricSet.update", f"got no {name}, expected {name}, which a metric reads")
    return values


def _column(name: str, columns: Mapping[str, ColumnValues] | None) -> ColumnValues:
    if columns is None or name not in columns:
        got = ", ".join(columns or ()) or "none"
        raise ConfigError("MetricSet.update", f"got the columns {got}, expected {name!r} among them")
    return columns[name]


class Slices:
    """One part for each of the most frequent values of a column, and one for all others.

    Attributes:
        part: Part of each sample, int64[N].
        parts: Number of parts.

    Args:
        codes: Code of each sample's value, int64[N]; -1 for a missing value, which counts as a value.
        values: Value of each code.
        most: Values that get a part of their own, at most.
    """

    def __init__(self, codes: Integers, values: pa.Array, most: int) -> None:
        missing = len(values)
        # As the last code, so that a missing value is counted and comes last among equal counts.
        codes = np.where(codes < 0, missing, codes)
        counts = np.bincount(codes, minlength=missing + 1)
        by_value = np.append(pc.array_sort_indices(values).to_numpy().astype(np.int64), missing)
        # Stable, so that values with equal counts stay in their order.
        by_count = by_value[np.argsort(-counts[by_value], kind="stable")]
        present = by_count[counts[by_count] > 0]
        chosen, self._others = present[:most], max(0, len(present) - most)
        part_of = np.full(missing + 1, len(chosen))
        part_of[chosen] = np.arange(len(chosen))
        self._values = [None if code == missing else values[int(code)].as_py() for code in chosen]
        self.part = part_of[codes]
        self.parts = len(chosen) + bool(self._others)

    def rename(self, column: str, names: NamesOfIds) -> None:
        """Replace the values, if they are ids, by their names."""
        ids = [value for value in self._values if isinstance(value, int) and not isinstance(value, bool)]
        names_of_ids = names(column, np.array(ids, np.int64)) if ids else None
        if names_of_ids is not None:
            by_id: dict[object, str | None] = dict(zip(ids, names_of_ids, strict=True))
            self._values = [by_id.get(value, value) for value in self._values]

    def results(self, values_of_parts: Sequence[MetricValues]) -> SliceResults:
        """Return the metrics of each part, with its value."""
        values = tuple(
            SliceValues(value=value, metrics=of_value)
            for value, of_value in zip(self._values, values_of_parts[: len(self._values)], strict=True)
        )
        return SliceResults(
            values=values, other=values_of_parts[-1] if self._others else None, other_values=self._others
        )
