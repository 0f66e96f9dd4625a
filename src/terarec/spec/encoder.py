"""How a raw value becomes a number or an id. Encoders are part of the data set and of the served artefact."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import ClassVar, Literal

from terarec.spec import checks

MISSING_ID = 0
"""Id of a missing value in every vocabulary."""
RARE_ID = 1
"""Id shared by the values that were too rare in the training part and by those never seen there."""
FIRST_ID = 2
"""Id of the most frequent value; the others follow by falling count, ties by rising value."""
MISSING_KEY = -(2**63)
"""Key of a missing value in a column whose keys are the raw integers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LogShiftEncoder:
    """ln(max(x, 1 - shift) + shift), a missing x being 0; ``shift`` makes the training part's minimum 1."""

    kind: ClassVar[str] = "log_shift"
    shift: float = 1.0

    def __post_init__(self) -> None:
        checks.finite_float(self, "shift")


@dataclass(frozen=True, kw_only=True, slots=True)
class StandardizeEncoder:
    """(x - mean) / deviation, a missing x being the mean; both are taken on the training part."""

    kind: ClassVar[str] = "standardize"
    mean: float
    deviation: float

    def __post_init__(self) -> None:
        checks.finite_float(self, "mean")
        checks.finite_float(self, "deviation", low=0.0, open_low=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class VocabularyEncoder:
    """Value -> contiguous id by frequency: 0 missing, 1 rare or unseen, 2 the most frequent value, and so on.

    Attributes:
        file: the vocabulary's Parquet file, relative to dataset.json (columns value, count; row i has id i + 2).
        value_type: how values are read: "string", "hex32" (up to eight hexadecimal digits), or "int64".
        min_count: values that occurred less often in the training part share id 1.
    """

    kind: ClassVar[str] = "vocabulary"
    file: str
    value_type: Literal["string", "hex32", "int64"] = "string"
    min_count: int = 1

    def __post_init__(self) -> None:
        checks.inner_path(self, "file")
        checks.one_of(self, "value_type", ("string", "hex32", "int64"))
        checks.positive_int(self, "min_count")


@dataclass(frozen=True, kw_only=True, slots=True)
class BucketizeEncoder:
    """Number -> id of its interval: 0 missing, then 1 + the number of ``boundaries`` that are <= x."""

    kind: ClassVar[str] = "bucketize"
    boundaries: tuple[float, ...]

    def __post_init__(self) -> None:
        rising = all(a < b for a, b in itertools.pairwise(self.boundaries))
        if not self.boundaries or not rising or not all(map(math.isfinite, self.boundaries)):
            checks.fail(self, "boundaries", "rising numbers")


DenseEncoder = LogShiftEncoder | StandardizeEncoder
CategoricalEncoder = VocabularyEncoder | BucketizeEncoder
