# SPDX-License-Identifier: Apache-2.0
"""Release 23.6: two embeddings of one model in a training cache, Staged and Cached, and keysets of each pass's keys."""

import hugectr
import numpy as np
import pyarrow.parquet as parquet
from mpi4py import MPI  # noqa: F401

SIZES = [3000, 2000, 1000, 500]
for number in range(3):
    hugectr.tools.DataGenerator(
        hugectr.tools.DataGeneratorParams(
            format=hugectr.DataReaderType_t.Parquet,
            label_dim=1,
            dense_dim=2,
            num_slot=4,
            i64_input_key=True,
            source=f"etc_data/train{number}/_file_list.txt",
            eval_source=f"etc_data/valid{number}/_file_list.txt",
            slot_size_array=SIZES,
            dist_type=hugectr.Distribution_t.PowerLaw,
            power_law_type=hugectr.PowerLaw_t.Short,
            num_files=2,
            eval_num_files=1,
            num_samples_per_file=2048,
        )
    ).generate()
    with open(f"etc_data/train{number}/_file_list.txt") as file:
        files = file.read().split()[1:]
    tables = [parquet.read_table(path) for path in files]
    # The keys of slot i begin at the sum of the sizes of the slots before.
    columns = tables[0].column_names[-len(SIZES) :]
    starts = np.cumsum([0, *SIZES[:-1]])
    keys = [table[name].to_numpy() + start for table in tables for name, start in zip(columns, starts, strict=True)]
    np.unique(np.concatenate(keys)).astype(np.int64).tofile(f"etc_data/train{number}/train.keyset")

solver = hugectr.CreateSolver(
    max_eval_batches=4,
    batchsize_eval=512,
    batchsize=512,
    lr=0.001,
    vvgpu=[[0]],
    i64_input_key=True,
    use_mixed_precision=False,
    repeat_dataset=False,
)
reader = hugectr.DataReaderParams(
    data_reader_type=hugectr.DataReaderType_t.Parquet,
    source=[f"etc_data/train{number}/_file_list.txt" for number in range(2)],
    keyset=[f"etc_data/train{number}/train.keyset" for number in range(2)],
    eval_source="etc_data/valid0/_file_list.txt",
    slot_size_array=SIZES,
    check_type=hugectr.Check_t.Non,
)
optimizer = hugectr.CreateOptimizer(
    optimizer_type=hugectr.Optimizer_t.Adam, update_type=hugectr.Update_t.Global, beta1=0.9, beta2=0.999
)
hmem_cache = hugectr.CreateHMemCache(num_blocks=1, target_hit_rate=0.4, max_num_evict=0)
etc = hugectr.CreateETC(
    ps_types=[hugectr.TrainPSType_t.Staged, hugectr.TrainPSType_t.Cached],
    sparse_models=["./0_sparse_model", "./1_sparse_model"],
    local_paths=["./local"],
    hmem_cache_configs=[hmem_cache],
)
model = hugectr.Model(solver, reader, optimizer, etc)
model.add(
    hugectr.Input(
        label_dim=1,
        label_name="label",
        dense_dim=2,
        dense_name="dense",
        data_reader_sparse_param_array=[
            hugectr.DataReaderSparseParam("wide_data", 1, True, 2),
            hugectr.DataReaderSparseParam("deep_data", 1, True, 2),
        ],
    )
)
for name, width in (("wide", 1), ("deep", 16)):
    model.add(
        hugectr.SparseEmbedding(
            embedding_type=hugectr.Embedding_t.DistributedSlotSparseEmbeddingHash,
            workspace_size_per_gpu_in_mb=1,
            embedding_vec_size=width,
            combiner="sum",
            sparse_embedding_name=f"{name}_embedding",
            bottom_name=f"{name}_data",
            optimizer=optimizer,
        )
    )
Layer, Dense = hugectr.Layer_t, hugectr.DenseLayer
model.add(Dense(Layer.Reshape, ["deep_embedding"], ["deep"], leading_dim=32))
model.add(Dense(Layer.Reshape, ["wide_embedding"], ["wide"], leading_dim=2))
model.add(Dense(Layer.ReduceSum, ["wide"], ["wide_sum"], axis=1))
model.add(Dense(Layer.Concat, ["deep", "dense"], ["all"]))
model.add(Dense(Layer.InnerProduct, ["all"], ["fc1"], num_output=16))
model.add(Dense(Layer.ReLU, ["fc1"], ["relu1"]))
model.add(Dense(Layer.InnerProduct, ["relu1"], ["fc2"], num_output=1))
model.add(Dense(Layer.Add, ["fc2", "wide_sum"], ["add"]))
model.add(Dense(Layer.BinaryCrossEntropyLoss, ["add", "label"], ["loss"]))
model.compile()
model.summary()
model.graph_to_json(graph_config_file="wdl.json")
model.fit(num_epochs=1, eval_interval=8, display=8)
updated = model.get_incremental_model()
model.save_params_to_files("wdl_etc")
model.set_source(
    source=["etc_data/train2/_file_list.txt"],
    keyset=["etc_data/train2/train.keyset"],
    eval_source="etc_data/valid2/_file_list.txt",
)
model.fit(num_epochs=1, eval_interval=4, display=4)
later = model.get_incremental_model()
expected = np.fromfile("etc_data/train2/train.keyset", dtype=np.int64)
print("widths", [vectors.shape[1] for _, vectors in later], all(np.isin(keys, expected).all() for keys, _ in later))
print("both slots", all(len(keys) > 0 for keys, _ in updated), len(updated[1][0]) <= sum(SIZES))
model.save_params_to_files("wdl_etc", 24)
