# SPDX-License-Identifier: Apache-2.0
"""`ServedDrift`: drift of the records that a server is asked to score, while it serves."""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa
from typing_extensions import override

from terarec.apps.drift.compare import ColumnDrift, compare
from terarec.apps.drift.summary import DataSummary, RowSummary, summarize_dataset
from terarec.errors import TerarecError
from terarec.etl.workflow import Workflow
from terarec.formats import read_dataset
from terarec.formats.block import ColumnBlock, merge, slice_rows
from terarec.serve.input_drift import InputDrift, ModelDrift
from terarec.serve.repeating import Backoff, Repeating
from terarec.serve.served_model import ServedModel

WINDOW_RECORDS = 20_000
"""Records that are compared, the last ones of a version."""
REFERENCE_ROWS = 1 << 17
"""Most rows of the training data that they are compared with."""

_EVERY_SECONDS = 10.0
_MOST_VERSIONS = 16
_MOST_WAITING = 1 << 16  # records that wait to be encoded, of all versions


@dataclass(slots=True)
class _Version:
    """A version, and its last records. It does not hold the model, whose tables go when it is served no longer.

    Attributes:
        name: Name of the model.
        version: Its version.
        data: Data set of its training.
        workflow: What encodes its records.
        waiting: Raw columns of requests that came since the last comparison.
        window: The last records as the model reads them, without labels; None before the first ones.
        comparison: The last comparison.
    """

    name: str
    version: str
    data: Path
    workflow: Workflow
    waiting: list[Mapping[str, pa.Array]] = field(default_factory=list)
    window: ColumnBlock | None = None
    comparison: ModelDrift | None = None


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
        self._num_waiting = 0
        self._references: dict[Path, DataSummary] = {}
        self._unread: dict[Path, tuple[Backoff, TerarecError]] = {}
        super().__init__("terarec-drift", every_seconds)

    def add(self, model: ServedModel, columns: Mapping[str, pa.Array], num_records: int) -> None:
        """Take the raw columns of a request. It does not wait for a comparison."""
        key = (model.name, model.version)
        with self._lock:
            if self._num_waiting + num_records > _MOST_WAITING:
                return  # the window is full of newer ones, anyway
            self._num_waiting += num_records
            workflow = model.session.workflow
            version = self._versions.setdefault(key, _Version(*key, Path(model.session.run.data), workflow))
            version.workflow = workflow
            version.waiting.append(columns)
            while len(self._versions) > _MOST_VERSIONS:
                del self._versions[next(iter(self._versions))]

    def read(self) -> Sequence[ModelDrift]:
        """Return the last comparisons of all versions."""
        with self._lock:
            versions = list(self._versions.values())
        return [version.comparison for version in versions if version.comparison is not None]

    @override
    def poll(self) -> int:
        with self._lock:
            taken = [(version, version.waiting) for version in self._versions.values() if version.waiting]
            for version, _ in taken:
                version.waiting = []
            self._num_waiting = 0
        for version, waiting in taken:
            window = _encoded(version.workflow, waiting)
            if version.window is not None:
                window = merge([version.window, window])
            version.window = slice_rows(window, max(window.num_rows - WINDOW_RECORDS, 0), window.num_rows)
            version.comparison = self._compared(version, version.window)
        return len(taken)

    def _compared(self, version: _Version, window: ColumnBlock) -> ModelDrift:
        try:
            reference = self._reference(version.data if self._data is None else self._data)
            current = RowSummary(version.workflow.dataset_spec(), version.workflow, has_labels=False)
            current.add((window.dense,), window.keys)
            report = compare(reference, current.summary("served records"))
        except TerarecError as error:
            return ModelDrift(model=version.name, version=version.version, problem=str(error))
        inputs = sorted(map(_input, report.columns), key=lambda column: -(column.stability_index or 0.0))
        return ModelDrift(
            model=version.name,
            version=version.version,
            records=window.num_rows,
            reference_records=reference.rows,
            inputs=tuple(inputs),
        )

    def _reference(self, path: Path) -> DataSummary:
        """Return the summary of the data, which is made once; where that fails, it is tried again after a pause."""
        if path in self._references:
            return self._references[path]
        backoff, failure = self._unread.get(path, (Backoff(_EVERY_SECONDS), None))
        if failure is not None and not backoff.is_due:
            raise failure.with_traceback(None)
        try:
            splits = ["train"] if "train" in read_dataset(path).splits else None
            summary = summarize_dataset(path, splits, allow_import=self._allow_import, most_rows=REFERENCE_ROWS)
        except TerarecError as error:
            self._unread[path] = backoff, error
            backoff.fail()
            raise
        self._references[path] = summary
        return summary


def _encoded(workflow: Workflow, requests: Sequence[Mapping[str, pa.Array]]) -> ColumnBlock:
    """Return the records of requests as a model reads them: encoding costs a call, more than a record."""
    columns = {name: pa.concat_arrays([request[name] for request in requests]) for name in requests[0]}
    encoded = workflow.encode(columns)
    no_labels = np.zeros((len(encoded.dense), 0), dtype=np.float32)
    return ColumnBlock(label=no_labels, dense=encoded.dense, keys=encoded.keys)


def _input(column: ColumnDrift) -> InputDrift:
    index = column.stability_index
    return InputDrift(
        name=column.name,
        stability_index=None if math.isnan(index) else index,
        missing=column.missing,
        rare=column.rare,
    )
