# SPDX-License-Identifier: Apache-2.0
"""Models that predict the next item of a history: SASRec, BERT4Rec, GRU4Rec and HSTU."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from terarec.spec import checks
from terarec.spec.negatives import NegativesSpec, check_positions, check_shared
from terarec.spec.tables import StaticTablesSpec, TablesSpec

SequenceLoss = Literal["bce", "sampled_bce", "softmax", "sampled_softmax"]
SHARED_DRAWS: tuple[SequenceLoss, ...] = ("sampled_bce", "sampled_softmax")
"""Losses whose drawn items all positions of a batch share."""


def _tables() -> TablesSpec:
    return StaticTablesSpec(initializer="normal", init_scale=0.02)


@dataclass(frozen=True, kw_only=True, slots=True)
class SequenceSpec:
    """Base of the specs of models that predict the next item of a history.

    Attributes:
        item: A column of one key a sample: the item that follows the history.
        history: A list column of the same keys, the earliest first.
        width: Length D of the vectors of items and positions.
        tables: Static, as large as the data set says, or dynamic; and the initial weights of their rows.
        max_length: Number of items of a history that count, the last ones.
        layers: Number of layers.
        dropout: Probability of zeroing an element in training.
        loss: "bce": binary cross entropy of the item and of drawn ones, which weigh as much as the item together;
            "sampled_bce": of the item and of drawn ones, each of which weighs as much, with logits less the logarithms
            of the draws' probabilities; "softmax": cross entropy among all items; "sampled_softmax": among the item
            and drawn ones.
        negatives: The drawn items: for each position ("bce"), or for a batch, whose positions share them
            ("sampled_bce", "sampled_softmax").
        similarity: "dot", or "cosine" of the vectors of history and item.
        temperature: Divisor of the similarity.
    """

    has_own_loss: ClassVar[bool] = True
    item: checks.Name
    history: checks.Name
    width: checks.Width = 64
    tables: TablesSpec = field(default_factory=_tables)
    max_length: checks.Width = 50
    layers: checks.Layers = 2
    dropout: checks.Dropout = 0.2
    loss: SequenceLoss = "bce"
    negatives: NegativesSpec = field(default_factory=NegativesSpec)
    similarity: Literal["dot", "cosine"] = "dot"
    temperature: checks.Positive = 1.0

    def __post_init__(self) -> None:
        checks.check_fields(self)
        if self.item == self.history:
            checks.reject(self, "history", f"got {self.history!r}, which is the item, expected a list column")
        (check_shared if self.loss in SHARED_DRAWS else check_positions)(self, self.negatives)


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionSequenceSpec(SequenceSpec):
    """Base of the specs of sequence models of attention.

    Attributes:
        heads: Attention heads of a layer.
    """

    heads: checks.Width = 2

    def __post_init__(self) -> None:
        SequenceSpec.__post_init__(self)
        if self.width % self.heads:
            checks.fail(self, "width", f"a multiple of the heads ({self.heads})")


@dataclass(frozen=True, kw_only=True, slots=True)
class SASRecSpec(AttentionSequenceSpec):
    """SASRec (Kang and McAuley 2018): a causal transformer, each position of which predicts the next item.

    Attributes:
        inner: Width of the hidden layer of a block's MLP.
    """

    kind: ClassVar[str] = "sasrec"
    inner: checks.Width = 256


@dataclass(frozen=True, kw_only=True, slots=True)
class BERT4RecSpec(AttentionSequenceSpec):
    """BERT4Rec (Sun et al. 2019): a bidirectional transformer that predicts masked items.

    Attributes:
        inner: Width of the hidden layer of a block's MLP.
        mask: Probability with which training masks an item.
    """

    kind: ClassVar[str] = "bert4rec"
    loss: SequenceLoss = "softmax"
    inner: checks.Width = 256
    mask: checks.PositiveShare = 0.2


@dataclass(frozen=True, kw_only=True, slots=True)
class GRU4RecSpec(SequenceSpec):
    """GRU4Rec (Hidasi et al. 2016): a recurrent network, each state of which predicts the next item.

    Attributes:
        state: Width of the state.
    """

    kind: ClassVar[str] = "gru4rec"
    layers: int = 1
    loss: SequenceLoss = "softmax"
    state: checks.Width = 128


@dataclass(frozen=True, kw_only=True, slots=True)
class HSTUSpec(AttentionSequenceSpec):
    """HSTU (Zhai et al. 2024): gated layers of pointwise attention with biases of distances, and of gaps in time.

    Attributes:
        times: List column of the times of the items of the history, keys of any integers, such as seconds since 1970;
            None for no biases of gaps.
        time_buckets: Number of biases of gaps: a bucket is 1.35 times as long as the one before, and longer gaps are in
            the last.
    """

    kind: ClassVar[str] = "hstu"
    loss: SequenceLoss = "sampled_softmax"
    negatives: NegativesSpec = field(default_factory=lambda: NegativesSpec(count=128))
    similarity: Literal["dot", "cosine"] = "cosine"
    temperature: float = 0.05
    times: checks.Name | None = None
    time_buckets: checks.Width = 128

    def __post_init__(self) -> None:
        AttentionSequenceSpec.__post_init__(self)
        if self.times is not None and self.times in (self.item, self.history):
            checks.reject(self, "times", f"got {self.times!r}, which is an item column, expected a column of times")
