# SPDX-License-Identifier: Apache-2.0
"""Training files of 2.3 to 3.0 over the planted data of these tests."""

from __future__ import annotations

import json

SCHEDULE = {"learning_rate": 0.01}


def training_file(path, source, eval_source, *, solver=(), optimizer=None, slots=4, dense=3):
    """Write the file of a small deep model and return its path."""
    clause = {
        "lr_policy": "fixed",
        "display": 20,
        "max_iter": 80,
        "gpu": [0],
        "batchsize": 500,
        "snapshot": 100000,
        "snapshot_prefix": str(path.parent / "made"),
        "eval_interval": 40,
        "max_eval_batches": 10,
        "input_key_type": "I64",
    }
    sparse = {
        "top": "data",
        "type": "DistributedSlot",
        "max_feature_num_per_sample": 4,
        "max_nnz": 1,
        "slot_num": slots,
    }
    table = {"max_vocabulary_size_per_gpu": 1000, "embedding_vec_size": 8, "combiner": 0}
    layers = [
        {
            "name": "data",
            "type": "Data",
            "source": source,
            "eval_source": eval_source,
            "check": "Sum",
            "label": {"top": "label", "label_dim": 1},
            "dense": {"top": "dense", "dense_dim": dense},
            "sparse": [sparse],
        },
        {
            "name": "embedding",
            "type": "DistributedSlotSparseEmbeddingHash",
            "bottom": "data",
            "top": "vectors",
            "sparse_embedding_hparam": table,
        },
        {"name": "r", "type": "Reshape", "bottom": "vectors", "top": "flat", "leading_dim": 8 * slots},
        {"name": "c", "type": "Concat", "bottom": ["flat", "dense"], "top": "all"},
        {"name": "fc1", "type": "InnerProduct", "bottom": "all", "top": "fc1", "fc_param": {"num_output": 16}},
        {"name": "relu1", "type": "ReLU", "bottom": "fc1", "top": "relu1"},
        {"name": "fc2", "type": "InnerProduct", "bottom": "relu1", "top": "fc2", "fc_param": {"num_output": 1}},
        {"name": "loss", "type": "BinaryCrossEntropyLoss", "bottom": ["fc2", "label"], "top": "loss"},
    ]
    optimizer = optimizer or {"type": "Adam", "update_type": "Global", "adam_hparam": SCHEDULE}
    path.write_text(json.dumps({"solver": {**clause, **dict(solver)}, "optimizer": optimizer, "layers": layers}))
    return str(path)
