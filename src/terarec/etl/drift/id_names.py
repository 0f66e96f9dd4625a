"""What the ids of a data set's columns stand for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from terarec.etl.values import ValueIds
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
    """Those of the categorical columns of the data set `spec`, which `workflow` made."""
    learnt = vocabularies(workflow)
    return {column.name: _names_of(column, workflow, learnt) for column in spec.categorical}


def vocabularies(workflow: Workflow) -> Mapping[str, ValueIds]:
    """Result column -> the vocabulary that made its ids, for those that a `Categorify` made."""
    found: dict[str, ValueIds] = {}
    for step, code in enumerate(workflow.plan.codes):
        if code.renames:
            renamed = {new: found[old] for old, new in code.renames.items() if old in found}
            found = {name: ids for name, ids in found.items() if name not in code.renames} | renamed
            continue
        for name in code.writes:
            found.pop(name, None)
        found.update(code.vocabularies(workflow.states.get(step)))
    return found


def _names_of(column: CategoricalColumn, workflow: Workflow, learnt: Mapping[str, ValueIds]) -> IdNames:
    if column.rows is None:
        return IdNames(missing=MISSING_KEY)
    if column.name not in learnt:
        return IdNames() if IdValues(workflow, column.name).num_reserved else IdNames(missing=None)
    ids = learnt[column.name]
    return IdNames(rare_ids=ids.hash_buckets, values=ids.values)
