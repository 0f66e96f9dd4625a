"""Reading data sets and HugeCTR's files as batches; `terarec.data.synthetic` generates some."""

from terarec.data.open import open_reader, read_spec
from terarec.data.reader import BatchReader, DatasetSource, InMemorySource, Reader, Source

__all__ = ["BatchReader", "DatasetSource", "InMemorySource", "Reader", "Source", "open_reader", "read_spec"]
