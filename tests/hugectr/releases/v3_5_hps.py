# SPDX-License-Identifier: Apache-2.0
"""Release 3.5: a wide and deep model, scored by a session, and its tables in a hierarchical parameter server."""

import json

import hugectr
import numpy as np
from hugectr.inference import (
    HPS,
    CreateInferenceSession,
    InferenceParams,
    ParameterServerConfig,
    PersistentDatabaseParams,
    UpdateSourceParams,
    VolatileDatabaseParams,
)

SIZES = [200, 300, 100, 50]
hugectr.tools.DataGenerator(
    hugectr.tools.DataGeneratorParams(
        format=hugectr.DataReaderType_t.Parquet,
        label_dim=1,
        dense_dim=3,
        num_slot=4,
        i64_input_key=True,
        source="data/_file_list.txt",
        eval_source="data/_file_list_test.txt",
        slot_size_array=SIZES,
        num_files=2,
        eval_num_files=1,
        num_samples_per_file=4096,
    )
).generate()
solver = hugectr.CreateSolver(
    model_name="hps_demo",
    max_eval_batches=4,
    batchsize_eval=512,
    batchsize=512,
    lr=0.001,
    vvgpu=[[0]],
    i64_input_key=True,
    repeat_dataset=True,
)
reader = hugectr.DataReaderParams(
    data_reader_type=hugectr.DataReaderType_t.Parquet,
    source=["data/_file_list.txt"],
    eval_source="data/_file_list_test.txt",
    slot_size_array=SIZES,
    check_type=hugectr.Check_t.Non,
)
model = hugectr.Model(solver, reader, hugectr.CreateOptimizer(optimizer_type=hugectr.Optimizer_t.Adam))
sparse = [
    hugectr.DataReaderSparseParam("data1", [1, 1], True, 2),
    hugectr.DataReaderSparseParam("data2", [1, 1], True, 2),
]
model.add(hugectr.Input(1, "label", 3, "dense", sparse))
for name, bottom, width in (("embedding1", "data1", 16), ("embedding2", "data2", 32)):
    model.add(
        hugectr.SparseEmbedding(
            embedding_type=hugectr.Embedding_t.DistributedSlotSparseEmbeddingHash,
            workspace_size_per_gpu_in_mb=1,
            embedding_vec_size=width,
            combiner="sum",
            sparse_embedding_name=name,
            bottom_name=bottom,
            optimizer=hugectr.CreateOptimizer(optimizer_type=hugectr.Optimizer_t.Adam),
        )
    )
Layer, Dense = hugectr.Layer_t, hugectr.DenseLayer
model.add(Dense(Layer.Reshape, ["embedding1"], ["flat1"], leading_dim=32))
model.add(Dense(Layer.Reshape, ["embedding2"], ["flat2"], leading_dim=64))
model.add(Dense(Layer.Concat, ["flat1", "flat2", "dense"], ["all"]))
model.add(Dense(Layer.InnerProduct, ["all"], ["fc1"], num_output=32))
model.add(Dense(Layer.ReLU, ["fc1"], ["relu1"]))
model.add(Dense(Layer.InnerProduct, ["relu1"], ["fc2"], num_output=1))
model.add(Dense(Layer.BinaryCrossEntropyLoss, ["fc2", "label"], ["loss"]))
model.compile()
model.fit(max_iter=20, display=10, eval_interval=10, snapshot=20, snapshot_prefix="hps_demo")
model.save_params_to_files("hps_demo", 20)
model.graph_to_json("hps_demo.json")

params = InferenceParams(
    model_name="hps_demo",
    max_batchsize=512,
    hit_rate_threshold=1.0,
    dense_model_file="hps_demo_dense_20.model",
    sparse_model_files=["hps_demo0_sparse_20.model", "hps_demo1_sparse_20.model"],
    deployed_devices=[0],
    device_id=0,
    use_gpu_embedding_cache=True,
    cache_size_percentage=0.5,
    i64_input_key=True,
    default_value_for_each_table=[0.0, 0.0],
)
session = CreateInferenceSession("hps_demo.json", params)
auc = session.evaluate(8, "data/_file_list_test.txt", hugectr.DataReaderType_t.Parquet, hugectr.Check_t.Non, SIZES)
print(f"Evaluation, AUC: {auc}")
scores = session.predict(8, "data/_file_list_test.txt", hugectr.DataReaderType_t.Parquet, hugectr.Check_t.Non, SIZES)
print("scores", scores.shape, scores.dtype)

config = ParameterServerConfig(
    emb_table_name={"hps_demo": ["sparse_embedding1", "sparse_embedding2"]},
    embedding_vec_size={"hps_demo": [16, 32]},
    max_feature_num_per_sample_per_emb_table={"hps_demo": [2, 2]},
    inference_params_array=[params],
    volatile_db=VolatileDatabaseParams(type=hugectr.DatabaseType_t.parallel_hash_map, num_partitions=4),
    persistent_db=PersistentDatabaseParams(type=hugectr.DatabaseType_t.disabled),
    update_source=UpdateSourceParams(type=hugectr.UpdateSourceType_t.null),
)
hps = HPS(config)
keys = np.fromfile("hps_demo1_sparse_20.model/key", np.int64)
rows = np.fromfile("hps_demo1_sparse_20.model/emb_vector", np.float32).reshape(-1, 32)
print("looked up", np.array_equal(hps.lookup(keys, "hps_demo", 1), rows), len(keys) > 100)

with open("ps.json", "w") as file:
    json.dump(
        {
            "supportlonglong": True,
            "volatile_db": {"type": "hash_map"},
            "models": [
                {
                    "model": "hps_demo",
                    "sparse_files": ["hps_demo0_sparse_20.model", "hps_demo1_sparse_20.model"],
                    "dense_file": "",
                    "network_file": "",
                    "num_of_worker_buffer_in_pool": 3,
                    "num_of_refresher_buffer_in_pool": 1,
                    "deployed_device_list": [0],
                    "max_batch_size": 1024,
                    "default_value_for_each_table": [0.0, 0.0],
                    "hit_rate_threshold": 0.9,
                    "gpucacheper": 1.0,
                    "gpucache": True,
                    "maxnum_catfeature_query_per_table_per_sample": [2, 2],
                    "embedding_vecsize_per_table": [16, 32],
                }
            ],
        },
        file,
    )
print("from a file", np.array_equal(HPS("ps.json").lookup(keys, "hps_demo", 1, 0), rows))
