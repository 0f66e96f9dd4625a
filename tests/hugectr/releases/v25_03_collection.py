# SPDX-License-Identifier: Apache-2.0
"""Release 25.03: DCNv2 over a multi-hot RawAsync file with an embedding collection, callbacks and its own options."""

import argparse

import hugectr
import numpy as np
from mpi4py import MPI

parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, default=0.005)
parser.add_argument("--table_sizes", type=lambda text: [int(size) for size in text.split(",")], default=[40, 9, 300])
args = parser.parse_args()
HOTNESS, SAMPLES = [2, 1, 3], 8192

rng = np.random.default_rng(MPI.COMM_WORLD.Get_rank())
for name in ("train_data.bin", "val_data.bin"):
    label = rng.integers(0, 2, (SAMPLES, 1), dtype=np.int32)
    dense = rng.random((SAMPLES, 4), dtype=np.float32).view(np.int32)
    sizes = zip(args.table_sizes, HOTNESS, strict=True)
    keys = [rng.integers(0, size, (SAMPLES, hot), dtype=np.int32) for size, hot in sizes]
    np.concatenate([label, dense, *keys], axis=1).tofile(name)


class Recorder(hugectr.TrainingCallback):
    def __init__(self):
        super().__init__()
        self.calls = []

    def on_training_start(self):
        self.calls.append("start")

    def on_eval_start(self, current_iter):
        self.calls.append(("eval_start", current_iter))
        return False

    def on_eval_end(self, current_iter, eval_results):
        self.calls.append(("eval_end", current_iter, sorted(eval_results)))
        return eval_results["AUC"] > 0.9

    def on_training_end(self, current_iter):
        self.calls.append(("end", current_iter))


recorder = Recorder()
solver = hugectr.CreateSolver(
    model_name="dcnv2",
    batchsize=512,
    batchsize_eval=512,
    max_eval_batches=SAMPLES // 512,
    lr=args.lr,
    vvgpu=[[0, 1]],
    i64_input_key=False,
    use_embedding_collection=True,
    train_inter_iteration_overlap=True,
    eval_intra_iteration_overlap=True,
    perf_logging=True,
    training_callbacks=[recorder],
)
reader = hugectr.DataReaderParams(
    data_reader_type=hugectr.DataReaderType_t.RawAsync,
    source=["train_data.bin"],
    eval_source="val_data.bin",
    check_type=hugectr.Check_t.Non,
    num_samples=SAMPLES,
    eval_num_samples=SAMPLES,
    cache_eval_data=1,
    slot_size_array=args.table_sizes,
    async_param=hugectr.AsyncParam(
        num_threads=1, num_batches_per_thread=16, shuffle=False, multi_hot_reader=True, is_dense_float=True
    ),
)
optimizer = hugectr.CreateOptimizer(
    optimizer_type=hugectr.Optimizer_t.AdaGrad, update_type=hugectr.Update_t.Global, initial_accu_value=0, epsilon=1e-8
)
model = hugectr.Model(solver, reader, optimizer)
model.add(
    hugectr.Input(
        label_dim=1,
        label_name="label",
        dense_dim=4,
        dense_name="dense",
        data_reader_sparse_param_array=[
            hugectr.DataReaderSparseParam(f"data{number}", hot, True, 1) for number, hot in enumerate(HOTNESS)
        ],
    )
)
tables = [
    hugectr.EmbeddingTableConfig(name=str(number), max_vocabulary_size=size, ev_size=8)
    for number, size in enumerate(args.table_sizes)
]
collection = hugectr.EmbeddingCollectionConfig(
    use_exclusive_keys=True, comm_strategy=hugectr.CommunicationStrategy.Uniform
)
collection.embedding_lookup(
    table_config=tables,
    bottom_name=[f"data{number}" for number in range(3)],
    top_name="sparse_embedding",
    combiner=["sum"] * 3,
)
collection.shard(
    shard_matrix=[["0", "1"], ["1", "2"]],
    shard_strategy=[("mp", ["0", "2"]), ("dp", ["1"])],
    compression_strategy={hugectr.CompressionStrategy.Unique: ["0", "2"]},
)
model.add(collection)
compute = hugectr.DenseLayerComputeConfig(async_wgrad=True, fuse_wb=False)
model.add(
    hugectr.DenseLayer(
        layer_type=hugectr.Layer_t.MLP,
        bottom_names=["dense"],
        top_names=["mlp1"],
        num_outputs=[16, 8],
        act_type=hugectr.Activation_t.Relu,
        compute_config=compute,
    )
)
model.add(hugectr.DenseLayer(hugectr.Layer_t.Concat, ["sparse_embedding", "mlp1"], ["concat1"]))
model.add(hugectr.DenseLayer(hugectr.Layer_t.MultiCross, ["concat1"], ["cross1"], projection_dim=4, num_layers=2))
model.add(
    hugectr.DenseLayer(
        layer_type=hugectr.Layer_t.MLP,
        bottom_names=["cross1"],
        top_names=["mlp2"],
        num_outputs=[16, 1],
        activations=[hugectr.Activation_t.Relu, hugectr.Activation_t.Non],
        use_bias=True,
    )
)
model.add(hugectr.DenseLayer(hugectr.Layer_t.BinaryCrossEntropyLoss, ["mlp2", "label"], ["loss"]))
model.compile()
model.summary()
model.fit(max_iter=40, display=10, eval_interval=20, snapshot=1_000_000, snapshot_prefix="dcnv2")
print(recorder.calls)
print("checked out", model.check_out_tensor("mlp1", hugectr.Tensor_t.Train).shape)
model.embedding_dump("./dump", ["0", "2"])
model.embedding_load("./dump", ["2"])
