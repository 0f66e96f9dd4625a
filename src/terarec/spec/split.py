"""How rows are set apart for validation and test. Ids of rows and hashes are described in docs/workflows.md."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, TypeAlias

from terarec.spec import checks


@dataclass(frozen=True, kw_only=True, slots=True)
class SplitByFraction:
    """The last rows in source order: the share `valid`, and after it, as the very last, the share `test`."""

    kind: ClassVar[str] = "by_fraction"
    valid: float = 0.1
    test: float = 0.0

    def __post_init__(self) -> None:
        _shares(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class SplitByHash:
    """Rows at random: by the hash of the row id."""

    kind: ClassVar[str] = "by_hash"
    valid: float = 0.1
    test: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        _shares(self)
        checks.int64(self, "seed", minimum=0)


@dataclass(frozen=True, kw_only=True, slots=True)
class SplitByUser:
    """All rows of a user together: by the hash of the value of `column`."""

    kind: ClassVar[str] = "by_user"
    column: str
    valid: float = 0.1
    test: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        _column(self)
        _shares(self)
        checks.int64(self, "seed", minimum=0)


@dataclass(frozen=True, kw_only=True, slots=True)
class SplitByTime:
    """The latest rows: from thresholds on, or shares of the rows ordered by time; equal times stay together.

    Attributes:
        column: an integer or number column, mostly seconds since 1970.
        valid_from: rows from this time on are "valid".
        test_from: rows from this time on are "test".
        valid: share of the rows, in the place of the thresholds.
        test: share of the rows, the latest of all.
    """

    kind: ClassVar[str] = "by_time"
    column: str
    valid_from: float | None = None
    test_from: float | None = None
    valid: float = 0.0
    test: float = 0.0

    def __post_init__(self) -> None:
        _column(self)
        for threshold in ("valid_from", "test_from"):
            if getattr(self, threshold) is not None:
                checks.finite_float(self, threshold)
        has_thresholds = self.valid_from is not None or self.test_from is not None
        if has_thresholds is bool(self.valid or self.test):
            checks.refuse(self, "", "expected either thresholds (valid_from, test_from) or shares (valid, test)")
        if self.valid_from is not None and self.test_from is not None and self.test_from <= self.valid_from:
            checks.fail(self, "test_from", f"a time after valid_from, {self.valid_from!r}")
        if not has_thresholds:
            _shares(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class SplitByFiles:
    """The last files: `valid` of them, and after these, as the very last, `test` of them.

    Attributes:
        valid_fraction: in the place of files, this share of the rows of the others, the last of them, for validation.
    """

    kind: ClassVar[str] = "by_files"
    valid: int = 1
    test: int = 0
    valid_fraction: float = 0.0

    def __post_init__(self) -> None:
        checks.positive_int(self, "valid", minimum=0)
        checks.positive_int(self, "test", minimum=0)
        if not self.valid and not self.test:
            checks.refuse(self, "", "got 0 files for both, expected at least one for valid or test")
        checks.finite_float(self, "valid_fraction", low=0.0, high=1.0)
        if self.valid_fraction == 1:
            checks.fail(self, "valid_fraction", "less than 1: the training part must not be empty")
        if self.valid_fraction and self.valid:
            checks.fail(self, "valid_fraction", f"0 with {self.valid} files for validation")


@dataclass(frozen=True, kw_only=True, slots=True)
class OneSplit:
    """All rows in one split: for files that a fitted workflow transforms, whatever split it was fitted with."""

    kind: ClassVar[str] = "one_split"
    split: Literal["train", "valid", "test"]

    def __post_init__(self) -> None:
        checks.one_of(self, "split", ("train", "valid", "test"))


Split: TypeAlias = SplitByFraction | SplitByHash | SplitByUser | SplitByTime | SplitByFiles | OneSplit


def _shares(split: SplitByFraction | SplitByHash | SplitByUser | SplitByTime) -> None:
    for share in ("valid", "test"):
        checks.finite_float(split, share, low=0.0, high=1.0)
    if not 0.0 < split.valid + split.test < 1.0:
        checks.refuse(split, "", f"got valid {split.valid} and test {split.test}, expected a sum between 0 and 1")


def _column(split: SplitByUser | SplitByTime) -> None:
    if not isinstance(split.column, str) or not split.column:
        checks.fail(split, "column", "the name of a column")
