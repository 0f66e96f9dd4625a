# SPDX-License-Identifier: Apache-2.0
"""Graphs as models of runs: from files, and with the weights of samples."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from terarec.batch import slice_samples
from terarec.config import load_run, save_run
from terarec.config.files import read_graph
from terarec.errors import ConfigError, DataNotFoundError
from terarec.models import GraphModel, build_model
from terarec.spec import GraphLabel, GraphLayer, GraphModelSpec, GraphSpec, RunSpec, to_data
from tests.errors import at
from tests.models.every import GRAPH, dataset, random_batch


@pytest.mark.parametrize("kind", ["binary_cross_entropy", "cross_entropy", "multi_cross_entropy"])
def test_weights_of_samples_multiply_their_losses(kind: str) -> None:
    """Against the losses of the samples one by one."""
    options = {"target_weights": (0.5,)} if kind == "multi_cross_entropy" else {}
    outputs = 2 if kind == "cross_entropy" else 1
    model = GraphModel(
        GraphSpec(
            labels=(GraphLabel(name="label", weight=3.0),),
            dense_dim=2,
            layers=(
                GraphLayer(kind="inner_product", bottoms=("dense",), tops=("logit",), options={"num_output": outputs}),
                GraphLayer(kind=kind, bottoms=("logit", "label"), tops=("loss",), options=options),
            ),
        )
    )
    batch = random_batch(dataset(categorical=()), 6)
    weight = torch.tensor([0.0, 1.0, 2.0, 0.5, 3.0, 1.0])
    with torch.no_grad():
        alone = torch.stack([model.loss(slice_samples(batch, row, row + 1)) for row in range(6)])
        torch.testing.assert_close(model.loss(replace(batch, weight=weight)), (alone * weight).mean())
        torch.testing.assert_close(model.loss(batch), alone.mean())


def written(folder: Path) -> Path:
    path = folder / "graph.json"
    path.write_text(json.dumps(to_data(GRAPH)))
    return path


def test_a_graph_of_a_file_is_that_of_the_spec(tmp_path: Path) -> None:
    path, batch = written(tmp_path), random_batch(dataset())
    inline, read = (
        build_model(spec, dataset(), seed=3) for spec in (GraphModelSpec(graph=GRAPH), GraphModelSpec(file=str(path)))
    )
    assert isinstance(inline, GraphModel)
    assert isinstance(read, GraphModel)
    assert torch.equal(inline.output_logits(inline(batch)), read.output_logits(read(batch)))


def test_a_run_takes_the_graph_from_its_directory(tmp_path: Path) -> None:
    written(tmp_path)
    (tmp_path / "run.json").write_text(json.dumps({"data": "d", "model": {"kind": "graph", "file": "graph.json"}}))
    run = load_run(tmp_path / "run.json")
    assert run == RunSpec(data=str(tmp_path / "d"), model=GraphModelSpec(graph=GRAPH))
    save_run(run, tmp_path / "saved.json")  # which no longer needs the file
    (tmp_path / "graph.json").unlink()
    assert load_run(tmp_path / "saved.json") == run
    with pytest.raises(DataNotFoundError, check=at(f"{tmp_path}/graph.json")):
        load_run(tmp_path / "run.json")


def test_a_wrong_graph_names_its_file_and_field(tmp_path: Path) -> None:
    path = tmp_path / "graph.json"
    path.write_text(json.dumps({**to_data(GRAPH), "dense_dimm": 2}))
    with pytest.raises(ConfigError, check=at(f"{path}: $.dense_dimm")):
        read_graph(path)
