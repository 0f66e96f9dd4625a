# SPDX-License-Identifier: Apache-2.0
"""`ServedDrift`: drift of the records that a server is asked to score, while it serves."""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa
from typing_extensions import override

from terarec.apps.drift.compare import ColumnDrift, DriftReport, compare, largest_index, share
from terarec.apps.drift.summary import (
    CategorySummary,
    DataSummary,
    NumberSummary,
    RowSummary,
    summarize_dataset,
)
from terarec.errors import TerarecError
from terarec.etl.workflow import Workflow
from terarec.formats import read_dataset
from terarec.formats.block import ColumnBlock, merge, slice_rows
from terarec.formats.dataset import DATASET_FILE
from terarec.io.files import file_identity
from terarec.repeating import Backoff, Repeating
from terarec.serve.drift_counts import DriftCounts, InputCounts, joined_counts
from terarec.serve.input_drift import InputDrift, ModelDrift
from terarec.serve.served_model import ServedModel

WINDOW_RECORDS = 20_000
"""Records that are compared, the last ones of a version."""
REFERENCE_ROWS = 1 << 17
"""Most rows of the training data that they are compared with."""

_EVERY_SECONDS = 10.0
_MOST_VERSIONS = 16  # from which on those that are served no longer go, the one that was for longest first
_MOST_WAITING, _MOST_BYTES = 1 << 16, 64 << 20  # records, and their bytes, that wait to be encoded, of all versions


@dataclass(slots=True)
class _Version:
    """A version, and its last records. It does not hold the model, whose tables go when it is served no longer.

    Attributes:
        name: Name of the model.
        version: Its version.
        data: Data set of its training.
        workflow: What encodes its records.
        model: The model, while it is there.
        reference: What they are compared with: the data as they were when the version was first compared; None before.
        reference_key: What tells it from the same data in another state.
        failure: Why the data could not be read; None if they could.
        backoff: When they are read again.
        waiting: Raw columns of requests that came since the last comparison.
        window: The last records as the model reads them, without labels; None before the first ones.
        counts: Those of the last comparison.
    """

    name: str
    version: str
    data: Path
    workflow: Workflow
    model: weakref.ref[ServedModel]
    reference: DataSummary | None = None
    reference_key: str = ""
    failure: TerarecError | None = None
    backoff: Backoff = field(default_factory=lambda: Backoff(_EVERY_SECONDS))
    waiting: list[Mapping[str, pa.Array]] = field(default_factory=list)
    window: ColumnBlock | None = None
    counts: DriftCounts | None = None


