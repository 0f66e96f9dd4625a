# SPDX-License-Identifier: Apache-2.0
"""Release 3.2: continuous training of Wide & Deep with a model oversubscriber, and incremental models."""

import hugectr
import numpy as np
from mpi4py import MPI  # noqa: F401

SIZES = [50, 60, 300, 400, 200, 100]
for number in range(3):
    hugectr.tools.DataGenerator(
        hugectr.tools.DataGeneratorParams(
            format=hugectr.DataReaderType_t.Norm,
            label_dim=1,
            dense_dim=3,
            num_slot=6,
            i64_input_key=False,
            source=f"file_list.{number}/list.txt",
            eval_source=f"file_list.{number}/test.txt",
            slot_size_array=SIZES,
            num_files=1,
            eval_num_files=1,
            num_samples_per_file=4096,
            check_type=hugectr.Check_t.Sum,
        )
    ).generate()
    np.arange(sum(SIZES), dtype=np.uint32).tofile(f"file_list.{number}/list.keyset")


def create(train_from_scratch, **models):
    solver = hugectr.CreateSolver(
        max_eval_batches=4, batchsize_eval=512, batchsize=512, lr=0.001, vvgpu=[[0]], repeat_dataset=False
    )
    reader = hugectr.DataReaderParams(
        data_reader_type=hugectr.DataReaderType_t.Norm,
        source=["file_list.0/list.txt", "file_list.1/list.txt"],
        keyset=["file_list.0/list.keyset", "file_list.1/list.keyset"],
        eval_source="file_list.2/test.txt",
        check_type=hugectr.Check_t.Sum,
    )
    optimizer = hugectr.CreateOptimizer(optimizer_type=hugectr.Optimizer_t.Adam)
    mos_params = hugectr.CreateMOS(train_from_scratch=train_from_scratch, use_host_memory_ps=False, **models)
    model = hugectr.Model(solver, reader, optimizer, mos_params)
    sparse = [
        hugectr.DataReaderSparseParam("wide_data", 1, True, 2),
        hugectr.DataReaderSparseParam("deep_data", 1, False, 4),
    ]
    model.add(hugectr.Input(1, "label", 3, "dense", sparse))
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
    model.add(Dense(Layer.Reshape, ["deep_embedding"], ["deep"], leading_dim=64))
    model.add(Dense(Layer.Reshape, ["wide_embedding"], ["wide"], leading_dim=2))
    model.add(Dense(Layer.ReduceSum, ["wide"], ["wide_sum"], axis=1))
    model.add(Dense(Layer.Concat, ["deep", "dense"], ["all"]))
    model.add(Dense(Layer.InnerProduct, ["all"], ["fc1"], num_output=16))
    model.add(Dense(Layer.ReLU, ["fc1"], ["relu1"]))
    model.add(Dense(Layer.InnerProduct, ["relu1"], ["fc2"], num_output=1))
    model.add(Dense(Layer.Add, ["fc2", "wide_sum"], ["add"]))
    model.add(Dense(Layer.BinaryCrossEntropyLoss, ["add", "label"], ["loss"]))
    model.compile()
    return model


model = create(True, dest_sparse_models=["./models/wdl_0_sparse", "./models/wdl_1_sparse"])
model.fit(num_epochs=1, eval_interval=8, display=8)
print("incremental", [100 < len(keys) <= sum(SIZES) for keys, _ in model.get_incremental_model()])
model.save_params_to_files("wdl", 16)

model = create(False, trained_sparse_models=["./models/wdl_0_sparse", "./models/wdl_1_sparse"])
model.load_dense_weights("wdl_dense_16.model")
model.set_source(
    source=["file_list.2/list.txt"], keyset=["file_list.2/list.keyset"], eval_source="file_list.2/test.txt"
)
model.fit(num_epochs=1, eval_interval=4, display=4)
for keys, vectors in model.get_incremental_model():
    print("updated", len(keys) == len(vectors) > 100, vectors.shape[1], vectors.dtype)
model.save_params_to_files("wdl", 24)
