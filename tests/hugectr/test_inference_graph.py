# SPDX-License-Identifier: Apache-2.0
"""Descriptions of models for inference: what their files leave out, since scores do not depend on it."""

import json

import pytest

from terarec.hugectr.errors import WrongInputError
from terarec.hugectr.inference.graph import read_inference_graph

TABLE = {"max_vocabulary_size_per_gpu": 100, "embedding_vec_size": 4, "combiner": 1}
DATA = {
    "name": "data",
    "type": "Data",
    "check": "Sum",
    "dense": {"top": "dense", "dense_dim": 2},
    "sparse": [{"top": "keys", "type": "DistributedSlot", "max_feature_num_per_sample": 30, "slot_num": 3}],
}
LAYERS = [
    {
        "name": "e",
        "type": "DistributedSlotSparseEmbeddingHash",
        "bottom": "keys",
        "top": "vectors",
        "sparse_embedding_hparam": TABLE,
    },
    {"name": "r", "type": "Reshape", "bottom": "vectors", "top": "flat", "leading_dim": 12},
    {"name": "c", "type": "Concat", "bottom": ["flat", "dense"], "top": "all"},
    {"name": "fc", "type": "InnerProduct", "bottom": "all", "top": "logit", "fc_param": {"num_output": 1}},
    {"name": "sigmoid", "type": "Sigmoid", "bottom": "logit", "top": "sigmoid"},
]


def written(folder, data):
    path = folder / "inference.json"
    path.write_text(json.dumps({"inference": {}, "layers": [data, *LAYERS]}))
    return str(path)


@pytest.mark.parametrize("clause", [{}, {"label": {}}, {"label": {"label_dim": 1}}, {"label": {"top": "click"}}])
def test_labels_may_be_left_out_in_part_or_wholly(clause, tmp_path):
    """Finding M7: upstream's own file of 3.0 has `label_dim` alone."""
    graph = read_inference_graph(written(tmp_path, {**DATA, **clause}))
    assert graph.inputs.label_names == [clause.get("label", {}).get("top", "label")]
    assert graph.widths == (4,)


@pytest.mark.parametrize("label", [3, {"label_dim": 0}, {"dims": 1}])
def test_a_wrong_label_is_reported(label, tmp_path):
    path = written(tmp_path, {**DATA, "label": label})
    with pytest.raises(WrongInputError, match="label"):
        read_inference_graph(path)
