"""Opens what a ``records.json`` describes."""

from __future__ import annotations

from pathlib import Path

from terarec.data.records.sources import NormSource, ParquetSource, RawAsyncSource, RawSource, RecordSource
from terarec.errors import FormatError
from terarec.formats.location import is_remote
from terarec.spec import RecordsSpec


def open_split(spec: RecordsSpec, split: str, directory: Path) -> RecordSource:
    """The samples of `split`.

    Args:
        spec: the content of a ``records.json``.
        split: for example "train".
        directory: that of the ``records.json``, from which relative paths count.

    Raises:
        ConfigError: no such split.
        DataNotFoundError: a file is missing.
        FormatError: a file does not hold what `spec` promises.
    """
    entry = spec.split(split)
    path = entry.path if is_remote(entry.path) else directory / entry.path
    source: RecordSource
    if spec.kind == "norm":
        source = NormSource(path, spec.layout, checksum=spec.checksum)
    elif spec.kind == "parquet":
        source = ParquetSource(path, spec.layout)
    elif spec.kind == "raw":
        source = RawSource(path, spec.layout, num_samples=entry.rows, float_label_dense=spec.float_label_dense)
    else:
        source = RawAsyncSource(path, spec.layout, num_samples=entry.rows, is_dense_float=spec.float_label_dense)
    found = sum(source.group_rows)
    if found != entry.rows:
        raise FormatError(f"{path}: holds {found} samples, expected {entry.rows} of split {split!r} (records.json)")
    return source
