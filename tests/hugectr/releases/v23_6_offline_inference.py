# SPDX-License-Identifier: Apache-2.0
"""Release 23.6: a model over two tables of several slots, scored offline on four devices."""

import hugectr
from hugectr.inference import InferenceModel, InferenceParams
from mpi4py import MPI  # noqa: F401

SIZES = [100, 120, 80, 60, 40, 20]
hugectr.tools.DataGenerator(
    hugectr.tools.DataGeneratorParams(
        format=hugectr.DataReaderType_t.Parquet,
        label_dim=2,
        dense_dim=2,
        num_slot=6,
        i64_input_key=True,
        nnz_array=[2, 1, 3, 1, 1, 2],
        source="multi/file_list.txt",
        eval_source="multi/file_list_test.txt",
        slot_size_array=SIZES,
        check_type=hugectr.Check_t.Non,
        dist_type=hugectr.Distribution_t.PowerLaw,
        power_law_type=hugectr.PowerLaw_t.Short,
        num_files=2,
        eval_num_files=1,
        num_samples_per_file=4096,
    )
).generate()
solver = hugectr.CreateSolver(
    model_name="multi", max_eval_batches=4, batchsize_eval=1024, batchsize=1024, lr=0.001, vvgpu=[[0]],
    i64_input_key=True, repeat_dataset=True,
)  # fmt: skip
optimizer = hugectr.CreateOptimizer(optimizer_type=hugectr.Optimizer_t.Adam)
reader = hugectr.DataReaderParams(
    data_reader_type=hugectr.DataReaderType_t.Parquet,
    source=["multi/file_list.txt"],
    eval_source="multi/file_list_test.txt",
    check_type=hugectr.Check_t.Non,
    slot_size_array=SIZES,
)
model = hugectr.Model(solver, reader, optimizer)
sparse = [
    hugectr.DataReaderSparseParam("data1", [2, 1, 3], False, 3),
    hugectr.DataReaderSparseParam("data2", [1, 1, 2], False, 3),
]
model.add(hugectr.Input([1, 1], ["label1", "label2"], 2, "dense", sparse))
for number, width in ((1, 8), (2, 16)):
    model.add(
        hugectr.SparseEmbedding(
            embedding_type=hugectr.Embedding_t.LocalizedSlotSparseEmbeddingHash,
            workspace_size_per_gpu_in_mb=1,
            embedding_vec_size=width,
            combiner="mean",
            sparse_embedding_name=f"embedding{number}",
            bottom_name=f"data{number}",
            optimizer=optimizer,
        )
    )
Layer, Dense = hugectr.Layer_t, hugectr.DenseLayer
model.add(Dense(Layer.Reshape, ["embedding1"], ["flat1"], leading_dim=24))
model.add(Dense(Layer.Reshape, ["embedding2"], ["flat2"], leading_dim=48))
model.add(Dense(Layer.Concat, ["flat1", "flat2", "dense"], ["all"]))
model.add(Dense(Layer.InnerProduct, ["all"], ["fc1"], num_output=16))
model.add(Dense(Layer.ReLU, ["fc1"], ["relu1"]))
model.add(Dense(Layer.InnerProduct, ["relu1"], ["a"], num_output=1))
model.add(Dense(Layer.InnerProduct, ["relu1"], ["b"], num_output=1))
model.add(Dense(Layer.BinaryCrossEntropyLoss, ["a", "label1"], ["loss1"]))
model.add(Dense(Layer.BinaryCrossEntropyLoss, ["b", "label2"], ["loss2"]))
model.compile(loss_names=["label1", "label2"], loss_weights=[0.5, 0.5])
model.fit(max_iter=12, display=6, eval_interval=6, snapshot=12, snapshot_prefix="multi")
model.save_params_to_files("multi", 12)
model.graph_to_json("multi.json")

params = InferenceParams(
    model_name="multi",
    max_batchsize=1024,
    hit_rate_threshold=1.0,
    dense_model_file="multi_dense_12.model",
    sparse_model_files=["multi0_sparse_12.model", "multi1_sparse_12.model"],
    deployed_devices=[0, 1, 2, 3],
    device_id=0,
    use_gpu_embedding_cache=True,
    cache_size_percentage=0.5,
    i64_input_key=True,
)
served = InferenceModel("multi.json", params)
found = served.predict(4, "multi/file_list_test.txt", hugectr.DataReaderType_t.Parquet, hugectr.Check_t.Non, SIZES)
print("predictions", found.shape)
auc = served.evaluate(
    num_batches=4,
    source="multi/file_list_test.txt",
    data_reader_type=hugectr.DataReaderType_t.Parquet,
    check_type=hugectr.Check_t.Non,
    slot_size_array=SIZES,
)
print(f"Evaluation, AUC: {auc}")
print("tensor", served.check_out_tensor("relu1").shape)
