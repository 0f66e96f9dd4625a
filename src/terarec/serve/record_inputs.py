# SPDX-License-Identifier: Apache-2.0
"""`RecordInputs`: what turns the raw records of a run into batches, opened again where its ids have become more."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from terarec.batch import Batch, Jagged
from terarec.errors import ConfigError
from terarec.etl.workflow import Workflow, workflow_of
from terarec.etl.workflow.serving import EncodedRecords
from terarec.formats import read_dataset
from terarec.formats.block import Keys
from terarec.formats.dataset import DATASET_FILE, workflow_files
from terarec.ragged import Ragged, flat_values
from terarec.spec import DatasetSpec


class RecordInputs:
    """A workflow and the columns that a model reads of what it gives. Does not change.

    Args:
        workflow: Encodes raw values as they were for training.
        dataset: Columns that the model reads.
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

    def newest(self, directory: Path) -> RecordInputs:
        """Return these, or what the files of the run describe by now, if they have changed.

        Args:
            directory: ``RUN/dataset`` of the run, also where these are from a copy of it.

        Raises:
            ConfigError: The workflow names a function that is not allowed, or does not make a column of the model.
            FormatError: A damaged file.
        """
        if directory == self._directory and _stamps(directory, self.dataset) == self._stamps:
            return self
        dataset = read_dataset(directory)
        workflow = workflow_of(directory, allow_import=self._allow_import)
        return RecordInputs(workflow, dataset, directory, self._allow_import)


def _stamps(directory: Path, dataset: DatasetSpec) -> tuple[tuple[str, int, int, int], ...]:
    """Return name, size, time and number of the files that describe a run's inputs, which tell whether they changed."""
    files = (DATASET_FILE, *workflow_files(dataset, directory))
    status = ((file, (directory / file).stat()) for file in files)
    return tuple((file, stat.st_size, stat.st_mtime_ns, stat.st_ino) for file, stat in status)


class RecordBatches:
    """Makes batches of records that a workflow has encoded, as a model reads them."""

    def __init__(self, workflow: Workflow, dataset: DatasetSpec) -> None:
        self._features = tuple(column.name for column in dataset.categorical)
        columns = [column.name for column in workflow.dataset_spec().categorical]
        missing = [name for name in self._features if name not in columns]
        if missing:
            problem = f"has the column {missing[0]!r}, which its workflow does not make, expected {', '.join(columns)}"
            raise ConfigError(f"data set {dataset.name!r}", problem)
        self._places = [columns.index(name) for name in self._features]  # a workflow gives keys after ids
        self._num_labels = len(dataset.labels)
        self._constants = _Constants(torch.arange(1), torch.zeros(0, self._num_labels))

    def __call__(self, records: EncodedRecords) -> Batch:
        """Return a batch; its labels, which no model looks at, are zeros."""
        num_records = len(records.dense)
        columns = [records.keys[place] for place in self._places]
        constants = self._constants
        if len(constants.label) != num_records:
            offsets = torch.arange(len(columns) * num_records + 1)
            # Requests tend to be of one size, so the last one's are kept; threads may replace each other's.
            self._constants = constants = _Constants(offsets, torch.zeros(num_records, self._num_labels))
        # The usual case, of one key in every bag, for which offsets are the constants and lengths need no sum.
        if set(map(type, columns)) == {np.ndarray}:
            keys, offsets = torch.from_numpy(np.concatenate(columns)), constants.offsets
        else:
            keys, offsets = _of_lists(columns, num_records)
        sparse = Jagged(names=self._features, keys=keys, offsets=offsets)
        return Batch(dense=torch.from_numpy(records.dense), label=constants.label, sparse=sparse)


class _Constants(NamedTuple):
    """Tensors that batches of one size share.

    Attributes:
        offsets: int64[S * B + 1], where every bag has one key.
        label: float32[B, L], zeros.
    """

    offsets: Tensor
    label: Tensor


def _of_lists(columns: Sequence[Keys], num_records: int) -> tuple[Tensor, Tensor]:
    """Return the keys int64[N] and offsets int64[S * B + 1] of columns of which some hold lists."""
    keys, lengths = [np.zeros(0, dtype=np.int64)], [np.zeros(1, dtype=np.int64)]
    one_each = np.ones(num_records, dtype=np.int64)
    for column in columns:
        keys.append(flat_values(column))
        lengths.append(np.diff(column.offsets) if isinstance(column, Ragged) else one_each)
    return torch.from_numpy(np.concatenate(keys)), torch.from_numpy(np.concatenate(lengths).cumsum())
