# SPDX-License-Identifier: Apache-2.0
"""A script for one process or several: it trains, saves, loads and evaluates, and prints what it finds.

Its arguments are the training data, the evaluation data, a folder for its files, and GPUs such as [[0,1]].
"""

import json
import sys

import hugectr
from mpi4py import MPI

source, eval_source, folder, gpus = sys.argv[1:]
solver = hugectr.CreateSolver(
    vvgpu=json.loads(gpus),
    max_eval_batches=4,
    batchsize_eval=498,
    batchsize=500,
    lr=0.05,
    seed=5,
    repeat_dataset=True,
    i64_input_key=True,
)
reader = hugectr.DataReaderParams(
    data_reader_type=hugectr.DataReaderType_t.Norm,
    source=source,
    eval_source=eval_source,
    check_type=hugectr.Check_t.Sum,
)
optimizer = hugectr.CreateOptimizer(optimizer_type=hugectr.Optimizer_t.AdaGrad, initial_accu_value=0.1)
model = hugectr.Model(solver, reader, optimizer)
model.add(hugectr.Input(1, "label", 3, "dense", [hugectr.DataReaderSparseParam("data", 1, True, 4)]))
for name, kind in (
    ("spread", hugectr.Embedding_t.DistributedSlotSparseEmbeddingHash),
    ("slots", hugectr.Embedding_t.LocalizedSlotSparseEmbeddingHash),
):
    model.add(
        hugectr.SparseEmbedding(
            embedding_type=kind,
            workspace_size_per_gpu_in_mb=2,
            embedding_vec_size=4,
            combiner="sum",
            sparse_embedding_name=name,
            bottom_name="data",
        )
    )
    model.add(hugectr.DenseLayer(hugectr.Layer_t.Reshape, [name], [f"{name}_flat"], leading_dim=16))
layers = hugectr.Layer_t
model.add(hugectr.DenseLayer(layers.Concat, ["spread_flat", "slots_flat", "dense"], ["all"]))
model.add(hugectr.DenseLayer(layers.InnerProduct, ["all"], ["hidden"], num_output=8))
model.add(hugectr.DenseLayer(layers.ReLU, ["hidden"], ["positive"]))
model.add(hugectr.DenseLayer(layers.InnerProduct, ["positive"], ["logit"], num_output=1))
model.add(hugectr.DenseLayer(layers.BinaryCrossEntropyLoss, ["logit", "label"], ["loss"]))
model.compile()
model.fit(max_iter=12, display=4, eval_interval=6, snapshot=0)
prefix = f"{folder}/held"
model.save_params_to_files(prefix, 12)


def evaluate() -> list[tuple[str, float]]:
    for _ in range(4):
        model.eval()
    return model.get_eval_metrics()


logits = model.check_out_tensor("logit", hugectr.Tensor_t.Train)
for _ in range(3):
    model.train()
loss = model.get_current_loss()
own = model.get_data_reader_train().share
model.load_dense_weights(f"{prefix}_dense_12.model")
model.load_sparse_weights([f"{prefix}0_sparse_12.model", f"{prefix}1_sparse_12.model"])
model.load_sparse_optimizer_states([f"{prefix}0_opt_sparse_12.model", f"{prefix}1_opt_sparse_12.model"])
model.get_data_reader_eval().set_source()
world = MPI.COMM_WORLD
auc = evaluate()[0][1]
model.export_predictions(f"{folder}/predictions", f"{folder}/labels")
found = {"auc": auc, "loss": loss, "logits": logits.shape[0], "size": world.Get_size()}
found["device"] = str(model.module.device)
print("FOUND", json.dumps({**found, "readers": 1 if own is None else own.size}))
model.save_params_to_files(f"{folder}/again", 12)
world.Barrier()
