# SPDX-License-Identifier: Apache-2.0
"""Models of interactions among columns: AutoInt, DCN, DCN V2, FFM, PNN, FiBiNET, MaskNet and FinalMLP."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from terarec.batch import Batch
from terarec.errors import ConfigError
from terarec.models.columns import (
    ColumnVectors,
    LinearTerms,
    OutputFactors,
    check_pairs,
    embeddings,
    input_width,
    mlp,
    multi_cross,
    side_by_side,
)
from terarec.nn import DotInteraction
from terarec.nn.attention import SelfAttention
from terarec.nn.dense import new_linear
from terarec.nn.field_products import BilinearFusion, BilinearProducts, field_aware_products
from terarec.nn.gates import ContextGate, MaskBlock, SqueezeExcitation, VectorNorm
from terarec.nn.initializers import dense_distributions
from terarec.nn.interaction import CrossMixture, CrossV2
from terarec.spec import (
    AutoIntSpec,
    DatasetSpec,
    DCNSpec,
    DCNV2Spec,
    FFMSpec,
    FiBiNETSpec,
    FinalMLPSpec,
    MaskNetSpec,
    PNNSpec,
)
from terarec.spec.checks import did_you_mean


class AutoInt(nn.Module):
    """Self-attention among the vectors of all columns, a linear layer over them, and optionally an MLP in parallel.

    AutoInt and AutoInt+ (Song et al. 2019, arXiv 1810.11921).

    Args:
        spec: Widths and layers; with ``spec.hidden`` it is AutoInt+.
        dataset: Columns.
        num_outputs: Number of outputs C; None for one a label.
        seed: Seed of the initial weights.
    """

    def __init__(
        self, spec: AutoIntSpec, dataset: DatasetSpec, *, num_outputs: int | None = None, seed: int = 0
    ) -> None:
        super().__init__()
        outputs = num_outputs or len(dataset.labels)
        generator = torch.Generator().manual_seed(seed)
        initial = dense_distributions(spec.init)
        self.vectors = ColumnVectors(spec, dataset, generator=generator, seed=seed)
        widths = (spec.width, *(spec.attention_width,) * spec.layers)
        self.attention = nn.Sequential(
            *(
                SelfAttention(
                    before,
                    after,
                    spec.heads,
                    generator=generator,
                    initial=initial,
                    residual=spec.residual,
                    scale=spec.scale,
                    layer_norm=spec.layer_norm,
                    dropout=spec.dropout,
                )
                for before, after in pairwise(widths)
            )
        )
        # Attention keeps a vector for each column; the paper's last layer reads all of them side by side.
        last = self.vectors.num_vectors * spec.attention_width
        weight, bias = initial(last, outputs)
        self.output = new_linear(last, outputs, weight=weight, bias=bias, generator=generator)
        width = input_width(spec, dataset)
        # The MLP reads the columns themselves, without attention, and its logits are added: the paper's AutoInt+.
        self.deep = mlp(spec, width, spec.hidden, outputs, generator) if spec.hidden else None
        self.linear = LinearTerms(spec, dataset, outputs, seed=seed) if spec.wide else None

    def forward(self, batch: Batch) -> Tensor:
        """Return the logits float[B, C]."""
        vectors, flat = self.vectors(batch)
        logits: Tensor = self.output(self.attention(vectors).flatten(1))
        if self.deep is not None:
            logits = logits + self.deep(flat)
        if self.linear is not None:
            logits = logits + self.linear.linear_terms(batch)
        return logits


class DCN(nn.Module):
    """Cross layers and an MLP over the dense columns and all embeddings, and a linear layer over the outputs of both.

    DCN (Wang et al. 2017, arXiv 1708.05123) and DCN V2 (Wang et al. 2021, arXiv 2008.13535).

    The arguments are those of `terarec.models.build_model`.
    """

    def __init__(
        self, spec: DCNSpec | DCNV2Spec, dataset: DatasetSpec, *, num_outputs: int | None = None, seed: int = 0
    ) -> None:
        super().__init__()
        outputs, width = num_outputs or len(dataset.labels), input_width(spec, dataset)
        generator = torch.Generator().manual_seed(seed)
        structure = "parallel" if isinstance(spec, DCNSpec) else spec.structure
        self.embedding = embeddings(spec, dataset, seed=seed)
        self.cross = _cross_layers(spec, width, generator)
        is_stacked = structure in ("stacked", "stacked_parallel")
        is_parallel = structure in ("parallel", "stacked_parallel") and bool(spec.hidden)
        self.stacked = mlp(spec, width, spec.hidden, None, generator) if is_stacked else None
        self.parallel = mlp(spec, width, spec.hidden, None, generator) if is_parallel else None
        # Stacked: the MLP replaces the cross layers' output; parallel: it is joined to that.
        last = (spec.hidden[-1] if is_stacked else width) + (spec.hidden[-1] if is_parallel else 0)
        weight, bias = dense_distributions(spec.init)(last, outputs)
        self.output = new_linear(last, outputs, weight=weight, bias=bias, generator=generator)

    def forward(self, batch: Batch) -> Tensor:
        """Return the logits float[B, C]."""
        x = side_by_side(self.embedding, batch)
        out = self.cross(x)
        if self.stacked is not None:
            out = self.stacked(out)
        if self.parallel is not None:
            out = torch.cat([out, self.parallel(x)], dim=1)
        logits: Tensor = self.output(out)
        return logits


def _cross_layers(spec: DCNSpec | DCNV2Spec, width: int, generator: torch.Generator) -> nn.Module:
    rank = 0 if isinstance(spec, DCNSpec) else spec.rank
    if rank is None:
        return CrossV2(width, spec.cross_layers, generator=generator, initial=dense_distributions(spec.init))
    if isinstance(spec, DCNV2Spec) and spec.experts > 1:
        return CrossMixture(width, spec.cross_layers, rank=rank, experts=spec.experts, generator=generator)
    return multi_cross(spec, width, spec.cross_layers, rank, generator)


class FFM(LinearTerms):
    """Linear terms, and for each pair of columns the dot of the vectors that they have for each other.

    Juan et al. 2016, "Field-aware factorization machines for CTR prediction".

    A row of a table holds the m vectors of its key, one for each column, side by side: it has m * D numbers.

    Args:
        spec: Width D, tables and initial weights.
        dataset: Columns, m in all; a dense one contributes its value times learned vectors.
        num_outputs: Number of outputs C; None for one a label.
        seed: Seed of the initial weights.
    """

    def __init__(self, spec: FFMSpec, dataset: DatasetSpec, *, num_outputs: int | None = None, seed: int = 0) -> None:
        outputs = num_outputs or len(dataset.labels)
        super().__init__(spec, dataset, outputs, seed=seed)
        self.num_columns = len(dataset.categorical) + len(dataset.dense)
        by_column = dataclasses.replace(spec, width=spec.width * self.num_columns)
        generator = torch.Generator().manual_seed(seed)
        self.vectors = ColumnVectors(by_column, dataset, generator=generator, seed=seed)
        self.products = OutputFactors(spec.width, outputs)

    def forward(self, batch: Batch) -> Tensor:
        """Return the logits float[B, C]."""
        vectors, _ = self.vectors(batch)
        products = field_aware_products(vectors.unflatten(2, (self.num_columns, -1)))
        logits: Tensor = self.linear_terms(batch) + self.products(products)
        return logits


class FiBiNET(LinearTerms):
    """Linear terms, and an MLP over the bilinear products of all pairs of vectors, gated and not.

    Huang et al. 2019, arXiv 1905.09433.

    The products of both kinds share their kernels. The MLP reads the dense columns, too.

    The arguments are those of `terarec.models.build_model`.
    """

    def __init__(
        self, spec: FiBiNETSpec, dataset: DatasetSpec, *, num_outputs: int | None = None, seed: int = 0
    ) -> None:
        outputs = num_outputs or len(dataset.labels)
        super().__init__(spec, dataset, outputs, seed=seed)
        generator = torch.Generator().manual_seed(seed)
        initial = dense_distributions(spec.init)
        self.vectors = ColumnVectors(spec, dataset, generator=generator, seed=seed)
        count = self.vectors.num_vectors
        check_pairs("fibinet", dataset, count)
        self.senet = SqueezeExcitation(count, spec.reduction, generator=generator, initial=initial)
        self.bilinear = BilinearProducts(count, spec.width, spec.bilinear, generator=generator, initial=initial)
        width = 2 * self.bilinear.out_width + len(dataset.dense)
        self.deep = mlp(spec, width, spec.hidden, outputs, generator)

    def forward(self, batch: Batch) -> Tensor:
        """Return the logits float[B, C]."""
        vectors, _ = self.vectors(batch)
        products = [self.bilinear(vectors), self.bilinear(self.senet(vectors))]
        logits: Tensor = self.linear_terms(batch) + self.deep(torch.cat([*products, batch.dense], dim=1))
        return logits


class FinalMLP(nn.Module):
    """Two MLPs, each over all columns times a gate of its own, and a bilinear form of their outputs.

    Mao et al. 2023, arXiv 2304.00902.

    A gate reads the vectors of its context columns, which are those of the columns themselves.

    The arguments are those of `terarec.models.build_model`.
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


