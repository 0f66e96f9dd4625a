"""What a recipe is: a run that repeats a published result, and the data that it needs. See docs/accuracy.md."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from terarec.spec import checks
from terarec.spec.run import RunSpec
from terarec.spec.split import SplitByFiles
from terarec.spec.workflow import WorkflowSpec

RECIPE_SPLITS = ("train", "valid", "test")
"""Splits that a recipe's data have, in the order in which their files are prepared."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PublishedResult:
    """The figures that a recipe is to reach.

    Attributes:
        auc: Area under the ROC curve on the test split, from 0 to 1.
        logloss: Mean logarithmic loss on the test split, in nats.
        source: Address of the publication.
        mean_auc: Mean area over several seeds, where it is published, too.
        mean_logloss: Mean logarithmic loss over these seeds.
    """

    auc: float
    logloss: float
    source: str
    mean_auc: float | None = None
    mean_logloss: float | None = None

    def __post_init__(self) -> None:
        checks.finite_float(self, "auc", low=0.0, high=1.0)
        checks.finite_float(self, "logloss", low=0.0)
        _check_address(self, "source")
        if (self.mean_auc is None) != (self.mean_logloss is None):
            checks.refuse(self, "", "got one of mean_auc and mean_logloss, expected both or neither")
        if self.mean_auc is not None:
            checks.finite_float(self, "mean_auc", low=0.0, high=1.0)
            checks.finite_float(self, "mean_logloss", low=0.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class RecipeSpec:
    """A published result and the run that repeats it.

    Attributes:
        published: The figures to reach.
        run: All settings; its `data` is the name of the recipe's data, in place of a path.
    """

    published: PublishedResult
    run: RunSpec

    def __post_init__(self) -> None:
        checks.instance(self, "published", PublishedResult, "a PublishedResult")
        checks.instance(self, "run", RunSpec, "a RunSpec")
        if not checks.is_name(self.run.data):
            checks.refuse(self, "run.data", f"got {self.run.data!r}, expected the name of a recipe's data")
        if self.run.init_from is not None:
            checks.refuse(self, "run.init_from", f"got {self.run.init_from!r}, expected none in a recipe")


@dataclass(frozen=True, kw_only=True, slots=True)
class RecipeDataSpec:
    """The files of a public data set, and how they are prepared.

    Attributes:
        source: Address where the data are described.
        files: Split ("train", "valid" and "test") -> names that its file may have.
        workflow: Preparation of these files in the order of the splits; the last two files are for valid and test.
    """

    source: str
    files: Mapping[str, tuple[str, ...]]
    workflow: WorkflowSpec

    def __post_init__(self) -> None:
        _check_address(self, "source")
        checks.instance(self, "files", Mapping, "names of files for each of 'train', 'valid' and 'test'")
        checks.instance(self, "workflow", WorkflowSpec, "a WorkflowSpec")
        if set(self.files) != set(RECIPE_SPLITS):
            got = ", ".join(map(repr, self.files)) or "none"
            checks.refuse(self, "files", f"got {got}, expected 'train', 'valid' and 'test'")
        for split, names in self.files.items():
            if not names or not all(isinstance(name, str) and name for name in names):
                checks.refuse(self, f"files.{split}", f"got {names!r}, expected names of files, at least one")
        if self.workflow.split != SplitByFiles(valid=1, test=1):
            checks.refuse(self, "workflow.split", "expected by_files with 1 file for valid and 1 for test")


def _check_address(owner: object, field: str) -> None:
    value = getattr(owner, field)
    if not isinstance(value, str) or not value.startswith(("https://", "http://")):
        checks.fail(owner, field, "an address that begins with https://")
