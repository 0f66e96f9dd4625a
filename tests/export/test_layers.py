# SPDX-License-Identifier: Apache-2.0
"""Every kind of layer: predictions of the file of each format are the model's."""

import itertools
import json
import sys
from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import pytest
import torch

from terarec.batch import Batch, Jagged
from terarec.errors import ConfigError, MissingDependencyError
from terarec.export import export_model, export_onnx
from terarec.export.artifact import EXPORT_FILE
from terarec.export.dense_part import DensePart
from terarec.models import GraphModel
from terarec.nn.registry import LAYERS
from tests.errors import at
from tests.export.samples import close, dense_graph, layer, run, run_export
from tests.params import in_every_run

THREE_BY_FOUR = layer("reshape", "dense", "cube", shape=[-1, 3, 4])
# Name -> (layers on "dense" [B, 12], the tensor that they end with, its elements a sample)
CASES = {
    "inner_product": ([layer("inner_product", "dense", "x", num_output=3)], 3),
    "inner_product of three dimensions": (
        [THREE_BY_FOUR, layer("inner_product", "cube", "x", num_output=2)],
        6,
    ),
    "fused_inner_product": ([layer("fused_inner_product", "dense", "x", num_output=3)], 3),
    "fused_inner_product without activation": (
        [layer("fused_inner_product", "dense", "x", num_output=3, activation="none")],
        3,
    ),
    "mlp": ([layer("mlp", "dense", "x", num_outputs=[7, 3], activations=["relu", "none"])], 3),
    "mlp without biases": ([layer("mlp", "dense", "x", num_outputs=[7, 3], biases=[False, False])], 3),
    "group_dense": ([layer("group_dense", "dense", "x", num_outputs=[7, 3], last_activation="none")], 3),
    "multi_cross": ([layer("multi_cross", "dense", "x", num_layers=3)], 12),
    "multi_cross of low rank": ([layer("multi_cross", "dense", "x", num_layers=2, projection_dim=4)], 12),
    "batch_norm": ([layer("batch_norm", "dense", "x", eps=0.01)], 12),
    "layer_norm": ([THREE_BY_FOUR, layer("layer_norm", "cube", "x", eps=0.01)], 12),
    "prelu_dice": ([layer("prelu_dice", "dense", "x", alpha=0.3, eps=0.01)], 12),
    "relu": ([layer("relu", "dense", "x")], 12),
    "sigmoid": ([layer("sigmoid", "dense", "x")], 12),
    "elu": ([layer("elu", "dense", "x", alpha=0.7)], 12),
    "cast": (
        # Through a sigmoid, as compilers may leave the rounding out.
        [layer("cast", "dense", "h", dtype="float16"), layer("cast", "h", "y"), layer("sigmoid", "y", "x")],
        12,
    ),
    "dropout": ([layer("dropout", "dense", "x", rate=0.5)], 12),
    "add": ([layer("elu", "dense", "y"), layer("add", "dense y dense", "x")], 12),
    "sub": ([layer("elu", "dense", "y"), layer("sub", "dense y", "x")], 12),
    "elementwise_multiply": ([layer("elu", "dense", "y"), layer("elementwise_multiply", "dense y y", "x")], 12),
    "concat": ([layer("elu", "dense", "y"), layer("concat", "dense y", "x")], 24),
    "concat of three dimensions": ([THREE_BY_FOUR, layer("concat", "cube cube", "x", axis=2)], 24),
    "reshape to more rows": ([layer("reshape", "dense", "x", leading_dim=4)], 12),
    "reshape with steps": ([layer("reshape", "dense", "x", leading_dim=2, time_step=3)], 12),
    "reshape of slots": ([THREE_BY_FOUR, layer("reshape", "cube", "x", selected=True, selected_slots=[2, 0])], 8),
    "select": ([THREE_BY_FOUR, layer("select", "cube", "x", dim=1, index=[2, 0, 2])], 12),
    "gather": ([layer("gather", "dense", "x", indices=[4, 0, 1, 1, 2])], 12),
    "slice": (
        [layer("slice", "dense", "a b c", ranges=[[0, 4], [2, 9], [9, 12]]), layer("concat", "c b a", "x")],
        14,
    ),
    "reduce_sum": ([THREE_BY_FOUR, layer("reduce_sum", "cube", "x", axis=1)], 4),
    "reduce_mean": ([THREE_BY_FOUR, layer("reduce_mean", "cube", "x", axis=2)], 3),
    "scale of elements": ([layer("scale", "dense", "x", axis=0, factor=3)], 36),
    "scale of rows": ([layer("scale", "dense", "x", axis=1, factor=3)], 36),
    "softmax": ([THREE_BY_FOUR, layer("softmax", "cube", "x")], 12),
    "softmax with a mask": ([layer("sigmoid", "dense", "m"), layer("softmax", "dense m", "x", factor=0.5)], 12),
    "matrix_multiply": (
        [
            THREE_BY_FOUR,
            layer("reshape", "dense", "other", shape=[-1, 4, 3]),
            layer("matrix_multiply", "cube other", "x"),
        ],
        9,
    ),
    "matrix_multiply transposed": (
        [THREE_BY_FOUR, layer("matrix_multiply", "cube cube", "x", transpose_b=True)],
        9,
    ),
    "matrix_multiply of batches": (
        [layer("slice", "dense", "a b", ranges=[[0, 5], [0, 12]]), layer("matrix_multiply", "a b", "x")],
        12,
    ),
    "matrix_multiply of a batch and a cube": (
        [THREE_BY_FOUR, layer("slice", "dense", "a", ranges=[[0, 5]]), layer("matrix_multiply", "a cube", "x")],
        12,
    ),
    "multi_head_attention": (
        [THREE_BY_FOUR, layer("multi_head_attention", "cube cube cube", "x", num_attention_heads=2)],
        12,
    ),
    "multi_head_attention with a mask": (
        [
            THREE_BY_FOUR,
            layer("slice", "dense", "l k", ranges=[[0, 1], [1, 2]]),
            layer("sequence_mask", "l k", "mask", max_sequence_len_from=3, max_sequence_len_to=3),
            layer("multi_head_attention", "cube cube cube mask", "x", num_attention_heads=2),
        ],
        12,
    ),
    "sequence_mask of one length": (
        [
            layer("slice", "dense", "l", ranges=[[0, 1]]),
            layer("sequence_mask", "l", "mask", max_sequence_len_to=3),
            layer("reshape", "mask", "x", leading_dim=3),
        ],
        3,
    ),
    "attention in two halves": (
        [
            THREE_BY_FOUR,
            layer("attention_scores", "cube cube cube", "scores values", num_attention_heads=2),
            layer("softmax", "scores", "weights"),
            layer("attention_values", "weights values", "x"),
        ],
        12,
    ),
    "fused_reshape_concat": (
        [THREE_BY_FOUR, layer("fused_reshape_concat", "cube cube", "x y")],
        16,
    ),
    "fused_reshape_concat_general": (
        [THREE_BY_FOUR, layer("fused_reshape_concat_general", "cube cube", "x")],
        24,
    ),
    "gru": ([layer("gru", "dense", "x", num_output=3, sequence_length=4, vector_size=3)], 12),
    "weight_multiply": ([layer("weight_multiply", "dense", "x", weight_dims=[12, 2])], 24),
    "fm_order2": ([layer("fm_order2", "dense", "x", out_dim=4)], 4),
    "interaction": (
        [THREE_BY_FOUR, layer("slice", "dense", "a", ranges=[[0, 4]]), layer("interaction", "a cube", "x")],
        11,
    ),
}