class ServedDrift(Repeating):
    """Compares the last records of each version with the data that it was trained on, every few seconds.

    `_lock` guards `_versions` and what waits; the rest belongs to the thread that compares.

    Args:
        data: Data set to compare with; None for that of each model's training.
        allow_import: Packages whose functions the workflow of the data may name.
        every_seconds: Seconds between two comparisons; None for none but by `poll`.
    """

    def __init__(
        self,
        data: Path | None = None,
        *,
        allow_import: Sequence[str] = (),
        every_seconds: float | None = _EVERY_SECONDS,
    ) -> None:
        self._data = data
        self._allow_import = tuple(allow_import)
        self._lock = threading.Lock()
        self._versions: dict[tuple[str, str], _Version] = {}
        self._num_waiting = self._num_bytes = 0
        self._references: dict[object, DataSummary] = {}  # those of `_versions` by data set and its state
        super().__init__("terarec-drift", every_seconds)

    def add(self, model: ServedModel, columns: Mapping[str, pa.Array], num_records: int) -> None:
        """Take the raw columns of a request. It does not wait for a comparison."""
        key = (model.name, model.version)
        num_bytes = sum(values.nbytes for values in columns.values())
        with self._lock:
            if self._num_waiting + num_records > _MOST_WAITING or self._num_bytes + num_bytes > _MOST_BYTES:
                return  # the window is full of newer ones, anyway
            self._num_waiting += num_records
            self._num_bytes += num_bytes
            workflow, data = model.session.workflow, Path(model.session.run.data)
            version = self._versions.pop(key, None) or _Version(*key, data, workflow, weakref.ref(model))
            version.workflow, version.model = workflow, weakref.ref(model)
            version.waiting.append(columns)
            self._versions[key] = version  # the last one in the order
            gone = [key for key, other in self._versions.items() if other.model() is None]
            for key in gone[: max(len(self._versions) - _MOST_VERSIONS, 0)]:
                del self._versions[key]

    def counts(self) -> Sequence[DriftCounts]:
        """Return what was counted for the last comparisons of all versions."""
        with self._lock:
            versions = list(self._versions.values())
        return [version.counts for version in versions if version.counts is not None]

    def read(self, others: Sequence[DriftCounts] = ()) -> Sequence[ModelDrift]:
        """Return the last comparisons of all versions; see `DriftWatch.read`."""
        return [_drift(counts) for counts in joined_counts([*self.counts(), *others])]

    @override
    def poll(self) -> int:
        with self._lock:
            taken = [(version, version.waiting) for version in self._versions.values() if version.waiting]
            for version, _ in taken:
                version.waiting = []
            self._num_waiting = self._num_bytes = 0
        for version, waiting in taken:
            window = _encoded(version.workflow, waiting)
            if version.window is not None:
                window = merge([version.window, window])
            version.window = slice_rows(window, max(window.num_rows - WINDOW_RECORDS, 0), window.num_rows)
            version.counts = self._compared(version, version.window)
        with self._lock:
            needed = [version.reference for version in self._versions.values()]
        self._references = {key: one for key, one in self._references.items() if any(one is other for other in needed)}
        return len(taken)

    def _compared(self, version: _Version, window: ColumnBlock) -> DriftCounts:
        try:
            reference = version.reference = version.reference or self._reference(version)
            current = RowSummary(version.workflow.dataset_spec(), version.workflow, has_labels=False)
            current.add((window.dense,), window.keys)
            report = compare(reference, current.summary("served records"))
        except TerarecError as error:
            return DriftCounts(model=version.name, version=version.version, problem=str(error))
        return DriftCounts(
            model=version.name,
            version=version.version,
            data=version.reference_key,
            records=window.num_rows,
            reference_records=reference.rows,
            inputs=tuple(_input(column, report) for column in report.columns),
        )

    def _reference(self, version: _Version) -> DataSummary:
        """Return the summary of the data as they are now; where that fails, it is tried again after a pause."""
        if version.failure is not None and not version.backoff.is_due:
            raise version.failure.with_traceback(None)
        path = version.data if self._data is None else self._data
        try:
            # Before the data are read: of some that are replaced meanwhile, the next version reads the new ones.
            key = path, file_identity(path / DATASET_FILE)
            if key not in self._references:
                splits = ["train"] if "train" in read_dataset(path).splits else None
                self._references[key] = summarize_dataset(
                    path, splits, allow_import=self._allow_import, most_rows=REFERENCE_ROWS
                )
            version.reference_key = repr(key)
        except TerarecError as error:
            version.failure = error
            version.backoff.fail()
            raise
        return self._references[key]


def _encoded(workflow: Workflow, requests: Sequence[Mapping[str, pa.Array]]) -> ColumnBlock:
    """Return the records of requests as a model reads them: encoding costs a call, more than a record."""
    columns = {name: pa.concat_arrays([request[name] for request in requests]) for name in requests[0]}
    encoded = workflow.encode(columns)
    no_labels = np.zeros((len(encoded.dense), 0), dtype=np.float32)
    return ColumnBlock(label=no_labels, dense=encoded.dense, keys=encoded.keys)


def _input(column: ColumnDrift, report: DriftReport) -> InputCounts:
    sides = report.reference, report.current
    bins = [column.bins, *([] if column.lists is None else [column.lists.bins])]
    numbers: list[NumberSummary | CategorySummary] = [
        side.numbers[column.name] if column.kind == "number" else side.categories[column.name] for side in sides
    ]
    rare = [0 if isinstance(one, NumberSummary) else one.rare for one in numbers]
    (first, now), (first_rare, now_rare) = numbers, rare
    return InputCounts(
        name=column.name,
        values=(first.total, now.total),
        missing=(first.missing, now.missing),
        rare=(first_rare, now_rare),
        bins=tuple((tuple(each.reference.tolist()), tuple(each.current.tolist())) for each in bins),
    )


def _drift(counts: DriftCounts) -> ModelDrift:
    """Return what is shown of counts."""
    inputs = sorted(map(_input_drift, counts.inputs), key=lambda column: -(column.stability_index or 0.0))
    return ModelDrift(
        model=counts.model,
        version=counts.version,
        records=counts.records,
        reference_records=counts.reference_records,
        inputs=tuple(inputs),
        problem=counts.problem,
    )


def _input_drift(column: InputCounts) -> InputDrift:
    index = largest_index(column.bins)
    return InputDrift(
        name=column.name,
        stability_index=None if math.isnan(index) else index,
        missing=_shares(column.missing, column.values),
        rare=_shares(column.rare, column.values),
    )


def _shares(counts: tuple[int, int], totals: tuple[int, int]) -> tuple[float, float]:
    first, now = (share(count, total) for count, total in zip(counts, totals, strict=True))
    return first, now
