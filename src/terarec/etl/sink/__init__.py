"""Encoded rows -> files: shards of a data set or HugeCTR's files, in order or shuffled."""
