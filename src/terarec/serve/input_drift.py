# SPDX-License-Identifier: Apache-2.0
"""Drift of what models are asked to score from their training data: what a server shows of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import pyarrow as pa

from terarec.serve.drift_counts import DriftCounts
from terarec.serve.models import ServedModels
from terarec.serve.served_model import ServedModel


@dataclass(frozen=True, kw_only=True, slots=True)
class InputDrift:
    """Drift of one column that a model reads.

    Attributes:
        name: Name of the column.
        stability_index: Population stability index; None where a side has no values.
        missing: Shares of missing values, in the training data and now.
        rare: Shares of values that are rare or that the training never saw, likewise; 0 for numbers.
    """

    name: str
    stability_index: float | None
    missing: tuple[float, float]
    rare: tuple[float, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelDrift:
    """Drift of the inputs of one version of a model.

    Attributes:
        model: Name of the model.
        version: Its version.
        records: Records that were compared, the last ones of the sample.
        reference_records: Rows of the training data that they were compared with.
        inputs: Its columns, those that have moved most first.
        problem: Why there is nothing to show; "" where there is.
    """

    model: str
    version: str
    records: int = 0
    reference_records: int = 0
    inputs: tuple[InputDrift, ...] = ()
    problem: str = ""


class DriftWatch(Protocol):
    """Compares the records of a sample of the requests with the training data."""

    def add(self, model: ServedModel, columns: Mapping[str, pa.Array], num_records: int) -> None:
        """Take the raw columns of a request that `model` has scored; called in the thread that writes records."""

    def counts(self) -> Sequence[DriftCounts]:
        """Return what was counted for the last comparisons of this process, for others."""

    def read(self, others: Sequence[DriftCounts] = ()) -> Sequence[ModelDrift]:
        """Return the last comparisons, also of versions that are served no more; it does not wait for one."""

    def close(self) -> None:
        """End its threads."""


def drift_of_served(
    drift: DriftWatch, models: ServedModels, others: Sequence[DriftCounts] = ()
) -> Sequence[ModelDrift]:
    """Return the last comparisons of the versions that are served at present, in the order of the index."""
    served = [each for each in drift.read(others) if each.version in models.versions(each.model)]
    return sorted(served, key=lambda each: (each.model, each.version))
