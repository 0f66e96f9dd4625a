"""Bytes <-> NumPy and Arrow: data set shards, ``dataset.json``, tensor containers. Described in docs/formats.md."""

from terarec.formats.arguments import check_rows
from terarec.formats.bfloat16 import BFLOAT16, widen_bfloat16
from terarec.formats.block import ColumnBlock, Keys, merge, slice_rows
from terarec.formats.buffers import recycled_empty
from terarec.formats.container import read_tensors, write_tensors
from terarec.formats.dataset import DATASET_FILE, read_dataset, workflow_files, write_dataset
from terarec.formats.even_sizes import even_sizes
from terarec.formats.layout import default_group_rows
from terarec.formats.parquet import ParquetShard, ParquetShardWriter
from terarec.formats.raw import RawShard, RawShardWriter
from terarec.formats.sample_columns import METADATA_TYPES
from terarec.formats.shard import Shard, create_shard, open_shard, shard_path
from terarec.formats.split_files import FileWriter, SplitFiles
from terarec.formats.table_file import TABLE_SUFFIXES, check_suffix, table_file
from terarec.formats.writer import ShardWriter

__all__ = [
    "BFLOAT16",
    "DATASET_FILE",
    "METADATA_TYPES",
    "TABLE_SUFFIXES",
    "ColumnBlock",
    "FileWriter",
    "Keys",
    "ParquetShard",
    "ParquetShardWriter",
    "RawShard",
    "RawShardWriter",
    "Shard",
    "ShardWriter",
    "SplitFiles",
    "check_rows",
    "check_suffix",
    "create_shard",
    "default_group_rows",
    "even_sizes",
    "merge",
    "open_shard",
    "read_dataset",
    "read_tensors",
    "recycled_empty",
    "shard_path",
    "slice_rows",
    "table_file",
    "widen_bfloat16",
    "workflow_files",
    "write_dataset",
    "write_tensors",
]