class MaskNet(nn.Module):
    """Blocks masked by the sample's vectors: in parallel with an MLP over all of them, or one after the other.

    Wang et al. 2021, arXiv 2102.07619.

    The arguments are those of `terarec.models.build_model`.
    """

    def __init__(
        self, spec: MaskNetSpec, dataset: DatasetSpec, *, num_outputs: int | None = None, seed: int = 0
    ) -> None:
        super().__init__()
        outputs = num_outputs or len(dataset.labels)
        generator = torch.Generator().manual_seed(seed)
        self.vectors = ColumnVectors(spec, dataset, generator=generator, seed=seed)
        self.norm = VectorNorm(self.vectors.num_vectors, spec.width)
        self.is_serial = spec.structure == "serial"
        width = self.vectors.num_vectors * spec.width
        in_widths = (width, *spec.blocks[:-1]) if self.is_serial else (width,) * len(spec.blocks)
        self.blocks = nn.ModuleList(
            MaskBlock(
                width,
                in_width,
                out_width,
                mask_width=max(1, round(spec.aggregation * in_width)),
                activation=spec.activation,
                dropout=spec.dropout,
                generator=generator,
                initial=dense_distributions(spec.init),
            )
            for in_width, out_width in zip(in_widths, spec.blocks, strict=True)
        )
        # Serial blocks are the deep part themselves.
        hidden = () if self.is_serial else spec.hidden
        last = spec.blocks[-1] if self.is_serial else sum(spec.blocks)
        self.deep = mlp(spec, last, hidden, outputs, generator)

    def forward(self, batch: Batch) -> Tensor:
        """Return the logits float[B, C]."""
        vectors, _ = self.vectors(batch)
        guide, x = vectors.flatten(1), self.norm(vectors).flatten(1)
        if self.is_serial:
            for block in self.blocks:
                x = block(x, guide)
        else:
            x = torch.cat([block(x, guide) for block in self.blocks], dim=1)
        logits: Tensor = self.deep(x)
        return logits


