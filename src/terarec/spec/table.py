"""What a table is: a storage fact, independent of the features that look it up."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from terarec.spec import checks

Initializer = Literal["uniform", "normal", "zeros"]


@dataclass(frozen=True, kw_only=True, slots=True)
class TableSpec:
    """A static embedding table: ``rows`` vectors of ``width`` float32 numbers, key == row.

    Attributes:
        name: unique among the tables of a model.
        rows: number of rows V.
        width: length D of a vector.
        initializer: distribution of the first weights.
        init_scale: half-width of the uniform, or standard deviation of the normal distribution; None takes
            1 / sqrt(rows), as the DLRM paper's code does (Naumov et al. 2019).
    """

    name: str
    rows: int
    width: int
    initializer: Initializer = "uniform"
    init_scale: float | None = None

    def __post_init__(self) -> None:
        checks.name(self)
        checks.positive_int(self, "rows")
        checks.positive_int(self, "width")
        checks.one_of(self, "initializer", ("uniform", "normal", "zeros"))
        if self.init_scale is not None:
            checks.finite_float(self, "init_scale", low=0.0, open_low=True)
