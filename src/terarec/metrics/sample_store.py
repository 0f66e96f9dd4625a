"""The samples of an evaluation, kept for metrics by group and by slice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from torch import Tensor

from terarec.errors import ConfigError
from terarec.metrics.columns import FloatColumns, Integers
from terarec.metrics.parts import Samples

ColumnValues: TypeAlias = "Tensor | npt.NDArray[np.generic] | pa.Array | pa.ChunkedArray"
"""One value a sample: integers, booleans, numbers or strings."""


class SampleStore:
    """Scores, labels, weights and columns of all samples; each is kept once.

    Memory a sample: 4 bytes for each logit, score, label and weight that is kept, and 8 bytes for each column of
    numbers, or 4 and each distinct string of a batch once. `samples` and `column` need as much again, once.

    Args:
        columns: Names of the columns to keep.
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
        """Take in a batch of B samples: predictions [B, C], labels [B, L], weights [B] and the columns' values [B]."""
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
                raise ConfigError(f"column {name!r}: got {got}, expected one type in all batches")
            chunks.append(columns[name])

    def join(self) -> None:
        """Put the batches together."""
        for held in (self._logits, self._scores, self._labels, self._weights):
            if len(held) > 1:
                held[:] = [np.concatenate(held)]

    def samples(self, label: int, group: Integers | None) -> tuple[Samples, Integers]:
        """The samples whose label number `label` is known, and their indices.

        Args:
            label: Number of the label.
            group: Group of every sample; None if there is no group column.
        """
        self.join()
        labels = self._labels[0]
        known = np.flatnonzero(~np.isnan(labels[:, label]))

        def of_label(held: list[FloatColumns]) -> FloatColumns | None:
            if not held:
                return None
            columns = held[0] if labels.shape[1] == 1 else held[0][:, label : label + 1]
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
        """The code of each sample's value in a column, int64[N] (-1 for a missing value), and the distinct values."""
        chunks = pa.chunked_array(self._columns[name])
        is_encoded = pa.types.is_dictionary(chunks.type)
        encoded = chunks.unify_dictionaries() if is_encoded else chunks.dictionary_encode()
        joined = encoded.combine_chunks()
        if isinstance(joined, pa.ChunkedArray):
            joined = joined.chunk(0)
        return joined.indices.fill_null(-1).to_numpy().astype(np.int64), joined.dictionary


def column_array(name: str, values: ColumnValues, rows: int) -> pa.Array:
    """`values` of a column as an array of int64, float64, booleans, or strings in a dictionary; NaN becomes null.

    Raises:
        ConfigError: not one value for each of the `rows` samples, or values of another type.
    """
    if isinstance(values, Tensor):
        values = values.detach().cpu()
        values = (values.double() if values.is_floating_point() else values).numpy()  # numpy has no bfloat16
    if isinstance(values, pa.ChunkedArray):
        values = values.combine_chunks()
    if not isinstance(values, pa.Array):
        flat = values[:, 0] if values.ndim == 2 and values.shape[1] == 1 else values
        if flat.ndim != 1:
            raise ConfigError(f"column {name!r}: got values {list(values.shape)}, expected one a sample, [{rows}]")
        values = pa.array(flat.copy(), from_pandas=True)
    if len(values) != rows:
        raise ConfigError(f"column {name!r}: got {len(values)} values for {rows} samples, expected one a sample")
    kind = values.type.value_type if pa.types.is_dictionary(values.type) else values.type
    try:
        return _as_stored(values, kind)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        expected = "integers of 64 bits, numbers, booleans or strings"
        raise ConfigError(f"column {name!r}: got values of type {values.type}, expected {expected}") from error


def _as_stored(values: pa.Array, kind: pa.DataType) -> pa.Array:
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        encoded = values if pa.types.is_dictionary(values.type) else values.dictionary_encode()
        return encoded.cast(pa.dictionary(pa.int32(), pa.large_string()))
    if pa.types.is_dictionary(values.type):
        values = values.dictionary_decode()
    if pa.types.is_boolean(kind):
        return values
    if pa.types.is_integer(kind):
        return values.cast(pa.int64())
    if pa.types.is_floating(kind):
        held = values.cast(pa.float64())
        return pa.array(held.to_numpy(zero_copy_only=False), from_pandas=True)
    raise pa.ArrowInvalid("not a type of a column")
