# SPDX-License-Identifier: Apache-2.0
"""Models of retrieval besides two towers: MF-BPR, NCF, YouTubeDNN and Mult-VAE."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal, get_args

from terarec.spec import checks
from terarec.spec.negatives import NegativesSpec, check_shared
from terarec.spec.network import Activation, NetworkSpec
from terarec.spec.tables import StaticTablesSpec, TablesSpec

PairLoss = Literal["bpr", "bce", "sampled_softmax"]
ItemLoss = Literal["softmax", "sampled_softmax"]
NCFForm = Literal["gmf", "mlp", "neumf"]


def _tables() -> TablesSpec:
    return StaticTablesSpec(initializer="normal", init_scale=0.01)


@dataclass(frozen=True, kw_only=True, slots=True)
class PairSpec:
    """Base of the specs of models of a user and an item.

    Attributes:
        user: A column of one key a sample.
        item: A column of one id a sample.
        width: Length D of every embedding vector.
        tables: Static, as large as the data set says, or dynamic; and the initial weights of their rows.
        negatives: The items with which the loss compares that of a sample.
        loss: "bpr": the logistic loss of the difference of two scores; "bce": binary cross entropy of each score;
            "sampled_softmax": cross entropy among the item and drawn ones, which a batch shares.
    """

    has_own_loss: ClassVar[bool] = True
    user: checks.Name
    item: checks.Name
    width: checks.Width = 64
    tables: TablesSpec = field(default_factory=_tables)
    negatives: NegativesSpec = field(default_factory=NegativesSpec)
    loss: PairLoss = "bpr"

    def __post_init__(self) -> None:
        checks.check_fields(self)
        if self.user == self.item:
            checks.reject(self, "item", f"got {self.item!r}, which is the user, expected another column")
        if self.loss == "sampled_softmax":
            check_shared(self, self.negatives)


@dataclass(frozen=True, kw_only=True, slots=True)
class MFBPRSpec(PairSpec):
    """Matrix factorization by BPR (Rendle et al. 2009): the dot of a vector of the user and one of the item."""

    kind: ClassVar[str] = "mf_bpr"


@dataclass(frozen=True, kw_only=True, slots=True)
class NCFSpec(PairSpec):
    """Neural collaborative filtering (He et al. 2017): GMF, an MLP, or both of them (NeuMF).

    Attributes:
        form: "gmf": a linear layer over the product of both vectors; "mlp": an MLP over both; "neumf": a linear layer
            over both, each with vectors of its own.
        mlp_width: Length of each of the vectors that the MLP reads; None for `width`.
        hidden: Widths of the MLP's layers.
        activation: Activation after each.
        dropout: Probability of zeroing a hidden unit in training.
    """

    kind: ClassVar[str] = "ncf"
    width: int = 8
    negatives: NegativesSpec = field(default_factory=lambda: NegativesSpec(count=4))
    loss: PairLoss = "bce"
    form: NCFForm = "neumf"
    mlp_width: checks.Width | None = None
    hidden: checks.Widths = (32, 16, 8)
    activation: Activation = "relu"
    dropout: checks.Dropout = 0.0

    def __post_init__(self) -> None:
        PairSpec.__post_init__(self)
        if self.mlp_width is not None and self.form == "gmf":
            checks.reject(self, "mlp_width", f"got {self.mlp_width} for the form 'gmf', which has no MLP")


@dataclass(frozen=True, kw_only=True, slots=True)
class YouTubeDNNSpec(NetworkSpec):
    """YouTubeDNN (Covington et al. 2016): an MLP over the mean of a history, whose output finds the next item.

    Attributes:
        item: A column of one id a sample: the item that follows the history.
        history: A list column of the same ids.
        user: Further columns of the user, dense or categorical.
        hidden: Widths of the hidden layers.
        similarity: "dot", or "cosine" of the vectors of user and item.
        temperature: Divisor of the similarity.
        loss: "softmax": cross entropy among all items; "sampled_softmax": among the item and drawn ones, which a batch
            shares.
        negatives: How these are drawn.
    """

    kind: ClassVar[str] = "youtube_dnn"
    has_own_loss: ClassVar[bool] = True
    item: str
    history: str
    user: tuple[str, ...] = ()
    width: int = 64
    hidden: checks.AnyWidths = (256, 128)
    similarity: Literal["dot", "cosine"] = "dot"
    temperature: checks.Positive = 1.0
    loss: ItemLoss = "sampled_softmax"
    negatives: NegativesSpec = field(default_factory=lambda: NegativesSpec(count=100))

    def __post_init__(self) -> None:
        NetworkSpec.__post_init__(self)
        _check_columns(self, self.item, self.history, self.user)
        _check_item_loss(self, self.loss, self.negatives)


@dataclass(frozen=True, kw_only=True, slots=True)
class MultVAESpec:
    """Mult-VAE (Liang et al. 2018): a variational autoencoder of a user's items, with a multinomial likelihood.

    Attributes:
        item: A column of one id a sample: the item that is scored, and one more of the user's in training.
        history: A list column of the same ids: the items of the user.
        hidden: Widths of the hidden layers of the encoder; those of the decoder are the same, the other way round.
        latent: Width of the latent vector.
        dropout: Probability of leaving an item out of the encoder's input in training.
        beta: Greatest factor of the divergence of the latent vectors from a normal distribution.
        anneal_steps: Number of training batches in which the factor rises from 0; 0 for `beta` from the start.
        tables: Static, as large as the data set says, or dynamic; and the initial weights of their rows.
        loss: "softmax": over all items; "sampled_softmax": over each of the user's and drawn ones, which a batch
            shares.
        negatives: How these are drawn.
    """

    kind: ClassVar[str] = "mult_vae"
    has_own_loss: ClassVar[bool] = True
    item: str
    history: str
    hidden: checks.Widths = (600,)
    latent: checks.Width = 200
    dropout: checks.Dropout = 0.5
    beta: checks.NonNegative = 0.2
    anneal_steps: checks.NonNegativeInt = 20_000
    tables: TablesSpec = field(default_factory=_tables)
    loss: ItemLoss = "softmax"
    negatives: NegativesSpec = field(default_factory=lambda: NegativesSpec(count=1000))

    def __post_init__(self) -> None:
        checks.check_fields(self)
        _check_columns(self, self.item, self.history, ())
        _check_item_loss(self, self.loss, self.negatives)


def _check_columns(owner: object, item: str, history: str, user: tuple[str, ...]) -> None:
    checks.name(owner, "item")
    checks.name(owner, "history")
    if item == history:
        checks.reject(owner, "history", f"got {history!r}, which is the item, expected a list column")
    if user:
        checks.distinct(owner, "user", (*user, item, history))


def _check_item_loss(owner: object, loss: ItemLoss, negatives: NegativesSpec) -> None:
    checks.one_of(owner, "loss", get_args(ItemLoss))
    check_shared(owner, negatives)
