# SPDX-License-Identifier: Apache-2.0
"""Small models with tables as the facade makes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from terarec.batch import Batch, Jagged
from terarec.models import GraphModel
from terarec.spec import (
    DenseOptimizerSpec,
    DynamicTableSpec,
    GraphEmbedding,
    GraphFeature,
    GraphLabel,
    GraphLayer,
    GraphSpec,
    SparseOptimizerSpec,
    TableSpec,
    TrainingSpec,
)
from terarec.train import Optimizers, Trainer

WIDTH = 3


def dynamic(*names: str, width: int = WIDTH) -> tuple[DynamicTableSpec, ...]:
    return tuple(DynamicTableSpec(name=name, width=width) for name in names)


def static(**rows: int) -> tuple[TableSpec, ...]:
    return tuple(TableSpec(name=name, rows=count, width=WIDTH) for name, count in rows.items())


def embedding(tables: Sequence[DynamicTableSpec | TableSpec], *, slots: int, name: str = "e") -> GraphEmbedding:
    """One table for all slots, or one for each."""
    features = tuple(GraphFeature(name=f"data.{slot}", table=tables[slot % len(tables)].name) for slot in range(slots))
    return GraphEmbedding(name=name, tables=tuple(tables), features=features)


def layer(kind: str, bottoms: str, tops: str, **options: object) -> GraphLayer:
    return GraphLayer(kind=kind, bottoms=tuple(bottoms.split()), tops=tuple(tops.split()), options=options)


def model(*embeddings: GraphEmbedding, layers: Sequence[GraphLayer] = (), seed: int = 1) -> GraphModel:
    """Embeddings of two slots each and two dense numbers under `layers` that end in "x" [B, n], and a logit."""
    joined = [layer("reshape", one.name, f"{one.name}_flat", leading_dim=2 * WIDTH) for one in embeddings]
    with_dense = layer("concat", " ".join(["dense", *(f"{one.name}_flat" for one in embeddings)]), "input")
    ends = [layer("inner_product", "x" if layers else "input", "logit", num_output=1)]
    ends.append(layer("binary_cross_entropy", "logit label", "loss"))
    spec = GraphSpec(
        labels=(GraphLabel(name="label"),),
        dense_name="dense",
        dense_dim=2,
        embeddings=embeddings,
        layers=(*joined, with_dense, *layers, *ends),
    )
    return GraphModel(spec, seed=seed)


def batch(*slots: Sequence[Sequence[int]], seed: int = 0, name: str = "data") -> Batch:
    """Keys of each sample, slot by slot."""
    size = len(slots[0])
    bags = [torch.tensor(bag, dtype=torch.int64) for slot in slots for bag in slot]
    generator = torch.Generator().manual_seed(seed)
    offsets = torch.tensor([0, *(len(bag) for bag in bags)]).cumsum(0)
    return Batch(
        dense=torch.rand(size, 2, generator=generator),
        label=torch.randint(0, 2, (size, 1), generator=generator).float(),
        sparse=Jagged(
            names=tuple(f"{name}.{slot}" for slot in range(len(slots))), keys=torch.cat(bags), offsets=offsets
        ),
    )


def new_trainer(
    net: GraphModel, dense: DenseOptimizerSpec, rows: Mapping[str, SparseOptimizerSpec], **settings: object
) -> Trainer:
    """A trainer of a graph with the rules `dense` and `rows`; `settings` are fields of `TrainingSpec`."""
    spec = TrainingSpec(**settings)  # type: ignore[arg-type]
    return Trainer(net, spec, Optimizers.of(net, dense, rows))


@torch.no_grad()
def evaluated(net: GraphModel, samples: Batch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The loss and the tensors of `samples` in evaluation mode."""
    tensors = net.eval()(samples)
    return net.total_loss(tensors), tensors
