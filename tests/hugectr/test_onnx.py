# SPDX-License-Identifier: Apache-2.0
"""`hugectr2onnx`: what ONNX Runtime predicts from a converted file is what the trained model predicts."""

from __future__ import annotations

import importlib
from pathlib import Path

import numpy as np
import pytest

import terarec.hugectr as hugectr
from terarec.hugectr.errors import BrokenFileError, FileCannotOpenError, WrongInputError
from terarec.hugectr.hugectr2onnx import EXEMPTION_LAYER_TYPES, ONNX_LAYER_TYPES, convert, main
from tests.errors import at
from tests.hugectr.scripts import Layer, dcn, dense_stack, embed, layer, model, to_loss
from tests.params import in_every_run

pytest.importorskip("onnx", reason="the extra 'onnx' is not installed")
runtime = pytest.importorskip("onnxruntime", reason="the extra 'onnx' is not installed")

LOCALIZED = hugectr.Embedding_t.LocalizedSlotSparseEmbeddingHash
SLOTS = 4


def deep(*sources, **settings):
    """Averaged and localized embeddings, BatchNorm, an MLP and an interaction."""
    made = model(*sources, **settings)
    embed(made, "one", 8, combiner="mean")
    embed(made, "two", 8, kind=LOCALIZED)
    bottom = dense_stack(made, "dense", 8, prefix="bottom")
    layer(made, Layer.Interaction, f"{bottom} one", "crossed")
    layer(made, Layer.Reshape, "two", "flat", leading_dim=8 * SLOTS)
    layer(made, Layer.Concat, "crossed flat", "all")
    layer(made, Layer.BatchNorm, "all", "normal", factor=0.1)
    layer(made, Layer.MLP, "normal", "top", num_outputs=[16, 8])
    return to_loss(made, "top")


class Trained:
    """A model after some steps, its files, and the last evaluation batch with its predictions."""

    def __init__(self, made, folder: Path, number_of_embeddings: int) -> None:
        made.start_data_reading()
        for _ in range(5):
            made.train()
        made.eval()
        self.graph = str(folder / "graph.json")
        made.graph_to_json(self.graph)
        made.save_params_to_files(str(folder / "m"), 5)
        self.dense = str(folder / "m_dense_5.model")
        self.sparse = [str(folder / f"m{number}_sparse_5.model") for number in range(number_of_embeddings)]
        self.onnx = str(folder / "m.onnx")
        evaluation = made._compiled("eval").evaluation
        batch, predictions = evaluation.batch, evaluation.predictions
        self.model, self.batch, self.predicted = made.module, batch, predictions["label"].numpy()
        self.keys = batch.sparse.keys.view(SLOTS, -1, 1).transpose(0, 1).contiguous().numpy()

    def run(self, **feed):
        opened = runtime.InferenceSession(self.onnx, providers=["CPUExecutionProvider"])
        names = [item.name for item in opened.get_inputs()]
        assert names == ["dense", *feed]
        (found,) = opened.run(["label"], {"dense": self.batch.dense.numpy(), **feed})
        return found


@pytest.mark.parametrize(
    ("script", "embeddings"),
    in_every_run([], [(dcn, ["embedding"]), (deep, ["one", "two"])]),
)
def test_predictions_are_those_of_the_model(tmp_path, planted, script, embeddings):
    trained = Trained(script(*planted[:2]), tmp_path, len(embeddings))
    convert(trained.onnx, trained.graph, trained.dense, True, trained.sparse)
    np.testing.assert_allclose(trained.run(data=trained.keys), trained.predicted, rtol=0, atol=1e-4)
    convert(trained.onnx, trained.graph, trained.dense)
    vectors = {name: trained.model.tensor(trained.batch, name).detach().numpy() for name in embeddings}
    np.testing.assert_allclose(trained.run(**vectors), trained.predicted, rtol=0, atol=1e-4)


def test_a_model_without_dense_numbers_has_their_input(tmp_path):
    """Finding M8: HugeCTR's files always begin with it, and its scripts read inputs by number."""
    made = model("none", "none", dense=0)
    embed(made, "embedding", 2)
    layer(made, Layer.Reshape, "embedding", "flat", leading_dim=2 * SLOTS)
    layer(made, Layer.InnerProduct, "flat", "logit", num_output=1)
    layer(made, Layer.BinaryCrossEntropyLoss, "logit label", "loss")
    graph, dense, path = (str(tmp_path / name) for name in ("graph.json", "dense.model", "m.onnx"))
    made.graph_to_json(graph)
    np.zeros(2 * SLOTS + 1, np.float32).tofile(dense)
    convert(path, graph, dense)
    opened = runtime.InferenceSession(path, providers=["CPUExecutionProvider"])
    assert [(item.name, item.shape[1:]) for item in opened.get_inputs()] == [("dense", [0]), ("embedding", [4, 2])]
    vectors = np.ones((3, SLOTS, 2), np.float32)
    (found,) = opened.run(None, {"dense": np.zeros((3, 0), np.float32), "embedding": vectors})
    assert found.ravel().tolist() == [0.5] * 3


def test_the_command_and_what_is_rejected(tmp_path, planted):
    trained = Trained(deep(*planted[:2]), tmp_path, 2)
    main(
        [
            *("--onnx_model_path", trained.onnx, "--graph_config", trained.graph, "--dense_model", trained.dense),
            *("--convert_embedding", "--sparse_models", *trained.sparse, "--ntp_file", f"{trained.dense}.ntp.json"),
        ]
    )
    np.testing.assert_allclose(trained.run(data=trained.keys), trained.predicted, rtol=0, atol=1e-4)
    Path(trained.onnx).unlink()
    with pytest.raises(WrongInputError, check=at("convert: sparse_models")):
        convert(trained.onnx, trained.graph, trained.dense, True, trained.sparse[:1])
    with pytest.raises(BrokenFileError, check=at(f"convert: {tmp_path}/m0_sparse_5.model/key")):
        convert(trained.onnx, trained.graph, trained.sparse[0] + "/key")
    Path(f"{trained.dense}.ntp.json").unlink()
    with pytest.raises(FileCannotOpenError, check=at(f"convert: {tmp_path}/m_dense_5.model.ntp.json")):
        convert(trained.onnx, trained.graph, trained.dense)
    assert not Path(trained.onnx).exists()


def test_a_layer_without_a_form_is_rejected(tmp_path, planted):
    made = model(*planted[:2])
    layer(made, Layer.Cast, "dense", "cast")
    made = to_loss(made, "cast")
    made.graph_to_json(str(tmp_path / "g.json"))
    made.save_params_to_files(str(tmp_path / "m"), 0)
    with pytest.raises(WrongInputError, check=at("convert: layer cast")):
        convert(str(tmp_path / "x.onnx"), str(tmp_path / "g.json"), str(tmp_path / "m_dense_0.model"))


def test_every_layer_is_known_or_exempted():
    assert set(hugectr.Layer_t.__members__) == ONNX_LAYER_TYPES | EXEMPTION_LAYER_TYPES
    assert len(ONNX_LAYER_TYPES) >= 31
    assert {"Cast"} == EXEMPTION_LAYER_TYPES


@pytest.mark.parametrize("name", ["converter", "hugectr_loader"])
def test_both_modules_of_the_package_are_imported_by_name(name):
    assert importlib.import_module(f"terarec.hugectr.hugectr2onnx.{name}").convert is convert
