"""Encoded rows -> files: shards of a data set or HugeCTR's files, in order or shuffled."""

from terarec.etl.sink.create import RECORD_KINDS, SinkOptions, create_sink, ordered_sink
from terarec.etl.sink.sink import Sink

__all__ = ["RECORD_KINDS", "Sink", "SinkOptions", "create_sink", "ordered_sink"]
