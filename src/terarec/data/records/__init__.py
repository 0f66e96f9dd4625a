"""Reading HugeCTR's data files as batches, asynchronously; docs/hugectr-formats.md describes the files."""

from terarec.data.records.described import open_split
from terarec.data.records.from_dataset import write_as_records
from terarec.data.records.generate import GeneratedRecords, generate_records
from terarec.data.records.generated_rows import RecordGenerator
from terarec.data.records.keysets import distinct_keys
from terarec.data.records.reader import RecordReader
from terarec.data.records.sources import NormSource, ParquetSource, RawAsyncSource, RawSource, RecordSource
from terarec.data.records.to_dataset import ImportedRecords, write_as_dataset
from terarec.formats.hugectr import RecordOptions
from terarec.spec import RecordLayout, SparseInput

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
    "distinct_keys",
    "generate_records",
    "open_split",
    "write_as_dataset",
    "write_as_records",
]
