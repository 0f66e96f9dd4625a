"""Raw values -> model inputs, exactly as when the data set was prepared. Used by preparation and by the server."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from terarec.errors import ConfigError
from terarec.etl.categorical_encoding import CategoricalEncoding, categorical_encoding
from terarec.etl.dense_encoding import encode_dense
from terarec.etl.encoded_records import EncodedRecords
from terarec.etl.raw_columns import RawColumn, RawValues
from terarec.etl.vocabulary import Vocabulary
from terarec.formats import read_dataset
from terarec.spec import DatasetSpec, VocabularyEncoder


class Encoders:
    """The encoders of a data set's columns.

    Attributes:
        spec: the data set.

    Args:
        spec: the data set.
        vocabularies: by the name of the categorical column, for those with a vocabulary.
    """

    def __init__(self, spec: DatasetSpec, vocabularies: Mapping[str, Vocabulary]) -> None:
        self.spec = spec
        self._raw_names = spec.raw_names
        self._accepted = frozenset(self._raw_names) | {column.name for column in spec.labels}
        self._dense = [(column.raw_name, column.encoder) for column in spec.dense]
        self._categorical: list[tuple[str, CategoricalEncoding]] = [
            (column.raw_name, categorical_encoding(column, vocabularies.get(column.name)))
            for column in spec.categorical
        ]

    @classmethod
    def load(cls, directory: Path) -> Encoders:
        """The encoders of the data set in `directory`; its shards are not needed.

        Raises:
            DataNotFoundError: no data set, or a vocabulary that it names is missing.
            FormatError: ``dataset.json`` or a vocabulary is damaged, or a vocabulary has another number of rows.
        """
        spec = read_dataset(directory)
        files = {
            column.name: column.encoder for column in spec.categorical if isinstance(column.encoder, VocabularyEncoder)
        }
        loaded = {
            (encoder.file, encoder.value_type): Vocabulary.load(directory / encoder.file, encoder.value_type)
            for encoder in files.values()
        }
        return cls(spec, {name: loaded[encoder.file, encoder.value_type] for name, encoder in files.items()})

    def encode(self, columns: Mapping[str, RawValues]) -> EncodedRecords:
        """Encode B records, given column by column.

        Args:
            columns: raw column (``spec.raw_names``) -> B values; None, null, ``""`` and, among numbers, NaN are
                missing. Label columns may be there and are not read.

        Raises:
            ConfigError: a column that is missing, unknown or of another length; a value of another type, with its
                column, row and what is accepted.
        """
        raw = self._raw_columns(columns)
        num_records = len(next(iter(raw.values()))) if raw else 0
        dense = np.empty((len(self._dense), num_records), dtype=np.float32)
        for out, (name, encoder) in zip(dense, self._dense, strict=True):
            encode_dense(encoder, raw[name], out)
        keys = tuple(encoding(raw[name]) for name, encoding in self._categorical)
        return EncodedRecords(dense=np.ascontiguousarray(dense.T), keys=keys)

    def _raw_columns(self, columns: Mapping[str, RawValues]) -> dict[str, RawColumn]:
        for name in columns:
            if name not in self._accepted:
                raise ConfigError(f"column {name!r}: not in the data set, expected {', '.join(self._raw_names)}")
        raw: dict[str, RawColumn] = {}
        for name in self._raw_names:
            if name not in columns:
                raise ConfigError(f"column {name!r}: missing, expected {', '.join(self._raw_names)}")
            raw[name] = RawColumn(name, columns[name])
        sizes = {len(column) for column in raw.values()}
        if len(sizes) > 1:
            first, *others = raw.values()
            other = next(column for column in others if len(column) != len(first))
            raise ConfigError(
                f"column {other.name!r}: holds {len(other)} values, expected {len(first)} as in column {first.name!r}"
            )
        return raw
