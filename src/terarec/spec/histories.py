# SPDX-License-Identifier: Apache-2.0
"""Models of a target and the histories that share its table: DIN, DIEN, BST and the ranking form of HSTU."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from terarec.spec import checks
from terarec.spec.negatives import NegativesSpec, check_positions
from terarec.spec.network import Activation, NetworkSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class TargetHistory(checks.Checked):
    """Column of candidates and list column of the user's earlier items, which share a table.

    Attributes:
        target: A column of one key a sample.
        history: A list column of the same keys.
    """

    target: checks.Name
    history: checks.Name


@dataclass(frozen=True, kw_only=True, slots=True)
class HistoriesSpec(NetworkSpec):
    """Base of the specs of models of targets and their histories.

    Attributes:
        sequences: Targets and their histories.
        mask_missing: Whether keys of missing values are left out of histories.
        hidden: Widths of the hidden layers.
    """

    sequences: tuple[TargetHistory, ...]
    mask_missing: bool = True
    activation: Activation = "dice"
    hidden: checks.Widths = (200, 80)

    def __post_init__(self) -> None:
        NetworkSpec.__post_init__(self)
        if not self.sequences:
            checks.fail(self, "sequences", "at least one pair of a target and a history")
        checks.distinct(self, "sequences", [pair.history for pair in self.sequences])
        # A target has one key a sample, a history a list of them.
        both = {pair.target for pair in self.sequences} & {pair.history for pair in self.sequences}
        if both:
            checks.reject(self, "sequences", f"{min(both)!r} is a target and a history, expected one of them")


@dataclass(frozen=True, kw_only=True, slots=True)
class DINSpec(HistoriesSpec):
    """Deep Interest Network (Zhou et al. 2018): histories pooled by attention to a target, and an MLP.

    Attributes:
        attention: Widths of the hidden layers of the attention's MLP.
        attention_activation: Activation after each of these.
        softmax: Whether the weights of a history are normalized by a softmax; the paper leaves them as they are.
    """

    kind: ClassVar[str] = "din"
    attention: checks.Widths = (64,)
    attention_activation: Activation = "dice"
    softmax: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class DIENSpec(HistoriesSpec):
    """Deep Interest Evolution Network (Zhou et al. 2019): two recurrent layers over a history, and an MLP.

    Attributes:
        max_length: Number of items of a history that count, the last ones.
        auxiliary: Factor of the auxiliary loss, which lets the states of the first layer predict the next items; 0 for
            none.
        negatives: The other items of the auxiliary loss.
    """

    kind: ClassVar[str] = "dien"
    max_length: checks.Width = 50
    auxiliary: checks.NonNegative = 1.0
    negatives: NegativesSpec = field(default_factory=NegativesSpec)

    def __post_init__(self) -> None:
        HistoriesSpec.__post_init__(self)
        check_positions(self, self.negatives)


HistoryOutput = Literal["concat", "mean", "target"]


@dataclass(frozen=True, kw_only=True, slots=True)
class BSTSpec(HistoriesSpec):
    """Behavior Sequence Transformer (Chen et al. 2019): a transformer over a history and its target, and an MLP.

    Attributes:
        max_length: Number of items of a history that count, the last ones.
        layers: Number of transformer blocks.
        heads: Heads of their attention.
        inner: Width of the hidden layer of a block's MLP.
        output: "concat": the vectors of all positions side by side; "mean": their mean; "target": that of the target.
    """

    kind: ClassVar[str] = "bst"
    max_length: checks.Width = 20
    layers: checks.Layers = 1
    heads: checks.Width = 2
    inner: checks.Width = 64
    output: HistoryOutput = "concat"
    activation: Activation = "relu"
    hidden: tuple[int, ...] = (256, 128)

    def __post_init__(self) -> None:
        HistoriesSpec.__post_init__(self)
        if self.width % self.heads:
            checks.fail(self, "width", f"a multiple of the heads ({self.heads})")


@dataclass(frozen=True, kw_only=True, slots=True)
class HSTURankerSpec(HistoriesSpec):
    """HSTU that ranks (Zhai et al. 2024): gated layers of attention over a history and its target, and an MLP.

    Attributes:
        actions: List column of what the user did with the items of the history, such as skipped or liked, ids; None
            for none.
        times: List column of the times of these items, keys of any integers; None for no biases of gaps in time.
        time: Column of the time of the target, which `times` need.
        max_length: Number of items of a history that count, the last ones.
        layers: Number of layers.
        heads: Heads of their attention.
        time_buckets: Number of biases of gaps, as of HSTU.
    """

    kind: ClassVar[str] = "hstu_ranker"
    actions: checks.Name | None = None
    times: checks.Name | None = None
    time: checks.Name | None = None
    max_length: checks.Width = 50
    layers: checks.Layers = 2
    heads: checks.Width = 2
    time_buckets: checks.Width = 128
    activation: Activation = "silu"
    hidden: tuple[int, ...] = (256, 128)

    def __post_init__(self) -> None:
        HistoriesSpec.__post_init__(self)
        if len(self.sequences) != 1:
            checks.fail(self, "sequences", "one pair of a target and a history")
        given = [name for name in ("actions", "times", "time") if getattr(self, name) is not None]
        if (self.times is None) != (self.time is None):
            checks.reject(self, "time", "expected times of the history and the time of the target, or neither")
        pair = self.sequences[0]
        checks.distinct(self, "sequences", [pair.target, pair.history, *(getattr(self, name) for name in given)])
        if self.width % self.heads:
            checks.fail(self, "width", f"a multiple of the heads ({self.heads})")
