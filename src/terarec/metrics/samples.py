# SPDX-License-Identifier: Apache-2.0
"""The samples of an evaluation, kept for metrics by group and by slice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from torch import Tensor

from terarec.errors import ConfigError
from terarec.metrics.auc import auc_by_group
from terarec.metrics.columns import FloatColumns, Floats, Integers
from terarec.metrics.ranking import RelevantRanks, ranks_of_samples

ColumnValues: TypeAlias = "Tensor | npt.NDArray[np.generic] | pa.Array | pa.ChunkedArray"
"""One value a sample: integers, booleans, numbers or strings."""


class NamesOfIds(Protocol):
    """The names of the ids in columns, such as `terarec.etl.workflow.ValueNames`."""

    def __call__(self, column: str, ids: Integers) -> Sequence[str | None] | None:
        """Return the name of each id, None for a missing value; None for a column without names."""


class SampleStore:
    """Scores, labels, weights and columns of all samples; each is kept once.

    Memory a sample: 4 bytes for each logit, score, label and weight that is kept, and 8 bytes for each column of
    numbers, or 4 and each distinct string of a batch once. `samples` and `column` need as much again, once.
    """

    def __init__(self, columns: Sequence[str]) -> None:
        self._columns: dict[str, list[pa.Array]] = {name: [] for name in columns}
        self._logits: list[FloatColumns] = []
        self._scores: list[FloatColumns] = []
        self._labels: list[FloatColumns] = []
        self._weights: list[FloatColumns] = []
        self._has_weights = False

    def add(
        self,
        logits: FloatColumns | None,
        scores: FloatColumns | None,
        labels: FloatColumns,
        weights: FloatColumns | None,
        columns: Mapping[str, pa.Array],
    ) -> None:
        """Add a batch of B samples: predictions [B, C], labels [B, L], weights [B] and the columns' values [B]."""
        # The caller may use the memory of a batch again.
        if logits is not None:
            self._logits.append(logits.copy())
        if scores is not None:
            self._scores.append(scores.copy())
        self._labels.append(labels.copy())
        self._weights.append(np.ones(len(labels), np.float32) if weights is None else weights.copy())
        self._has_weights |= weights is not None
        for name, chunks in self._columns.items():
            if chunks and chunks[0].type != columns[name].type:
                got = f"{columns[name].type} values after {chunks[0].type} ones"
                raise ConfigError(f"column {name!r}", f"got {got}, expected one type in all batches")
            chunks.append(columns[name])

    def join(self) -> None:
        """Put the batches together."""
        for columns in (self._logits, self._scores, self._labels, self._weights):
            if len(columns) > 1:
                columns[:] = [np.concatenate(columns)]

    def samples(self, label: int, group: Integers | None) -> tuple[Samples, Integers]:
        """Return the samples whose label number `label` is known, and their indices.

        Args:
            label: Number of the label.
            group: Group of every sample; None if there is no group column.
        """
        self.join()
        labels = self._labels[0]
        known = np.flatnonzero(~np.isnan(labels[:, label]))

        def of_label(of_batches: list[FloatColumns]) -> FloatColumns | None:
            if not of_batches:
                return None
            columns = of_batches[0] if labels.shape[1] == 1 else of_batches[0][:, label : label + 1]
            return columns[known]

        samples = Samples(
            logits=of_label(self._logits),
            scores=of_label(self._scores),
            labels=labels[known, label],
            weights=self._weights[0][known] if self._has_weights else None,
            group=None if group is None else group[known],
        )
        return samples, known

    def column(self, name: str) -> tuple[Integers, pa.Array]:
        """Return the code of each sample's value in a column, int64[N] (-1 for missing), and the distinct values."""
        chunks = pa.chunked_array(self._columns[name])
        is_encoded = pa.types.is_dictionary(chunks.type)
        encoded = chunks.unify_dictionaries() if is_encoded else chunks.dictionary_encode()
        joined = encoded.combine_chunks()
        if isinstance(joined, pa.ChunkedArray):
            joined = joined.chunk(0)
        return joined.indices.fill_null(-1).to_numpy().astype(np.int64), joined.dictionary


def column_array(name: str, values: ColumnValues, rows: int) -> pa.Array:
    """Return `values` of a column as an array of int64, float64, booleans, or encoded strings; NaN becomes null.

    Raises:
        ConfigError: Not one value for each of the `rows` samples, or values of another type.
    """
    if isinstance(values, Tensor):
        values = values.detach().cpu()
        values = (values.double() if values.is_floating_point() else values).numpy()  # numpy has no bfloat16
    if isinstance(values, pa.ChunkedArray):
        values = values.combine_chunks()
    if not isinstance(values, pa.Array):
        flat = values[:, 0] if values.ndim == 2 and values.shape[1] == 1 else values
        if flat.ndim != 1:
            raise ConfigError(f"column {name!r}", f"got values {list(values.shape)}, expected one a sample, [{rows}]")
        values = pa.array(flat.copy(), from_pandas=True)
    if len(values) != rows:
        raise ConfigError(f"column {name!r}", f"got {len(values)} values for {rows} samples, expected one a sample")
    kind = values.type.value_type if pa.types.is_dictionary(values.type) else values.type
    try:
        return _as_stored(values, kind)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        expected = "integers of 64 bits, numbers, booleans or strings"
        raise ConfigError(f"column {name!r}", f"got values of type {values.type}, expected {expected}") from error


