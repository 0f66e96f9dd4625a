# SPDX-License-Identifier: Apache-2.0
"""Release 2.3: a training file, a session of its own loop, and a model oversubscriber with files in a folder."""

import json

import numpy as np
from hugectr import Check_t, DataReaderType_t, Session, get_learning_rate_scheduler, solver_parser_helper
from hugectr.tools import DataGenerator, DataGeneratorParams

SIZES = [500, 400, 300, 200]
dataset = []
for number in range(3):
    DataGenerator(
        DataGeneratorParams(
            format=DataReaderType_t.Norm,
            label_dim=1,
            dense_dim=2,
            num_slot=4,
            i64_input_key=False,
            source=f"data{number}/file_list.txt",
            eval_source=f"data{number}/file_list_test.txt",
            slot_size_array=SIZES,
            num_files=2,
            eval_num_files=1,
            num_samples_per_file=2048,
            check_type=Check_t.Sum,
        )
    ).generate()
    np.arange(sum(SIZES), dtype=np.uint32).tofile(f"data{number}/file_list.keyset")
    dataset.append((f"data{number}/file_list.txt", f"data{number}/file_list.keyset"))

json_file = "conf.json"
layers = [
    {
        "name": "data",
        "type": "Data",
        "source": dataset[0][0],
        "eval_source": "data0/file_list_test.txt",
        "check": "Sum",
        "label": {"top": "label", "label_dim": 1},
        "dense": {"top": "dense", "dense_dim": 2},
        "sparse": [
            {"top": "data1", "type": "DistributedSlot", "max_feature_num_per_sample": 4, "max_nnz": 1, "slot_num": 4}
        ],
    },
    {
        "name": "sparse_embedding1",
        "type": "DistributedSlotSparseEmbeddingHash",
        "bottom": "data1",
        "top": "sparse_embedding1",
        "sparse_embedding_hparam": {"max_vocabulary_size_per_gpu": 1500, "embedding_vec_size": 16, "combiner": 0},
    },
    {"name": "reshape1", "type": "Reshape", "bottom": "sparse_embedding1", "top": "reshape1", "leading_dim": 64},
    {"name": "concat1", "type": "Concat", "bottom": ["reshape1", "dense"], "top": "concat1"},
    {"name": "fc1", "type": "InnerProduct", "bottom": "concat1", "top": "fc1", "fc_param": {"num_output": 1}},
    {"name": "loss", "type": "BinaryCrossEntropyLoss", "bottom": ["fc1", "label"], "top": "loss"},
]
optimizer = {
    "type": "Adam",
    "update_type": "Local",
    "adam_hparam": {"learning_rate": 0.001, "beta1": 0.9, "beta2": 0.999, "epsilon": 0.0000001},
}
with open(json_file, "w") as file:
    json.dump({"solver": {}, "optimizer": optimizer, "layers": layers}, file)

solver_config = solver_parser_helper(
    seed=0,
    batchsize=512,
    batchsize_eval=512,
    eval_batches=4,
    model_file="",
    embedding_files=[],
    vvgpu=[[0]],
    use_mixed_precision=False,
    scaler=1.0,
    i64_input_key=False,
    use_algorithm_search=True,
    use_cuda_graph=True,
    repeat_dataset=False,
)
lr_sch = get_learning_rate_scheduler(json_file)
sess = Session(solver_config, json_file, True, "temp_embedding")
data_reader_train = sess.get_data_reader_train()
data_reader_eval = sess.get_data_reader_eval()
data_reader_eval.set_file_list_source("data0/file_list_test.txt")
model_oversubscriber = sess.get_model_oversubscriber()
iteration = 0
for file_list, keyset_file in dataset:
    data_reader_train.set_file_list_source(file_list)
    model_oversubscriber.update(keyset_file)
    while True:
        lr = lr_sch.get_next()
        sess.set_learning_rate(lr)
        good = sess.train()
        if not good:
            break
        iteration += 1
    sess.check_overflow()
    sess.copy_weights_for_evaluation()
    good_eval = True
    for _ in range(solver_config.max_eval_batches):
        good_eval = sess.eval()
    if not good_eval:
        data_reader_eval.set_file_list_source()
    for name, value in sess.get_eval_metrics():
        print(f"Evaluation, {name}: {value}")
    print(f"[HUGECTR][INFO] trained with data in {file_list}")
print("iterations", iteration)
sess.download_params_to_files("./", iteration)
model_oversubscriber.store(["stored.model"])

resumed_config = solver_parser_helper(
    batchsize=512,
    batchsize_eval=512,
    eval_batches=4,
    model_file=f"./_dense_{iteration}.model",
    embedding_files=["stored.model"],
    vvgpu=[[0]],
    i64_input_key=False,
    repeat_dataset=False,
)
resumed = Session(resumed_config, json_file, True, "temp_embedding")
for one in (sess, resumed):
    one.get_data_reader_eval().set_file_list_source("data1/file_list_test.txt")
print("resumed equals", resumed.evaluation() == sess.evaluation())
