"""What training minimises for a model that returns logits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from terarec.spec import checks


@dataclass(frozen=True, kw_only=True, slots=True)
class BinarySpec:
    """Binary cross entropy of each label; several labels make a multi-label model.

    Attributes:
        label_weights: Factor of each label's loss; empty for ones.
    """

    kind: ClassVar[str] = "binary"
    label_weights: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        _check_weights(self, self.label_weights)


@dataclass(frozen=True, kw_only=True, slots=True)
class MultiClassSpec:
    """Cross entropy of one class out of several; the label column holds its number.

    Attributes:
        classes: Number of classes C; the label is one of 0 to C - 1.
        label_smoothing: Share of each label that is spread over all classes (Szegedy et al. 2016, arXiv 1512.00567).
    """

    kind: ClassVar[str] = "multi_class"
    classes: int
    label_smoothing: float = 0.0

    def __post_init__(self) -> None:
        checks.positive_int(self, "classes", minimum=2)
        checks.finite_float(self, "label_smoothing", low=0.0, high=1.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class RegressionSpec:
    """A loss of the difference between output and label.

    Attributes:
        loss: "mse" for its square, "mae" for its absolute value, "huber" for the square below `delta` and the absolute
            value above it (Huber 1964).
        delta: Where "huber" becomes linear.
    """

    kind: ClassVar[str] = "regression"
    loss: Literal["mse", "mae", "huber"] = "mse"
    delta: float = 1.0

    def __post_init__(self) -> None:
        checks.one_of(self, "loss", ("mse", "mae", "huber"))
        checks.finite_float(self, "delta", low=0.0, open_low=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class PairwiseSpec:
    """Logistic loss of score differences in all pairs of samples with different labels.

    This is RankNet's loss (Burges et al. 2005); with one positive a group it is BPR's (Rendle et al. 2009).

    Attributes:
        group: Column whose values the two samples of a pair share, such as a query or a user; None pairs all samples
            of a batch.
    """

    kind: ClassVar[str] = "pairwise"
    group: str | None = None

    def __post_init__(self) -> None:
        if self.group is not None:
            checks.name(self, "group")


@dataclass(frozen=True, kw_only=True, slots=True)
class SampledSoftmaxSpec:
    """Cross entropy of logits [B, 1 + N] whose first column is the positive item's and the others sampled items'.

    A model that draws its negatives from the batch, such as ``two_tower``, brings this loss itself.

    Attributes:
        temperature: Divisor of the logits.
    """

    kind: ClassVar[str] = "sampled_softmax"
    temperature: float = 1.0

    def __post_init__(self) -> None:
        checks.finite_float(self, "temperature", low=0.0, open_low=True)


ObjectiveSpec = BinarySpec | MultiClassSpec | RegressionSpec | PairwiseSpec | SampledSoftmaxSpec


def _check_weights(owner: object, weights: tuple[float, ...]) -> None:
    checks.instance(owner, "label_weights", tuple | list, "a factor for each label, such as [1.0, 0.5]")
    for weight in weights:
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0.0 <= weight < float("inf"):
            checks.refuse(owner, "label_weights", f"got {weight!r}, expected finite numbers >= 0")
