"""Reading HugeCTR's data files as batches, asynchronously; docs/hugectr-formats.md describes the files."""

from terarec.data.records.convert import ImportedRecords, write_as_dataset, write_as_records
from terarec.data.records.generate import GeneratedRecords, RecordGenerator, generate_records
from terarec.data.records.reader import RecordReader
from terarec.data.records.sources import (
    NormSource,
    ParquetSource,
    RawAsyncSource,
    RawSource,
    RecordSource,
    open_split,
)
from terarec.spec import RecordLayout, RecordOptions, SparseInput

__all__ = [
    "GeneratedRecords",
    "ImportedRecords",
    "NormSource",
    "ParquetSource",
    "RawAsyncSource",
    "RawSource",
    "RecordGenerator",
    "RecordLayout",
    "RecordOptions",
    "RecordReader",
    "RecordSource",
    "SparseInput",
    "generate_records",
    "open_split",
    "write_as_dataset",
    "write_as_records",
]