BATCH = 5
OF_ONE_BATCH = ["gather", "matrix_multiply of batches", "matrix_multiply of a batch and a cube"]
"""Cases that take batches of `BATCH` samples alone."""
ONE_LOGIT = layer("inner_product", "dense", "x", num_output=1)
LOSSES = {
    "binary_cross_entropy": ([ONE_LOGIT, layer("binary_cross_entropy", "x label", "loss")], 1),
    "cross_entropy": (
        [layer("inner_product", "dense", "x", num_output=2), layer("cross_entropy", "x label", "loss")],
        1,
    ),
}


def towers(names: Iterable[str]) -> GraphModel:
    """The cases side by side in one graph, the label of each with its name."""
    stacks = {name: CASES[name] for name in names} | LOSSES
    layers = []
    for name, (stack, elements) in stacks.items():
        if name not in LOSSES:
            flat = layer("reshape", "x", "flat", leading_dim=elements)
            loss = layer("multi_cross_entropy", "flat label", "loss", target_weights=[1.0] * elements)
            stack = [*stack, flat, loss]

        def own(tensors: tuple[str, ...], name: str = name) -> tuple[str, ...]:
            return tuple({"dense": "dense", "label": name}.get(tensor, f"{tensor} of {name}") for tensor in tensors)

        layers += [replace(part, bottoms=own(part.bottoms), tops=own(part.tops)) for part in stack]
    return dense_graph(12, layers, {name: elements for name, (_, elements) in stacks.items()})


