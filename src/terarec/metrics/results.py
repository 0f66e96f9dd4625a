"""Results of a metric set: values overall, by label and by slice."""

from __future__ import annotations

from dataclasses import dataclass

from terarec.spec.codec import finite_data

JsonValue = None | bool | int | float | str | list["JsonValue"] | dict[str, "JsonValue"]


@dataclass(frozen=True, kw_only=True, slots=True)
class LabelValues:
    """The metrics of one label.

    Attributes:
        rows: Samples whose label is known.
        values: Metric -> value; NaN where it is undefined.
    """

    rows: int
    values: dict[str, float]

    def to_json(self) -> dict[str, JsonValue]:
        """Return the same as JSON values; None for NaN and infinity."""
        return {"rows": self.rows, "metrics": finite_data(self.values)}


@dataclass(frozen=True, kw_only=True, slots=True)
class MetricValues:
    """The metrics of some samples.

    Attributes:
        rows: Samples with a weight above 0.
        values: Metric -> mean over the labels; NaN where it is undefined for a label.
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
        found: Metrics of the samples.
    """

    value: str | int | float | bool | None
    found: MetricValues

    def to_json(self) -> dict[str, JsonValue]:
        """Return the same as JSON values; None for NaN and infinity."""
        return {"value": self.value, **self.found.to_json()}


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

    def to_json(self) -> dict[str, JsonValue]:
        """Return the same as JSON values; None for NaN and infinity."""
        return {**self.overall.to_json(), "slices": {name: found.to_json() for name, found in self.slices.items()}}
