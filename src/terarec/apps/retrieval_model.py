# SPDX-License-Identifier: Apache-2.0
"""`RetrievalModel`: vectors of users and of items by a trained model, from raw columns."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

import numpy as np
import torch
from torch import Tensor

from terarec.apps.item_index import Floats
from terarec.batch import Batch, to_device
from terarec.config.files import DATASET_DIRECTORY
from terarec.etl.workflow import Workflow, workflow_of
from terarec.etl.workflow.raw_values import RawValues
from terarec.etl.workflow.serving import EncodedRecords
from terarec.models.artifact import LoadedModel, load_model
from terarec.models.contract import device_of
from terarec.models.registry import vectors_of
from terarec.nn.precision import autocast
from terarec.serve.record_inputs import RecordBatches
from terarec.serve.session import InputColumn, input_columns
from terarec.spec import Numbers, to_data


class RetrievalModel:
    """A trained model of vectors and its workflow: vectors of users and of items from raw columns.

    It has two towers, or reads a history. The score of an item is the dot product of both vectors.

    Attributes:
        inputs: Raw columns of users and items.
        step: Training steps of the weights.
        workflow: Encodes raw values as they were for training.
        of_users: The same, of what the vectors of users depend on.

    Args:
        loaded: The model, in `numbers`, and what describes it.
        workflow: Encodes raw values as they were for training.
        numbers: Numbers of rows and layers; None for those of the training.
    """

    def __init__(self, loaded: LoadedModel, workflow: Workflow, numbers: Numbers | None = None) -> None:
        self._model = vectors_of(loaded.model, loaded.spec.model.kind)
        self._device = device_of(loaded.model)
        self._run, self._state, self._numbers = loaded.spec, loaded.state, numbers or Numbers()
        self.workflow = workflow
        self._batch = RecordBatches(workflow, loaded.dataset)
        # By attribute, as a model of the user's own code may have vectors without them.
        read = [getattr(self._model, name, None) for name in ("user_columns", "item_columns")]
        self.of_users, self._of_items = (workflow if names is None else workflow.reading(names) for names in read)
        raw = self.of_users.record_columns.keys() | self._of_items.record_columns.keys()
        self.inputs: tuple[InputColumn, ...] = tuple(column for column in input_columns(workflow) if column.name in raw)
        self.step = loaded.step

    @classmethod
    def open(
        cls,
        run: Path | str,
        checkpoint: int | str | None = None,
        *,
        device: torch.device | None = None,
        allow_import: Sequence[str] = (),
    ) -> Self:
        """Load a checkpoint of a run; arguments and errors are those of `InferenceSession.open`."""
        loaded = load_model(run, checkpoint, device=device, allow_import=allow_import)
        return cls(loaded, workflow_of(Path(run) / DATASET_DIRECTORY, allow_import=allow_import))

    def fingerprint(self) -> str:
        """Return the SHA-256 of all that the vectors depend on but the columns, in hexadecimal."""
        # The checkpoint's id is made of the checksums of its files, so it stands for the rows of tables as well. Row
        # files have none; runs that differ in these alone have other descriptions.
        described = [to_data(part) for part in (self._state, self._run, self._numbers)]
        return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()

    def users(self, columns: Mapping[str, RawValues]) -> Floats:
        """Return vectors float32[B, D] of B users; columns of items alone may be absent."""
        return self._vectors(columns, of_items=False)

    def items(self, columns: Mapping[str, RawValues]) -> Floats:
        """Return vectors float32[I, D] of I items; columns of users alone may be absent."""
        return self._vectors(columns, of_items=True)

    def _vectors(self, columns: Mapping[str, RawValues], *, of_items: bool) -> Floats:
        count, size = len(next(iter(columns.values()))), self._run.training.batch_size
        workflow = self._of_items if of_items else self.of_users
        # `concatenate` needs an array, and no batch says how wide the vectors are.
        parts = [np.empty((0, 1), np.float32)] if not count else []
        for begin in range(0, count, size):
            part = min(size, count - begin)
            of_part = {name: values[begin : begin + part] for name, values in columns.items()}
            encoded = workflow.encode(self._all_columns(of_part, part, workflow))
            parts.append(self._encoded(encoded, of_items=of_items))
        return np.concatenate(parts)

    def user_records(self, columns: Mapping[str, RawValues], count: int) -> dict[str, RawValues]:
        """Return the raw columns that `of_users` encodes.

        Args:
            columns: Those of users -> `count` values.
            count: Number of users.
        """
        return self._all_columns(columns, count, self.of_users)

    def _all_columns(self, columns: Mapping[str, RawValues], count: int, workflow: Workflow) -> dict[str, RawValues]:
        # A step may make columns of both sides at once, and so read those that are not there.
        read = (column for column in self.inputs if column.name in workflow.record_columns)
        return {column.name: columns.get(column.name, [_unread(column)] * count) for column in read}

    def encoded_users(self, records: EncodedRecords) -> Floats:
        """Return vectors float32[B, D] of B users whose records `of_users` has encoded."""
        return self._encoded(records, of_items=False)

    def _encoded(self, records: EncodedRecords, *, of_items: bool) -> Floats:
        batch = to_device(self._batch(records), self._device)
        with torch.inference_mode(), autocast(self._numbers.products(self._run), self._device):
            vectors: Floats = self._of(batch, of_items=of_items).float().cpu().numpy()
        return vectors

    def _of(self, batch: Batch, *, of_items: bool) -> Tensor:
        return self._model.item_vectors(batch) if of_items else self._model.user_vectors(batch)


def _unread(column: InputColumn) -> int | None:
    # Ids and numbers of data without a workflow must be there.
    return 0 if column.hotness == 1 and column.kind != "string" else None
