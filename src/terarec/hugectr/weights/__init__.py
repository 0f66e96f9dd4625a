"""Copies weights between a model and HugeCTR's model files. docs/hugectr-formats.md describes the files."""

from terarec.hugectr.weights.collection import check_collection, dump_collection, dump_folder, load_collection
from terarec.hugectr.weights.dense import (
    load_dense,
    load_dense_optimizer_states,
    save_dense,
    save_dense_optimizer_states,
)
from terarec.hugectr.weights.sparse import (
    EmbeddingFile,
    FileNames,
    check_sparse,
    embedding_file,
    is_single_file,
    load_sparse,
    save_sparse,
)
from terarec.hugectr.weights.sparse_states import (
    check_sparse_optimizer_states,
    load_sparse_optimizer_states,
    save_sparse_optimizer_states,
)

__all__ = [
    "EmbeddingFile",
    "FileNames",
    "check_collection",
    "check_sparse",
    "check_sparse_optimizer_states",
    "dump_collection",
    "dump_folder",
    "embedding_file",
    "is_single_file",
    "load_collection",
    "load_dense",
    "load_dense_optimizer_states",
    "load_sparse",
    "load_sparse_optimizer_states",
    "save_dense",
    "save_dense_optimizer_states",
    "save_sparse",
    "save_sparse_optimizer_states",
]