def batch(model: GraphModel, size: int) -> Batch:
    dense = torch.rand(size, model.spec.dense_dim, generator=torch.Generator().manual_seed(1)) * 4 - 2
    return Batch(
        dense=dense,
        label=torch.zeros(size, sum(label.dim for label in model.spec.labels)),
        sparse=Jagged(names=(), keys=torch.empty(0, dtype=torch.int64), offsets=torch.zeros(1, dtype=torch.int64)),
    )


OF_ANY_BATCH = [name for name in CASES if name not in OF_ONE_BATCH]
FEW = ["interaction", "gru", "multi_head_attention with a mask", "softmax with a mask", "prelu_dice"]


@pytest.mark.parametrize(
    ("cases", "file_format"),
    in_every_run(
        # torch's exporter of ONNX files takes seconds for all.
        [(OF_ANY_BATCH, "torchscript")],
        [
            (FEW, "onnx"),
            *itertools.product((OF_ANY_BATCH, OF_ONE_BATCH), ("onnx", "torchscript", "torch", "aotinductor")),
        ],
    ),
)
def test_predictions_are_the_models(tmp_path, cases, file_format):
    model = towers(cases)
    export_model(model, tmp_path / "out", format=file_format)
    for size in (1, 5, 17) if cases != OF_ONE_BATCH else (BATCH,):
        samples = batch(model, size)
        found = run_export(tmp_path / "out", {"dense": samples.dense.numpy()})
        expected = model.predictions(model(samples))
        assert list(found) == list(expected) == [*cases, *LOSSES]
        for name, scores in expected.items():
            close(found[name], scores, name)


def test_every_kind_of_the_registry_is_tried():
    stacks = [*CASES.values(), *LOSSES.values()]
    assert {part.kind for layers, _ in stacks for part in layers} | {"multi_cross_entropy"} == set(LAYERS)


def test_batches_of_one_size_are_described(tmp_path):
    model = towers(["matrix_multiply of batches"])
    export_model(model, tmp_path / "out", format="torchscript")
    (given,) = json.loads((tmp_path / "out" / EXPORT_FILE).read_text())["inputs"]
    assert given["shape"] == [BATCH, 12]
    with pytest.raises(ConfigError, check=at("graph", "takes batches of 5 samples alone")):
        DensePart.of_graph(model)


def small(*layers) -> GraphModel:
    return dense_graph(1, [*layers, layer("binary_cross_entropy", "x label", "loss")])


@pytest.mark.slow
def test_the_batch_is_open(tmp_path):
    export_onnx(small(ONE_LOGIT), tmp_path / "model.onnx")
    for size in (0, 1, 17):
        assert run(tmp_path / "model.onnx", {"dense": np.zeros((size, 1), np.float32)})["label"].shape == (size, 1)


def test_a_prediction_that_needs_the_label_is_rejected(tmp_path):
    model = small(layer("add", "dense label", "x"))
    with pytest.raises(ConfigError, check=at("layer 'x'")):
        export_onnx(model, tmp_path / "model.onnx")
    assert list(tmp_path.iterdir()) == []


def test_the_missing_library_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(MissingDependencyError, check=at("onnxscript")):
        export_onnx(small(ONE_LOGIT), tmp_path / "model.onnx")
    assert list(tmp_path.iterdir()) == []
