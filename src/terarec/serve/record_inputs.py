# SPDX-License-Identifier: Apache-2.0
"""`RecordInputs`: what turns the raw records of a run into batches, opened again where its ids have become more."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from terarec.batch import Batch
from terarec.etl.workflow import Workflow, workflow_of
from terarec.etl.workflow.raw_values import RawValues
from terarec.formats import read_dataset
from terarec.formats.dataset import DATASET_FILE, workflow_files
from terarec.formats.frames import Frame
from terarec.serve.record_batches import RecordBatches
from terarec.spec import DatasetSpec


class RecordInputs:
    """A workflow and the columns that a model reads of what it gives. Does not change.

    Attributes:
        workflow: Encodes raw values as they were for training.
        dataset: Columns that the model reads.
        batches: Makes batches of what the workflow has encoded.

    Args:
        workflow: As above.
        dataset: As above.
        directory: ``RUN/dataset``, which both are from; None where they are from no run.
        allow_import: Packages whose functions the workflow may name.
    """

    def __init__(
        self,
        workflow: Workflow,
        dataset: DatasetSpec,
        directory: Path | None = None,
        allow_import: Sequence[str] = (),
    ) -> None:
        self.workflow = workflow
        self.dataset = dataset
        self.batches = RecordBatches(workflow, dataset)
        self._directory = directory
        self._allow_import = tuple(allow_import)
        # Of files that change after they were read here, the next call of `newest` reads them once more.
        self._stamps = () if directory is None else _stamps(directory, dataset)

    def __call__(self, columns: Mapping[str, RawValues] | Frame) -> Batch:
        """Return the batch of B raw records; arguments and errors are those of `Workflow.encode`."""
        return self.batches(self.workflow.encode(columns))

    def newest(self) -> RecordInputs:
        """Return these, or what the files of the run describe by now, if they have changed.

        Raises:
            ConfigError: The workflow names a function that is not allowed, or does not make a column of the model.
            FormatError: A damaged file.
        """
        if self._directory is None or _stamps(self._directory, self.dataset) == self._stamps:
            return self
        dataset = read_dataset(self._directory)
        workflow = workflow_of(self._directory, allow_import=self._allow_import)
        return RecordInputs(workflow, dataset, self._directory, self._allow_import)


def _stamps(directory: Path, dataset: DatasetSpec) -> tuple[tuple[str, int, int, int], ...]:
    """Return name, size, time and number of the files that describe a run's inputs, which tell whether they changed."""
    files = (DATASET_FILE, *workflow_files(dataset, directory))
    status = ((file, (directory / file).stat()) for file in files)
    return tuple((file, found.st_size, found.st_mtime_ns, found.st_ino) for file, found in status)
