"""Reading HugeCTR's data files as batches, asynchronously; docs/hugectr-formats.md describes the files."""

from terarec.data.records.keysets import distinct_keys
from terarec.data.records.reader import RecordReader
from terarec.data.records.sources import NormSource, ParquetSource, RawAsyncSource, RawSource, RecordSource
from terarec.spec import RecordLayout, SparseInput

__all__ = [
    "NormSource",
    "ParquetSource",
    "RawAsyncSource",
    "RawSource",
    "RecordLayout",
    "RecordReader",
    "RecordSource",
    "SparseInput",
    "distinct_keys",
]
