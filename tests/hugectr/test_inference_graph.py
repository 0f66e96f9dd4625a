# SPDX-License-Identifier: Apache-2.0
"""Descriptions of models for inference: what their files leave out, and the keys of one-hot embeddings."""

import json

import numpy as np
import pytest

import terarec.hugectr as hugectr
from terarec.hugectr.errors import WrongInputError
from terarec.hugectr.inference import InferenceModel, InferenceParams
from terarec.hugectr.inference.graph import read_inference_graph
from tests.errors import at
from tests.hugectr.families import bare, inputs
from tests.hugectr.planted import Planted, Samples, write_norm
from tests.hugectr.scripts import Layer, embed, layer, to_loss

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


ONE_HOT = hugectr.Embedding_t.LocalizedSlotSparseEmbeddingOneHot


def add_one_hot(made, top, bottom, width, *sizes):
    slots = len(sizes)
    embed(made, top, width, bottom=bottom, kind=ONE_HOT, slot_size_array=list(sizes))
    layer(made, Layer.Reshape, top, f"{top}_flat", leading_dim=slots * width)


def test_keys_of_one_hot_embeddings_are_moved_by_the_sizes_of_their_own_slots(tmp_path):
    """Whatever the order of the embeddings, with two of one input, and with an input that none reads."""
    data = Planted(200)
    source = write_norm(tmp_path / "data", Samples(data.label, data.dense, np.vstack([data.keys, data.keys[:1]])))
    made = bare(source, source, batchsize=100, batchsize_eval=100)
    inputs(made, ("none", 1), ("a", 2), ("b", 2))
    add_one_hot(made, "of_b", "b", 4, 30, 20)
    add_one_hot(made, "deep", "a", 4, 40, 20)
    add_one_hot(made, "wide", "a", 1, 40, 20)
    layer(made, Layer.Concat, "of_b_flat deep_flat wide_flat dense", "all")
    to_loss(made, "all")
    made.start_data_reading()
    made.eval()
    made.graph_to_json(str(tmp_path / "g.json"))
    made.save_params_to_files(str(tmp_path / "m"))
    sparse = [str(tmp_path / f"m{number}_sparse_0.model") for number in range(3)]
    params = InferenceParams("m", 100, 1.0, str(tmp_path / "m_dense_0.model"), sparse, 0, True, 1.0, True)
    model = InferenceModel(str(tmp_path / "g.json"), params)
    scores = model.predict(1, source, hugectr.DataReaderType_t.Norm, hugectr.Check_t.Sum)
    expected = made.check_out_tensor("logit", hugectr.Tensor_t.Evaluate)  # the probabilities, as a loss leaves them
    assert np.abs(scores - expected).max() < 1e-6
    model.close()


def test_embeddings_of_one_input_have_the_same_keys(tmp_path):
    made = bare("train", "valid")
    inputs(made, ("a", 2))
    add_one_hot(made, "deep", "a", 4, 40, 20)
    add_one_hot(made, "wide", "a", 1, 30, 20)
    layer(made, Layer.Concat, "deep_flat wide_flat", "all")
    layer(made, Layer.InnerProduct, "all", "logit", num_output=1)
    layer(made, Layer.BinaryCrossEntropyLoss, "logit label", "loss")
    made.graph_to_json(str(tmp_path / "g.json"))
    with pytest.raises(WrongInputError, check=at("SparseEmbedding 'wide': slot_size_array")):
        read_inference_graph(str(tmp_path / "g.json"))
