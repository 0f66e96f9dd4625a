# SPDX-License-Identifier: Apache-2.0
"""Small graph models, and what the files of exports give."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from terarec.export.artifact import EXPORT_FILE
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


def run_export(out: Path, feed: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """What the file in `out` gives in the library of its format."""
    described = json.loads((out / EXPORT_FILE).read_text())
    file = out / described["file"]
    if described["file_format"] == "onnx":
        return run(file, dict(feed))
    if described["file_format"] == "aotinductor":
        program = torch._inductor.aoti_load_package(str(file))
    else:
        program = torch.jit.load(file) if file.suffix == ".pt" else torch.export.load(file).module()
    with torch.no_grad():
        values = program(*(torch.from_numpy(feed[given["name"]]) for given in described["inputs"]))
    return dict(zip(described["outputs"], (value.numpy() for value in values), strict=True))


def dense_graph(dense_dim: int, layers: list[GraphLayer], labels: Mapping[str, int] | None = None) -> GraphModel:
    spec = GraphSpec(
        labels=tuple(GraphLabel(name=name, dim=dim) for name, dim in (labels or {"label": 1}).items()),
        dense_name="dense",
        dense_dim=dense_dim,
        layers=tuple(layers),
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


def close(found: np.ndarray, expected: Tensor, name: str = "") -> None:
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected.detach().numpy(), rtol=0, atol=1e-4, err_msg=name)