def _as_stored(values: pa.Array, kind: pa.DataType) -> pa.Array:
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        encoded = values if pa.types.is_dictionary(values.type) else values.dictionary_encode()
        # One type for all batches, whose dictionaries `column` unifies: they may bring short or large strings, encoded
        # or not.
        return encoded.cast(pa.dictionary(pa.int32(), pa.large_string()))
    if pa.types.is_dictionary(values.type):
        values = values.dictionary_decode()
    if pa.types.is_boolean(kind):
        return values
    if pa.types.is_integer(kind):
        return values.cast(pa.int64())
    if pa.types.is_floating(kind):
        floats = values.cast(pa.float64())
        # NaN becomes null, since NaN equals nothing, and each would be a value of its own.
        return pa.array(floats.to_numpy(zero_copy_only=False), from_pandas=True)
    raise pa.ArrowInvalid("not a type of a column")


@dataclass(frozen=True, kw_only=True)
class Samples:
    """N samples with a known label.

    Attributes:
        logits: Logits [N, 1], or [N, C] for classes; None if no metric reads them.
        scores: Probabilities or values, like `logits`.
        labels: Known labels [N].
        weights: Weights [N], > 0; None for ones.
        group: Group of each sample, int64[N]; -1 for none. None if there is no group column.
    """

    logits: FloatColumns | None
    scores: FloatColumns | None
    labels: FloatColumns
    weights: FloatColumns | None
    group: Integers | None


class PartedSamples:
    """Samples, each with its part.

    Args:
        samples: Samples of one label.
        part: Part of each sample, int64[N] in [0, parts).
        parts: Number of parts.
    """

    def __init__(self, samples: Samples, part: Integers, parts: int) -> None:
        self.samples = samples
        self.part = part
        self.parts = parts

    def auc(self) -> Floats:
        """Return the weighted AUC of each part, float64[parts]."""
        samples = self.samples
        assert samples.logits is not None
        return auc_by_group(samples.logits[:, 0], samples.labels, samples.weights, self.part, self.parts)

    def gauc(self) -> Floats:
        """Return the mean AUC of the groups in each part that have both classes, weighted by their impressions."""
        samples, grouped = self.samples, self._groups
        assert samples.logits is not None
        kept = grouped.kept
        weights = None if samples.weights is None else samples.weights[kept]
        values = auc_by_group(samples.logits[kept, 0], samples.labels[kept], weights, grouped.code, grouped.count)
        return self._mean_of_groups(values, grouped.weight)

    def ranking(self, values: Floats) -> Floats:
        """Return the mean of one value a group over the groups of each part, weighted by the samples' mean weight."""
        grouped = self._groups
        return self._mean_of_groups(values, grouped.weight / grouped.size)

    @cached_property
    def ranks(self) -> RelevantRanks:
        """The ranks of the samples with labels above 0, in the groups of each part."""
        samples, grouped = self.samples, self._groups
        assert samples.logits is not None
        kept = grouped.kept
        return ranks_of_samples(samples.logits[kept, 0], samples.labels[kept], grouped.code, grouped.count)

    @cached_property
    def _groups(self) -> _Groups:
        """The groups of each part: a group that occurs in two parts is one group in each."""
        samples = self.samples
        assert samples.group is not None
        kept = np.flatnonzero(samples.group >= 0)
        num_groups = int(samples.group.max(initial=-1)) + 1
        # A pair (part, group) as one integer, so that one pass of `unique` numbers the groups of all parts.
        pairs, code = np.unique(self.part[kept] * num_groups + samples.group[kept], return_inverse=True)
        size = np.bincount(code, minlength=len(pairs))
        weight = size if samples.weights is None else np.bincount(code, samples.weights[kept], len(pairs))
        return _Groups(
            kept=kept, code=code, part=pairs // max(num_groups, 1), size=size, weight=weight.astype(np.float64)
        )

    def _mean_of_groups(self, values: Floats, weights: Floats) -> Floats:
        is_defined = ~np.isnan(values)
        part, weights = self._groups.part[is_defined], weights[is_defined]
        totals = np.bincount(part, values[is_defined] * weights, self.parts)
        of_part = np.bincount(part, weights, self.parts)
        means: Floats = np.divide(totals, of_part, out=np.full(self.parts, np.nan), where=of_part > 0)
        return means


@dataclass(frozen=True, kw_only=True)
class _Groups:
    """The G groups of the samples that have one: their indices and group codes, and each group's part and weight."""

    kept: Integers
    code: Integers
    part: Integers
    size: Integers
    weight: Floats

    @property
    def count(self) -> int:
        return len(self.part)
