# SPDX-License-Identifier: Apache-2.0
"""Models with a tower for each label: shared bottom, MMoE, PLE and ESMM.

The papers: Caruana 1997, "Multitask learning" (Machine Learning 28); Ma et al. 2018, "Modeling task relationships in
multi-task learning with multi-gate mixture-of-experts" (KDD); Tang et al. 2020, "Progressive layered extraction"
(RecSys); Ma et al. 2018, "Entire space multi-task model" (arXiv 1804.07931).

The arguments of a model are those of `terarec.models.build_model`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn

from terarec.batch import Batch
from terarec.models.columns import embeddings, input_width, mlp, side_by_side
from terarec.nn.gates import funnel_logits, mix_experts
from terarec.spec import DatasetSpec, ESMMSpec, MMoESpec, PLESpec, SharedBottomSpec
from terarec.spec.multitask import TowersSpec


class SharedBottom(nn.Module):
    """One MLP over all columns, and a tower for each output on top."""

    def __init__(
        self, spec: SharedBottomSpec, dataset: DatasetSpec, *, num_outputs: int | None = None, seed: int = 0
    ) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.embedding = embeddings(spec, dataset, seed=seed)
        self.bottom = mlp(spec, input_width(spec, dataset), spec.hidden, None, generator)
        self.towers = Towers(spec, spec.hidden[-1], num_outputs or len(dataset.labels), generator)

    def forward(self, batch: Batch) -> Tensor:
        """Return the logits float[B, C]."""
        shared = self.bottom(side_by_side(self.embedding, batch))
        logits: Tensor = self.towers([shared] * len(self.towers.mlps))
        return logits


class MMoE(nn.Module):
    """Experts over all columns, and for each output a gate that mixes them, and a tower."""

    def __init__(self, spec: MMoESpec, dataset: DatasetSpec, *, num_outputs: int | None = None, seed: int = 0) -> None:
        super().__init__()
        outputs, width = num_outputs or len(dataset.labels), input_width(spec, dataset)
        generator = torch.Generator().manual_seed(seed)
        self.embedding = embeddings(spec, dataset, seed=seed)
        self.experts = _mlps(spec, width, spec.hidden, None, spec.experts, generator)
        self.gates = _mlps(spec, width, spec.gate, spec.experts, outputs, generator)
        self.towers = Towers(spec, spec.hidden[-1], outputs, generator)

    def forward(self, batch: Batch) -> Tensor:
        """Return the logits float[B, C]."""
        x = side_by_side(self.embedding, batch)
        experts = _outputs(self.experts, x)
        logits: Tensor = self.towers([mix_experts(experts, gate(x)) for gate in self.gates])
        return logits


class ExtractionLayer(nn.Module):
    """A layer of PLE: experts of each output and shared ones, and gates that mix them.

    The gate of an output mixes its own experts and the shared ones, that of the shared part mixes all.

    Args:
        spec: Widths, layers and numbers of experts.
        in_width: Width n of the inputs.
        num_outputs: Number of outputs C.
        is_last: Whether there is no further layer, which would read the shared part.
        generator: Source of the initial weights.
    """

    def __init__(
        self, spec: PLESpec, in_width: int, num_outputs: int, *, is_last: bool, generator: torch.Generator
    ) -> None:
        super().__init__()
        own, shared = spec.label_experts, spec.shared_experts
        self.label_experts = nn.ModuleList(
            _mlps(spec, in_width, spec.hidden, None, own, generator) for _ in range(num_outputs)
        )
        self.shared_experts = _mlps(spec, in_width, spec.hidden, None, shared, generator)
        self.gates = _mlps(spec, in_width, spec.gate, own + shared, num_outputs, generator)
        self.shared_gate = None if is_last else mlp(spec, in_width, spec.gate, num_outputs * own + shared, generator)

    def forward(self, inputs: Sequence[Tensor], shared: Tensor) -> tuple[list[Tensor], Tensor]:
        """Return the mixture of each output, and that of the shared part.

        Args:
            inputs: float[B, n] of each output.
            shared: float[B, n] of the shared part.

        Returns:
            float[B, W] of each output and of the shared part, which the last layer returns as it is.
        """
        of_shared = _outputs(self.shared_experts, shared)
        of_labels = [
            _outputs(cast(nn.ModuleList, experts), x) for experts, x in zip(self.label_experts, inputs, strict=True)
        ]
        mixed = [
            mix_experts(torch.cat([own, of_shared], dim=1), gate(x))
            for own, gate, x in zip(of_labels, self.gates, inputs, strict=True)
        ]
        if self.shared_gate is None:
            return mixed, shared
        return mixed, mix_experts(torch.cat([*of_labels, of_shared], dim=1), self.shared_gate(shared))


class PLE(nn.Module):
    """Extraction layers with experts of each output and shared ones, and a tower for each output."""

    def __init__(self, spec: PLESpec, dataset: DatasetSpec, *, num_outputs: int | None = None, seed: int = 0) -> None:
        super().__init__()
        outputs, width = num_outputs or len(dataset.labels), input_width(spec, dataset)
        generator = torch.Generator().manual_seed(seed)
        self.embedding = embeddings(spec, dataset, seed=seed)
        self.layers = nn.ModuleList(
            ExtractionLayer(
                spec,
                spec.hidden[-1] if index else width,
                outputs,
                is_last=index == spec.layers - 1,
                generator=generator,
            )
            for index in range(spec.layers)
        )
        self.towers = Towers(spec, spec.hidden[-1], outputs, generator)

    def forward(self, batch: Batch) -> Tensor:
        """Return the logits float[B, C]."""
        shared = side_by_side(self.embedding, batch)
        inputs = [shared] * len(self.towers.mlps)
        for layer in self.layers:
            inputs, shared = layer(inputs, shared)
        logits: Tensor = self.towers(inputs)
        return logits


class ESMM(nn.Module):
    """A tower for each output over shared embeddings; outputs are the steps of a funnel, such as click and purchase.

    The tower of a step has the probability of this step given the one before; its output is the logit of having taken
    all steps up to it, which is what its label says of every sample. So there is no selection bias: the loss of each
    label is over all samples.

    Args:
        spec: Widths and layers.
        dataset: Columns; its labels are in the order of the steps.
        num_outputs: Number of outputs C; None for one a label.
        seed: Seed of the initial weights.
    """

    def __init__(self, spec: ESMMSpec, dataset: DatasetSpec, *, num_outputs: int | None = None, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.embedding = embeddings(spec, dataset, seed=seed)
        self.towers = Towers(spec, input_width(spec, dataset), num_outputs or len(dataset.labels), generator)

    def forward(self, batch: Batch) -> Tensor:
        """Return the logits float[B, C]."""
        x = side_by_side(self.embedding, batch)
        return funnel_logits(self.towers([x] * len(self.towers.mlps)))


class Towers(nn.Module):
    """An MLP with one output for each label.

    Args:
        spec: Layers of a tower.
        in_width: Width n of their inputs.
        num_outputs: Number of towers C.
        generator: Source of the initial weights.
    """

    def __init__(self, spec: TowersSpec, in_width: int, num_outputs: int, generator: torch.Generator) -> None:
        super().__init__()
        self.mlps = _mlps(spec, in_width, spec.tower, 1, num_outputs, generator)

    def forward(self, inputs: Sequence[Tensor]) -> Tensor:
        """Return the outputs side by side: C times float[B, n] -> float[B, C]."""
        return torch.cat([tower(x) for tower, x in zip(self.mlps, inputs, strict=True)], dim=1)


def _mlps(
    spec: TowersSpec,
    in_width: int,
    hidden: Sequence[int],
    outputs: int | None,
    count: int,
    generator: torch.Generator,
) -> nn.ModuleList:
    return nn.ModuleList(mlp(spec, in_width, hidden, outputs, generator) for _ in range(count))


def _outputs(experts: nn.ModuleList, x: Tensor) -> Tensor:
    """Return the outputs of all experts: float[B, n] -> float[B, E, W]."""
    return torch.stack([expert(x) for expert in experts], dim=1)
