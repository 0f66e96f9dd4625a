"""Reading data sets and HugeCTR's files as batches; `terarec.data.synthetic` generates some."""

from terarec.data.open import open_reader, read_spec
from terarec.data.reader import BatchReader, DatasetSource, InMemorySource, Reader, SampleSource
from terarec.data.sampling import RankShare

__all__ = [
    "BatchReader",
    "DatasetSource",
    "InMemorySource",
    "RankShare",
    "Reader",
    "SampleSource",
    "open_reader",
    "read_spec",
]
