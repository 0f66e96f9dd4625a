# SPDX-License-Identifier: Apache-2.0
"""Release 3.1: Wide & Deep over Norm files, pass by pass with a model oversubscriber; tensors are sliced by hand."""

import sys

sys.path.append("/usr/local/hugectr/lib")
import hugectr
import numpy as np
from mpi4py import MPI  # noqa: F401

SIZES = [50, 60, 30, 40, 20, 10]
for number in range(2):
    generator = hugectr.tools.DataGeneratorParams(
        format=hugectr.DataReaderType_t.Norm,
        label_dim=1,
        dense_dim=3,
        num_slot=6,
        i64_input_key=False,
        source=f"pass{number}/file_list.txt",
        eval_source=f"pass{number}/file_list_test.txt",
        slot_size_array=SIZES,
        num_files=2,
        eval_num_files=1,
        num_samples_per_file=4096,
        check_type=hugectr.Check_t.Sum,
        dist_type=hugectr.Distribution_t.PowerLaw,
        power_law_type=hugectr.PowerLaw_t.Short,
    )
    hugectr.tools.DataGenerator(generator).generate()
    np.arange(sum(SIZES), dtype=np.uint32).tofile(f"pass{number}.keyset")

solver = hugectr.CreateSolver(
    max_eval_batches=4, batchsize_eval=1024, batchsize=1024, vvgpu=[[0]], i64_input_key=False, repeat_dataset=False
)
reader = hugectr.DataReaderParams(
    data_reader_type=hugectr.DataReaderType_t.Norm,
    source=["pass0/file_list.txt", "pass1/file_list.txt"],
    keyset=["pass0.keyset", "pass1.keyset"],
    eval_source="pass0/file_list_test.txt",
    check_type=hugectr.Check_t.Sum,
)
optimizer = hugectr.CreateOptimizer(optimizer_type=hugectr.Optimizer_t.Adam, update_type=hugectr.Update_t.Global)
mos = hugectr.CreateMOS(
    train_from_scratch=True, use_host_memory_ps=False, dest_sparse_models=["wide_model", "deep_model"]
)
model = hugectr.Model(solver, reader, optimizer, mos)
model.add(
    hugectr.Input(
        label_dim=1,
        label_name="label",
        dense_dim=3,
        dense_name="dense",
        data_reader_sparse_param_array=[
            hugectr.DataReaderSparseParam("wide_data", 1, True, 2),
            hugectr.DataReaderSparseParam("deep_data", 1, True, 4),
        ],
    )
)
for name, width in (("wide", 1), ("deep", 8)):
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
Layer = hugectr.Layer_t
for kind, bottoms, tops, options in (
    (Layer.Reshape, ["deep_embedding"], ["deep"], {"leading_dim": 32}),
    (Layer.Reshape, ["wide_embedding"], ["wide"], {"leading_dim": 2}),
    (Layer.ReduceSum, ["wide"], ["wide_sum"], {"axis": 1}),
    (Layer.Concat, ["deep", "dense"], ["all"], {}),
    (Layer.Slice, ["all"], ["all1", "all2"], {"ranges": [(0, 35), (0, 35)]}),
    (Layer.InnerProduct, ["all1"], ["fc1"], {"num_output": 16}),
    (Layer.ReLU, ["fc1"], ["relu1"], {}),
    (Layer.Dropout, ["relu1"], ["dropout1"], {"dropout_rate": 0.5}),
    (Layer.InnerProduct, ["dropout1"], ["fc2"], {"num_output": 1}),
    (Layer.InnerProduct, ["all2"], ["fc3"], {"num_output": 1}),
    (Layer.Add, ["fc2", "fc3", "wide_sum"], ["add"], {}),
    (Layer.BinaryCrossEntropyLoss, ["add", "label"], ["loss"], {}),
):
    model.add(hugectr.DenseLayer(layer_type=kind, bottom_names=bottoms, top_names=tops, **options))
model.compile()
model.summary()
model.graph_to_json(graph_config_file="wide_deep.json")
model.fit(num_epochs=1, eval_interval=4, display=4)
model.set_source(source=["pass1/file_list.txt"], keyset=["pass1.keyset"], eval_source="pass1/file_list_test.txt")
model.fit(num_epochs=1, eval_interval=4, display=4)
for keys, vectors in model.get_incremental_model():
    print(keys.shape, vectors.shape)
model.save_params_to_files("wide_deep")
