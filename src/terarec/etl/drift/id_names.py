"""What the ids of a data set's columns stand for."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from terarec.etl.workflow import IdValues, Workflow
from terarec.spec import MISSING_ID, MISSING_KEY, CategoricalColumn, DatasetSpec


@dataclass(frozen=True, slots=True)
class IdNames:
    """The ids of one column.

    Attributes:
        missing: the id, or key, of a missing value; None where none can be missing.
        rare_ids: how many ids, from 1 on, rare and unseen values share.
        values: what the ids behind these stand for; None: an id stands for itself.
    """

    missing: int | None = MISSING_ID
    rare_ids: int = 0
    values: pa.Array | None = None

    def are_missing(self, ids: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which of the ids mean a missing value, bool[n]."""
        return np.zeros(len(ids), dtype=np.bool_) if self.missing is None else np.asarray(ids == self.missing)

    def are_rare(self, ids: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which of the ids are those of rare and unseen values, bool[n]."""
        return np.asarray((ids > 0) & (ids <= self.rare_ids))

    def texts(self, ids: NDArray[np.int64]) -> pa.Array:
        """The values of other ids, as large_string[n]."""
        if self.values is None:
            return pa.array(ids).cast(pa.large_string())
        values = self.values.take(pa.array(ids - 1 - self.rare_ids))
        if pa.types.is_uint32(values.type):
            return pa.array([f"{number:08x}" for number in values.to_numpy()], type=pa.large_string())
        return values.cast(pa.large_string())


def id_names(workflow: Workflow, spec: DatasetSpec) -> dict[str, IdNames]:
    """Return the ids of the categorical columns of the data set `spec`, which `workflow` made."""
    return {column.name: _names_of(column, workflow) for column in spec.categorical}


def _names_of(column: CategoricalColumn, workflow: Workflow) -> IdNames:
    if column.rows is None:
        return IdNames(missing=MISSING_KEY)
    made = IdValues(workflow, column.name)
    if made.vocabulary is None:
        return IdNames() if made.num_reserved else IdNames(missing=None)
    return IdNames(rare_ids=made.vocabulary.hash_buckets, values=made.vocabulary.values)
