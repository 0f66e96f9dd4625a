# SPDX-License-Identifier: Apache-2.0
"""Recipes: published results, the runs that repeat them, and the preparation of their data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, ClassVar

from terarec.spec import checks
from terarec.spec.run import RunSpec
from terarec.spec.workflow import SplitByFiles, WorkflowSpec

RECIPE_SPLITS = ("train", "valid", "test")
"""Splits that a recipe's data have, in the order in which their files are prepared."""

LOG = "log"
"""Files of a recipe whose workflow splits them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PublishedResult:
    """Metrics that a recipe has to reach.

    Attributes:
        source: Address of the publication of the metrics, or else of the settings.
        auc: Area under the ROC curve on the test split, from 0 to 1; None where those of labels are published, or none.
        logloss: Mean logarithmic loss on the test split, in nats; None where it is not published.
        mean_auc: Mean area over several seeds, where it is published, too.
        mean_logloss: Mean logarithmic loss over these seeds.
        label_auc: Label -> area, for several labels.
    """

    kind: ClassVar[str] = "binary"
    source: str
    auc: checks.Share | None = None
    logloss: checks.NonNegative | None = None
    mean_auc: checks.Share | None = None
    mean_logloss: checks.NonNegative | None = None
    label_auc: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        checks.check_fields(self)
        checks.instance(self, "label_auc", Mapping, "an area for each label")
        if not all(isinstance(area, float) and 0.0 <= area <= 1.0 for area in self.label_auc.values()):
            checks.fail(self, "label_auc", "areas from 0 to 1")
        if self.auc is not None and self.label_auc:
            checks.reject(self, "", "got auc and label_auc, expected one of them at most")
        _check_source(self)
        if (self.mean_auc is None) != (self.mean_logloss is None):
            checks.reject(self, "", "got one of mean_auc and mean_logloss, expected both or neither")

    @property
    def metrics(self) -> Mapping[str, float | None]:
        """The metrics by name; None for one that is not published."""
        of_labels = {f"auc/{label}": area for label, area in self.label_auc.items()}
        return of_labels or {
            "auc": self.auc,
            "logloss": self.logloss,
            "mean_auc": self.mean_auc,
            "mean_logloss": self.mean_logloss,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class PublishedRanking:
    """Metrics of the first 10 of all items that a recipe has to reach.

    Attributes:
        source: Address of the publication of the metrics, or else of the settings.
        hit_rate: Share of the users whose item of the test split is among them; None where it is not published.
        ndcg: Mean NDCG of these lists; None where it is not published.
        precision: Mean share of relevant items in them; None where it is not published.
    """

    kind: ClassVar[str] = "ranking"
    source: str
    hit_rate: checks.Share | None = None
    ndcg: checks.Share | None = None
    precision: checks.Share | None = None

    def __post_init__(self) -> None:
        checks.check_fields(self)
        _check_source(self)
        if (self.hit_rate is None and self.precision is None) != (self.ndcg is None):
            checks.reject(self, "", "got ndcg or a rate alone, expected both or neither")

    @property
    def metrics(self) -> Mapping[str, float | None]:
        """The metrics by name."""
        values = {"hr@10": self.hit_rate, "ndcg@10": self.ndcg, "precision@10": self.precision}
        return {name: value for name, value in values.items() if name != "precision@10" or value is not None}


@dataclass(frozen=True, kw_only=True, slots=True)
class RecipeSpec:
    """Published result and the run that repeats it.

    Attributes:
        published: The metrics to reach.
        run: All settings; its `data` is the name of the recipe's data, in place of a path.
    """

    published: PublishedResult | PublishedRanking
    run: RunSpec

    def __post_init__(self) -> None:
        checks.instance(self, "published", PublishedResult | PublishedRanking, "published metrics")
        checks.instance(self, "run", RunSpec, "a RunSpec")
        if not checks.is_name(self.run.data):
            checks.reject(self, "run.data", f"got {self.run.data!r}, expected the name of a recipe's data")
        if self.run.init_from is not None:
            checks.reject(self, "run.init_from", f"got {self.run.init_from!r}, expected none in a recipe")


@dataclass(frozen=True, kw_only=True, slots=True)
class RecipeDataSpec:
    """Files of a public data set, and their preparation.

    Attributes:
        source: Address where the data are described.
        files: Names that each file may have. Either of the splits "train", "valid" and "test", in this order, of which
            the last two are for valid and test; or of "log", which the workflow splits: "day_*" is `log_files` files
            with a number in the place of the star, in the order of their numbers.
        workflow: Preparation of these files.
        log_files: Number of files of the log.
    """

    kind: ClassVar[str] = "workflow"
    source: str
    files: Mapping[str, tuple[str, ...]]
    workflow: WorkflowSpec
    log_files: checks.PositiveInt = 1

    def __post_init__(self) -> None:
        checks.check_fields(self)
        _check_source(self)
        checks.instance(self, "files", Mapping, "names of files for each of 'train', 'valid' and 'test', or of 'log'")
        checks.instance(self, "workflow", WorkflowSpec, "a WorkflowSpec")
        if tuple(self.files) not in (RECIPE_SPLITS, (LOG,)):
            got = ", ".join(map(repr, self.files)) or "none"
            checks.reject(self, "files", f"got {got}, expected 'train', 'valid' and 'test', or 'log'")
        for split, names in self.files.items():
            if not names or not all(isinstance(name, str) and name for name in names):
                checks.reject(self, f"files.{split}", f"got {names!r}, expected names of files, at least one")
        # Published figures are those of the publication's own split, which its files are.
        if LOG not in self.files and self.workflow.split != SplitByFiles(valid=1, test=1):
            checks.reject(self, "workflow.split", "expected by_files with 1 file for valid and 1 for test")


@dataclass(frozen=True, kw_only=True, slots=True)
class SequenceDataSpec:
    """File of sequences: a line a user, the user's number and then those of items in the order of time.

    The last item of a user is for the test, the one before it for the validation, and the rest is for training.

    All such data have the same runs, and differ in their published metrics alone.

    Attributes:
        source: Address where the data are described.
        names: Names that the file may have.
        published: Name of a run -> its metrics.
    """

    kind: ClassVar[str] = "sequences"
    source: str
    names: tuple[str, ...]
    published: Mapping[str, PublishedRanking]

    def __post_init__(self) -> None:
        _check_source(self)
        checks.instance(self, "published", Mapping, "the metrics of each run")
        _check_names(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class RatingDataSpec:
    """File of ratings: a user, an item, a rating and a time in each line. Each rated item is one that the user took.

    Attributes:
        source: Address where the data are described.
        names: Names that the file may have.
        test: Share of the ratings of each user, the latest ones, that is the test split.
    """

    kind: ClassVar[str] = "ratings"
    source: str
    names: tuple[str, ...]
    test: Annotated[float, checks.number(0.0, 0.9, open_low=True)] = 0.25

    def __post_init__(self) -> None:
        checks.check_fields(self)
        _check_source(self)
        _check_names(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class RatedSequenceDataSpec:
    """File of ratings: a user, an item, a rating and a time in each line, which give a sequence of each user.

    The split is that of `SequenceDataSpec`.

    Attributes:
        source: Address where the data are described.
        names: Names that the file may have.
        max_length: Number of items of a history, the last ones.
    """

    kind: ClassVar[str] = "rated_sequences"
    source: str
    names: tuple[str, ...]
    max_length: checks.Width

    def __post_init__(self) -> None:
        checks.check_fields(self)
        _check_source(self)
        _check_names(self)


def _check_names(owner: SequenceDataSpec | RatingDataSpec | RatedSequenceDataSpec) -> None:
    if not owner.names or not all(isinstance(name, str) and name for name in owner.names):
        checks.reject(owner, "names", f"got {owner.names!r}, expected names of files, at least one")


def _check_source(owner: AnyDataSpec | PublishedResult | PublishedRanking) -> None:
    if not isinstance(owner.source, str) or not owner.source.startswith(("https://", "http://")):
        checks.fail(owner, "source", "an address that begins with https://")


AnyDataSpec = RecipeDataSpec | SequenceDataSpec | RatingDataSpec | RatedSequenceDataSpec
