# SPDX-License-Identifier: Apache-2.0
"""Model repositories: the versions of a model, the pointer to the one that answers, and servers that follow it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal

from terarec.spec import checks

MOST_VERSIONS = 10**10 - 1
"""Largest number of a version, as Triton's."""
MOST_EVENTS = 100
"""Most events that the pointer of a model keeps."""

ControlMode = Literal["poll", "explicit", "none"]
PointerAction = Literal["promote", "split", "shadow", "rollback", "end"]
_Version = Annotated[int, checks.whole(1, MOST_VERSIONS)]
_Versions = Annotated[tuple[int, ...], checks.list_of(checks.integer(1, MOST_VERSIONS))]


@dataclass(frozen=True, kw_only=True, slots=True)
class PromotedVersions:
    """The versions that the pointer names; without a pointer the highest one."""

    kind: ClassVar[str] = "promoted"


@dataclass(frozen=True, kw_only=True, slots=True)
class LatestVersions(checks.Checked):
    """The highest versions, and those that the pointer names.

    Attributes:
        count: Number of the highest versions.
    """

    kind: ClassVar[str] = "latest"
    count: checks.PositiveInt = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class AllVersions:
    """All versions."""

    kind: ClassVar[str] = "all"


@dataclass(frozen=True, kw_only=True, slots=True)
class SpecificVersions(checks.Checked):
    """Some versions, and those that the pointer names.

    Attributes:
        versions: Numbers of the versions.
    """

    kind: ClassVar[str] = "specific"
    versions: _Versions


VersionPolicy = PromotedVersions | LatestVersions | AllVersions | SpecificVersions


