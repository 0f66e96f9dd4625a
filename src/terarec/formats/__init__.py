"""Files as NumPy and Arrow data: shards, ``dataset.json``, tensor containers. Described in docs/formats.md."""

from terarec.formats.block import (
    METADATA_TYPES,
    ColumnBlock,
    Keys,
    check_rows,
    default_group_rows,
    empty_from_pool,
    merge,
    slice_rows,
)
from terarec.formats.container import BFLOAT16, read_tensors, tensor_shapes, widen_bfloat16, write_tensors
from terarec.formats.dataset import DATASET_FILE, read_dataset, workflow_files, write_dataset
from terarec.formats.parquet import ParquetShard, ParquetShardWriter
from terarec.formats.parts import PARTS_FILE, PartSpec, read_part_keys, read_parts, write_parts
from terarec.formats.raw import RawShard, RawShardWriter
from terarec.formats.shard import (
    FileWriter,
    Shard,
    ShardWriter,
    SplitFiles,
    create_shard,
    even_sizes,
    open_shard,
    shard_path,
)
from terarec.formats.table_file import TABLE_SUFFIXES, check_suffix, read_table_file, table_file

__all__ = [
    "BFLOAT16",
    "DATASET_FILE",
    "METADATA_TYPES",
    "PARTS_FILE",
    "TABLE_SUFFIXES",
    "ColumnBlock",
    "FileWriter",
    "Keys",
    "ParquetShard",
    "ParquetShardWriter",
    "PartSpec",
    "RawShard",
    "RawShardWriter",
    "Shard",
    "ShardWriter",
    "SplitFiles",
    "check_rows",
    "check_suffix",
    "create_shard",
    "default_group_rows",
    "empty_from_pool",
    "even_sizes",
    "merge",
    "open_shard",
    "read_dataset",
    "read_part_keys",
    "read_parts",
    "read_table_file",
    "read_tensors",
    "shard_path",
    "slice_rows",
    "table_file",
    "tensor_shapes",
    "widen_bfloat16",
    "workflow_files",
    "write_dataset",
    "write_parts",
    "write_tensors",
]
