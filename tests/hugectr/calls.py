"""For every table a call with nothing but what has no default, so that tests can walk the tables."""

import terarec.hugectr as hugectr
from terarec.hugectr.tables.contents import RECORDS, TABLES
from terarec.hugectr.tables.table import Table

SLOTS = hugectr.DataReaderSparseParam("keys", 1, True, 2)
OLD_SLOTS = hugectr.DataReaderSparseParam(hugectr.DataReaderSparse_t.Distributed, 30, 1, 2)
TABLE = hugectr.EmbeddingTableConfig("items", 10, 4)
DENSE = {"dense_dim": 3, "dense_name": "dense"}
EMBEDDING = {
    "embedding_type": hugectr.Embedding_t.DistributedSlotSparseEmbeddingHash,
    "embedding_vec_size": 8,
    "combiner": "sum",
    "sparse_embedding_name": "vectors",
    "bottom_name": "keys",
}

# By name of the callable: one call for each of its forms, in their order.
CALLS = {
    "CreateSolver": [{}, {}],
    "CreateOptimizer": [{}, {}],
    "optimizer.CreateOptimizer": [{}],
    "DataReaderParams": [
        {"data_reader_type": hugectr.DataReaderType_t.Parquet, "source": "train.txt", "eval_source": "val.txt"}
    ],
    "AsyncParam": [
        {"num_threads": 1, "num_batches_per_thread": 4},
        {"num_threads": 1, "num_batches_per_thread": 4, "io_block_size": 512},
    ],
    "data.DataSourceParams": [{}, {"use_hdfs": False}],
    "Input": [
        {"label_dim": 1, "label_name": "label", **DENSE, "data_reader_sparse_param_array": [SLOTS]},
        {
            "label_dims": [1, 1],
            "label_names": ["a", "b"],
            "label_weights": [0.5, 0.5],
            **DENSE,
            "data_reader_sparse_param_array": [SLOTS],
        },
        {"label_dims": [1, 1], "label_names": ["a", "b"], **DENSE, "data_reader_sparse_param_array": [SLOTS]},
        {
            "label_dim": 1,
            "label_name": "label",
            **DENSE,
            "data_reader_sparse_param_array": [OLD_SLOTS],
            "sparse_names": ["keys"],
        },
        {
            "data_reader_type": hugectr.DataReaderType_t.Norm,
            "source": "train.txt",
            "eval_source": "val.txt",
            "check_type": hugectr.Check_t.Sum,
            "label_dim": 1,
            "label_name": "label",
            **DENSE,
            "data_reader_sparse_param_array": [OLD_SLOTS],
            "sparse_names": ["keys"],
        },
    ],
    "DataReaderSparseParam": [
        {"top_name": "keys", "nnz_per_slot": 1, "is_fixed_length": True, "slot_num": 2},
        {"type": hugectr.DataReaderSparse_t.Localized, "max_feature_num": 30, "max_nnz": 1, "slot_num": 2},
        {"sparse_name": "keys", "nnz_per_slot": [1, 2], "is_fixed_length": False, "slot_num": 2},
    ],
    "SparseEmbedding": [
        {**EMBEDDING, "workspace_size_per_gpu_in_mb": 1},
        {**EMBEDDING, "combiner": 0, "max_vocabulary_size_per_gpu": 100},
    ],
    "HybridEmbeddingParam": [{}, {"use_train_precompute_indices": False}],
    "DenseLayer": [{"layer_type": hugectr.Layer_t.ReLU, "bottom_names": ["a"], "top_names": ["b"]}],
    "DenseLayerComputeConfig": [{}],
    "DenseLayerSwitchs": [{}],
    "GroupDenseLayer": [
        {"bottom_name_list": ["a"], "top_name_list": ["b", "c"], "num_outputs": [4, 2]},
        {"bottom_name": "a", "top_name_list": ["b", "c"], "num_outputs": [4, 2]},
    ],
    "EmbeddingTableConfig": [
        {"name": "items", "max_vocabulary_size": 10, "ev_size": 4},
        {"table_id": 0, "max_vocabulary_size": 10, "ev_size": 4, "max_sequence_len": 3},
        {"table_id": 0, "max_vocabulary_size": 10, "ev_size": 4},
    ],
    "EmbeddingTablePlaceHolder": [{"id_space": 0, "max_vocabulary_size": 10, "ev_size": 4}],
    "CreateETC": [{"ps_types": [hugectr.TrainPSType_t.Staged]}],
    "CreateHMemCache": [{"num_blocks": 2, "target_hit_rate": 0.4, "max_num_evict": 0}],
    "CreateMOS": [{"train_from_scratch": True}],
    "solver_parser_helper": [{}, {"eval_batches": 7}],
    "tools.DataGeneratorParams": [
        {
            "format": hugectr.DataReaderType_t.Norm,
            "label_dim": 1,
            "dense_dim": 3,
            "num_slot": 2,
            "i64_input_key": True,
            "source": "train.txt",
            "eval_source": "val.txt",
            "slot_size_array": [10, 20],
        }
    ],
    "EmbeddingCollectionConfig": [{}, {"output_layout": "feature_major"}],
    "EmbeddingCollectionConfig.embedding_lookup": [
        {"table_config": TABLE, "bottom_name": "keys", "top_name": "vectors", "combiner": "sum"}
    ],
    "EmbeddingCollectionConfig.shard": [{"shard_matrix": [["items"]], "shard_strategy": [("mp", ["items"])]}],
    "EmbeddingPlanner.embedding_lookup": [
        {"table_config": TABLE, "bottom_name": "keys", "top_name": "vectors", "combiner": "sum"}
    ],
    "EmbeddingPlanner.create_embedding_collection": [
        {"plan_file": "plan.json"},
        {"shard_matrix": [[1]], "emb_table_group_strategy": [[0]], "emb_table_placement_strategy": ["mp"]},
    ],
    "Model": [
        {
            "solver": hugectr.CreateSolver(),
            "reader_params": hugectr.DataReaderParams(hugectr.DataReaderType_t.Parquet, "a.txt", [], "b.txt"),
            "opt_params": hugectr.CreateOptimizer(),
        }
    ],
    "Model.add": [{"input": SLOTS}],
    "Model.fit": [{}],
    "Model.set_learning_rate": [{"lr": 0.1}],
    "Model.save_params_to_files": [{"prefix": "here"}],
    "Model.load_dense_weights": [{"dense_model_file": "a.model"}],
    "Model.load_dense_optimizer_states": [{"dense_opt_states_file": "a.model"}],
    "Model.load_sparse_weights": [{"sparse_embedding_files": ["a.model"]}],
    "Model.load_sparse_optimizer_states": [{"sparse_opt_states_files": {"a": "a.model"}}],
    "EmbeddingTrainingCache.update": [{"keyset_file": "a.keyset"}],
    "LearningRateScheduler": [{"base_lr": 0.1}],
    "Session": [{"solver_config": hugectr.solver_parser_helper(), "config_file": "conf.json"}],
}


def calls() -> list[tuple[Table, dict[str, object]]]:
    """(table, least call) for every table."""
    left = {name: list(forms) for name, forms in CALLS.items()}
    return [(table, left[table.name].pop(0)) for table in TABLES]


def records() -> list[tuple[type, Table, dict[str, object]]]:
    """(class, table, least call) for every form of every class of objects."""
    least = {id(table): call for table, call in calls()}
    return [(record, form, least[id(form)]) for record in RECORDS for form in record.FORMS]
