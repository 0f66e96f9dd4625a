# SPDX-License-Identifier: Apache-2.0
"""Release 4.1: DLRM over a RawAsync file with a hybrid embedding and groups of fused layers, in mixed precision."""

import hugectr
from mpi4py import MPI  # noqa: F401

SIZES = [300, 20, 100, 7, 50, 3]
hugectr.tools.DataGenerator(
    hugectr.tools.DataGeneratorParams(
        format=hugectr.DataReaderType_t.Raw,
        label_dim=1,
        dense_dim=5,
        num_slot=6,
        i64_input_key=False,
        source="./train_data.bin",
        eval_source="./test_data.bin",
        slot_size_array=SIZES,
        num_samples=16384,
        eval_num_samples=4096,
        power_law_type=hugectr.PowerLaw_t.Short,
        dist_type=hugectr.Distribution_t.PowerLaw,
    )
).generate()

solver = hugectr.CreateSolver(
    max_eval_batches=8,
    batchsize_eval=512,
    batchsize=512,
    lr=0.5,
    warmup_steps=5,
    decay_start=20,
    decay_steps=10,
    decay_power=2.0,
    end_lr=0.0,
    vvgpu=[[0, 1], [0, 1]],
    repeat_dataset=True,
    use_mixed_precision=True,
    scaler=1024,
    use_cuda_graph=True,
    gen_loss_summary=False,
    async_mlp_wgrad=True,
    device_layout=hugectr.DeviceLayout.NodeFirst,
    all_reduce_algo=hugectr.AllReduceAlgo.OneShot,
    grouped_all_reduce=True,
    num_iterations_statistics=20,
    metrics_spec={hugectr.MetricsType.AUC: 0.9999},
)
reader = hugectr.DataReaderParams(
    data_reader_type=hugectr.DataReaderType_t.RawAsync,
    source=["./train_data.bin"],
    eval_source="./test_data.bin",
    check_type=hugectr.Check_t.Non,
    num_samples=16384,
    eval_num_samples=4096,
    cache_eval_data=8,
    slot_size_array=SIZES,
    async_param=hugectr.AsyncParam(32, 4, 10, 2, 4096, True, hugectr.Alignment_t.Auto),
)
optimizer = hugectr.CreateOptimizer(
    optimizer_type=hugectr.Optimizer_t.SGD, update_type=hugectr.Update_t.Local, atomic_update=True
)
model = hugectr.Model(solver, reader, optimizer)
model.add(
    hugectr.Input(
        label_dim=1,
        label_name="label",
        dense_dim=5,
        dense_name="dense",
        data_reader_sparse_param_array=[hugectr.DataReaderSparseParam("data1", 1, False, 6)],
    )
)
model.add(
    hugectr.SparseEmbedding(
        embedding_type=hugectr.Embedding_t.HybridSparseEmbedding,
        workspace_size_per_gpu_in_mb=1,
        slot_size_array=SIZES,
        embedding_vec_size=8,
        combiner="sum",
        sparse_embedding_name="sparse_embedding1",
        bottom_name="data1",
        optimizer=optimizer,
        hybrid_embedding_param=hugectr.HybridEmbeddingParam(
            2, -1, 0.01, 1.3e11, 1.9e11, 1.0, hugectr.CommunicationType.IB_NVLink_Hier,
            hugectr.HybridEmbeddingType.Distributed,
        ),
    )
)  # fmt: skip
model.add(
    hugectr.GroupDenseLayer(
        group_layer_type=hugectr.GroupLayer_t.GroupFusedInnerProduct,
        bottom_name_list=["dense"],
        top_name_list=["fc1", "fc2"],
        num_outputs=[16, 8],
    )
)
model.add(
    hugectr.DenseLayer(
        layer_type=hugectr.Layer_t.Interaction,
        bottom_names=["fc2", "sparse_embedding1"],
        top_names=["interaction1", "interaction1_grad"],
    )
)
model.add(
    hugectr.GroupDenseLayer(
        group_layer_type=hugectr.GroupLayer_t.GroupFusedInnerProduct,
        bottom_name_list=["interaction1", "interaction1_grad"],
        top_name_list=["fc3", "fc4"],
        num_outputs=[16, 1],
        last_act_type=hugectr.Activation_t.Non,
    )
)
model.add(
    hugectr.DenseLayer(
        layer_type=hugectr.Layer_t.BinaryCrossEntropyLoss, bottom_names=["fc4", "label"], top_names=["loss"]
    )
)
model.compile()
model.summary()
model.fit(max_iter=40, display=10, eval_interval=20, snapshot=2000000, snapshot_prefix="dlrm")
