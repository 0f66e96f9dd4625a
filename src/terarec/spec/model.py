"""What a model is: its shape, apart from the data set that gives it features and row counts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from terarec.spec import checks
from terarec.spec.tables import StaticTablesSpec, TablesSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class DLRMSpec:
    """DLRM (Naumov et al. 2019): bottom MLP, pairwise dot interaction, top MLP.

    Attributes:
        width: length D of every embedding vector, and of the bottom MLP's output.
        bottom: widths of the bottom MLP's layers; the last must equal `width`.
        top: widths of the top MLP's hidden layers; the layer to the logit is added.
        tables: static, as large as the data set says, or dynamic.
    """

    kind: ClassVar[str] = "dlrm"
    width: int = 16
    bottom: tuple[int, ...] = (512, 256, 16)
    top: tuple[int, ...] = (512, 256)
    tables: TablesSpec = field(default_factory=StaticTablesSpec)

    def __post_init__(self) -> None:
        checks.positive_int(self, "width")
        checks.widths(self, "bottom")
        checks.widths(self, "top")
        if self.bottom[-1] != self.width:
            checks.fail(self, "bottom", f"a last layer as wide as the embedding ({self.width})")


@dataclass(frozen=True, kw_only=True, slots=True)
class WideDeepSpec:
    """Wide & Deep (Cheng et al. 2016): a linear part over all features beside an MLP over their embeddings.

    Attributes:
        width: length D of every embedding vector of the deep part (the wide part's are 1 long).
        hidden: widths of the MLP's hidden layers.
        dropout: probability of zeroing a hidden unit while training.
        tables: static, as large as the data set says, or dynamic.
    """

    kind: ClassVar[str] = "wide_deep"
    width: int = 8
    hidden: tuple[int, ...] = (256, 128)
    dropout: float = 0.0
    tables: TablesSpec = field(default_factory=StaticTablesSpec)

    def __post_init__(self) -> None:
        checks.positive_int(self, "width")
        checks.widths(self, "hidden")
        checks.finite_float(self, "dropout", low=0.0, high=0.95)


ModelSpec = DLRMSpec | WideDeepSpec