@dataclass(frozen=True, kw_only=True, slots=True)
class RepositoryModelSpec:
    """A model of a repository: the content of its ``model.json``.

    Attributes:
        versions: Versions that a server loads.
    """

    format: ClassVar[str] = "terarec.repository_model"
    versions: VersionPolicy = field(default_factory=PromotedVersions)

    def __post_init__(self) -> None:
        checks.instance(
            self, "versions", VersionPolicy, "PromotedVersions(), LatestVersions(count=2) or another policy"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class SplitSpec(checks.Checked):
    """A share of the requests that a second version answers.

    Attributes:
        version: The second version.
        share: Share of the values of the key whose requests it answers, above 0 and below 1.
        by: Parameter of a request, or else input column, whose value decides: equal values get the same version.
    """

    version: _Version
    share: Annotated[float, checks.number(0.0, 1.0, open_low=True, open_high=True)]
    by: checks.ColumnName


@dataclass(frozen=True, kw_only=True, slots=True)
class ShadowSpec(checks.Checked):
    """A share of the requests that a second version scores, too, whose scores are compared and not sent.

    Attributes:
        version: The second version.
        share: Share of the requests, above 0 and at most 1.
    """

    version: _Version
    share: checks.PositiveShare


@dataclass(frozen=True, kw_only=True, slots=True)
class PromotionSpec:
    """What a version does once it is promoted: by default it answers all requests.

    Attributes:
        share: Share of the requests that the version answers; None for all of them.
        by: Parameter of a request, or else input column, whose value decides which requests these are.
        shadow: Share of the requests that the version scores without answering; None for none.
        keep: Number of the highest versions to keep; older ones that do not answer are removed. None for all.
        follow: Whether servers that allow it go on to later checkpoints of the run.
        split: Split of the data whose samples a server compares; None for that of the training's evaluations, or the
            first one of data without it.

    Raises:
        ConfigError: A value out of range, a share without a key, or both a share and a shadow.
    """

    share: float | None = None
    by: str | None = None
    shadow: float | None = None
    keep: checks.PositiveInt | None = None
    follow: bool = False
    split: str | None = None

    def __post_init__(self) -> None:
        checks.check_fields(self)
        if (self.share is None) != (self.by is None):
            field = "by" if self.by is None else "share"
            checks.reject(self, field, "got the other one of --share and --by alone, expected both or none")
        if self.share is not None:
            checks.follow(self, "share", checks.number(0.0, 1.0, open_low=True, open_high=True))
            checks.column_name(self, "by")
        if self.shadow is not None:
            checks.follow(self, "shadow", checks.number(0.0, 1.0, open_low=True))
            if self.share is not None:
                checks.reject(self, "shadow", "got it with a share of the answers, expected one of them")
        if self.split == "":
            checks.fail(self, "split", "the name of a split or None")

    def split_of(self, version: int) -> SplitSpec | None:
        """Return the share of the requests that a version answers; None for all or none of them."""
        if self.share is None or self.by is None:
            return None
        return SplitSpec(version=version, share=self.share, by=self.by)

    def shadow_of(self, version: int) -> ShadowSpec | None:
        """Return the share of the requests that a version scores without answering; None for none."""
        return None if self.shadow is None else ShadowSpec(version=version, share=self.shadow)


@dataclass(frozen=True, kw_only=True, slots=True)
class PointerEvent(checks.Checked):
    """A change of a pointer.

    Attributes:
        time: Time of the change, in UTC.
        action: "promote" for a version that answers from then on, "split" and "shadow" for a second version,
            "rollback" for an earlier one, "end" for the end of a split or a shadow.
        version: The version.
    """

    time: str
    action: PointerAction
    version: _Version


@dataclass(frozen=True, kw_only=True, slots=True)
class PointerSpec(checks.Checked):
    """Which version of a model answers: the content of its ``pointer.json``.

    Attributes:
        current: Version that answers; None before the first promotion.
        since: Time from which it answers, in UTC; "" before the first promotion.
        before: Versions that answered before it and to which a rollback returns, the last one at the end.
        split: Share of the requests that a second version answers; None for no such version.
        shadow: Share of the requests that a second version scores, too; None for no such version.
        history: The last changes, the newest at the end.
    """

    format: ClassVar[str] = "terarec.pointer"
    current: _Version | None = None
    since: str = ""
    before: _Versions = ()
    split: SplitSpec | None = None
    shadow: ShadowSpec | None = None
    history: tuple[PointerEvent, ...] = ()

    @property
    def versions(self) -> tuple[int, ...]:
        """The versions that requests need: the one that answers, that of a split and that of a shadow."""
        named = (self.current, self.split and self.split.version, self.shadow and self.shadow.version)
        return tuple(dict.fromkeys(version for version in named if version))

    def roles(self) -> dict[str, int | float | str | None]:
        """Return what the versions do, by name, for people and programs that read it."""
        split, shadow = self.split, self.shadow
        return {
            "answers": self.current,
            "since": self.since or None,
            "split_version": None if split is None else split.version,
            "split_share": None if split is None else split.share,
            "split_by": None if split is None else split.by,
            "shadow_version": None if shadow is None else shadow.version,
            "shadow_share": None if shadow is None else shadow.share,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class VersionSpec:
    """A version of a model: the content of its ``version.json``.

    Attributes:
        run: Name of the run's directory.
        model: Kind of the model.
        step: Training steps of its weights.
        data: Name of the data set that it was trained on.
        made: Time at which the version was made, in UTC.
        memory_bytes: Bytes of its tables and layers in memory.
        files: File of the version -> its SHA-256, for those whose checksums are not in a checkpoint.
        metrics: Metric of the last evaluation up to `step` -> its value.
        metrics_step: Step of that evaluation; None if there was none.
        metrics_split: Split of that evaluation.
        follows: Directory of the run whose later checkpoints the version takes over as they are written; None for a
            version that stays as it is.
    """

    format: ClassVar[str] = "terarec.model_version"
    run: str
    model: str
    step: checks.NonNegativeInt
    data: str
    made: str
    memory_bytes: checks.NonNegativeInt
    files: Mapping[str, str]
    metrics: Mapping[str, float] = field(default_factory=dict)
    metrics_step: checks.NonNegativeInt | None = None
    metrics_split: str = ""
    follows: str | None = None

    def __post_init__(self) -> None:
        checks.check_fields(self)
        for name in self.files:
            if not checks.is_inner_path(name):
                checks.reject(self, "files", f"got {checks.quoted(name)}, expected relative paths inside the version")


@dataclass(frozen=True, kw_only=True, slots=True)
class RepositorySpec:
    """A model repository that a server serves.

    Attributes:
        path: Directory of the repository.
        control: "poll" to follow promotions, rollbacks and new models; "explicit" to load and unload models on request
            alone; "none" to load all models once.
        load: Models that are loaded at the start in explicit control; ``*`` for all.
        poll_seconds: Seconds between two looks at the repository.
        keep_versions: Number of former versions that stay in memory, to return to at once.
        follow_runs: Whether versions take over later checkpoints of the runs that they name.

    Raises:
        ConfigError: A value out of range, or models to load in another control.
    """

    path: str
    control: ControlMode = "poll"
    load: tuple[str, ...] = ()
    poll_seconds: checks.Positive = 1.0
    keep_versions: Annotated[int, checks.whole(0, 1000)] = 1
    follow_runs: bool = False

    def __post_init__(self) -> None:
        checks.check_fields(self)
        if self.load and self.control != "explicit":
            checks.reject(self, "load", f"got models with control {self.control!r}, expected control 'explicit'")
        checks.distinct(self, "load", self.load)
