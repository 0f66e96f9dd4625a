# SPDX-License-Identifier: Apache-2.0
"""Graphs travel through JSON: what is written is what HugeCTR's keys mean, and reading gives the same objects back."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import terarec.hugectr as hugectr
from terarec.hugectr.enums import Activation_t, Embedding_t, Initializer_t, Layer_t, Optimizer_t, Update_t
from terarec.hugectr.errors import BrokenFileError, FileCannotOpenError, WrongInputError
from terarec.hugectr.graph_json import Graph, graph_to_json, read_graph
from terarec.hugectr.json_files import JsonObject, read_json, write_json
from terarec.hugectr.layers import LOSSES, layer_formats
from terarec.hugectr.schema.table import forms
from tests.errors import at
from tests.params import examples

ADAM = hugectr.CreateOptimizer()
DEFAULTS = forms()["DenseLayer"][0].defaults()
INPUT = hugectr.Input(1, "label", 13, "dense", [hugectr.DataReaderSparseParam("data1", 1, False, 26)])


class _AnyWidth(dict):
    """Tensors of 4 columns, whatever their names."""

    def __missing__(self, name):
        return 4


WIDTHS = _AnyWidth()


def through_json(*parts, name=""):
    """Parts as JSON text and back."""
    written = graph_to_json(Graph(model_name=name, parts=parts), ADAM, lambda embedding: 1000, WIDTHS)
    return read_graph(JsonObject(json.loads(json.dumps(written)), "graph.json"))


def value_of(name):
    """Values of the parameter `name` of a layer."""
    default = DEFAULTS[name]
    if name == "activations":
        return st.lists(st.sampled_from(Activation_t), max_size=3)
    if name == "biases":
        return st.lists(st.booleans(), max_size=3)
    if name == "target_weight_vec":
        return st.lists(st.floats(-2, 2, width=32), max_size=3)
    if name == "ranges":
        return st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=3)
    if name == "dropout_rate":
        return st.floats(0, 0.99)
    if isinstance(default, bool):
        return st.booleans()
    if isinstance(default, int):
        return st.integers(1, 50)
    if isinstance(default, float):
        return st.floats(0, 4)
    if isinstance(default, list):
        return st.lists(st.integers(1, 9), max_size=4)
    return st.sampled_from(type(default))


@st.composite
def layers(draw):
    kind = draw(st.sampled_from(Layer_t))
    options = {
        key.parameter: draw(value_of(key.parameter)) for key in layer_formats()[kind].keys if draw(st.booleans())
    }
    if kind in LOSSES and draw(st.booleans()):
        options |= {"use_regularizer": True, "regularizer_type": draw(st.sampled_from(hugectr.Regularizer_t))}
    if "selected_slots" in options:
        options["selected"] = True
    names = st.lists(st.text("abc", min_size=1), min_size=1, max_size=3)
    return hugectr.DenseLayer(kind, draw(names), draw(names), **options)


@given(layer=layers())
@settings(max_examples=examples(300))
def test_a_layer_comes_back(layer):
    assert through_json(INPUT, layer).parts == (INPUT, layer)


OPTIMIZERS = [
    hugectr.CreateOptimizer(Optimizer_t.Ftrl, Update_t.Local, beta=0.5, lambda1=0.25, lambda2=0.125),
    hugectr.CreateOptimizer(Optimizer_t.Adam, Update_t.LazyGlobal, beta1=0.5, beta2=0.75, epsilon=1e-4),
    hugectr.CreateOptimizer(Optimizer_t.AdaGrad, initial_accu_value=0.5, epsilon=1e-3),
    hugectr.CreateOptimizer(Optimizer_t.MomentumSGD, momentum_factor=0.5),
    hugectr.CreateOptimizer(Optimizer_t.Nesterov, momentum_factor=0.75),
    hugectr.CreateOptimizer(Optimizer_t.SGD, Update_t.Local, atomic_update=False),
    hugectr.CreateOptimizer(Optimizer_t.RMSProp),
]


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda optimizer: optimizer.optimizer_type.name)
@pytest.mark.parametrize("kind", Embedding_t)
def test_an_embedding_comes_back(kind, optimizer):
    sizes = [7] * 26
    embedding = hugectr.SparseEmbedding(kind, 25, 16, "mean", "vectors", "data1", sizes, optimizer)
    assert through_json(INPUT, embedding).parts == (INPUT, embedding)
    by_rows = hugectr.SparseEmbedding(kind, 100, 16, 1, "vectors", "data1", sizes, optimizer)
    (_, found) = through_json(INPUT, by_rows).parts
    assert (found.max_vocabulary_size_per_gpu, found.combiner, found.optimizer) == (100, "mean", optimizer)


def test_an_embedding_without_an_optimizer_gets_the_model_s():
    kind = Embedding_t.DistributedSlotSparseEmbeddingHash
    (_, found) = through_json(INPUT, hugectr.SparseEmbedding(kind, 25, 16, "sum", "vectors", "data1")).parts
    assert found.optimizer == ADAM


def collection(*, has_lists, plan):
    tables = [hugectr.EmbeddingTableConfig("a", 10, 4, opt_params=ADAM), hugectr.EmbeddingTableConfig("b", -1, 4)]
    config = hugectr.EmbeddingCollectionConfig(True, hugectr.CommunicationStrategy.Hierarchical)
    if has_lists:
        config.embedding_lookup(tables, ["d0", "d1"], "joined", ["sum", "concat"])
    else:
        for number, table in enumerate([*tables, tables[0]]):
            config.embedding_lookup(table, f"d{number}", f"e{number}", "average")
    if plan:
        config.shard(
            [["a", "b"], ["b"]], [("mp", [("a", 2)]), ("dp", ["b"])], {hugectr.CompressionStrategy.Unique: ["a"]}
        )
    return config


@pytest.mark.parametrize("has_lists", [True, False])
@pytest.mark.parametrize("plan", [True, False])
def test_an_embedding_collection_comes_back(has_lists, plan):
    config = collection(has_lists=has_lists, plan=plan)
    assert through_json(INPUT, config).parts == (INPUT, config)


def test_inputs_come_back():
    slots = [hugectr.DataReaderSparseParam("a", [1, 2], True, 2), hugectr.DataReaderSparseParam("b", 3, False, 1)]
    one = hugectr.Input([1], ["x"], 0, "", slots)
    several = hugectr.Input([1, 2], ["x", "y"], 3, "dense", slots)
    weighted = hugectr.Input([1, 2], ["x", "y"], [0.25, 0.75], 3, "dense", slots)
    assert through_json(several, name="mmoe") == Graph(model_name="mmoe", parts=(several,))
    assert through_json(weighted).parts == (weighted,)
    assert through_json(one).parts[0].label_names == ["x"]


def test_a_tensor_that_several_layers_read_goes_through_a_slice():
    """As HugeCTR writes it, for whose readers a tensor has one reader."""
    parts = (
        INPUT,
        hugectr.DenseLayer(Layer_t.InnerProduct, ["dense"], ["fc"], num_output=4),
        hugectr.DenseLayer(Layer_t.ReLU, ["fc"], ["relu"]),
        hugectr.DenseLayer(Layer_t.ElementwiseMultiply, ["fc", "fc"], ["square"]),
        hugectr.DenseLayer(Layer_t.Add, ["relu", "square"], ["sum"]),
    )
    written = graph_to_json(Graph(model_name="", parts=parts), ADAM, lambda embedding: 0, {"fc": 4})["layers"][2:]
    assert [(one["type"], one["bottom"], one["top"]) for one in written] == [
        ("Slice", "fc", ["fc_slice0", "fc_slice1", "fc_slice2"]),
        ("ReLU", "fc_slice0", "relu"),
        ("ElementwiseMultiply", ["fc_slice1", "fc_slice2"], "square"),
        ("Add", ["relu", "square"], "sum"),
    ]
    assert written[0]["ranges"] == [[0, 4]] * 3
    assert through_json(*parts).parts == parts
    del written[0]["is_copy"]
    data = {"layers": [{"type": "Data", **written_input()}, *written]}
    (_, cut, *_) = read_graph(JsonObject(data, "graph.json")).parts
    assert cut.top_names == ["fc_slice0", "fc_slice1", "fc_slice2"]  # of HugeCTR, which has no such mark


def written_input():
    slots = {"top": "data1", "nnz_per_slot": [1], "is_fixed_length": False, "slot_num": 1}
    return {"label": {"top": "label", "label_dim": 1}, "dense": {"top": "dense", "dense_dim": 13}, "sparse": [slots]}


def test_words_of_hugectr_s_own_files():
    layers = [
        {
            "type": "FusedInnerProduct",
            "bottom": "dense",
            "top": "fc",
            "fc_param": {"num_output": 4},
            "position": "None",
            "activation": "None",
        },
        {"type": "SequenceMask", "bottom": ["a", "b"], "top": "mask", "max_sequence_len": 9},
    ]
    data = {"layers": [{"type": "Data", **written_input()}, *layers]}
    (_, fused, mask) = read_graph(JsonObject(data, "graph.json")).parts
    assert (fused.pos_type, fused.act_type) == (hugectr.FcPosition_t.Non, Activation_t.Non)
    assert (mask.max_sequence_len_from, mask.max_sequence_len_to) == (9, 9)
    (found,) = graph_to_json(Graph(model_name="", parts=(fused,)), ADAM, lambda embedding: 0, {})["layers"]
    assert found == layers[0]


def test_keys_are_those_of_hugectr():
    parts = (
        INPUT,
        hugectr.SparseEmbedding(
            Embedding_t.LocalizedSlotSparseEmbeddingHash, 2, 16, "sum", "sparse_embedding1", "data1", [5] * 26, ADAM
        ),
        hugectr.DenseLayer(
            Layer_t.InnerProduct, ["dense"], ["fc1"], num_output=8, weight_init_type=Initializer_t.XavierUniform
        ),
        hugectr.DenseLayer(Layer_t.PReLU_Dice, ["fc1"], ["dice"], elu_alpha=0.2, eps=1e-8),
        hugectr.DenseLayer(Layer_t.Slice, ["dice"], ["s1", "s2"], ranges=[(0, 4), (4, 8)]),
        hugectr.DenseLayer(
            Layer_t.BinaryCrossEntropyLoss,
            ["s1", "label"],
            ["loss"],
            use_regularizer=True,
            regularizer_type=hugectr.L2,
            **{"lambda": 0.5},
        ),
    )
    assert graph_to_json(Graph(model_name="dcn", parts=parts), ADAM, lambda embedding: 77, WIDTHS) == {
        "model_name": "dcn",
        "layers": [
            {
                "type": "Data",
                "label": {"top": "label", "label_dim": 1},
                "dense": {"top": "dense", "dense_dim": 13},
                "sparse": [{"top": "data1", "nnz_per_slot": [1] * 26, "is_fixed_length": False, "slot_num": 26}],
            },
            {
                "type": "LocalizedSlotSparseEmbeddingHash",
                "bottom": "data1",
                "top": "sparse_embedding1",
                "sparse_embedding_hparam": {
                    "workspace_size_per_gpu_in_mb": 2,
                    "max_vocabulary_size_global": 77,
                    "embedding_vec_size": 16,
                    "combiner": "sum",
                    "slot_size_array": [5] * 26,
                },
                "optimizer": {
                    "update_type": "Global",
                    "type": "Adam",
                    "adam_hparam": {"beta1": 0.9, "beta2": 0.999, "epsilon": 1e-7},
                },
            },
            {
                "type": "InnerProduct",
                "bottom": "dense",
                "top": "fc1",
                "fc_param": {"num_output": 8, "weight_init": "XavierUniform"},
            },
            {
                "type": "PReLU_Dice",
                "bottom": "fc1",
                "top": "dice",
                "prelu_dice_param": {"alpha": 0.2, "elu_alpha": 0.2, "eps": 1e-8},
            },
            {"type": "Slice", "bottom": "dice", "top": ["s1", "s2"], "ranges": [[0, 4], [4, 8]]},
            {
                "type": "BinaryCrossEntropyLoss",
                "bottom": ["s1", "label"],
                "top": "loss",
                "lambda": 0.5,
                "regularizer": "L2",
            },
        ],
    }


def layer_of(**clause):
    data = {"type": "Data", "label": {"top": "label", "label_dim": 1}, "dense": {"top": "dense", "dense_dim": 0}}
    return JsonObject({"layers": [{**data, "sparse": []}, clause]}, "g.json")


def test_older_spellings_are_read():
    def read(**clause):
        return read_graph(layer_of(**clause, bottom="a", top="b")).parts[1]

    assert read(type="Multiply", weight_dims=[2, 3]).layer_type is Layer_t.WeightMultiply
    assert read(type="DotProduct").layer_type is Layer_t.ElementwiseMultiply
    dice = read(type="PReLU_Dice", prelu_dice_param={"alpha": 0.5, "epsilon": 0.25})
    assert (dice.elu_alpha, dice.eps) == (0.5, 0.25)
    assert read(type="Reshape", selected=[1, 3], name="reshape1").selected
    assert read(type="Reshape", selected=[]).selected  # all of them


@pytest.mark.parametrize(
    ("clause", "place"),
    [
        ({"type": "Reshapo"}, ("g.json.layers[1].type",)),
        ({"type": "ReLU", "rate": 3}, ("g.json.layers[1]",)),
        ({"type": "Dropout", "rate": 3}, ("g.json.layers[1].rate",)),
        ({"type": "ReLU", "top": 3}, ("g.json.layers[1].top",)),
        ({"type": "InnerProduct", "fc_param": {"num_output": "x"}}, ("g.json.layers[1].fc_param.num_output",)),
        ({"type": "InnerProduct", "fc_param": 3}, ("g.json.layers[1].fc_param", "got 3")),
        (
            {"type": "InnerProduct", "fc_param": {"outputs": 3}},
            ("g.json.layers[1].fc_param", "got an unknown key 'outputs'"),
        ),
        ({"type": "DistributedSlotSparseEmbeddingHash"}, ("g.json.layers[1].sparse_embedding_hparam",)),
    ],
)
def test_files_that_cannot_be(clause, place):
    with pytest.raises(WrongInputError, check=at(*place)):
        read_graph(layer_of(**{"bottom": "a", "top": "b"} | clause))


def test_files_that_are_none(tmp_path):
    with pytest.raises(FileCannotOpenError, check=at(f"{tmp_path}/none.json")):
        read_json(str(tmp_path / "none.json"))
    (tmp_path / "broken.json").write_text("{")
    with pytest.raises(BrokenFileError, check=at(f"{tmp_path}/broken.json")):
        read_json(str(tmp_path / "broken.json"))
    write_json(str(tmp_path / "good.json"), {"layers": []})
    with pytest.raises(WrongInputError, check=at("layers")):
        read_graph(read_json(str(tmp_path / "good.json")))
    assert [path.name for path in tmp_path.iterdir() if path.suffix == ".partial"] == []
