# SPDX-License-Identifier: Apache-2.0
"""Models of ever richer interactions among columns: FFM, PNN, FiBiNET, MaskNet and FinalMLP."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from terarec.spec import checks
from terarec.spec.network import EmbeddedSpec, NetworkSpec, WideNetworkSpec
from terarec.spec.tables import Initializer


@dataclass(frozen=True, kw_only=True, slots=True)
class FFMSpec(EmbeddedSpec):
    """Field-aware factorization machine (Juan et al. 2016): every column has one vector for each other column.

    Attributes:
        wide_initializer: Initial weights of the keys in the linear terms; None for those of `tables`.
    """

    kind: ClassVar[str] = "ffm"
    width: int = 4
    wide_initializer: Initializer | None = "zeros"


@dataclass(frozen=True, kw_only=True, slots=True)
class PNNSpec(NetworkSpec):
    """Product-based network (Qu et al. 2016): an MLP over the columns and the products of their vectors.

    Attributes:
        products: "inner": the dots of all pairs of vectors; "outer": the outer product of their sum with itself;
            "both" of them.
        hidden: Widths of the hidden layers.
    """

    kind: ClassVar[str] = "pnn"
    products: Literal["inner", "outer", "both"] = "inner"
    hidden: checks.Widths = (256, 128)


BilinearKernels = Literal["all", "each", "interaction"]


@dataclass(frozen=True, kw_only=True, slots=True)
class FiBiNETSpec(WideNetworkSpec):
    """FiBiNET (Huang et al. 2019): bilinear products of all pairs of vectors, as they are and as gates weigh them.

    Attributes:
        reduction: Divisor of the number of columns that gives the hidden width of the gates.
        bilinear: "all": one kernel; "each": one for each first column of a pair; "interaction": one for each pair.
    """

    kind: ClassVar[str] = "fibinet"
    reduction: checks.Width = 3
    bilinear: BilinearKernels = "interaction"


@dataclass(frozen=True, kw_only=True, slots=True)
class MaskNetSpec(NetworkSpec):
    """MaskNet (Wang et al. 2021): blocks whose inputs are multiplied by a mask that the sample's vectors give.

    Attributes:
        structure: "parallel": all blocks read the vectors, and an MLP their outputs; "serial": each reads the block
            before it, and a linear layer the last one.
        blocks: Width of the output of each block.
        aggregation: Hidden width of a mask, as a multiple of the width of its output.
        hidden: Widths of the MLP's hidden layers behind parallel blocks.
    """

    kind: ClassVar[str] = "masknet"
    structure: Literal["parallel", "serial"] = "parallel"
    blocks: checks.Widths = (64, 64, 64)
    aggregation: Annotated[float, checks.number(0.0, float(checks.MOST_LAYERS), open_low=True)] = 2.0
    hidden: checks.AnyWidths = (256, 128)


@dataclass(frozen=True, kw_only=True, slots=True)
class FinalMLPSpec(NetworkSpec):
    """FinalMLP (Mao et al. 2023): two MLPs over gated columns, whose outputs meet in a bilinear form.

    Attributes:
        hidden: Widths of the first MLP's layers.
        second: Widths of the second MLP's layers.
        gate: Widths of the hidden layers of both gates.
        first_context: Categorical columns whose vectors the gate of the first MLP reads; empty for learned weights.
        second_context: The same of the second MLP.
        heads: Parts into which both outputs are cut, each with a bilinear form of its own.
    """

    kind: ClassVar[str] = "final_mlp"
    hidden: checks.Widths = (256, 128)
    second: checks.Widths = (256, 128)
    gate: checks.AnyWidths = (64,)
    first_context: tuple[str, ...] = ()
    second_context: tuple[str, ...] = ()
    heads: checks.Width = 1

    def __post_init__(self) -> None:
        NetworkSpec.__post_init__(self)
        for context in ("first_context", "second_context"):
            checks.distinct(self, context, getattr(self, context))
        for stack in ("hidden", "second"):
            if getattr(self, stack)[-1] % self.heads:
                checks.fail(self, stack, f"a last layer whose width is a multiple of the heads ({self.heads})")
