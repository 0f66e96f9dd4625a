# SPDX-License-Identifier: Apache-2.0
"""Models of ever richer interactions among columns: FFM, PNN, FiBiNET, MaskNet and FinalMLP."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

from terarec.spec import checks
from terarec.spec.network import EmbeddedSpec, NetworkSpec, WideNetworkSpec, check_wide
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

    def __post_init__(self) -> None:
        EmbeddedSpec.__post_init__(self)
        check_wide(self)


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
    hidden: tuple[int, ...] = (256, 128)

    def __post_init__(self) -> None:
        NetworkSpec.__post_init__(self)
        checks.one_of(self, "products", ("inner", "outer", "both"))
        checks.widths(self, "hidden")


BilinearKernels = Literal["all", "each", "interaction"]


@dataclass(frozen=True, kw_only=True, slots=True)
class FiBiNETSpec(WideNetworkSpec):
    """FiBiNET (Huang et al. 2019): bilinear products of all pairs of vectors, as they are and as gates weigh them.

    Attributes:
        reduction: Divisor of the number of columns that gives the hidden width of the gates.
        bilinear: "all": one kernel; "each": one for each first column of a pair; "interaction": one for each pair.
    """

    kind: ClassVar[str] = "fibinet"
    reduction: int = 3
    bilinear: BilinearKernels = "interaction"

    def __post_init__(self) -> None:
        WideNetworkSpec.__post_init__(self)
        checks.positive_int(self, "reduction", maximum=checks.MOST_WIDTH)
        checks.one_of(self, "bilinear", get_args(BilinearKernels))


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
    blocks: tuple[int, ...] = (64, 64, 64)
    aggregation: float = 2.0
    hidden: tuple[int, ...] = (256, 128)

    def __post_init__(self) -> None:
        NetworkSpec.__post_init__(self)
        checks.one_of(self, "structure", ("parallel", "serial"))
        checks.widths(self, "blocks")
        checks.finite_float(self, "aggregation", low=0.0, high=float(checks.MOST_LAYERS), open_low=True)
        checks.widths(self, "hidden", allow_empty=True)


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
    hidden: tuple[int, ...] = (256, 128)
    second: tuple[int, ...] = (256, 128)
    gate: tuple[int, ...] = (64,)
    first_context: tuple[str, ...] = ()
    second_context: tuple[str, ...] = ()
    heads: int = 1

    def __post_init__(self) -> None:
        NetworkSpec.__post_init__(self)
        checks.widths(self, "hidden")
        checks.widths(self, "second")
        checks.widths(self, "gate", allow_empty=True)
        for context in ("first_context", "second_context"):
            checks.distinct(self, context, getattr(self, context))
        checks.positive_int(self, "heads", maximum=checks.MOST_WIDTH)
        for stack in ("hidden", "second"):
            if getattr(self, stack)[-1] % self.heads:
                checks.fail(self, stack, f"a last layer whose width is a multiple of the heads ({self.heads})")
