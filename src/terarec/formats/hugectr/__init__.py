"""HugeCTR's files: bytes <-> NumPy and Arrow. Described in docs/hugectr-formats.md."""

from terarec.formats.hugectr.batch_norm import SUFFIX as STATISTICS_SUFFIX
from terarec.formats.hugectr.batch_norm import BatchNormStatistics, read_statistics, write_statistics
from terarec.formats.hugectr.collection_dump import (
    COLLECTION_FILES,
    CollectionDump,
    DumpedTable,
    open_collection,
    write_collection,
)
from terarec.formats.hugectr.dataset_records import (
    ROWS_PER_FILE,
    RecordKind,
    RecordOptions,
    describe_dataset,
    describe_records,
)
from terarec.formats.hugectr.dense_model import read_floats, write_floats
from terarec.formats.hugectr.field_types import FieldTypes, raw_async_types, raw_types
from terarec.formats.hugectr.file_list import read_file_list, write_file_list
from terarec.formats.hugectr.fixed_record_writer import FixedRecordWriter
from terarec.formats.hugectr.fixed_records import FixedRecordFile
from terarec.formats.hugectr.keyset import read_keyset, write_keyset
from terarec.formats.hugectr.norm import NormFile
from terarec.formats.hugectr.norm_writer import NormWriter
from terarec.formats.hugectr.parquet_metadata import (
    METADATA_FILE,
    ParquetMetadata,
    base_name,
    read_parquet_metadata,
    write_parquet_metadata,
)
from terarec.formats.hugectr.parquet_records import ParquetRecordFile
from terarec.formats.hugectr.record_writers import create_writer, final_keys
from terarec.formats.hugectr.records_file import RECORDS_FILE, read_records, write_records
from terarec.formats.hugectr.sparse_file import SparseFileLayout, read_sparse_file, write_sparse_file
from terarec.formats.hugectr.sparse_folder import (
    SPARSE_FOLDER_FILES,
    SparseFolder,
    open_sparse_folder,
    write_sparse_folder,
)
from terarec.formats.hugectr.sparse_rows import CHUNK_ROWS, SparseRows
from terarec.formats.hugectr.sparse_states import SparseStates, StateLayout, open_sparse_states, write_sparse_states
from terarec.formats.hugectr.split_records import SplitRecords

__all__ = [
    "CHUNK_ROWS",
    "COLLECTION_FILES",
    "METADATA_FILE",
    "RECORDS_FILE",
    "ROWS_PER_FILE",
    "SPARSE_FOLDER_FILES",
    "STATISTICS_SUFFIX",
    "BatchNormStatistics",
    "CollectionDump",
    "DumpedTable",
    "FieldTypes",
    "FixedRecordFile",
    "FixedRecordWriter",
    "NormFile",
    "NormWriter",
    "ParquetMetadata",
    "ParquetRecordFile",
    "RecordKind",
    "RecordOptions",
    "SparseFileLayout",
    "SparseFolder",
    "SparseRows",
    "SparseStates",
    "SplitRecords",
    "StateLayout",
    "base_name",
    "create_writer",
    "describe_dataset",
    "describe_records",
    "final_keys",
    "open_collection",
    "open_sparse_folder",
    "open_sparse_states",
    "raw_async_types",
    "raw_types",
    "read_file_list",
    "read_floats",
    "read_keyset",
    "read_parquet_metadata",
    "read_records",
    "read_sparse_file",
    "read_statistics",
    "write_collection",
    "write_file_list",
    "write_floats",
    "write_keyset",
    "write_parquet_metadata",
    "write_records",
    "write_sparse_file",
    "write_sparse_folder",
    "write_sparse_states",
    "write_statistics",
]
