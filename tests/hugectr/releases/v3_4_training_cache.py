# SPDX-License-Identifier: Apache-2.0
"""Release 3.4: DCN over Parquet files, with a cached training cache that a loop of its own updates, and resumed."""

import hugectr
import numpy as np
from mpi4py import MPI  # noqa: F401

SIZES = [40, 30, 20, 10]
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
np.arange(sum(SIZES), dtype=np.int64).tofile("data.keyset")


def build(name):
    solver = hugectr.CreateSolver(
        model_name=name,
        max_eval_batches=4,
        batchsize_eval=512,
        batchsize=512,
        lr=0.001,
        vvgpu=[[0, 1]],
        i64_input_key=True,
        use_mixed_precision=False,
        repeat_dataset=False,
        metrics_spec={hugectr.MetricsType.AUC: 1.0, hugectr.MetricsType.AverageLoss: 0.0},
    )
    reader = hugectr.DataReaderParams(
        data_reader_type=hugectr.DataReaderType_t.Parquet,
        source=["data/_file_list.txt"],
        keyset=["data.keyset"],
        eval_source="data/_file_list_test.txt",
        slot_size_array=SIZES,
        check_type=hugectr.Check_t.Non,
    )
    optimizer = hugectr.CreateOptimizer(optimizer_type=hugectr.Optimizer_t.AdaGrad, initial_accu_value=0.1)
    cache = hugectr.CreateHMemCache(num_blocks=2, target_hit_rate=0.5, max_num_evict=0)
    etc = hugectr.CreateETC(
        ps_types=[hugectr.TrainPSType_t.Cached],
        sparse_models=["./dcn_sparse_model"],
        local_paths=["./"],
        hmem_cache_configs=[cache],
    )
    model = hugectr.Model(solver, reader, optimizer, etc)
    sparse = [hugectr.DataReaderSparseParam("data1", [1, 1, 1, 1], True, 4)]
    model.add(hugectr.Input(1, "label", 3, "dense", sparse))
    model.add(
        hugectr.SparseEmbedding(
            embedding_type=hugectr.Embedding_t.LocalizedSlotSparseEmbeddingHash,
            workspace_size_per_gpu_in_mb=1,
            embedding_vec_size=8,
            combiner="mean",
            sparse_embedding_name="embedding",
            bottom_name="data1",
            optimizer=optimizer,
        )
    )
    Layer, Dense = hugectr.Layer_t, hugectr.DenseLayer
    model.add(Dense(Layer.Reshape, ["embedding"], ["flat"], leading_dim=32))
    model.add(Dense(Layer.Concat, ["flat", "dense"], ["all"]))
    model.add(Dense(Layer.MultiCross, ["all"], ["cross"], num_layers=3))
    model.add(Dense(Layer.InnerProduct, ["all"], ["fc1"], num_output=16))
    model.add(Dense(Layer.ReLU, ["fc1"], ["relu1"]))
    model.add(Dense(Layer.Concat, ["relu1", "cross"], ["both"]))
    model.add(Dense(Layer.InnerProduct, ["both"], ["fc2"], num_output=1))
    model.add(Dense(Layer.BinaryCrossEntropyLoss, ["fc2", "label"], ["loss"]))
    model.compile()
    return model


model = build("dcn")
scheduler = model.get_learning_rate_scheduler()
train, evaluation = model.get_data_reader_train(), model.get_data_reader_eval()
cache = model.get_embedding_training_cache()
evaluation.set_source("data/_file_list_test.txt")
for _ in range(2):
    train.set_source("data/_file_list.txt")
    cache.update("data.keyset")
    count = 0
    while True:
        model.set_learning_rate(scheduler.get_next())
        if not model.train(False):
            break
        count += 1
    print("iterations", count, "loss", model.get_current_loss())
for _ in range(4):
    model.eval(False)
for name, value in model.get_eval_metrics():
    print(f"Evaluation, {name}: {value}")
print("incremental", [keys.shape for keys, _ in model.get_incremental_model()])
model.save_params_to_files("./", 16)

resumed = build("resumed")
resumed.load_dense_weights(dense_model_file="./_dense_16.model")
resumed.load_dense_optimizer_states(dense_opt_states_file="./_opt_dense_16.model")
resumed.fit(num_epochs=1, eval_interval=8, display=8)
