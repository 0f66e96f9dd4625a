"""Reading data sets as batches; `terarec.data.synthetic` generates some."""

from terarec.data.reader import Reader
from terarec.data.source import DatasetSource, InMemorySource, Source

__all__ = ["DatasetSource", "InMemorySource", "Reader", "Source"]
