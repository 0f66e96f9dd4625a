# SPDX-License-Identifier: Apache-2.0
"""FinalMLP (Mao et al. 2023, arXiv 2304.00902)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from terarec.batch import Batch
from terarec.errors import ConfigError
from terarec.models.columns import embeddings, input_width, mlp, side_by_side
from terarec.nn.field_products import BilinearFusion
from terarec.nn.gates import ContextGate
from terarec.nn.initializers import dense_distributions
from terarec.spec import DatasetSpec, FinalMLPSpec
from terarec.spec.checks import did_you_mean


class FinalMLP(nn.Module):
    """Two MLPs, each over all columns times a gate of its own, and a bilinear form of their outputs.

    A gate reads the vectors of its context columns, which are those of the columns themselves.

    Args:
        spec: Widths, layers and contexts.
        dataset: Columns.
        num_outputs: Number of outputs C; None for one a label.
        seed: Seed of the initial weights.

    Raises:
        ConfigError: A context column that is not there.
    """

    def __init__(
        self, spec: FinalMLPSpec, dataset: DatasetSpec, *, num_outputs: int | None = None, seed: int = 0
    ) -> None:
        super().__init__()
        outputs, width = num_outputs or len(dataset.labels), input_width(spec, dataset)
        generator = torch.Generator().manual_seed(seed)
        self.embedding = embeddings(spec, dataset, seed=seed)
        self.gates, self.streams, self._contexts = nn.ModuleList(), nn.ModuleList(), []
        for context, hidden in ((spec.first_context, spec.hidden), (spec.second_context, spec.second)):
            places = _places(context, dataset)
            # The pooled vectors follow the dense columns.
            self._contexts.append([len(dataset.dense) + place * spec.width for place in places])
            gate = mlp(spec, spec.width * len(places), spec.gate, width, generator) if places else None
            self.gates.append(ContextGate(width, gate))
            self.streams.append(mlp(spec, width, hidden, None, generator))
        self.width = spec.width
        self.fusion = BilinearFusion(
            spec.hidden[-1],
            spec.second[-1],
            spec.heads,
            outputs,
            generator=generator,
            initial=dense_distributions(spec.init),
        )

    def forward(self, batch: Batch) -> Tensor:
        """Return the logits float[B, C]."""
        x = side_by_side(self.embedding, batch)
        vectors = [
            stream(gate(x, torch.cat([x[:, place : place + self.width] for place in places], dim=1) if places else x))
            for gate, stream, places in zip(self.gates, self.streams, self._contexts, strict=True)
        ]
        logits: Tensor = self.fusion(*vectors)
        return logits


def _places(context: Sequence[str], dataset: DatasetSpec) -> list[int]:
    names = [column.name for column in dataset.categorical]
    for name in context:
        if name not in names:
            raise ConfigError(
                "final_mlp",
                f"context: data set {dataset.name!r} has no categorical column {name!r}{did_you_mean(name, names)}, "
                f"expected one of {', '.join(names) or 'some'}",
            )
    return [names.index(name) for name in context]
