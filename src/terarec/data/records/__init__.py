# SPDX-License-Identifier: Apache-2.0
"""Reading HugeCTR's data files as batches, asynchronously; docs/hugectr-formats.md describes the files."""

from terarec.data.records.convert import write_as_dataset, write_as_records
from terarec.data.records.reader import RecordReader
from terarec.data.records.sources import NormSource, ParquetSource, RawAsyncSource, RawSource, open_split
from terarec.spec import RecordOptions

__all__ = [
    "NormSource",
    "ParquetSource",
    "RawAsyncSource",
    "RawSource",
    "RecordOptions",
    "RecordReader",
    "open_split",
    "write_as_dataset",
    "write_as_records",
]
