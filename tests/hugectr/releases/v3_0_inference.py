# SPDX-License-Identifier: Apache-2.0
"""Release 3.0: a session of a training file, and its model served from an inference file through a cache."""

import json

import numpy as np
from hugectr import Check_t, DataReaderType_t, Session, solver_parser_helper
from hugectr.inference import CreateEmbeddingCache, CreateParameterServer, InferenceSession
from hugectr.tools import DataGenerator, DataGeneratorParams

SIZES = [500, 400, 300, 200]
DataGenerator(
    DataGeneratorParams(
        format=DataReaderType_t.Norm,
        label_dim=1,
        dense_dim=2,
        num_slot=4,
        i64_input_key=True,
        source="data/file_list.txt",
        eval_source="data/file_list_test.txt",
        slot_size_array=SIZES,
        num_files=2,
        eval_num_files=1,
        num_samples_per_file=2048,
        check_type=Check_t.Sum,
    )
).generate()
data = {
    "name": "data",
    "type": "Data",
    "source": "data/file_list.txt",
    "eval_source": "data/file_list_test.txt",
    "check": "Sum",
    "label": {"top": "label", "label_dim": 1},
    "dense": {"top": "dense", "dense_dim": 2},
    "sparse": [
        {"top": "data1", "type": "DistributedSlot", "max_feature_num_per_sample": 4, "max_nnz": 1, "slot_num": 4}
    ],
}
hidden = [
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
]
optimizer = {
    "type": "Adam",
    "update_type": "Local",
    "adam_hparam": {"learning_rate": 0.001, "beta1": 0.9, "beta2": 0.999, "epsilon": 0.0000001},
}
loss = {"name": "loss", "type": "BinaryCrossEntropyLoss", "bottom": ["fc1", "label"], "top": "loss"}
with open("train.json", "w") as file:
    json.dump({"solver": {}, "optimizer": optimizer, "layers": [data, *hidden, loss]}, file)

config = solver_parser_helper(
    batchsize=512,
    batchsize_eval=512,
    max_eval_batches=4,
    model_file="",
    embedding_files=[],
    vvgpu=[[0]],
    i64_input_key=True,
    repeat_dataset=True,
)
session = Session(config, "train.json", False)
session.start_data_reading()
for _ in range(16):
    session.train()
for _ in range(4):
    session.eval()
for name, value in session.get_eval_metrics():
    print(f"Evaluation, {name}: {value}")
session.download_params_to_files("./", 16)

inference = {
    "max_batchsize": 64,
    "hit_rate_threshold": 0.6,
    "dense_model_file": "./_dense_16.model",
    "sparse_model_file": "./0_sparse_16.model",
    "label": 1,
    "input_key_type": "I64",
}
sigmoid = {"name": "sigmoid", "type": "Sigmoid", "bottom": ["fc1"], "top": "sigmoid"}
with open("inference.json", "w") as file:
    json.dump({"inference": inference, "layers": [data, *hidden, sigmoid]}, file)

rng = np.random.default_rng(0)
starts = np.cumsum([0, *SIZES[:-1]])
keys = starts + rng.integers(0, SIZES, (64, 4))
dense = rng.random((64, 2)).astype(np.float32)
parameter_server = CreateParameterServer(["inference.json"], ["dnn"], True)
embedding_cache = CreateEmbeddingCache(parameter_server, 0, True, 0.9, "inference.json", "dnn", True)
server = InferenceSession("inference.json", 0, embedding_cache)
scores = server.predict(dense.flatten().tolist(), keys.flatten().tolist(), list(range(64 * 4 + 1)), True)
again = server.predict(dense.flatten().tolist(), keys.flatten().tolist(), list(range(64 * 4 + 1)), True)
print("scores", len(scores), all(0 < score < 1 for score in scores), np.allclose(scores, again, atol=0.2))
