"""`GraphScoring`: a graph model's scores from the outputs of its embeddings."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from terarec.errors import ConfigError
from terarec.export.graph_models import graph_inputs, needed_layers
from terarec.export.inputs import ModelInput
from terarec.export.scoring import Scores
from terarec.models import GraphModel
from terarec.models.graph import Embeddings
from terarec.nn.registry import LAYERS


class GraphScoring(nn.Module):
    """Computes the scores of a graph model from `inputs`, without its tables and the tensors that only losses read.

    Attributes:
        inputs: Arguments of `forward`: the dense tensor, and the outputs of the embeddings.
        outputs: One name, of the scores side by side.
        model: A copy of the layers.
        row_type: Numbers of rows, of which it has none.

    Args:
        model: The model.
        scores: Scores of the logits of its labels; None for the predictions of its losses.

    Raises:
        ConfigError: A model whose predictions depend on labels.
    """

    row_type = "fp32"

    def __init__(self, model: GraphModel, scores: Scores | None) -> None:
        super().__init__()
        self.inputs: tuple[ModelInput, ...] = tuple(graph_inputs(model, None))
        self._names = [given.name for given in self.inputs]
        # `deepcopy` uses the entries here as its copies of the tables.
        self.model = copy.deepcopy(model, {id(model.embeddings): Embeddings({})})
        # The modules of the copy, so that a later change of the model's weights does not reach a program.
        modules = dict(zip((layer.tops[0] for layer in model.spec.layers), self.model.layers, strict=True))
        labels = {label.name for label in model.spec.labels}
        self._steps: list[tuple[Sequence[str], Sequence[str], nn.Module]] = []
        for layer in needed_layers(model.spec):
            if LAYERS[layer.kind].is_loss:
                continue
            if not labels.isdisjoint(layer.bottoms):
                raise ConfigError(f"layer {layer.tops[0]!r}", "reads a label, expected predictions that depend on none")
            self._steps.append((layer.bottoms, layer.tops, modules[layer.tops[0]]))
        self._scores = scores
        name = "scores"
        # ONNX has one namespace for inputs and outputs.
        while name in self._names:
            name += "_"
        self.outputs = (name,)

    def forward(self, *values: Tensor) -> tuple[Tensor, ...]:
        """Return the scores float32[B, n]."""
        tensors = dict(zip(self._names, values, strict=True))
        for bottoms, tops, module in self._steps:
            found = module(*(tensors[name] for name in bottoms))
            tensors.update(zip(tops, (found,) if isinstance(found, Tensor) else found, strict=True))
        if self._scores is not None:
            return (self._scores(self.model.label_logits(tensors)).float(),)
        return (torch.cat(list(self.model.predictions(tensors).values()), dim=1).float(),)
