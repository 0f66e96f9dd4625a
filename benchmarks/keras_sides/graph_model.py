# SPDX-License-Identifier: Apache-2.0
"""terarec: the model as a graph, trained by `Trainer` as in the HugeCTR facade."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

import terarec
from keras_sides import workload as sizes
from keras_sides.workload import Floats, Inputs, Workload
from terarec.batch import Batch, Jagged
from terarec.models import GraphModel
from terarec.nn.dense import InnerProduct
from terarec.spec import (
    AdamSpec,
    GraphEmbedding,
    GraphFeature,
    GraphLabel,
    GraphLayer,
    GraphSpec,
    RowOptions,
    TableSpec,
    TrainingSpec,
)
from terarec.train import Optimizers, Trainer
from terarec.train.devices import keep_freed_memory


def graph_of(workload: Workload) -> GraphSpec:
    """Return the graph of the layers in HugeCTR's samples."""
    deep = len(workload.slot_rows) * sizes.WIDTH
    layers = [
        GraphLayer(kind="concat", bottoms=("deep", "dense"), tops=("x",)),
        *_hidden("x", "1", workload.dropout),
        *_hidden("dropout1", "2", workload.dropout),
    ]
    embeddings = [_embedding("deep", workload.slot_rows, sizes.WIDTH)]
    if workload.model == "dcn":
        cross = {"num_layers": sizes.CROSS_LAYERS}
        layers += [
            GraphLayer(kind="multi_cross", bottoms=("x",), tops=("crossed",), options=cross),
            GraphLayer(kind="concat", bottoms=("dropout2", "crossed"), tops=("both",)),
            GraphLayer(kind="inner_product", bottoms=("both",), tops=("logit",), options={"num_output": 1}),
        ]
    else:
        embeddings.append(_embedding("wide", workload.wide_rows, 1))
        layers += [
            GraphLayer(kind="inner_product", bottoms=("dropout2",), tops=("fc3",), options={"num_output": 1}),
            GraphLayer(kind="reduce_sum", bottoms=("wide",), tops=("wide_sum",), options={"axis": 1}),
            GraphLayer(kind="add", bottoms=("fc3", "wide_sum"), tops=("logit",)),
        ]
    layers.append(GraphLayer(kind="binary_cross_entropy", bottoms=("logit", "label"), tops=("loss",)))
    assert deep + sizes.NUM_DENSE == 429, "HugeCTR's samples have this width"
    return GraphSpec(
        labels=(GraphLabel(name="label"),),
        dense_name="dense",
        dense_dim=sizes.NUM_DENSE,
        embeddings=tuple(embeddings),
        layers=tuple(layers),
    )


def _hidden(bottom: str, number: str, dropout: float) -> list[GraphLayer]:
    return [
        GraphLayer(
            kind="inner_product", bottoms=(bottom,), tops=(f"fc{number}",), options={"num_output": sizes.HIDDEN}
        ),
        GraphLayer(kind="relu", bottoms=(f"fc{number}",), tops=(f"relu{number}",)),
        GraphLayer(kind="dropout", bottoms=(f"relu{number}",), tops=(f"dropout{number}",), options={"rate": dropout}),
    ]


def _embedding(name: str, slot_rows: tuple[int, ...], width: int) -> GraphEmbedding:
    slots = [f"{name}{slot}" for slot in range(len(slot_rows))]
    return GraphEmbedding(
        name=name,
        tables=tuple(TableSpec(name=slot, rows=rows, width=width) for slot, rows in zip(slots, slot_rows, strict=True)),
        features=tuple(GraphFeature(name=slot, table=slot) for slot in slots),
        output="flat",
    )


class Graph:
    """Implements `Side`; the mode of `RowOptions` selects the rows that Adam updates."""

    version = f"terarec {terarec.__version__}, torch {torch.__version__}"

    def __init__(self, workload: Workload, mode: str) -> None:
        keep_freed_memory()
        self.workload = workload
        self.model = GraphModel(graph_of(workload))
        adam = AdamSpec(lr=sizes.LR, beta1=sizes.BETA1, beta2=sizes.BETA2, eps=sizes.EPSILON, eps_hat=True)
        rows = AdamSpec(
            lr=sizes.LR, beta1=sizes.BETA1, beta2=sizes.BETA2, eps=sizes.EPSILON, eps_hat=True,
            rows=RowOptions(mode=mode),  # type: ignore[arg-type]
        )  # fmt: skip
        self.trainer = Trainer(self.model, TrainingSpec(), Optimizers.of(self.model, adam, rows))

    def load(self, weights: dict[str, Floats]) -> None:
        for name, slot_rows in (("table", self.workload.slot_rows), ("wide", self.workload.wide_rows)):
            if not slot_rows:
                continue
            collection = self.model.collection("deep" if name == "table" else name)
            parts = torch.from_numpy(weights[name]).split(slot_rows)
            for table, part in zip(collection.tables.values(), parts, strict=True):
                collection.table(table.name).copy_(part)
        for layer, module in zip(self.model.spec.layers, self.model.layers, strict=True):
            if layer.kind == "inner_product":
                name = layer.tops[0] if layer.tops[0].startswith("fc") else "fc3"
                module.set_file_parameters([torch.from_numpy(weights[f"{name}_{part}"]) for part in ("kernel", "bias")])
            elif layer.kind == "multi_cross":
                pairs = zip(weights["cross_kernels"], weights["cross_biases"], strict=True)
                module.set_file_parameters([torch.from_numpy(row)[None] for pair in pairs for row in pair])

    def prepare(self, batches: list[Inputs]) -> None:
        self.batches = [self._batch(batch) for batch in batches]

    def step(self, number: int) -> Tensor:
        return self.trainer.train_step(self.batches[number])

    def products(self, batch: int) -> Callable[[], None]:
        """Return a function that computes only the matrix products of a step, into allocated memory."""
        layers = [module.linear for module in self.model.layers if isinstance(module, InnerProduct)]
        given = []
        for out_width, in_width in (layer.weight.shape for layer in layers):
            x, y, weight = torch.randn(batch, in_width), torch.randn(batch, out_width), torch.randn(out_width, in_width)
            given += [
                (x, weight.T, torch.empty_like(y)),
                (y.T, x, torch.empty_like(weight)),
                (y, weight, torch.empty_like(x)),
            ]

        def run() -> None:
            for left, right, out in given:
                torch.mm(left, right, out=out)

        return run

    def _batch(self, inputs: Inputs) -> Batch:
        columns = np.concatenate([inputs.keys.T, inputs.wide_keys.T])
        names = [feature.name for embedding in self.model.spec.embeddings for feature in embedding.features]
        return Batch(
            dense=torch.from_numpy(inputs.dense),
            label=torch.from_numpy(inputs.label),
            sparse=Jagged(
                names=tuple(names),
                keys=torch.from_numpy(columns.reshape(-1)),
                offsets=torch.arange(columns.size + 1),
            ),
        )
