# SPDX-License-Identifier: Apache-2.0
"""`ServedDrift`: drift of the records that a server is asked to score, while it serves."""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa
from typing_extensions import override

from terarec.apps.drift.compare import ColumnDrift, compare
from terarec.apps.drift.summary import DataSummary, RowSummary, summarize_dataset
from terarec.errors import TerarecError
from terarec.etl.workflow.serving import EncodedRecords
from terarec.formats import read_dataset
from terarec.serve.input_drift import InputDrift, ModelDrift
from terarec.serve.repeating import Repeating
from terarec.serve.served_model import ServedModel

WINDOW_RECORDS = 20_000
"""Records that are compared, the last ones of a version."""
REFERENCE_ROWS = 1 << 17
"""Most rows of the training data that they are compared with."""

_EVERY_SECONDS = 5.0
_MOST_VERSIONS = 16
_MOST_WAITING = 1 << 16  # records that wait to be encoded, of all versions


@dataclass(slots=True)
class _Version:
    """A version, and its last records.

    Attributes:
        model: The version.
        waiting: Raw columns of records that came since the last comparison.
        encoded: Records of the window as the model reads them.
        num_records: Their number.
        found: The last comparison.
    """

    model: ServedModel
    waiting: list[tuple[Mapping[str, pa.Array], int]] = field(default_factory=list)
    encoded: deque[EncodedRecords] = field(default_factory=deque)
    num_records: int = 0
    found: ModelDrift | None = None


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
        self._references: dict[Path, DataSummary | TerarecError] = {}
        super().__init__("terarec-drift", every_seconds)

    def add(self, model: ServedModel, columns: Mapping[str, pa.Array], num_records: int) -> None:
        """Take the raw columns of a request. It does not wait for a comparison."""
        key = (model.name, model.version)
        with self._lock:
            if self._num_waiting + num_records > _MOST_WAITING:
                return  # the window is full of newer ones, anyway
            self._num_waiting += num_records
            version = self._versions.setdefault(key, _Version(model))
            version.waiting.append((columns, num_records))
            while len(self._versions) > _MOST_VERSIONS:
                del self._versions[next(iter(self._versions))]

    def read(self) -> Sequence[ModelDrift]:
        """Return the last comparisons of all versions."""
        with self._lock:
            versions = list(self._versions.values())
        return [version.found for version in versions if version.found is not None]

    @override
    def poll(self) -> int:
        with self._lock:
            taken = [(version, version.waiting) for version in self._versions.values() if version.waiting]
            for version, _ in taken:
                version.waiting = []
            self._num_waiting = 0
        for version, waiting in taken:
            for columns, num_records in waiting:
                version.encoded.append(version.model.session.workflow.encode(columns))
                version.num_records += num_records
            while version.num_records - len(version.encoded[0].dense) >= WINDOW_RECORDS:
                version.num_records -= len(version.encoded.popleft().dense)
            version.found = self._compared(version)
        return len(taken)

    def _compared(self, version: _Version) -> ModelDrift:
        model = version.model
        path = Path(model.session.run.data) if self._data is None else self._data
        if path not in self._references:
            try:
                self._references[path] = self._reference(path)
            except TerarecError as error:
                self._references[path] = error
        reference = self._references[path]
        try:
            if isinstance(reference, TerarecError):
                raise reference.with_traceback(None)
            workflow = model.session.workflow
            current = RowSummary(workflow.dataset_spec(), workflow, has_labels=False)
            for records in version.encoded:
                current.add((records.dense,), records.keys)
            report = compare(reference, current.summary("served records"))
        except TerarecError as error:
            return ModelDrift(model=model.name, version=model.version, problem=str(error))
        inputs = sorted(map(_input, report.columns), key=lambda column: -(column.stability_index or 0.0))
        return ModelDrift(
            model=model.name,
            version=model.version,
            records=version.num_records,
            reference_records=reference.rows,
            inputs=tuple(inputs),
        )

    def _reference(self, path: Path) -> DataSummary:
        splits = ["train"] if "train" in read_dataset(path).splits else None
        return summarize_dataset(path, splits, allow_import=self._allow_import, most_rows=REFERENCE_ROWS)


def _input(column: ColumnDrift) -> InputDrift:
    index = column.stability_index
    return InputDrift(
        name=column.name,
        stability_index=None if math.isnan(index) else index,
        missing=column.missing,
        rare=column.rare,
    )