class PNN(nn.Module):
    """An MLP over all columns, and the inner or outer products of their vectors.

    Product-based neural network (Qu et al. 2016, arXiv 1611.00144).

    The arguments are those of `terarec.models.build_model`.
    """

    def __init__(self, spec: PNNSpec, dataset: DatasetSpec, *, num_outputs: int | None = None, seed: int = 0) -> None:
        super().__init__()
        outputs, width = num_outputs or len(dataset.labels), input_width(spec, dataset)
        generator = torch.Generator().manual_seed(seed)
        self.vectors = ColumnVectors(spec, dataset, generator=generator, seed=seed)
        self.width = spec.width
        self.has_outer = spec.products != "inner"
        self.dots: DotInteraction | None = None
        if spec.products != "outer":
            check_pairs("pnn", dataset, self.vectors.num_vectors)
            self.dots = DotInteraction(self.vectors.num_vectors, spec.width)
            width += self.dots.out_width - spec.width
        if self.has_outer:
            width += spec.width * spec.width
        self.deep = mlp(spec, width, spec.hidden, outputs, generator)

    def forward(self, batch: Batch) -> Tensor:
        """Return the logits float[B, C]."""
        vectors, flat = self.vectors(batch)
        parts = [flat]
        if self.dots is not None:
            # Without the first vector, which the interaction puts before the dots and `flat` has.
            parts.append(self.dots(vectors[:, 0], vectors[:, 1:].flatten(1))[:, self.width :])
        if self.has_outer:
            # The outer products of all pairs add up to that of the sum with itself (sec. III-D), D^2 numbers.
            total = vectors.sum(1)
            parts.append((total.unsqueeze(2) * total.unsqueeze(1)).flatten(1))
        logits: Tensor = self.deep(torch.cat(parts, dim=1))
        return logits
