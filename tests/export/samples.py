"""Small graph models, and what ONNX Runtime makes of them."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from terarec.export import export_onnx
from terarec.models.graph import GraphModel
from terarec.spec import GraphLabel, GraphLayer, GraphSpec

pytest.importorskip("onnx", reason="the extra 'onnx' is not installed")
runtime = pytest.importorskip("onnxruntime", reason="the extra 'onnx' is not installed")


def layer(kind: str, bottoms: str, tops: str, **options: Any) -> GraphLayer:
    return GraphLayer(kind=kind, bottoms=tuple(bottoms.split()), tops=tuple(tops.split()), options=options)


def session(path: Path) -> Any:
    options = runtime.SessionOptions()
    options.intra_op_num_threads = 1
    return runtime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def run(path: Path, feed: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    opened = session(path)
    assert {item.name for item in opened.get_inputs()} == set(feed)
    return dict(zip((item.name for item in opened.get_outputs()), opened.run(None, feed), strict=True))


def dense_graph(dense_dim: int, layers: list[GraphLayer], *, label_dim: int = 1) -> GraphModel:
    spec = GraphSpec(
        labels=(GraphLabel(name="label", dim=label_dim),), dense_name="dense", dense_dim=dense_dim, layers=tuple(layers)
    )
    return shaken(GraphModel(spec, seed=3)).eval()


def shaken(model: GraphModel) -> GraphModel:
    """`model` with random numbers where initial weights and statistics are constants."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, tensor in [*model.layers.named_parameters(), *model.layers.named_buffers()]:
            if tensor.is_floating_point() and name.rsplit(".")[-1][0] != "_":
                tensor.copy_(torch.rand(tensor.shape, generator=generator) - (0.0 if "running_var" in name else 0.5))
    return model


def exported(model: GraphModel, path: Path, feed: dict[str, np.ndarray], **options: Any) -> dict[str, np.ndarray]:
    export_onnx(model, path / "model.onnx", **options)
    return run(path / "model.onnx", feed)


def close(found: np.ndarray, expected: Tensor) -> None:
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected.detach().numpy(), rtol=0, atol=1e-4)
